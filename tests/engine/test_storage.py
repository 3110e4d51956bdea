"""Where parameter groups live, when their parts are gathered, and when gradients are summed."""

import weakref
from collections import Counter
from math import prod

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.arrays.backend import CPU
from spmd_engine.comm import algorithms
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.gathering import OpenParameters
from spmd_engine.engine.plan import Storage, make_plan
from spmd_engine.engine.recompute import Recompute
from spmd_engine.engine.reducer import Reducer
from spmd_engine.engine.storage import GroupStorage
from spmd_engine.layers import Linear
from spmd_engine.models import Model, deep_mlp, gpt
from spmd_engine.models.mlp import squared_loss
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import Member, Sum, make_groups

FLOAT = np.dtype(np.float64)
every_stage_of_zero = pytest.mark.parametrize("zero", [0, 1, 2, 3])

# --- one group

SHAPES = {"w0": (5, 3), "empty": (0, 4), "w1": (2, 7), "bias": (6,), "number": ()}
MESHES = [
    ({"data": 2}, Sum(("data",), ("data",))),
    ({"data": 5}, Sum(("data",), ("data",))),  # one owns nothing of what stages share
    ({"replicate": 2, "shard": 3}, Sum(("replicate", "shard"), ("shard",))),
    ({"data": 2, "context": 2}, Sum(("data", "context"), ("data", "context"))),
    ({"model": 2, "data": 2}, Sum(("data",), ("data",))),
    ({"pipe": 3, "data": 2}, Sum(("data",), ("data",), stages=(0, 2))),
    ({"pipe": 2}, Sum((), (), stages=(0, 1))),
    ({"data": 2}, Sum()),
]
every_mesh = pytest.mark.parametrize("axes, summed", MESHES, ids=str)


def on_each_rank(axes, summed, zero, program):
    """``program(storage, mesh)`` by rank of the mesh, where the group is held."""

    def body():
        with Mesh(**axes) as mesh:
            if summed.stages and mesh.coordinates["pipe"] not in summed.stages:
                return None
            cut = summed.cut if zero else ()
            total = Sum(summed.over, cut, summed.stages)
            members = [Member(name, shape, len(shape) > 1, total, prod(shape)) for name, shape in SHAPES.items()]
            group, *_ = make_groups(members, FLOAT.itemsize)  # what stages share stands alone: then the first
            return program(GroupStorage(group, mesh, zero, FLOAT, CPU), mesh)

    return run(body, prod(axes.values()))


def integers(size, *seed):
    """Of which sums have no rounding."""
    return np.random.default_rng(seed).integers(-99, 99, size).astype(float)


def summed_with(axes, summed, rank):
    """The ranks over which the gradients of ``rank`` are summed."""
    sizes = tuple(axes.values())
    here = dict(zip(axes, np.unravel_index(rank, sizes)))

    def together(other):
        there = dict(zip(axes, np.unravel_index(other, sizes)))
        free = {*summed.over, *(("pipe",) if summed.stages else ())}
        return all(axis in free or here[axis] == there[axis] for axis in axes) and (
            not summed.stages or there["pipe"] in summed.stages
        )

    return [other for other in range(prod(sizes)) if together(other)]


@every_stage_of_zero
@every_mesh
def test_own_parts_of_reduced_gradients_are_the_sum_over_ranks(axes, summed, zero):
    def program(storage, mesh):
        for step in range(2):
            for name, gradient in storage.gradients.items():
                assert gradient.shape == SHAPES[name]
            storage.whole_gradients[...] = integers(storage.group.size, step, mesh.rank)
            pending = storage.start_reduce()
            result = pending.wait() if pending else None
            if storage.zero >= 2:
                storage.own_gradients[...] = result
            rest = storage.start_reduce_rest()
            if rest:
                rest.wait()
            total = sum(integers(storage.group.size, step, r) for r in summed_with(axes, summed, mesh.rank))
            np.testing.assert_array_equal(storage.own_gradients, total[storage.interval])
        return storage.interval, storage.group.size

    for rank, found in enumerate(results := on_each_rank(axes, summed, zero, program)):
        if found and zero and summed.cut:  # the parts of those who share state are the whole
            owners = summed_with(axes, Sum(summed.cut), rank)
            intervals = [results[owner][0] for owner in owners]
            assert [i.start for i in intervals] + [found[1]] == [0, *(i.stop for i in intervals)]
        elif found:
            assert found[0] == slice(0, found[1])


