"""What ranks hold of arrays: rectangles, put together to the whole and counted once."""

from math import prod

import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint
from spmd_engine.engine import SGD, ShardedEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import MismatchError, UsageError
from spmd_engine.training import Trainer
from support import tiny
from support.linear_engine import Linear
from support.pairwise import in_turn

WHOLE = {
    "uneven": np.arange(7 * 5).reshape(7, 5),
    "replicated": np.arange(4.0),
    "cut twice": np.arange(5 * 6 * 2, dtype=np.float32).reshape(5, 6, 2),
    "few": np.arange(2),  # fewer than ranks: some have none
    "nothing": np.zeros((0, 3)),
    "number": np.array(2.5),
    "over both": np.arange(11),
}
SHARDINGS = {
    "uneven": "d f/model",
    "cut twice": "d/data f/model h",
    "few": "d/model",
    "nothing": "d/model f",
    "over both": "d/data,model",
}
AXES = {"data": 2, "model": 3}


class Plain(ShardedEngine):
    """Nothing but arrays."""

    forward = backward = load_checkpoint = None


class Shelf(Plain):
    """Blocks of WHOLE, as SHARDINGS say."""

    shardings = SHARDINGS

    def __init__(self, mesh):
        self.mesh = mesh
        self.parameters = {name: self.block(name, whole).copy() for name, whole in WHOLE.items()}

    def global_shape(self, name):
        return WHOLE[name].shape if name in WHOLE else super().global_shape(name)


def transposed(x):
    return np.array(x, order="F")


def read_only(x):
    x = x.view()
    x.flags.writeable = False
    return x


def on_shelves(program, axes=AXES, kind=Shelf):
    """``program(shelf, mesh)`` on every rank."""

    def body():
        with Mesh(**axes) as mesh:
            return program(kind(mesh), mesh)

    return run_threads(body, prod(axes.values()))


# --- the whole, from what ranks hold


@in_turn(2, name=list(WHOLE), axes=[AXES, {"data": 1, "model": 1}, {"model": 4, "data": 1}])
def test_the_whole_is_on_every_rank(name, axes):
    for whole in on_shelves(lambda shelf, mesh: shelf.gather(name), axes):
        np.testing.assert_array_equal(whole, WHOLE[name], strict=True)


@in_turn(2, name=list(WHOLE), root=[0, 4])
def test_the_whole_may_be_on_one_rank_alone(name, root):
    results = on_shelves(lambda shelf, mesh: shelf.gather(name, root=root))
    np.testing.assert_array_equal(results[root], WHOLE[name], strict=True)
    assert [rank for rank, whole in enumerate(results) if whole is not None] == [root]


@in_turn(2, name=list(WHOLE), root=[None, 5])
def test_each_element_is_sent_once_to_those_who_lack_it(name, root):
    """Of ranks that hold the same, one sends; who has a part already gets only the rest."""

    def program(shelf, mesh):
        mesh.ledger.clear()
        shelf.gather(name, root=root)
        wanted = WHOLE[name].size if root in (None, mesh.rank) else shelf.parameters[name].size
        return mesh.ledger.total("all_to_all").sent, wanted - shelf.parameters[name].size

    sent, lacking = zip(*on_shelves(program))
    assert sum(sent) == sum(lacking) * WHOLE[name].itemsize


@pytest.mark.parametrize("kind", [Shelf, Plain], ids=["shapes-known", "shapes-asked"])
def test_the_number_of_collectives_does_not_grow_with_the_arrays(kind):
    """Three to learn what each rank holds of all arrays, one of them for shapes that differ between ranks; then, for
    each array, one to agree and one to send, if a rank lacks a part."""

    class Asking(Shelf):
        global_shape = kind.global_shape

    def program(shelf, mesh):
        mesh.ledger.clear()
        counts = []
        for _ in range(2):
            for name in WHOLE:
                shelf.gather(name)
                counts.append(mesh.ledger.total().calls)
        return np.diff([0, *counts]).tolist()

    moves = [1 + (name in SHARDINGS and WHOLE[name].size > 0) for name in WHOLE]
    for counts in on_shelves(program, kind=Asking):
        assert counts == [3 + moves[0], *moves[1:], *moves]


