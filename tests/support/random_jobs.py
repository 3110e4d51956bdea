"""Jobs that are drawn from a seed: what is computed, and on which sequence of meshes.

A job is trained in legs. Each leg continues from the checkpoint of the previous one on its own mesh, and some legs
change their shape in between. The reference is one rank that runs all steps at once.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from spmd_engine import Mesh, TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.axes import MeshPosition
from spmd_engine.checkpoints import Checkpoint
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.parallel_config import PIPELINES, RECOMPUTE
from spmd_engine.engine.state.assignment import shares_text
from spmd_engine.errors import UsageError
from spmd_engine.layers import RouterOptions
from spmd_engine.layers.attention.context import CONTEXT_METHODS
from spmd_engine.models import Mixture
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.strategies import STRATEGIES, default_axes
from spmd_engine.tokens.tokenizer import Tokenizer
from spmd_engine.training.data.prepare import prepare
from support import saved, tiny
from support.labelled_images import write_npz

FAMILIES = sorted(Path(__file__).parents[1].joinpath("golden", "decoders").iterdir())
TEXTS = [f"document {number}: " + "a cab " * (number * 7 % 30) for number in range(40)]
AXES = {
    "decoder": ["pipe", "data", "context", "model", "replicate", "shard", "queries"],
    "experts": ["pipe", "data", "expert", "model", "context"],
    "images": ["pipe", "data", "rows", "columns", "model"],
    "mlp": ["pipe", "data", "row", "col", "model"],
}
MOST = 6  #: ranks


class Letters(Tokenizer):
    """A tokenizer with the vocabulary size of the models of ``golden/decoders``."""

    vocabulary, end, separator, sha256 = 23, 0, 0, "letters"

    def encode(self, text, *, special=True):
        return [1 + ord(letter) % 22 for letter in text]

    def decode(self, tokens):
        return "".join(chr(96 + token) for token in tokens if token)

    def encode_places(self, text):
        return self.encode(text), [(place, place + 1) for place in range(len(text))]

    def piece(self, token):
        return self.decode([token])


@dataclass
class Leg:
    """Training up to step ``stop_at`` on a mesh; from step ``turns_at`` on another one."""

    stop_at: int
    axes: dict
    how: dict
    run: dict  #: options of the run besides the steps
    trace: int = 0
    turns_at: int | None = None
    turned: tuple[dict, dict] = field(default_factory=lambda: ({}, {}))

    def __str__(self):
        turned = f", after {self.turns_at} {self.turned}" if self.turns_at else ""
        return f"to step {self.stop_at} on {self.axes} {self.how} {self.run} trace={self.trace}{turned}"


class RandomJob:
    """A job drawn from the seed: ``what`` is computed, and the legs."""

    def __init__(self, seed, folder):
        self.rng, self.folder = np.random.default_rng(seed), Path(folder)
        self.rng_of_shares = np.random.default_rng([seed, 1])
        rng = self.rng
        self.steps = int(rng.integers(2, 6))
        self.kind = str(rng.choice(["decoder", "decoder", "experts", "images", "mlp", "page"]))
        self.what = {
            "dtype": "float64", "steps": self.steps, "eval_samples": 6, "sample": 0, "warmup": 2,
            "seed": int(rng.integers(9)), "optimizer": str(rng.choice(["adamw", "sgd"])),
            "grad_clip": float(rng.choice([0, 0.3, 1])), "eval_every": int(rng.choice([0, 2])),
            "batch_size": int(rng.integers(6, 13)), "micro_batches": int(rng.integers(1, 4)),
            "learning_rate": 0.02,
        }  # fmt: skip
        getattr(self, f"_{self.kind}")()

    @cached_property
    def legs(self):
        """Drawn when they are asked for: their meshes take longer than some jobs."""
        cuts = sorted({self.steps, *self.rng.integers(1, self.steps + 1, self.rng.integers(0, 3)).tolist()})
        return [self._leg(first, last) for first, last in zip([0, *cuts[:-1]], cuts, strict=True)]

    # --- what is computed

    def _decoder(self, families=FAMILIES):
        rng = self.rng
        self.what |= {
            "data": self._tokens(), "model": str(rng.choice(families)), "length": int(rng.integers(5, 20)),
            "documents": str(rng.choice(["joined", "apart", "restarted"])),
        }  # fmt: skip
        if rng.random() < 0.25:
            self.what["lora"] = LoRAOptions(rank=int(rng.integers(1, 4)))

    def _experts(self):
        rng = self.rng
        self._decoder([each for each in FAMILIES if each.name in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")])
        self.what.pop("lora", None)
        if rng.random() < 0.5:
            options = RouterOptions(bias_rate=float(rng.choice([0, 0.1])))
            mixture = Mixture(int(rng.integers(2, 8)), int(rng.integers(2)), 7, "", options)
            self.what |= {"model": "gpt-moe-nano", "mixture": mixture, "dropout": float(rng.choice([0, 0.1]))}

    def _images(self):
        rng, data = self.rng, self.folder / "images.npz"
        if not data.exists():
            write_npz(data)
        self.what |= {
            "data": str(data), "model": str(rng.choice(["convnet", "resnet-nano"])),
            "augment": str(rng.choice(["none", "shift-flip"])),
        }  # fmt: skip

    def _mlp(self):
        self.what |= {"data": self._text(), "model": "mlp"}

    def _page(self):
        self.what |= {"data": self._text(), "model": "mlp", "strategy": str(self.rng.choice(sorted(STRATEGIES)))}

    def _text(self):
        (self.folder / "text").mkdir(exist_ok=True)
        (self.folder / "text" / "all.py").write_text("\n".join(TEXTS * 60))
        return str(self.folder / "text")

    def _tokens(self):
        path = self.folder / "letters.tokens"
        if not path.exists():
            run_threads(lambda: prepare(Mesh().group(), [self._text_lines()], Letters(), path), 1)
        return str(path)

    def _text_lines(self):
        path = self.folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        return str(path)

    # --- where

    def _leg(self, first, last):
        rng = self.rng
        aside = {
            "save_every": int(rng.choice([0, 1, 2])), "save_in_background": bool(rng.integers(2)),
            "check_replicas_every": int(rng.choice([0, 1])), "keep": int(rng.integers(1, 3)),
        }  # fmt: skip
        ranks = int(rng.choice([1, 2, 3, 4, 6]))
        leg = Leg(last, *self._place(ranks), aside, trace=int(rng.random() < 0.2))
        if self.kind != "page" and last - first > 1 and rng.random() < 0.5:
            leg.turns_at, leg.turned, leg.trace = int(rng.integers(first + 1, last)), self._place(ranks), 0
        return leg

    def _place(self, ranks):
        """A mesh of this number of ranks, and options of the model on it; an invalid combination is drawn again."""
        if self.kind == "page":
            return self._page_axes(ranks), {}
        for _ in range(200):
            axes, how = self._axes(ranks), self._how()
            job = TrainConfig.of(**self.what | how)
            try:
                place = MeshPosition(axes, dict.fromkeys(axes, 0))
                composed_layout(job.model.build(job.composition), place, job.composition)
            except UsageError:
                continue
            shares = tiny.drawn_shares(axes, self.rng_of_shares, samples=False)
            return axes, how | {"shares": shares_text(shares) or None}
        raise AssertionError(f"nothing fits {self.what}")

    def _page_axes(self, ranks):
        try:
            return dict(default_axes(STRATEGIES[self.what["strategy"]], ranks))
        except UsageError:
            return dict.fromkeys(STRATEGIES[self.what["strategy"]].axes or ("data",), 1)

    def _axes(self, ranks):
        axes = {}
        for factor in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}[ranks]:
            axis = str(self.rng.choice(AXES[self.kind]))
            axes[axis] = axes.get(axis, 1) * factor
        return dict(sorted(axes.items(), key=lambda _: self.rng.random())) or {"data": 1}

    def _how(self):
        rng = self.rng
        how = {
            "zero": [None, 0, 1, 2, 3][rng.integers(5)],
            "recompute": str(rng.choice(RECOMPUTE[: {"images": 2, "mlp": 1}.get(self.kind, 3)])),
            "schedule": [None, *PIPELINES][rng.integers(1 + len(PIPELINES))],
            "stages": [None, "even", "cost"][rng.integers(3)],
            "group_threshold": int(rng.choice([0, 500, 1 << 20])), "group_cap": int(rng.choice([0, 4000, 1 << 24])),
        }  # fmt: skip
        if self.kind in ("decoder", "experts"):
            how["sequence_parallel"] = bool(rng.integers(2))
            how["context_method"] = [None, *CONTEXT_METHODS][rng.integers(1 + len(CONTEXT_METHODS))]
        if self.kind == "experts":
            how["rebalance_every"] = int(rng.choice([0, 1, 2]))
        if self.kind == "images":
            how["reshard_after"] = [None, 1, 2][rng.integers(3)]
        return how

    # --- training

    def trained(self, leg, folder, resume):
        """Losses by step of one leg."""
        job, requests = TrainConfig.of(**self.what | leg.how | leg.run | {"mesh": leg.axes}), {}
        if leg.turns_at is not None:
            axes, how = leg.turned
            requests[leg.turns_at] = ShapeRequest({"mesh": axes, **how})
        options = {"resume": resume, "stop_at": leg.stop_at, "trace": leg.trace, "propose": requests.get}
        run_threads(lambda: train(job, folder, **options), tiny.ranks_of(leg.axes))
        return losses_in(folder)

    def alone(self, folder):
        """Losses by step of one rank that runs all steps at once."""
        leg = Leg(self.steps, self._axes_of_one(), {}, {"save_every": 0})
        return self.trained(leg, folder, resume=False)

    def _axes_of_one(self):
        strategy = self.what.get("strategy")
        return dict.fromkeys((strategy and STRATEGIES[strategy].axes) or ("data",), 1)

    def __str__(self):
        return "\n  ".join((f"{self.kind}: {self.what}", *map(str, self.legs)))


def losses_in(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {said["step"]: said["loss"] for said in map(json.loads, lines)}


def check_job(seed, folder):
    """Train a job; assert that losses and the final checkpoint equal those of one rank. Returns the errors of rejected
    legs, which cannot be predicted, and the job as text."""
    job = RandomJob(seed, folder)
    done, refused = {}, []
    for leg in job.legs:
        try:
            done |= job.trained(leg, job.folder / "run", resume=bool(done))
        except UsageError as error:
            refused.append(f"{error}".partition("\nraised on")[0])
            return refused, str(job)
    alone = job.alone(job.folder / "alone")
    assert done.keys() == alone.keys(), job
    np.testing.assert_allclose([done[n] for n in alone], [*alone.values()], rtol=1e-9, err_msg=str(job))
    for what in saved.parameters, saved.state:
        found, expected = what(job.folder / "run"), what(job.folder / "alone")
        assert found.keys() == expected.keys(), job
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-8, atol=1e-9, err_msg=f"{name} of {job}")
    assert Checkpoint(job.folder / "run").metadata["step"] == job.steps
    return refused, str(job)