@every_stage_of_zero
@every_mesh
def test_gradients_go_by_the_operation_that_sends_least(axes, summed, zero):
    """Parts are scattered and then summed over replicas, and nothing whole where there are parts."""

    def program(storage, mesh):
        storage.gradients["w0"][...] = 0
        for start in (storage.start_reduce, storage.start_reduce_rest):
            pending = start()
            if pending:
                pending.wait()
        return {key: entry.sent for key, entry in mesh.ledger.entries.items()}, storage.group.size * FLOAT.itemsize

    cut = summed.cut if zero else ()
    rest = (*(("pipe",) if summed.stages else ()), *(axis for axis in summed.over if axis not in cut))
    entries = [found for found in on_each_rank(axes, summed, zero, program) if found]
    size = entries[0][1]
    expected = Counter()
    parts = prod(axes[axis] for axis in cut)
    copies = prod(axes[axis] for axis in rest if axis != "pipe") * max(1, len(summed.stages))
    if cut:
        expected["reduce_scatter", ",".join(cut), "gradients"] = size * (parts - 1) * (len(entries) // parts)
    if rest:  # of each part 2 (copies - 1) times
        expected["all_reduce", ",".join(rest), "gradients"] = 2 * size * (copies - 1) * len(entries) // parts // copies
    assert sum((Counter(sent) for sent, _ in entries), Counter()) == expected


@every_stage_of_zero
@every_mesh
def test_what_owners_update_everyone_who_needs_it_has(axes, summed, zero):
    def program(storage, mesh):
        everywhere = integers(storage.group.size, 5)
        storage.own_parameters[...] = everywhere[storage.interval]
        refresh = storage.start_refresh()
        assert (refresh is not None) == (storage.zero in (1, 2))
        if refresh:
            refresh.wait()
        storage.start_gather()
        storage.start_gather()  # nothing more: it is on its way
        storage.finish_gather()
        np.testing.assert_array_equal(storage.whole_parameters, everywhere)
        for name, block in storage.parameters.items():
            np.testing.assert_array_equal(block, everywhere[storage.group.spans[name]].reshape(SHAPES[name]))
        calls = {key: entry.calls for key, entry in mesh.ledger.entries.items()}
        gathers = {("all_gather", ",".join(summed.cut), "parameters"): 1}
        assert calls == (gathers if storage.zero else {})

    on_each_rank(axes, summed, zero, program)


@every_stage_of_zero
def test_which_arrays_are_here_at_which_time(zero):
    def program(storage, mesh):
        sizes = [part.stop - part.start for part in storage.group.intervals(3)]
        own = sizes[mesh.rank] if zero else storage.group.size

        def here():
            return storage.whole_parameters is not None, storage.whole_gradients is not None

        parameters, gradients = zero < 3, zero < 2
        assert storage.own_parameters.shape == storage.own_gradients.shape == (own,)
        assert storage.stored_parameters.shape == (own if zero == 3 else storage.group.size,)
        assert here() == (parameters, gradients)
        assert not parameters or np.shares_memory(storage.own_parameters, storage.whole_parameters)
        assert not gradients or np.shares_memory(storage.own_gradients, storage.whole_gradients)

        storage.start_gather()
        storage.finish_gather()
        assert here() == (True, gradients)
        assert storage.gradients is storage.gradients
        assert here() == (True, True)
        if not gradients:
            assert not np.shares_memory(storage.own_gradients, storage.whole_gradients)
        pending = storage.start_reduce()
        assert here() == (True, gradients)  # what is not stored was given away
        pending.wait()
        gathered = memory_of(storage.whole_parameters)
        storage.release()
        assert here() == (parameters, gradients)
        assert parameters or gathered() is None

    on_each_rank({"data": 3}, Sum(("data",), ("data",)), zero, program)


def test_memory_that_is_being_gathered_into_is_not_released_before_it_ends():
    def program(storage, mesh):
        storage.own_parameters[...] = 1
        storage.start_gather()
        storage.release()
        assert mesh.ledger.total("all_gather").calls == 1  # it is over
        storage.own_parameters[...] = 2
        storage.start_gather()
        storage.finish_gather()
        assert (storage.whole_parameters == 2).all()
        assert mesh.ledger.total("all_gather").calls == 2

    on_each_rank({"data": 3}, Sum(("data",), ("data",)), 3, program)


# --- parameters, opened a layer at a time

UNTIED, TIED = (gpt(tiny.GPTSize(**{**tiny.SIZE.__dict__, "tied": tied})) for tied in (False, True))
#: bytes: a group each, a few layers a group, one group
thresholds = pytest.mark.parametrize("threshold", [0, 1500, 1 << 20], ids=["many groups", "some groups", "one group"])


class Parts:
    """Storages of a model on a mesh, parameters filled with numbers that depend on name and place alone."""

    def __init__(self, model, mesh, storage, *, kind=GroupStorage):
        self.model, self.layers = model, range(len(model.layers))
        self.plan = make_plan(model, mesh, Layout.for_mesh(mesh), FLOAT.itemsize, storage=storage)
        zero = storage.stage(mesh.axes)
        self.storages = [kind(group, mesh, zero, FLOAT, CPU) for group in self.plan.groups]
        self.whole = {n: integers(shape, i) for i, (n, (_, shape)) in enumerate(model.parameters())}
        for each in self.storages:
            flat = np.zeros(each.group.size)
            for name, view in each.group.views(flat).items():
                view[...] = self.whole[name]
            each.own_parameters[...] = flat[each.interval]
            if each.zero < 3:
                each.whole_parameters[...] = flat
        self.of_name = {name: each for each in self.storages for name in each.group.spans}

    def used(self, *layers):
        """The groups that some layers use, in the order of use."""
        names = [full for layer in layers for full in self.plan.uses[layer].values()]
        return list(dict.fromkeys(self.of_name[name] for name in names))

    def gathered(self):
        return {each for each in self.storages if each.whole_parameters is not None}


def memory_of(array):
    """A reference to what all views of an array hold on to."""
    return weakref.ref(array.base if isinstance(array.base, np.ndarray) else array)


def leaves(tree, prefix=""):
    """A layer's arrays by their own names: "norm/scale" stands at ["norm"]["scale"]."""
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]


