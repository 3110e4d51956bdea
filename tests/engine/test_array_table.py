"""The table of a group's arrays, and that engines hold just what it says."""

from itertools import product

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.dtypes import described
from spmd_engine.arrays.precision import HALVES, rounded
from spmd_engine.axes import parse_axes
from spmd_engine.engine import AdamW
from spmd_engine.engine.state import array_table as kinds
from spmd_engine.engine.state.array_table import array_table
from spmd_engine.errors import UsageError
from support import tiny

#: By kind, under ZeRO 0 to 3: the whole (W) or a part (P), only while it is used (?), on the disk (@), with the memory
#: of another kind (=).
IN_MEMORY = {
    kinds.USED: "W W W W?",
    kinds.SENT: "=W =P =P P",
    kinds.UPDATED: "=W =P =P =P",
    kinds.GRADIENT: "W W W? W?",
    kinds.SUMMED: "=W =P P P",
    kinds.STATE: "W P P P",
    kinds.SAVED: "W? W? W? W?",
    kinds.FROZEN: "W W W P",
    kinds.BUFFER: "W W W W",
}
OF_HALVES = {kinds.UPDATED: "W P P P"}
OFFLOADED = {  # parameters under ZeRO 1 and 2 only where no other rank holds them
    "none": {},
    "optimizer": {kinds.STATE: "W@ P@ P@ P@"},
    "activations": {kinds.SAVED: "W?@ W?@ W?@ W?@"},
    "parameters": {kinds.USED: "W? . . W?", kinds.SENT: "W@ . . P@"},
}
OFFLOADED_HALVES = {kinds.SENT: "W? . . P?", kinds.UPDATED: "W@ . . P@"}
ONLY_TRAINED = {kinds.UPDATED, kinds.GRADIENT, kinds.SUMMED, kinds.STATE, kinds.SAVED}
AS_USED = {kinds.USED, kinds.SENT, kinds.SAVED, kinds.FROZEN}  #: in the dtype of layers; others are sums

WAYS = list(product(range(4), ("float32", "bfloat16"), OFFLOADED, (True, False)))


def short(row):
    own = "=" if row.alias else ""
    return own + "WP"[bool(row.axes)] + "?" * (not row.lasts) + "@" * (row.place == "disk" and not row.alias)


@pytest.mark.parametrize(("zero", "dtype", "offload", "trained"), WAYS)
def test_the_table_states_where_each_kind_of_array_lives(zero, dtype, offload, trained):
    is_half = dtype in HALVES
    places = {} if offload == "none" else {offload: "disk"}
    table = array_table(zero, ("data",), described(dtype), places=places, trained=trained)
    expected = {**IN_MEMORY, **(OF_HALVES if is_half else {}), **OFFLOADED[offload]}
    if trained and is_half and offload == "parameters":
        expected |= OFFLOADED_HALVES
    columns = {kind: row.split()[zero] for kind, row in expected.items() if trained or kind not in ONLY_TRAINED}
    assert table.keys() == columns.keys()
    for kind, row in table.items():
        assert columns[kind] in (short(row), "."), kind
        assert row.dtype == (described(dtype) if kind in AS_USED else np.float32), kind


def test_a_group_that_no_axis_shards_is_whole_under_every_stage():
    whole = array_table(0, (), np.dtype(np.float32))
    assert all(array_table(zero, (), np.dtype(np.float32)) == whole for zero in (1, 2, 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", range(4))
def test_an_engine_holds_the_bytes_of_the_table(zero, dtype):
    def program():
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, dtype=described(dtype), zero=zero, group_threshold=1500)
            for storage in engine.storages:
                own = storage.interval.stop - storage.interval.start
                table = storage.table.bytes_by_class(storage.group.size, own, states=2)
                held = {kind: array for kind, array in storage.arrays.items() if array is not None}
                for name in ("parameters", "gradients"):
                    memories = {id(base_of(x)): base_of(x) for kind, x in held.items() if kinds.CLASSES[kind] == name}
                    assert table[name] == sum(x.nbytes for x in memories.values())
            optimizer = AdamW()
            optimizer.prepare(engine)
            state = sum(x.nbytes for arrays in optimizer.state.values() for x in arrays.values())
            assert state == sum(
                each.table.bytes_by_class(each.group.size, each.own_parameters.size, 2)["optimizer state"]
                for each in engine.storages
            )

    run_threads(program, 2)


def base_of(x):
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("axes", "zero"), [("data=2", 0), ("data=2", 1), ("data=2", 3), ("pipe=2,data=2", 2), ("pipe=2,model=1|2", 0)]
)
def test_an_engine_for_inference_holds_neither_gradients_nor_masters(axes, zero, dtype):
    whole, sizes = tiny.make_engine(tiny.mesh_of_one(), dtype=np.float64).parameters, parse_axes(axes)

    def program():
        with Mesh(**sizes) as mesh:
            how = {"dtype": described(dtype), "zero": zero, "drawn": False}
            engine, trained = (tiny.make_engine(mesh, trained=trained, **how) for trained in (False, True))
            for each in (engine, trained):
                each.load_checkpoint(whole)
            assert not engine.owned and not engine.gradients
            for storage in engine.storages:
                assert storage.arrays.keys() == {kinds.USED, kinds.SENT}
                assert storage.own_gradients is storage.whole_gradients is None
            for name, array in engine.parameters.items():  # equal to those that layers of the other use
                assert array.dtype == described(dtype)
                np.testing.assert_array_equal(array, rounded(whole[name][engine.index(name)], array.dtype))
            batch = tiny.batch(engine, 0)
            assert engine.evaluate(batch) == trained.evaluate(batch)
            with pytest.raises(UsageError, match="this engine was made for inference, without gradients"):
                engine.step(batch)

    run_threads(program, tiny.ranks_of(sizes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_initial_values_of_an_engine_for_inference_are_those_of_one_that_is_trained(dtype):
    engines = [tiny.make_engine(tiny.mesh_of_one(), dtype=described(dtype), trained=trained) for trained in (0, 1)]
    for name, array in engines[0].parameters.items():
        np.testing.assert_array_equal(array, rounded(engines[1].parameters[name], array.dtype))
