"""The trainer, checkpoints and generation, on virtual ranks."""

import resource
import warnings
from types import MappingProxyType

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.updates import sum_of_squares
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import SGD, AdamW
from spmd_engine.engine.batch import batch_of, make_batch
from spmd_engine.engine.optimizers import WarmupCosine
from spmd_engine.errors import NotFiniteError, ReplicasDifferError
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.strategies import DataParallel
from spmd_engine.training import Trainer
from spmd_engine.training import trainer as training_loop
from support import saved, tiny


def make_trainer(mesh, optimizer=None, engine=MappingProxyType({}), **options):
    engine = tiny.make_engine(mesh, dropout=0.1, **engine)
    return Trainer(
        engine, optimizer or AdamW(), lambda step: tiny.batch(engine, step), lambda step: 0.05, grad_clip=0.3, **options
    )


def train_from(axes, folder, steps, resume):
    def program():
        with Mesh(**axes) as mesh:
            trainer = make_trainer(mesh)
            if resume:
                trainer.steps_done = load_checkpoint(folder, trainer.engine, trainer.optimizer)["step"]
            losses = [report.loss for report in trainer.run(steps)]
            save_checkpoint(folder, trainer.engine, trainer.optimizer, step=trainer.steps_done)
            return losses

    return run_threads(program, tiny.ranks_of(axes))[0]


def test_a_run_goes_on_exactly_on_another_mesh(tmp_path):
    whole = train_from({"data": 1}, tmp_path / "whole", 4, resume=False)
    first = train_from({"pipe": 2, "shard": 2}, tmp_path / "parts", 1, resume=False)
    first += train_from({"data": 2, "model": 2}, tmp_path / "parts", 2, resume=True)
    second = train_from({"model": 8}, tmp_path / "parts", 3, resume=True)  # of 6 heads, two ranks have none
    second += train_from({"context": 3}, tmp_path / "parts", 4, resume=True)
    np.testing.assert_allclose(first + second, whole, rtol=1e-12)
    for of in (saved.parameters, saved.state):
        ours, theirs = of(tmp_path / "parts"), of(tmp_path / "whole")
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            # A key's bias has no gradient but rounding noise, which Adam makes steps of.
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-10, err_msg=name)


def test_clipping_scales_the_step_to_the_limit():
    def moved(grad_clip):
        with Mesh() as mesh:
            trainer = make_trainer(mesh, SGD())
            trainer.grad_clip = grad_clip
            before = {name: p.copy() for name, p in trainer.engine.parameters.items()}
            norm = trainer.step().grad_norm
            change = sum(((p - before[name]) ** 2).sum() for name, p in trainer.engine.parameters.items())
            return norm, np.sqrt(change) / 0.05

    norm, full = moved(0.0)
    np.testing.assert_allclose(full, norm, rtol=1e-9)
    np.testing.assert_allclose(moved(norm / 2)[1], norm / 2, rtol=1e-5)
    np.testing.assert_allclose(moved(norm * 2)[1], norm, rtol=1e-9)


def test_a_report_without_an_account_costs_no_collective():
    def program():
        with Mesh(data=2) as mesh:
            trainer = make_trainer(mesh, step_metrics=False)
            report = trainer.step().as_dict()
            return list(report), mesh.ledger.total(label="metrics").calls

    keys, calls = run_threads(program, 2)[0]
    assert keys == ["step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second"]
    assert calls == 0


def test_reports_hold_what_metrics_need():
    def program():
        with Mesh(data=2) as mesh:
            report = make_trainer(mesh).step().as_dict()
            return report

    one, two = run_threads(program, 2)
    assert one["bytes_sent"] == two["bytes_sent"] > 0
    always = ["step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second", "bytes_sent"]
    of_ranks = ["shares", "cpu_seconds", "private_bytes"]
    assert list(one) == [*always, "exposed_communication", "gigabytes_per_second", *of_ranks]
    assert one["shares"] == two["shares"] and list(one["gigabytes_per_second"]) == ["data"]
    np.testing.assert_allclose(np.sum(one["shares"], axis=1), 1, atol=0.002)
    assert len(one["cpu_seconds"]) == len(one["shares"]) and all(seconds >= 0 for seconds in one["cpu_seconds"])
    assert 0 < one["exposed_communication"] < one["seconds"] * 1.5
    with Mesh(data=1) as mesh:
        alone = make_trainer(mesh).step().as_dict()
    assert list(alone) == [*always, "private_bytes"]
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(0 < memory < resident for memory in (*one["private_bytes"], *alone["private_bytes"]))
    assert one["tokens"] == tiny.BATCH * tiny.SIZE.context