@pytest.mark.parametrize("zero, threshold", [(0, 1500), (1, 1500), (3, 0), (3, 1500), (3, 1 << 20)])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_layer_opens_its_own_parameters(model, zero, threshold):
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(model, mesh, Storage(zero, threshold))
            opened = OpenParameters(parts.storages, parts.plan.uses)
            for layer in (*parts.layers, *reversed(parts.layers), 3, 3, 6, 0):
                found = dict(leaves(opened.open(layer, ahead=range(layer + 1, len(parts.layers)))))
                assert list(found) == list(parts.plan.uses[layer])
                for own, full in parts.plan.uses[layer].items():
                    np.testing.assert_array_equal(found[own], parts.whole[full], strict=True)
            assert zero == 3 or not mesh.ledger.entries

    run(program, 2)


@thresholds
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_of_groups_in_parts_only_those_in_use_and_the_next_are_here(model, threshold):
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(model, mesh, Storage(3, threshold))
            opened = OpenParameters(parts.storages, parts.plan.uses)
            last = parts.layers[-1]
            walk = [(layer, (), range(layer + 1, last + 1)) for layer in parts.layers]
            walk += [(layer, (), range(layer - 1, -1, -1)) for layer in reversed(parts.layers)]
            walk += [(4, (2, 3), (1, 0)), (3, (2, 3, 4), (1, 0)), (2, (2,), ()), (2, (), (2, 3, 4))]
            for layer, keep, ahead in walk:
                opened.open(layer, keep=keep, ahead=ahead)
                wanted = parts.used(layer, *keep)
                following = [each for each in parts.used(*ahead) if each not in wanted][:1]
                assert parts.gathered() == {*wanted, *following}
            opened.close()
            assert not parts.gathered()

    run(program, 2)


def pair_bytes(width):
    """Of the parameters of one layer of a deep MLP."""
    return 2 * (width * width + width) * FLOAT.itemsize


class Logged(GroupStorage):
    """Says when gathers begin and when they are waited for."""

    def start_gather(self):
        self.log.append(f"start {self.group.name}")
        super().start_gather()

    def finish_gather(self):
        self.log.append(f"finish {self.group.name}")
        super().finish_gather()


def test_the_next_group_is_on_its_way_before_the_one_in_use_is_waited_for():
    def program():
        with Mesh(data=2) as mesh:
            parts, log = Parts(deep_mlp(8, 4), mesh, Storage(3, pair_bytes(4)), kind=Logged), []
            for each in parts.storages:
                each.log = log
            opened = OpenParameters(parts.storages, parts.plan.uses)
            for layer in parts.layers:
                opened.open(layer, ahead=range(layer + 1, 4))
            return list(dict.fromkeys(log))

    events = ["start 0", "start 1", "finish 0", "start 2", "finish 1", "start 3", "finish 2", "finish 3"]
    assert run(program, 2) == [[event.replace(" ", " group") for event in events]] * 2


