"""How many calls of Python a training step takes: what follows from shapes alone is prepared once, not in each step."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from spmd_engine import batch_of
from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.numba.functions import fast_functions
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.models import gpt
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.training import Trainer
from support.tiny import mesh_of_one

pytest.importorskip("spmd_engine.arrays.numba.kernels")

MOST, MOST_FURTHER = 6500, 6000  #: calls of Python and of C: in a step of gpt-nano, for each further micro-batch


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.setenv("SPMD_FAST", "1")
    monkeypatch.setitem(CPU.__dict__, "kernels", fast_functions())


def calls_of(function):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_takes_few_calls(loops):
    """Of gpt-nano at half its width, which takes as many."""
    engine = LayeredEngine(gpt(replace(GPT_SIZES["gpt-nano"], width=48)), mesh_of_one(), dtype=np.float32)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 129))
    batches = [batch_of(tokens[:2, :-1], tokens[:2, 1:], engine), batch_of(tokens[:, :-1], tokens[:, 1:], engine, 2)]
    trainer = Trainer(engine, AdamW(), lambda step: batches[step // 2], lambda step: 1e-3, step_metrics=False)
    trainer.step()
    calls = calls_of(trainer.step)
    assert calls <= MOST
    trainer.step()
    assert calls_of(trainer.step) - calls <= MOST_FURTHER