def test_metrics_are_by_rank_wherever_the_ranks_are_on_the_mesh(monkeypatch):
    monkeypatch.setattr(training_loop, "_private_bytes", lambda now: world().rank)

    def program():
        with Mesh(data=3, order=[2, 0, 1]) as mesh:
            for brief in True, False:
                with pytest.raises(ReplicasDifferError, match="rank 0 of 3 found"):
                    training_loop.StepMetrics(mesh, brief).close(skips=mesh.rank == 0, signal=0)
            return training_loop.StepMetrics(mesh).close()[1]["private_bytes"]

    assert run_threads(program, 3) == [[0, 1, 2]] * 3


def test_a_loss_that_is_not_finite_stops_before_the_update():
    with Mesh() as mesh:
        trainer = make_trainer(mesh)
        trainer.engine.parameters["norm/scale"][...] = np.inf
        before = trainer.engine.parameters["embedding/table"].copy()
        with np.errstate(all="ignore"), pytest.raises(NotFiniteError, match="step 1: the loss is nan"):
            trainer.step()
        assert np.array_equal(trainer.engine.parameters["embedding/table"], before)


def test_evaluation_of_nothing_but_hidden_targets_is_0():
    def program():
        with Mesh(data=2) as mesh:
            trainer = make_trainer(mesh)
            tokens = tiny.tokens(0)[0]

            def load(samples):
                return tokens[samples], tokens[samples], np.zeros_like(tokens[samples])

            return trainer.evaluate([make_batch(load, len(tokens), 1, trainer.engine)])

    assert run_threads(program, 2) == [0.0, 0.0]


def test_evaluation_weighs_batches_by_their_terms():
    def program():
        with Mesh() as mesh:
            trainer = make_trainer(mesh)
            return trainer.evaluate([tiny.batch(trainer.engine, 0), tiny.batch(trainer.engine, 1)])

    results = run_threads(program, 1) + run_threads(program, 3)
    np.testing.assert_allclose(results, results[0], rtol=1e-13)


def test_warmup_and_cosine():
    rate = WarmupCosine(peak=1.0, steps=110, warmup=10, floor=0.1)
    assert [round(rate(step), 9) for step in (0, 4, 9, 10, 60, 110, 500)] == [0.1, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1]


def test_gradients_that_are_not_finite_stop_before_the_update():
    with Mesh() as mesh:
        trainer = make_trainer(mesh)
        trainer.engine.gradient_norm = lambda: float("inf")
        before = trainer.engine.parameters["norm/scale"].copy()
        with pytest.raises(NotFiniteError, match="step 1: the gradient's norm is inf"):
            trainer.step()
        assert np.array_equal(trainer.engine.parameters["norm/scale"], before)


def test_norms_of_large_gradients_are_finite():
    assert sum_of_squares(np.full(4, 1e25, np.float32)) == pytest.approx(4e50, rel=1e-6)


def spoilt(mesh, steps, rank, **options):
    """A trainer whose loss has, in these steps and on this rank, a gradient that is not a number."""
    trainer = make_trainer(mesh, **options)

    def loss(outputs, targets, **options):
        value, gradient = trainer.engine.loss(outputs, targets, **options)
        if trainer.steps_done in steps and mesh.rank == rank:
            gradient.reshape(-1)[0] = np.nan
        return value, gradient

    trainer.loss = loss
    return trainer


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "model": 2}, {"shard": 2}], ids=str)
def test_a_step_that_is_not_finite_updates_nothing_on_any_rank(axes):
    def program():
        with Mesh(**axes) as mesh:
            trainer = spoilt(mesh, {1, 2}, rank=1, max_skipped=2)
            first = trainer.step()
            before = {name: each.copy() for name, each in trainer.engine.parameters.items()}
            for _ in range(2):
                report = trainer.step()
                assert report.skipped.startswith("the gradient's norm is nan (gradient of ")
                assert report.as_dict()["grad_norm"] == "nan"
            for name, each in trainer.engine.parameters.items():
                np.testing.assert_array_equal(each, before[name])
            last = trainer.step()
            assert first.skipped is last.skipped is None and trainer.steps_done == 4
            return last.loss

    assert len(set(run_threads(program, tiny.ranks_of(axes)))) == 1