def test_what_is_held_otherwise_than_last_time_is_asked_for_anew():
    """Even if only one rank's part has another shape now."""

    def program():
        with Mesh(data=2) as mesh:
            shelf = Plain()
            shelf.mesh, shelf.group, shelf.shardings = mesh, mesh.group, {"w": "d/data"}
            for length in 7, 6, 5:  # 4 and 3 rows; 3 and 3; 3 and 2
                whole = np.arange(length)
                shelf.parameters = {"w": shelf.block("w", whole)}
                np.testing.assert_array_equal(shelf.gather("w"), whole)

    run_threads(program, 2)


def test_parts_of_different_dtypes_are_every_rank_s_error():
    def program(shelf, mesh):
        if mesh.rank == 2:
            shelf.parameters["uneven"] = shelf.parameters["uneven"].astype(np.float32)
        with pytest.raises(MismatchError, match="ranks hold 'uneven', .* in several dtypes: <f4, <i8"):
            shelf.gather("uneven")
        return True

    assert all(on_shelves(program))


def test_what_is_gathered_is_a_copy():
    def program(shelf, mesh):
        for name in ("replicated", "number"):
            shelf.gather(name)[...] = -1
            np.testing.assert_array_equal(shelf.parameters[name], WHOLE[name])

    on_shelves(program)
    on_shelves(program, {"data": 1, "model": 1})


class Rows(Shelf):
    """Of every array some rows a rank, in rank order, whatever the sharding; the last rank has none at all."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.parameters = {name: WHOLE[name][self.rows(name)] for name in self.kept if mesh.rank < mesh.size - 1}

    kept = ("uneven", "replicated", "cut twice")
    shardings = {}

    @property
    def names(self):
        return tuple(WHOLE)

    def rows(self, name):
        length, ranks = len(WHOLE[name]), self.mesh.size - 1
        return slice(length * self.mesh.rank // ranks, length * (self.mesh.rank + 1) // ranks)

    def index(self, name):
        if name not in self.parameters:
            return None
        return (self.rows(name), *(slice(0, n) for n in WHOLE[name].shape[1:]))


@pytest.mark.parametrize("root", [None, 0, 5])
@pytest.mark.parametrize("name", Rows.kept)
def test_rows_are_put_together_also_by_a_rank_that_has_none(name, root):
    results = on_shelves(lambda shelf, mesh: shelf.gather(name, root=root), kind=Rows)
    for whole in [results[root]] if root is not None else results:
        np.testing.assert_array_equal(whole, WHOLE[name], strict=True)


def test_what_nobody_holds_is_an_error():
    with pytest.raises(UsageError, match="no rank holds any of 'few'"):
        on_shelves(lambda shelf, mesh: shelf.gather("few"), kind=Rows)


class Torn(Rows):
    """Rank 1's rows are gone."""

    def index(self, name):
        return None if self.mesh.rank == 1 else super().index(name)


@pytest.mark.parametrize("root", [None, 0])
def test_pieces_that_are_missing_are_an_error(root):
    message = "uneven: ranks hold 30 of its 35 elements; is its sharding right?"
    with pytest.raises(UsageError, match=message):
        on_shelves(lambda shelf, mesh: shelf.gather("uneven", root=root), kind=Torn)


def test_names_asked_differently_are_every_rank_s_error():
    def program(shelf, mesh):
        with pytest.raises(MismatchError, match=r"gather: ranks \[1, 4\] make another call than rank 0"):
            shelf.gather("few" if mesh.rank in (1, 4) else "uneven")
        return True

    assert all(on_shelves(program))


def test_another_root_or_another_part_is_every_rank_s_error():
    def program(shelf, mesh):
        for other in (lambda: shelf.gather("few", root=1), lambda: shelf.gather_owned("few", shelf.parameters)):
            with pytest.raises(MismatchError, match=r"gather: ranks \[2\] make another call than rank 0"):
                other() if mesh.rank == 2 else shelf.gather("few")
        np.testing.assert_array_equal(shelf.gather("few"), WHOLE["few"])

    on_shelves(program)


@pytest.mark.parametrize("call", ["gather", "sharding", "global_shape"])
def test_an_unknown_name_is_an_error_that_says_those_there_are(call):
    with pytest.raises(UsageError, match="no parameter 'w'; .*: uneven, replicated, cut twice"):
        on_shelves(lambda shelf, mesh: getattr(shelf, call)("w"))


# --- the parts


@pytest.mark.parametrize("name", WHOLE)
def test_a_shard_says_where_it_lies(name):
    def program(shelf, mesh):
        shard = shelf.addressable_shard(name)
        np.testing.assert_array_equal(WHOLE[name][shard.index], shard.data, strict=True)
        assert shard.data is shelf.parameters[name]

    on_shelves(program)


