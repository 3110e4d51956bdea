"""Every hook of the package keeps to the protocol, and a job that has it computes what a job without it computes."""

import ast
from functools import cache
from inspect import signature
from pathlib import Path

import pytest

import spmd_engine
from spmd_engine import Mesh, Run, TrainConfig, run_threads
from spmd_engine.adaptive.shape_changes import ShapeChanges
from spmd_engine.jobs.run_job import CommonChoices
from spmd_engine.planning.dry_run.first_step_check import FirstStepCheck, first_step_check
from spmd_engine.training import Hook
from spmd_engine.training.expert_load import Rebalancer
from spmd_engine.training.observers import Observer, Observers
from spmd_engine.training.workload import make_trainer, open_workload

RANKS, STEPS = 2, 2


class Asking(Hook):
    """If it ``asks``, then on one rank after the first step. It remembers in which order it was called."""

    def __init__(self, asks):
        self.asks, self.calls = asks, []

    def prepare(self, job, ranks):
        self.calls.append(("prepare", ranks.size))
        return ["a notice"]

    def before_compute(self, step):
        self.calls.append(("before_compute", step))

    def after_update(self, step):
        self.calls.append(("after_update", step))

    def has_request(self, step):
        return step == 1 and self.asks

    def complete(self, report):
        self.calls.append(("complete", report.step))
        return report

    def between_steps(self, step, requested):
        self.calls.append(("between_steps", step, requested))

    def during(self, run, steps):
        self.asks &= run.engine.device_id == 1
        self.calls.append(("during", steps))
        return super().during(run, steps)

    def notified(self, name, *facts):
        self.calls.append(name)


#: Each hook of the package, and that of this file; add yours.
HOOKS = {
    "Asking": lambda workload: Asking(True),
    "CommonChoices": lambda workload: CommonChoices(),
    "FirstStepCheck": lambda workload: first_step_check(workload, enforced=True),
    "Observers": lambda workload: Observers([Observer()]),
    "Rebalancer": lambda workload: Rebalancer(workload.job.composition),
    "ShapeChanges": lambda workload: ShapeChanges(workload),
}


@cache
def results(name, folder):
    """By rank: the hook, its notices, the losses and gradients' norms of a run, and a hook after it that never asks."""
    job = TrainConfig.of(model="mlp", steps=STEPS, batch_size=4, eval_samples=4, sample=0)

    def program():
        with Mesh(data=RANKS) as mesh:
            workload, found = open_workload(job, mesh), []
            hook, last = HOOKS[name](workload) if name else Hook(), Asking(False)
            last.complete = lambda report: found.append((report.loss, report.grad_norm)) or report
            notices = hook.prepare(job, mesh.group())
            Run(folder, make_trainer(workload), config=job.as_json(), hooks=[hook, last]).train(STEPS)
            return hook, notices, found, last

    return run_threads(program, RANKS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_keeps_to_the_protocol_and_changes_no_result(name, tmp_path, tmp_path_factory):
    found, plain = results(name, tmp_path), results("", tmp_path_factory.getbasetemp() / "plain")
    for (hook, notices, reports, last), (_, _, expected, _) in zip(found, plain, strict=True):
        assert reports == expected and len(reports) == STEPS
        assert all(isinstance(notice, str) for notice in notices)
        own = {each for kind in type(hook).__mro__[:-2] for each in vars(kind)}
        for member in own & vars(Hook).keys() - {"__module__", "__doc__"}:
            ours, theirs = signature(getattr(hook, member)), signature(getattr(Hook(), member))
            assert [*ours.parameters] == [*theirs.parameters], member
        assert ("between_steps", 1, False) in last.calls, "a request of one hook is not one of another"


def test_hooks_act_in_one_order_on_all_ranks(tmp_path):
    (hook, *_), (other, *_) = results("Asking", tmp_path)
    assert hook.calls == other.calls
    step = lambda n: [
        ("before_compute", n),
        ("after_update", n),
        ("complete", n),
        *(["saved"] if n == STEPS else []),
        "stepped",
        ("between_steps", n, n == 1),
    ]
    assert hook.calls == [("prepare", RANKS), ("during", STEPS), *step(1), *step(2), "finished"]


def test_the_protocol_has_at_most_ten_methods_and_every_hook_is_tested():
    assert len([name for name in vars(Hook) if not name.startswith("_")]) <= 10
    texts = [path.read_text() for path in Path(spmd_engine.__file__).parent.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "Hook" in text]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    hooks = {node.name for node in classes if "Hook" in map(ast.unparse, node.bases)}
    assert hooks | {"Asking"} == HOOKS.keys() and FirstStepCheck.__name__ in hooks