@pytest.mark.parametrize("compress", ["bfloat16", "top-k:0.5", "powersgd:2"])
def test_what_compression_keeps_is_finite_again(compress):
    def program():
        with Mesh(data=2) as mesh:
            trainer = spoilt(mesh, {1}, rank=1, max_skipped=1, engine={"compress": compress})
            return [bool(trainer.step().skipped) for _ in range(4)]

    assert run_threads(program, 2) == [[False, True, False, False]] * 2


@pytest.mark.parametrize("step_metrics", [True, False])
def test_a_norm_that_is_not_finite_on_one_rank_alone_is_a_flipped_bit(step_metrics):
    def program():
        with Mesh(data=3) as mesh:
            trainer = make_trainer(mesh, max_skipped=2, step_metrics=step_metrics, stop=StopFlag())
            trainer.step()
            norm = trainer.engine.gradient_norm

            def spoilt_here():
                if mesh.rank == 1:
                    next(iter(trainer.engine.gradients.values())).reshape(-1)[3] = np.inf
                return norm()

            trainer.engine.gradient_norm = spoilt_here
            with pytest.raises(ReplicasDifferError, match="rank 1 of 3 found something in the summed gradients"):
                trainer.step()

    run_threads(program, 3)


def test_an_engine_that_says_itself_what_a_loss_is_is_asked():
    class Doubling(DataParallel):
        def evaluate(self, batch, loss=None):
            return 2.0 * super().evaluate(batch, loss)

    def program(kind):
        with Mesh(data=2) as mesh:
            engine = kind(4, 6, mesh)
            engine.initialize(0)
            x = np.arange(32.0).reshape(8, 4) / 32
            trainer = Trainer(engine, SGD(), lambda step: None, lambda step: 0.1)
            return trainer.evaluate([batch_of(x, x, engine, step=step) for step in range(2)])

    assert run_threads(program, 2, args=(Doubling,))[0] == pytest.approx(
        2 * run_threads(program, 2, args=(DataParallel,))[0]
    )


def test_too_many_in_a_row_end_the_training():
    def program():
        with Mesh(data=2, pipe=2) as mesh:
            trainer = spoilt(mesh, {0, 2, 3}, rank=3, max_skipped=1)
            assert [bool(trainer.step().skipped) for _ in range(3)] == [True, False, True]
            said = r"step 4: the gradient's norm is nan \(gradient of .*, rank .*\) in 2 steps in a row; lower the"
            with pytest.raises(NotFiniteError, match=said):
                trainer.step()

    run_threads(program, 4)


@pytest.mark.parametrize("spoilt_part", ["inputs", "targets"])
def test_data_that_are_not_finite_are_named_and_not_the_learning_rate(spoilt_part):
    def program():
        with Mesh(data=2) as mesh:
            engine = DataParallel(4, 6, mesh)
            engine.initialize(0)
            x, y = np.ones((8, 4)), np.ones((8, 4))
            {"inputs": x, "targets": y}[spoilt_part][6, 2] = np.nan  # a sample of rank 1
            trainer = Trainer(engine, SGD(), lambda step: batch_of(x, y, engine), lambda step: 0.1, max_skipped=1)
            cause = f"the {spoilt_part} on rank 1 have values that are not finite: mend the data"
            assert trainer.step().skipped.endswith(cause)
            with pytest.raises(NotFiniteError, match=f"in 2 steps in a row; {cause}$"):
                trainer.step()
            with pytest.raises(NotFiniteError, match=f"the validation loss is nan after step 1; {cause}$"):
                trainer.evaluate([batch_of(x, y, engine)])

    run_threads(program, 2)


def test_a_run_without_a_loop_over_it_says_that_it_makes_no_step():
    with Mesh() as mesh:
        trainer = make_trainer(mesh)
        with pytest.warns(RuntimeWarning, match=r"run\(2\) has made no step; .* for report in") as found:
            trainer.run(2)
        assert found[0].filename == __file__ and trainer.steps_done == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert next(trainer.run(2)).step == 1
            trainer.run(1)  # nothing to do


def test_a_loss_that_grows_without_end_is_logged_once(caplog):
    with Mesh() as mesh:
        trainer = make_trainer(mesh)
        for loss in (np.nan, 2.0, 150.0, 1e200, 1e201):
            trainer._note_growth(loss)
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "step 0: the loss is 1e+200, over 100 times the first: lower the learning"
        )
