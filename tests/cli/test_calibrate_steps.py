"""What is fitted to steps, where it is known what they take."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine.cli import calibrate
from spmd_engine.engine.optimizers import AdamW
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.machine.files import read_machine
from spmd_engine.planning.machine.machine import Fitted
from spmd_engine.planning.simulator.compute_time import ComputeTimes


def test_a_machine_that_is_known_is_found(monkeypatch):
    monkeypatch.setattr(
        calibrate, "STEPS", (("mlp", 16), ("mlp", 512), ("gpt-nano", 1), ("gpt-nano", 2), ("convnet", 4))
    )
    machine = replace(read_machine("cpu"), fitted=Fitted())
    known = Fitted(memory_share=0.4, pass_seconds=2e-4)
    compute, seconds = ComputeTimes(replace(machine, fitted=known)), []
    for job in calibrate._jobs():
        options = {"batch_size": job.data.batch_size, "optimizer": AdamW()}
        step = analyze(job.model, {"data": 1}, job.composition, **options).classes[0].step
        seconds.append(sum(compute.seconds(0, step.computations)[0]))
    seconds[-1] = np.nan  # cannot be run here
    found = calibrate.fitted(machine, np.array(seconds)).fitted
    assert (found.product_share, found.memory_share, found.pass_seconds) == pytest.approx((1.0, 0.4, 2e-4), rel=0.02)
