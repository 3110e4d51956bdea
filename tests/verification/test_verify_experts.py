"""verify names what goes wrong with the gradients of experts, and of what routes to them."""

from dataclasses import replace

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import Pending
from spmd_engine.verification import Cause, mesh_of_one, verify
from support import routed, tiny


def disagreement(spoil, *, finite_differences=False, **axes):
    """What verify says of the small GPT with experts; that its reference is right, one test shows for all."""

    def program():
        with Mesh(**axes) as mesh:
            engine = routed.engine_on(mesh, routed.model(layers=1))
            spoil(engine)
            reference = routed.engine_on(mesh_of_one(), routed.model(layers=1)) if mesh.rank == 0 else None
            return verify(engine, reference, tiny.batch, steps=2, finite_differences=finite_differences)

    return run_threads(program, tiny.ranks_of(axes))[0].disagreement


def test_experts_agree():
    assert disagreement(lambda engine: None, finite_differences=True, expert=2, data=2) is None


def test_a_missing_sum_of_experts_over_their_replicas_is_named():
    def forget(engine):
        for storage in engine.storages:
            if storage.group.home is not None:
                storage.start_reduce = lambda: Pending.completed(None)

    found = disagreement(forget, expert=2, data=2)
    assert "expert" in found.name and found.findings[0].cause is Cause.MISSING_SUM
    assert found.findings[0].axes == ("data",)


def test_a_sum_too_many_of_experts_is_named():
    def twice(engine):
        for storage in engine.storages:
            if storage.group.home is not None:
                plain = storage.start_reduce

                def again(plain=plain, storage=storage):
                    plain().wait()
                    return plain()

                storage.start_reduce = again

    found = disagreement(twice, expert=2, data=2)
    assert "expert" in found.name and found.findings[0].cause is Cause.REPEATED_SUM
    assert found.findings[0].axes == ("data",)


def test_a_router_that_is_not_summed_over_f_is_named():
    def program():
        with Mesh(expert=2, model=2) as mesh:
            built = routed.model(layers=1)
            parameters = dict(built.layers)["block0/moe"].parameters
            parameters["router"] = replace(parameters["router"], summed="bs")
            engine = routed.engine_on(mesh, built)
            reference = routed.engine_on(mesh_of_one(), routed.model(layers=1)) if mesh.rank == 0 else None
            return verify(engine, reference, tiny.batch, steps=1, finite_differences=False)

    found = run_threads(program, 4)[0].disagreement
    assert "router" in found.name and found.findings[0].cause is Cause.MISSING_SUM
    assert found.findings[0].axes == ("model",)
