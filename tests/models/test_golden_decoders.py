"""Against transformers: folders and vectors that scripts/make_golden_decoders.py made, of each family."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import load_pretrained
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.models.names import load_config
from spmd_engine.models.weight_map import weight_map
from support import parts, tiny
from support.pairwise import in_turn

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
FAMILIES = sorted(path.name for path in FOLDERS.iterdir())
#: Key heads are two: some of these have more ranks than that, cut sequences beyond 64 positions, or keep parts.
MESHES = [
    ({"data": 1}, {}),
    ({"model": 3}, {"sequence_parallel": True}),
    ({"context": 2, "data": 2}, {}),
    ({"pipe": 2, "model": 2}, {"zero": 3, "recompute": "block"}),
    ({"expert": 2, "context": 2}, {"context_method": "ulysses", "zero": 2}),
    ({"data": 2, "model": 2, "queries": 2}, {"sequence_parallel": True, "zero": 2}),  # three of these share a key head
]
WITHOUT_SHARED_KEYS = ("bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt")


def on_one(family, of):
    """The mesh whose turn it is; of two families of three, that of one device."""
    return 1 + of // 3 % (4 if family in WITHOUT_SHARED_KEYS else 5) if of % 3 == 0 else 0


#: Every family on one mesh, most of them alone, and each mesh with several; the rest takes long.
CASES = [
    pytest.param(
        family,
        *case,
        id=f"{family}-{number}",
        marks=[] if number == on_one(family, of) else pytest.mark.soak,
    )
    for of, family in enumerate(FAMILIES)
    for number, case in enumerate(MESHES)
    if family not in WITHOUT_SHARED_KEYS or "queries" not in case[0]
]
#: Families that others have beside them but for names: of these, one mesh in make test, and no more.
NAMES_ALONE = (
    "cwm", "granitemoehybrid", "helium", "internlm3", "jais2", "ministral", "ministral3", "seed_oss"
)  # fmt: skip
FAMILY_CASES = [pytest.param(each, marks=pytest.mark.soak if each in NAMES_ALONE else []) for each in FAMILIES]


def golden(family):
    return dict(np.load(FOLDERS / family / "reference.npz"))


def engine_of(family, axes, dtype, composition):
    folder = str(FOLDERS / family)
    config = ModelConfig(name=folder, shape=load_config(folder), dtype=dtype)
    engine = build_engine(config, Mesh(**axes), ParallelConfig(mesh=axes, **composition))
    load_pretrained(engine, folder)
    return engine


def in_its_place(gradients, stored, gradient, dims, own):
    """Compare a parameter's gradient with that of the tensor that it is stored in, or of its part of it."""
    found = next(each for each in stored if f"gradient/{each.tensor}" in gradients)
    whole = gradients[f"gradient/{found.tensor}"]
    if found.rows is not None:
        whole = whole[slice(*found.rows[:2])]
    sizes = own | {letter: count for letter, (_, count) in (found.at | found.among).items()}
    letters = [letter for word in found.dims.split() for letter in word]
    part = whole.reshape([sizes[letter] for letter in letters])
    index = {letter: number for letter, (number, _) in found.at.items()}
    index |= {letter: slice(first, first + own[letter]) for letter, (first, _) in found.among.items()}
    part = part[tuple(index.get(letter, slice(None)) for letter in letters)]
    left = [letter for letter in letters if letter not in found.at]
    expected = part.transpose([left.index(letter) for letter in dims.split()])
    scale = max(abs(each).max() for name, each in gradients.items() if name.startswith("gradient/"))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-10 * scale, err_msg=found.tensor)


@pytest.mark.parametrize(("family", "axes", "composition"), CASES)
def test_logits_loss_and_gradients_in_float64(family, axes, composition):
    expected = golden(family)

    def program():
        engine = engine_of(family, axes, "float64", composition)
        whole = batch_of(expected["tokens"], expected["targets"], engine)
        with engine.inference():
            logits = engine.forward(whole.micro_batches[0].inputs)
        logits = None if logits is None else engine.join_outputs(logits)
        loss = engine.step(whole)
        shapes = {name: engine.global_shape(name) for name in engine.parameters}
        return logits, loss, parts.updated(engine, engine.gradients), shapes

    names = dict(weight_map(load_config(FOLDERS / family)))
    filled = Pretrained(FOLDERS / family).filled
    ranks, shapes = run_threads(program, tiny.ranks_of(axes)), {}
    for logits, loss, _, here in ranks:
        shapes |= here
        if logits is not None:
            np.testing.assert_allclose(logits, expected["logits64"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(loss, expected["loss64"], rtol=1e-12)
    for name, gradient in parts.joined([gradients for _, _, gradients, _ in ranks], shapes).items():
        in_its_place(expected, names[name], gradient, filled[name].view.dims, filled[name].view.sizes)


@in_turn(6, family=FAMILY_CASES)
def test_logits_in_float32_are_those_of_transformers_as_it_is(family):
    expected = golden(family)
    engine = engine_of(family, {"data": 1}, "float32", {})
    with engine.inference():
        logits = engine.forward(expected["tokens"])
    last = expected["logits32"]
    # Theirs are up to 1.6e-6 from those in float64, ours up to 0.8e-6.
    np.testing.assert_allclose(logits[:, -last.shape[1] :], last, rtol=0, atol=2e-6 * abs(last).max())


CACHED = [
    pytest.param(family, axes, id=family, marks=pytest.mark.soak if family in NAMES_ALONE else [])
    for family, axes in zip(FAMILIES, cycle([{"model": 2, "data": 3}, {"model": 2}, {}]))
]


@in_turn(6, **{"family, axes": CACHED})
def test_piece_by_piece_with_a_cache(family, axes):
    """Prompts of 20 tokens, then 50 more, then one after the other: at their positions. Of six ranks two have none."""
    expected = golden(family)

    def program():
        engine, cache, parts = engine_of(family, axes, "float64", {}), Cache(), []
        tokens = expected["tokens"][engine.batch_span(2)]
        with engine.inference():
            for begin, end in ((0, 20), (20, 70), (70, 71), (71, 72)):
                parts.append(engine.join_outputs(engine.forward(tokens[:, begin:end], cache=cache)))
        return np.concatenate(parts, axis=1)

    for logits in run_threads(program, tiny.ranks_of(axes)):
        np.testing.assert_allclose(logits, expected["logits64"], rtol=0, atol=1e-10)
