"""What a stranger may rely on who subclasses ShardedEngine."""

from functools import partial

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import ShardedEngine
from spmd_engine.errors import MismatchError, UsageError
from spmd_engine.strategies import DataParallel, SingleDevice, TensorParallel
from spmd_engine.strategies.two_layers import initial_parameters
from support.strangers import Bare, D, F


def test_abstract_methods_are_those_three():
    assert ShardedEngine.__abstractmethods__ == {"load_checkpoint", "forward", "backward"}


def test_everything_given_works_without_super_init():
    def program():
        engine = Bare()
        rank, size = engine.device_id, engine.num_devices
        engine.barrier()
        engine.load_checkpoint({"w": np.ones((3, 2))})
        assert engine.forward(np.ones((1, 3))).tolist() == [[3.0, 3.0]]
        assert engine.backward(np.ones((1, 2)))["w"].tolist() == [[float(size)] * 2] * 3
        assert engine.all_gather(np.array([rank])).tolist() == list(range(size))
        assert engine.all_reduce(np.array([rank]), op="max").tolist() == [size - 1]
        assert engine.reduce_scatter(np.arange(size)).tolist() == [rank * size]
        assert engine.all_to_all(np.arange(size)).tolist() == [rank] * size
        assert engine.broadcast(np.array([rank]), root=size - 1).tolist() == [size - 1]
        if rank == 0:
            engine.send(dest_id=1, arr=np.ones((2, 3), np.float16))
        if rank == 1:
            got = engine.receive(src_id=0)
            assert (got.shape, got.dtype) == ((2, 3), np.float16)
        assert engine.ledger.total("barrier").calls == 1

    run_threads(program, 3)


def test_collectives_go_over_a_named_axis():
    def program():
        with Mesh(data=2, model=2) as mesh:
            engine = Bare()
            engine.mesh = mesh
            total = engine.all_reduce(np.array([mesh.rank]), over="data")
            assert total.tolist() == [2 * mesh.coordinates["model"] + 2]

    run_threads(program, 4)


class Sliced:
    """A whole array that may only be read in blocks: reading all of it where it is cut is an error."""

    def __init__(self, array, limit):
        self.shape, self._array, self._limit = array.shape, array, limit

    def __getitem__(self, index):
        block = self._array[index]
        assert block.size <= self._limit, f"read {block.size} of {self._array.size} elements"
        return block


def test_a_checkpoint_is_read_by_slices_alone():
    whole = initial_parameters(D, F, dtype=np.float64)

    def program():
        with Mesh(model=4) as mesh:
            engine = TensorParallel(D, F, mesh, np.float64)
            engine.load_checkpoint({name: Sliced(array, D * 3) for name, array in whole.items()})
            return {name: engine.gather(name) for name in whole}

    for result in run_threads(program, 4):
        assert all(np.array_equal(result[name], whole[name]) for name in whole)


def test_a_memory_map_is_a_checkpoint(tmp_path):
    for name, array in initial_parameters(D, F).items():
        np.save(tmp_path / name.replace("/", "-"), array)
    engine = SingleDevice(D, F)
    names = list(engine.parameters)
    files = {name: np.load(tmp_path / f"{name.replace('/', '-')}.npy", mmap_mode="r") for name in names}
    engine.load_checkpoint(files)
    assert all(np.array_equal(engine.parameters[name], files[name]) for name in names)


@pytest.mark.parametrize("strategy", [SingleDevice, DataParallel])
def test_micro_batches_in_flight(strategy):
    engine = strategy(D, F, dtype=np.float64)
    engine.load_checkpoint(initial_parameters(D, F, dtype=np.float64))
    x = np.random.default_rng(0).standard_normal((3, 2, D))
    expected = []
    for m in range(3):
        engine.forward(x[m])
        expected.append(engine.backward(x[m]))
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        for m in range(3):
            with engine.micro_batch(m):
                engine.forward(x[m])
        for m in order:
            with engine.micro_batch(m):
                gradients = engine.backward(x[m])
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(gradient, expected[m][name])


def test_gather_is_whole_on_every_rank_and_knows_its_names():
    def program():
        with Mesh(model=3) as mesh:
            engine = TensorParallel(D, F, mesh)
            assert engine.gather("layer_0/weights").shape == (D, F) == engine.global_shape("layer_0/weights")
            with pytest.raises(UsageError, match="no parameter 'w9'; there are: layer_0/weights"):
                engine.gather("w9")

    run_threads(program, 3)


@pytest.mark.parametrize("others", ["leave", "reduce"])
def test_a_gather_that_only_one_rank_calls_is_an_error(others):
    def program():
        with Mesh(model=3) as mesh:
            engine = TensorParallel(D, F, mesh)
            if mesh.rank == 0:
                engine.gather("layer_0/weights")
            elif others == "reduce":
                engine.all_reduce(np.ones(3))

    with pytest.raises(MismatchError, match="rank 0 called all_gather"):
        run_threads(program, 3)


def test_the_norm_counts_every_element_once():
    whole = initial_parameters(D, F, dtype=np.float64)
    expected = np.sqrt(sum((array**2).sum() for array in whole.values()))

    def program(strategy, **axes):
        with Mesh(**axes) as mesh:
            engine = strategy(D, F, mesh, np.float64)
            engine.load_checkpoint(whole)
            engine.gradients = dict(engine.parameters)
            return engine.gradient_norm()

    meshes = [(DataParallel, {"data": 3}), (TensorParallel, {"model": 3}), (TensorParallel, {"model": 2, "data": 2})]
    for strategy, axes in meshes:
        norms = run_threads(partial(program, strategy, **axes), int(np.prod(list(axes.values()))))
        np.testing.assert_allclose(norms, expected, rtol=1e-13)


def test_gathers_of_different_names_are_an_error():
    def program():
        with Mesh(model=2) as mesh:
            TensorParallel(D, D, mesh).gather(f"layer_{mesh.rank}/weights")

    with pytest.raises(MismatchError, match=r"ranks \[1\] make another call"):
        run_threads(program, 2)


def test_blocks_of_parameters_without_a_sharding_are_whole_copies():
    engine, whole = Bare(), np.ones((3, 2))
    block = engine.block("w", whole)
    assert np.array_equal(block, whole) and not np.shares_memory(block, whole)
    with pytest.raises(UsageError, match="no parameter 'v'"):
        engine.sharding("v")