def test_released_memory_is_given_back():
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(deep_mlp(8, 4), mesh, Storage(3, pair_bytes(4)))
            opened = OpenParameters(parts.storages, parts.plan.uses)
            opened.open(0, ahead=range(1, 4))
            first = memory_of(parts.storages[0].whole_parameters)
            opened.open(1, ahead=range(2, 4))
            assert first() is None

    run(program, 2)


# --- gradients, as layers finish


class Garbage(Mesh):
    """New memory is full of nonsense, as it may be; ``alive`` counts what was made since and is still held."""

    def empty(self, *args, **options):
        array = super().empty(*args, **options)
        array.fill(np.nan)
        self.__dict__.setdefault("made", []).append(memory_of(array))
        return array

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.made)


def contribution(parts, m, layer, own, rank):
    """What a layer adds to the gradient of one of its parameters on a rank; None where it adds nothing."""
    full = parts.plan.uses[layer][own]
    if full == "positions/table" or (full == "norm/scale" and m != 1):
        return None
    return integers(parts.whole[full].shape, rank, m, layer, len(own), ord(own[0]))


def backward(parts, reducer, micro_batches, rank, seen=lambda event: None):
    """All backwards of a step, with gradients that are drawn instead of computed."""
    for m in range(micro_batches):
        for layer in reversed(parts.layers):
            sums = reducer.sums(layer)
            for own in parts.plan.uses[layer]:
                value = contribution(parts, m, layer, own, rank)
                if value is not None:
                    sums.add(own, value)
            reducer.layer_done(layer)
            seen((m, layer))


def expected_gradients(parts, micro_batches, ranks):
    total = {name: np.zeros(whole.shape) for name, whole in parts.whole.items()}
    for layer in parts.layers:
        for own, full in parts.plan.uses[layer].items():
            for m in range(micro_batches):
                for rank in ranks:
                    value = contribution(parts, m, layer, own, rank)
                    total[full] += 0 if value is None else value
    return total


def make_reducer(parts):
    return Reducer(parts.storages, parts.plan.uses, [parts.layers])


def assert_reduced(parts, micro_batches, ranks):
    expected = expected_gradients(parts, micro_batches, ranks)
    for each in parts.storages:
        rows = each.group.rows(each.interval)
        for name, own in each.group.views(each.own_gradients, each.interval).items():
            np.testing.assert_array_equal(own, expected[name][rows[name]], err_msg=name)


STORED = [
    *[({"data": 3}, Storage(zero, 1500)) for zero in (0, 1, 2, 3)],
    *[({"data": 2}, Storage(zero, 0)) for zero in (1, 3)],
    *[({"data": 2}, Storage(zero, 1 << 20)) for zero in (0, 2)],
    ({"data": 2, "shard": 2}, Storage(None, 1500)),
    ({"data": 2, "shard": 2}, Storage(2, 1500)),
    ({"replicate": 2, "shard": 2}, Storage(None, 1500)),
    ({"replicate": 2, "shard": 2}, Storage(1, 1500)),
]


@pytest.mark.parametrize("axes, storage", STORED, ids=[f"{tiny.mesh_id(a)}-{s.zero}-{s.threshold}" for a, s in STORED])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_micro_batches_and_ranks_add_up_and_nothing_else(model, axes, storage):
    """From memory full of nonsense: what comes first is written, what nothing comes for is zero."""

    def program():
        with Garbage(**axes) as mesh:
            parts = Parts(model, mesh, storage)
            reducer = make_reducer(parts)
            for each in parts.storages:
                each.own_gradients[...] = np.nan
                if each.zero < 2:
                    each.whole_gradients[...] = np.nan
            for micro_batches in (3, 1):
                reducer.begin(micro_batches)
                backward(parts, reducer, micro_batches, mesh.rank)
                reducer.finish()
                assert_reduced(parts, micro_batches, range(mesh.size))

    run(program, prod(axes.values()))


class Sent(GroupStorage):
    """Says when gradients leave."""

    def start_reduce(self):
        self.log.append(self.group.name)
        return super().start_reduce()


