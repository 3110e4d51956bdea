"""Texts on the stand-in for CuPy are those of the CPU."""

from pathlib import Path

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.serving import SamplingOptions, StoppingCriteria, generate

FAMILIES = Path(__file__).parents[1] / "golden" / "decoders"


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.soak), "gemma3", "olmoe"])
def test_texts_on_cuda_are_those_of_the_cpu(family, cuda):
    def write(device):
        with Mesh(model=2) as mesh:
            model = ModelConfig(name=str(FAMILIES / family), dtype="float64", seed=3)
            engine = build_engine(model, mesh, ParallelConfig(), device=device)
            drawn, stopping = SamplingOptions(sample=True, seed=2, top_p=0.9), StoppingCriteria(8)
            return [each.tokens for each in generate(engine, [[1, 2, 3], [4]], sampling=drawn, stopping=stopping)]

    assert run_threads(write, 2, args=["cuda"]) == run_threads(write, 2, args=["cpu"])