def test_shapes_of_the_whole_follow_from_the_blocks():
    def program(shelf, mesh):
        return {name: Plain.global_shape(shelf, name) for name in WHOLE}

    for shapes in on_shelves(program):
        assert shapes == {name: whole.shape for name, whole in WHOLE.items()}


def test_the_norm_counts_each_element_once():
    def program(shelf, mesh):
        shelf.gradients = shelf.parameters
        counted = {name: shelf.counts_here(name) * part.size for name, part in shelf.parameters.items()}
        return shelf.gradient_norm(), counted

    results = on_shelves(program)
    expected = sum((whole.astype(float) ** 2).sum() for whole in WHOLE.values()) ** 0.5
    np.testing.assert_allclose([norm for norm, _ in results], expected, rtol=1e-14)
    for name, whole in WHOLE.items():
        assert sum(counted[name] for _, counted in results) == whole.size


@pytest.mark.parametrize("axes", [AXES, {"data": 1, "model": 1}], ids=tiny.mesh_id)
@pytest.mark.parametrize("of", [np.asarray, transposed, read_only])
def test_blocks_are_contiguous_copies(of, axes):
    """Optimizers write into them, and want them flat."""

    def program(shelf, mesh):
        for name, whole in WHOLE.items():
            source = of(whole)
            block = shelf.block(name, source)
            assert type(block) is np.ndarray and not np.shares_memory(block, source)
            assert block.flags.c_contiguous and block.flags.writeable
            np.testing.assert_array_equal(block, whole[shelf.index(name)], strict=True)

    on_shelves(program, axes)


def test_blocks_of_a_file_are_copied_once_at_most(tmp_path):
    """A memory map's slices are views; a checkpoint's are arrays of their own, and taken over as they are."""
    np.save(tmp_path / "x.npy", np.arange(24.0).reshape(4, 6))
    save_file({"x": np.arange(24.0).reshape(4, 6)}, tmp_path / "x.safetensors")
    mapped, saved = np.load(tmp_path / "x.npy", mmap_mode="r"), Checkpoint(tmp_path / "x.safetensors")["x"]
    read = []

    class Watched:
        shape, slices_are_copies = saved.shape, True

        def __getitem__(self, index):
            read.append(saved[index])
            return read[-1]

    with Mesh(data=1, model=1) as mesh:
        shelf = Shelf(mesh)
        shelf.shardings = {"x": "d f/model"}
        of_map, of_checkpoint = shelf.block("x", mapped), shelf.block("x", Watched())
    assert type(of_map) is np.ndarray and of_map.flags.writeable and not np.shares_memory(of_map, mapped)
    assert np.shares_memory(of_checkpoint, read[0])


@pytest.mark.parametrize("name", ["uneven", "replicated"])
def test_blocks_on_a_device_are_copies_too(name, device):
    def program(shelf, mesh):
        shelf.backend = device
        there = device.asarray(WHOLE[name])
        of_host, of_device = shelf.block(name, transposed(WHOLE[name])), shelf.block(name, there)
        assert not np.shares_memory(of_device.memory, there.memory)
        for block in (of_host, of_device):
            assert device.owns(block) and block.flags.c_contiguous
            np.testing.assert_array_equal(block.memory, WHOLE[name][shelf.index(name)], strict=True)

    on_shelves(program)


def test_an_engine_in_groups_copies_its_blocks_too():
    with Mesh(data=1) as mesh:
        engine = tiny.make_engine(mesh)
        name = engine.names[0]
        whole = transposed(engine.gather(name))
        block = engine.block(name, whole)
        assert not np.shares_memory(block, whole) and block.flags.c_contiguous


def test_ranks_that_load_one_array_train_apart():
    """Virtual ranks share the caller's memory; each trains its own."""
    whole = {"w": np.zeros((5, 3))}
    x, y = (np.random.default_rng(seed).standard_normal(shape) for seed, shape in ((0, (8, 5)), (1, (8, 3))))

    def program():
        engine = Linear()
        engine.load_checkpoint(whole)
        trainer = Trainer(engine, SGD(), lambda step: batch_of(x, y, engine, step=step), lambda step: 0.1)
        return [report.loss for report in trainer.run(3)]

    expected = run_threads(program, 1)[0]
    for ranks in (2, 4):
        np.testing.assert_allclose(run_threads(program, ranks)[0], expected, rtol=1e-12)
    assert not whole["w"].any()