@pytest.mark.parametrize("zero", [0, 2])
@thresholds
def test_groups_leave_as_soon_as_the_backward_is_through_with_them(threshold, zero):
    """Before ZeRO-2 after the last micro-batch's, from then on after each."""

    def program():
        with Mesh(data=2) as mesh:
            parts, log = Parts(TIED, mesh, Storage(zero, threshold), kind=Sent), []
            for each in parts.storages:
                each.log = log
            reducer = make_reducer(parts)
            reducer.begin(2)
            backward(parts, reducer, 2, mesh.rank, log.append)
            reducer.finish()

            through = {}  # the last layer of a backward that uses a group: the first of the model
            for layer in reversed(parts.layers):
                through.update(dict.fromkeys(parts.used(layer), layer))
            expected = []
            for m in range(2):
                for layer in reversed(parts.layers):
                    if m == 1 or zero >= 2:
                        expected += [each.group.name for each in parts.used(layer) if through[each] == layer]
                    expected.append((m, layer))
            assert log == expected

    run(program, 2)


@pytest.mark.parametrize("zero", [2, 3])
def test_few_whole_gradients_are_here_at_once(zero):
    def program():
        with Garbage(data=3) as mesh:
            parts = Parts(deep_mlp(16, 4), mesh, Storage(zero, pair_bytes(4)))
            assert len(parts.storages) == 8
            reducer, alive, stored = make_reducer(parts), [], mesh.alive
            for _ in range(2):
                reducer.begin(3)
                backward(parts, reducer, 3, mesh.rank, lambda event: alive.append(mesh.alive - stored))
                reducer.finish()
                assert mesh.alive == stored
            return max(alive)

    assert max(run(program, 3)) == 2  # on their way, between two layers


@every_stage_of_zero
def test_a_reducer_begins_anew_after_a_step_that_broke_off(zero, monkeypatch):
    """Sums under way, of many pieces here, must not end in the gradients of the next step."""
    monkeypatch.setattr(algorithms, "PIECE", 256)

    def program():
        with Garbage(data=2) as mesh:
            parts = Parts(UNTIED, mesh, Storage(zero, 3000))
            reducer = make_reducer(parts)
            for broken_after in (1, 3, len(parts.layers)):
                reducer.begin(1)
                for layer in [*reversed(parts.layers)][:broken_after]:
                    for own, full in parts.plan.uses[layer].items():
                        reducer.sums(layer).add(own, np.full_like(parts.whole[full], np.nan))
                    reducer.layer_done(layer)
                reducer.begin(2)
                backward(parts, reducer, 2, mesh.rank)
                reducer.finish()
                assert_reduced(parts, 2, range(2))

    run(program, 2)


# --- in an engine


def engine_on(mesh, model, **options):
    return LayeredEngine(model, mesh, Layout.for_mesh(mesh), dtype=FLOAT, **options)


def batch_for(engine, micro_batches):
    x = integers((6, 4), 1) / 99
    return batch_of(x, x[::-1].copy(), engine, micro_batches)


def counted(mesh):
    """Calls and bytes since the last time, by operation and label."""
    found = {key[::2]: (entry.calls, entry.sent) for key, entry in mesh.ledger.entries.items()}
    mesh.ledger.clear()
    return found


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.BLOCK])
@pytest.mark.parametrize("pairs, micro_batches", [(1, 1), (2, 3), (6, 2)])
@every_stage_of_zero
def test_calls_and_bytes_of_a_step(zero, pairs, micro_batches, recompute):
    """Fully sharded, each group is gathered once a forward and once a backward, but for the group that is there.

    That is the last of a forward when the backward begins, and the first of that when the next forward does.
    Recomputation gathers nothing more: what it opens is what the backward is about to use.
    """
    ranks, count = 2, 6 // pairs

    def program():
        with Mesh(data=ranks) as mesh:
            storage = Storage(zero, pairs * pair_bytes(4))
            engine = engine_on(mesh, deep_mlp(12, 4), storage=storage, recompute=recompute)
            batch = batch_for(engine, micro_batches)
            mesh.ledger.clear()
            for _ in range(2):
                engine.step(batch)
                engine.after_update()
                yield counted(mesh)

    gathers = {0: 0, 1: count, 2: count, 3: count + (2 * micro_batches - 1) * (count - 1)}[zero]
    sums = count * micro_batches if zero >= 2 else count
    operation = "reduce_scatter" if zero else "all_reduce"
    for steps in zip(*run(lambda: list(program()), ranks)):
        for found in steps:
            assert found.get(("all_gather", "parameters"), (0,))[0] == gathers
            assert found[operation, "gradients"][0] == sums
            assert sum(label == "gradients" for _, label in found) == 1
        sent = sum((Counter({key: size for key, (_, size) in found.items()}) for found in steps), Counter())
        group = pairs * pair_bytes(4) * (ranks - 1)
        assert sent["all_gather", "parameters"] == gathers * group
        assert sent[operation, "gradients"] == sums * group * (1 if zero else 2)


