"""What is fitted to steps, where it is known what they take; and a machine that is busy."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.cli import calibrate
from spmd_engine.engine.optimizers import AdamW
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.machine import measure
from spmd_engine.planning.machine.machine import Fitted, read_machine
from spmd_engine.planning.simulator.times import ComputeTimes


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


# --- other programs


@pytest.mark.parametrize("cores, share", [(1, 1.0), (2, 0.5), (8, 0.5)])
def test_ranks_that_take_turns_by_themselves_are_told_from_a_busy_machine(cores, share, monkeypatch):
    """Two ranks, each on a processor half of the time: all that one core has, and half of what two have."""
    monkeypatch.setattr(measure, "cores_of", lambda ranks: cores)

    def program():
        ticks = count()  # of the clock, hundredths of a second
        with Mesh(data=2) as mesh:
            return measure.share_of_cores(mesh, lambda: next(ticks) / 100, lambda: next(ticks) / 200)

    assert run_threads(program, ranks=2) == pytest.approx([share, share], rel=0.05)


@pytest.fixture
def times(monkeypatch):
    """What takes long in ``calibrate``, replaced; the shares of the cores are taken from the list that it returns."""
    shares = []
    for name, function in {
        "share_of_cores": lambda mesh: shares.pop(0),
        "choose_products": lambda *_, **__: [],
        "measure_machine": lambda *_: replace(read_machine("cpu"), source="measured"),
    }.items():
        monkeypatch.setattr(calibrate, name, function)
    return shares


@pytest.mark.parametrize("busy", range(3))
def test_a_busy_machine_is_not_measured_unless_by_force(busy, times):
    times += [0.97] * busy + [0.4]
    with pytest.raises(UsageError, match="other programs take 60% of the cores .*nothing is written.*--force"):
        calibrate._measure(1.0, False, ".", False)
    assert times == []
    times += [0.97] * busy + [0.4] + [0.97] * (2 - busy)
    machine = calibrate._measure(1.0, False, ".", True)
    assert machine.source == "measured, while other programs took 60% of the cores"


def test_an_idle_machine_is_measured(times):
    times += [0.99, 1.0, 0.9]
    assert calibrate._measure(1.0, False, ".", False).source == "measured"


def test_two_ranks_that_find_the_machine_busy_are_not_replaced_by_one(times, monkeypatch):
    started = []

    def start_ranks(ranks, arguments):
        started.append(arguments)
        raise UsageError(
            "bench: 2 ranks failed (2) with ...:\nspmd_engine: calibrate: other programs take 60%\nmpiexec"
        )

    monkeypatch.setattr(calibrate, "start_ranks", start_ranks)
    with pytest.raises(UsageError, match="^calibrate: other programs take 60%$"):
        calibrate._measure_on_two_ranks(1.0, False, "a/disk", False)
    assert started[0][started[0].index("--offload-dir") + 1] == "a/disk"
