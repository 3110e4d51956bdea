"""Steps of strategies and of engines of one's own on the stand-in for CuPy give what NumPy gives."""

from math import prod
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest

from spmd_engine import Mesh, batch_of, run_threads
from spmd_engine.arrays.backend import get_backend
from spmd_engine.comm.device_transport import choose_transport
from spmd_engine.engine import SGD, AdamW, making_on
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.strategies import STRATEGIES
from spmd_engine.training import Trainer
from support import fake_cupy, fake_nccl, pages
from support.fake_cupy import events
from support.linear_engine import Linear
from support.pairwise import in_turn

GPT2 = Path(__file__).parents[1] / "golden" / "decoders" / "gpt2"


@in_turn(2, name=list(STRATEGIES))
def test_a_strategy_on_cuda_trains_as_on_the_cpu(name, cuda):
    axes = pages.meshes(STRATEGIES[name])[1]

    def program(device):
        with making_on(get_backend(device)):
            losses, *arrays = pages.train(name, axes, AdamW, 2)
        assert all(x is None or (device == "cuda") == cuda.owns(x) for kind in arrays for x in kind.values())
        host = [{key: x if x is None else get_backend("cpu").asarray(x) for key, x in kind.items()} for kind in arrays]
        return losses, *host

    for found, expected in zip(*(run_threads(program, prod(axes.values()), args=[each]) for each in ("cuda", "cpu"))):
        pages.assert_trained_alike(found, expected)


def test_an_engine_of_one_s_own_on_cuda_trains_as_on_the_cpu(cuda):
    def program(device):
        engine = make_engine(Linear, Mesh(), device=device)
        engine.load_checkpoint({"w": np.arange(6.0).reshape(3, 2)})
        x, y = np.random.default_rng(0).standard_normal((2, 8, 3))
        trainer = Trainer(engine, SGD(), lambda step: batch_of(x, y[:, :2], engine, 2, step), lambda step: 0.1)
        return [report.loss for report in trainer.run(3)] + [trainer.evaluate([batch_of(x, y[:, :2], engine)])]

    np.testing.assert_allclose(*(run_threads(program, 2, args=[device]) for device in ("cuda", "cpu")), rtol=1e-12)


def test_an_engine_of_one_s_own_takes_the_best_transport(cuda, monkeypatch):
    """Without a call of ``choose_transport``, which comes first where there is one."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))

    def program(chosen):
        with Mesh(data=2) as mesh:
            if chosen:
                choose_transport(mesh.group(), cuda, chosen)
            engine = make_engine(Linear, mesh, device="cuda")
            engine.all_reduce(cuda.asarray(np.ones(3)), over="data")

    with fake_nccl.installed() as communicators:
        run_threads(program, 2, args=["staged"])
        assert not communicators.created
        run_threads(program, 2, args=[None])
        assert sorted(communicators.created) == [(2, 0), (2, 1)]


def test_an_engine_with_parameters_on_the_host_is_refused(cuda):
    class OnHost(Linear):
        def __init__(self):
            self.parameters = {"w": np.zeros((3, 2))}

    with pytest.raises(UsageError, match="OnHost: w is not on device 'cuda'; make parameters by self.xp"):
        run_threads(lambda: make_engine(OnHost, Mesh(), device="cuda"), 1)


@pytest.mark.parametrize(
    "axes, how",
    [({"data": 3}, {"zero": 3}), ({"pipe": 3}, {}), pytest.param({"context": 3}, {}, marks=pytest.mark.soak)],
    ids=str,
)
def test_the_host_of_a_rank_waits_as_often_with_others_by_nccl(axes, how, cuda, monkeypatch):
    """Twice in a step, for the norm of the gradient and the loss: never for a collective or a message."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))

    def program():
        with Mesh(**axes) as mesh:
            assert "NCCL" in choose_transport(mesh.group(), cuda)[0]
            model = ModelConfig(name=str(GPT2), dtype="float64")
            engine = build_engine(model, mesh, ParallelConfig(**how), device="cuda")
            x = np.random.default_rng(0).integers(0, 10, (6, 12))
            batches = lambda step: batch_of(x, x, engine, 2, step)
            trainer = Trainer(engine, AdamW(), batches, lambda step: 1e-3, grad_clip=1.0)
            trainer.step()
            before = mesh.ledger.total().calls
            events().clear()
            trainer.step()
            assert events().syncs <= 2 and not events().count("start_to_host")
            return mesh.ledger.total().calls - before

    with fake_nccl.installed():
        assert min(run_threads(program, 3)) > 3