@pytest.mark.parametrize("recompute", [Recompute.BLOCK, Recompute.ATTENTION])
def test_recomputing_blocks_of_several_groups_gathers_nothing_more(recompute):
    def program(recompute):
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, zero=3, tied=False, group_threshold=1500, recompute=recompute)
            batch = tiny.batch(engine, 0, micro_batches=2)
            mesh.ledger.clear()
            engine.step(batch)
            return len(engine.plan.groups), counted(mesh)["all_gather", "parameters"][0]

    expected = run(program, 2, args=(Recompute.NONE,))
    assert expected[0][0] > 6  # groups of less than a block
    assert run(program, 2, args=(recompute,)) == expected


def test_evaluation_gathers_once_a_forward():
    def program():
        with Mesh(data=2) as mesh:
            engine = engine_on(mesh, deep_mlp(12, 4), storage=Storage(3, pair_bytes(4)))
            batch = batch_for(engine, 2)
            mesh.ledger.clear()
            engine.evaluate(batch)
            return counted(mesh)["all_gather", "parameters"][0]

    assert run(program, 2) == [12, 12]


def test_nothing_stays_whole_between_steps():
    """It would take memory, and hide that somebody has changed the parameters meanwhile."""

    def program():
        with Mesh(data=2) as mesh:
            engine = engine_on(mesh, deep_mlp(12, 4), storage=Storage(3, pair_bytes(4)))
            batch = batch_for(engine, 2)
            for compute in (engine.step, engine.evaluate):
                compute(batch)
                assert all(storage.whole_parameters is None for storage in engine._storages)
                for parameter in engine.parameters.values():
                    parameter *= 1.5
            changed = engine.evaluate(batch)
            engine.after_update()
            assert engine.evaluate(batch) == changed

    run(program, 2)


@every_stage_of_zero
def test_a_step_after_one_that_broke_off_is_right(zero, monkeypatch):
    monkeypatch.setattr(algorithms, "PIECE", 256)

    def program():
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, group_threshold=3000, zero=zero)
            batch, (_, first) = tiny.batch(engine, 0), engine.model.layers[0]
            expected = engine.step(batch), engine.gradient_norm()
            calls = []

            def broken(*args):
                calls.append(args)
                if len(calls) == 2:  # in the last micro-batch, when other groups are on their way
                    raise RuntimeError
                return type(first).backward_weight(first, *args)

            first.backward_weight = broken
            with pytest.raises(RuntimeError):
                engine.step(batch)
            del first.backward_weight
            assert (engine.step(batch), engine.gradient_norm()) == expected

    run(program, 2)


def autoencoder(width=6):
    """Its decoder has the encoder's weights, in the opposite order; all of them of one shape."""
    letters = [("d", "f"), ("f", "d"), ("d", "f"), ("f", "d")]
    layers = [Linear((i, width), (o, width), bias=False) for i, o in letters]
    layers[2].tied, layers[3].tied = {"weights": "layer_1/weights"}, {"weights": "layer_0/weights"}
    named = tuple((f"layer_{number}", layer) for number, layer in enumerate(layers))
    return Model("autoencoder", named, "b d", "b d", "b d", squared_loss)


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2}, {"data": 2, "pipe": 4}], ids=tiny.mesh_id)
@pytest.mark.parametrize("zero", [0, 3])
def test_stages_may_finish_with_what_they_share_in_different_orders(axes, zero):
    x = integers((8, 6), 1) / 99

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_on(mesh, autoencoder(), storage=Storage(zero))
            engine.step(batch_of(x, x[::-1].copy(), engine, 2))
            return engine.gradient_norm(), {n: engine.gather_owned(n, engine.gradients) for n in engine.names}

    def alone():
        engine = LayeredEngine(autoencoder(), dtype=FLOAT)
        engine.step(batch_of(x, x[::-1].copy(), engine, 2))
        return engine.gradient_norm(), engine.named(engine.gradients)

    ((norm, gradients),) = run(alone, 1)
    for result in run(program, prod(axes.values())):
        np.testing.assert_allclose(result[0], norm, rtol=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(result[1][name], gradient, atol=1e-13)
