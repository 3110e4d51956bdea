"""A real model, trained by others, that comes in a wheel: its own text on every mesh."""

from importlib.resources import files

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from support import tiny
from support.script_module import script

pytest.importorskip("glassllm", reason="needs the model in PyPI's glassllm: pip install '.[test]'")

PROMPT = [494, 160, 729, 633, 111]  # Alice was beginning to
TEXT = " the\nQueen to the Queen, and she found it was saying to herself, and\nshe was so much a"
MESHES = [
    ({"data": 1}, {}),
    pytest.param({"model": 2}, {}, marks=pytest.mark.soak),
    ({"model": 3}, {"sequence_parallel": True}),  # more ranks than key heads, and 341 does not divide
    pytest.param({"model": 4}, {}, marks=pytest.mark.soak),
    pytest.param({"context": 2}, {"context_method": "ring"}, marks=pytest.mark.soak),
    pytest.param({"context": 3}, {"context_method": "gather"}, marks=pytest.mark.soak),
    ({"context": 2, "model": 2}, {"context_method": "ulysses"}),
    pytest.param({"pipe": 4}, {}, marks=pytest.mark.soak),
    pytest.param({"pipe": 2, "model": 2}, {}, marks=pytest.mark.soak),
    ({"shard": 3}, {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("glass-en")
    script("convert_glassllm").convert("en", made)
    return str(made)


def scores_after(engine, tokens):
    """Of the token that follows, on ranks that have them: the same sequence on all ranks along the batch."""
    rows = np.tile(tokens, (engine.mesh.size, 1))
    (rows,) = engine.cut_rows(rows[engine.batch_span(len(rows))], None)[:1]
    y = engine.forward(np.ascontiguousarray(rows))
    return None if y is None else engine.join_outputs(y)[0, -1]


def greedy(engine, tokens, count):
    group = engine.group()
    with engine.inference():
        for _ in range(count):
            scores = scores_after(engine, tokens)
            best = np.array(-1 if scores is None else scores.argmax())
            tokens = [*tokens, int(group.all_reduce(best, "max"))]
    return tokens


@pytest.mark.parametrize(("axes", "composition"), MESHES, ids=lambda each: "" if not each else str(each))
def test_its_greedy_text(folder, axes, composition):
    """On several ranks the first half of it."""
    count = 24 if tiny.ranks_of(axes) == 1 else 12

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(folder), mesh, ParallelConfig(mesh=axes, **composition))
            return greedy(engine, PROMPT, count)[len(PROMPT) :]

    from glassllm.tokenizer import Tokenizer

    vocabulary = Tokenizer.load(str(files("glassllm") / "weights" / "en.tokenizer.json"))
    for tokens in run_threads(program, tiny.ranks_of(axes)):
        assert len(tokens) == count and TEXT.startswith(vocabulary.decode(tokens))
        assert count < 24 or vocabulary.decode(tokens) == TEXT


def test_its_log_probability(folder):
    engine, _ = open_pretrained(ModelConfig(folder, dtype="float64"), Mesh())
    with engine.inference():
        scores = scores_after(engine, PROMPT)
    assert scores.max() - np.log(np.exp(scores).sum()) == pytest.approx(-1.5998, abs=1e-4)
