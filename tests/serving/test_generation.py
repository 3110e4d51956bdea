"""Texts: the same on every mesh, in every batch, and ended as asked."""

import json
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.precision import dtype_of, emulated
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.layers.attention.kv_cache import Columns
from spmd_engine.models import DecoderConfig
from spmd_engine.serving import SamplingOptions, StoppingCriteria, generate
from spmd_engine.serving.sampling import read_generation_config
from spmd_engine.serving.scoring import score
from spmd_engine.tokens import ByteTokenizer
from spmd_engine.tokens.hugging_face import read_tokenizer
from support import tiny
from support.pairwise import in_turn

TOKENS = 11
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3], [12]]
GREEDY = SamplingOptions()
DRAWN = SamplingOptions(sample=True, seed=2)
ALL = SamplingOptions(sample=True, top_k=6, top_p=0.8, min_p=0.05, repetition_penalty=1.3, temperature=2.0)
MESHES = (
    {"data": 3},
    {"model": 8},
    {"data": 2, "model": 2},
    {"pipe": 2, "model": 2},
    {"context": 4},
    {"context": 2, "data": 2},
    {"shard": 2},
    {"pipe": 2, "model": (1, 2)},
    {"pipe": 4},  # the last stage has no attention
)


def write(axes, sampling, which=range(5), **options):
    def program():
        with Mesh(**axes) as mesh:
            return generate(
                tiny.make_engine(mesh),
                [PROMPTS[number] for number in which],
                sampling=sampling,
                stopping=StoppingCriteria(TOKENS, slide=True),  # beyond the context of 10
                log_probs=True,
                **options,
            )

    return run_threads(program, tiny.ranks_of(axes))


@pytest.mark.parametrize(
    ("sampling", "meshes"),
    [
        pytest.param(GREEDY, MESHES, id="greedy", marks=pytest.mark.soak),  # on meshes, a real model's text is
        pytest.param(DRAWN, MESHES[::4], id="drawn"),
        pytest.param(DRAWN, MESHES, id="drawn on others", marks=pytest.mark.soak),
        pytest.param(ALL, MESHES[3::2], id="all"),
        pytest.param(ALL, MESHES, id="all on others", marks=pytest.mark.soak),
    ],
)
def test_one_seed_is_one_text_on_every_mesh_and_rank(sampling, meshes):
    (expected,) = write({"data": 1}, sampling)
    assert [len(each.tokens) for each in expected] == [TOKENS] * 5
    for axes in meshes:
        for found in write(axes, sampling):
            assert [each.tokens for each in found] == [each.tokens for each in expected], axes
            likely, other = ([each.log_probs for each in texts] for texts in (expected, found))
            np.testing.assert_allclose(other, likely, rtol=1e-9)


LLAMA = DecoderConfig(
    width=12, heads=6, key_value_heads=2, head_width=4, hidden=14, layers=2, vocabulary=13, context=40
)


def write_llama(axes, count=10, sampling=DRAWN, **how):
    def program():
        with Mesh(**axes) as mesh:
            model = ModelConfig(name="llama", shape=LLAMA, dtype="float64", seed=3)
            engine = build_engine(model, mesh, ParallelConfig(**how))
            return generate(engine, PROMPTS, sampling=sampling, stopping=StoppingCriteria(count), log_probs=True)

    return run_threads(program, tiny.ranks_of(axes))


def test_shared_key_heads_and_rotary_positions_write_the_same_on_every_mesh():
    """Key heads are two: on four ranks, the queries that share one are cut."""
    expected = written_by_one_device(DRAWN)
    for axes in {"model": 4}, {"model": 2, "context": 2}, {"pipe": 3}, {"data": 2, "model": 2}:
        for found in write_llama(axes):
            assert [each.tokens for each in found] == [each.tokens for each in expected], axes


SHARES = [
    ({"model": 3}, "model=1:2:0"),
    ({"model": 2}, "model=0:1"),
    ({"model": 2, "context": 2}, "model=5:1"),
    ({"model": 2, "queries": 2}, "model=2:1,queries=1:3"),
    ({"data": 2, "model": 2}, "data=2:1,model=1:3"),
]


@cache
def written_by_one_device(sampling):
    return write_llama({"data": 1}, sampling=sampling)[0]


@in_turn(
    3,
    sampling={"drawn": DRAWN, "all": ALL},
    **{"axes, shares": [pytest.param(*each, id=each[1]) for each in SHARES]},
)
def test_shares_of_key_heads_and_vocabulary_write_the_same(sampling, axes, shares):
    """A rank may have no key head, or nothing; a context method may send heads of ranks that have unequal numbers."""
    for found in write_llama(axes, sampling=sampling, shares=shares):
        assert [each.tokens for each in found] == [each.tokens for each in written_by_one_device(sampling)]


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.soak), ALL], ids=["greedy", "all"])
def test_a_text_does_not_hang_on_the_others_of_its_batch(sampling):
    (together,) = write({"data": 1}, sampling)
    for which in [2], [4, 1], [0, 3, 2]:
        (some,) = write({"data": 1}, sampling, which)
        assert [each.tokens for each in some] == [together[number].tokens for number in which]
    (by_two,) = write({"data": 1}, sampling, batch_size=2)
    assert [each.tokens for each in by_two] == [each.tokens for each in together]


def test_a_prompt_given_twice_is_drawn_twice():
    (texts,) = write({"data": 1}, DRAWN)
    assert texts[0].tokens != texts[3].tokens
    (likeliest,) = write({"data": 1}, GREEDY)
    assert likeliest[0].tokens == likeliest[3].tokens


def test_greedy_tokens_are_the_likeliest_of_a_forward_of_the_whole_text():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        (text,) = generate(engine, [[3, 1]], stopping=StoppingCriteria(8), log_probs=True)
        with engine.inference():
            scores = engine.forward(np.array([[3, 1, *text.tokens]]))[0]
    assert text.tokens == scores[1:-1].argmax(axis=1).tolist()
    likely = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(text.log_probs, likely[np.arange(1, 9), text.tokens], rtol=1e-10)


def test_texts_end_as_asked():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        (free,) = generate(engine, [[1, 2, 3]], stopping=StoppingCriteria(7))
        assert (free.finish, len(free.tokens)) == ("length", 7)
        ends = (free.tokens[0],)
        (ended, other) = generate(engine, [[1, 2, 3], [5]], stopping=StoppingCriteria(4, ends=ends))
        assert (ended.finish, ended.tokens) == ("end", free.tokens[:1])
        assert len(other.tokens) == 4 or other.finish == "end"
        (full,) = generate(engine, [[1, 2, 3]], stopping=StoppingCriteria(50))
        assert (full.finish, len(full.tokens)) == ("context", 8)  # seven fill the context, which predicts one more


class Letters(ByteTokenizer):
    """Token 1 is a, and so on."""

    def decode(self, tokens):
        return "".join(chr(96 + token) for token in tokens)


def test_stop_strings_end_a_text_and_no_part_of_them_is_emitted():
    with Mesh() as mesh:
        engine, told = tiny.make_engine(mesh), []
        options = {"sampling": SamplingOptions(sample=True, seed=5), "tokenizer": Letters()}
        (free,) = generate(engine, [[1, 2]], stopping=StoppingCriteria(7), **options)
        stop = free.text[3:5]
        stopping = StoppingCriteria(7, stop=("zz", stop))
        (stopped,) = generate(
            engine, [[1, 2]], stopping=stopping, on_text=lambda number, text: told.append(text), **options
        )
    assert stopped.finish == "stop" and stopped.stop == stop
    assert stopped.text == "".join(told) == free.text[: free.text.index(stop)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1, 13]], "has token 13, but gpt knows 0 to 12"),
        ([[1, 1.5]], r"prompts\[0\]\[1\] is 1.5; give lists of tokens"),
        ([[1] * 11], "the prompt has 11 tokens, more than the context of 10"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts, message):
    with Mesh() as mesh, pytest.raises(UsageError, match=message):
        generate(tiny.make_engine(mesh), prompts)


def test_parameters_that_are_not_finite_are_an_error():
    def program():
        with Mesh(model=2) as mesh:
            engine = tiny.make_engine(mesh)
            engine.parameters["norm/shift" if "norm/shift" in engine.parameters else "norm/bias"][...] = np.nan
            generate(engine, [[1]])

    with pytest.raises(NotFiniteError, match="scores are not finite"):
        run_threads(program, 2)


def test_ties_within_rounding_are_counted_in_float32():
    def program(dtype):
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, dtype=dtype)
            table = engine.parameters["embedding/table"]
            table[9] = table[7]  # equal scores for two tokens, always
            return generate(engine, [[1, 2, 3]], stopping=StoppingCriteria(5))[0]

    for dtype in (np.float32, np.float64):
        (text,) = run_threads(program, 1, args=(dtype,))
        among_the_best = sum(token in (7, 9) for token in text.tokens)
        assert 7 in text.tokens and 9 not in text.tokens, "of equal scores the lower token's is taken"
        assert text.near_ties >= among_the_best > 0


@in_turn(2, precision=["bfloat16", "float16"], axes=[{"data": 1}, {"model": 2}, {"context": 2}, {"pipe": 2}])
def test_cached_keys_of_16_bits_write_what_a_forward_of_the_whole_text_gives(axes, precision, monkeypatch):
    """The cache holds 16 bits; the logits that choose tokens are float32."""
    kept = set()
    append = Columns.append
    monkeypatch.setattr(Columns, "append", lambda *args: kept.update(x.dtype for x in args[2:]) or append(*args))

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, dtype=dtype_of(precision))
            (text,) = generate(engine, [[3, 1, 4]], stopping=StoppingCriteria(7), log_probs=True)
            assert kept == {dtype_of(precision)}
            (exact,) = score(tiny.make_engine(mesh), [[3, 1, 4, *text.tokens]])
        return text.log_probs, exact.log_probs[-7:]

    for found, exact in run_threads(program, tiny.ranks_of(axes)):
        np.testing.assert_allclose(found, exact, atol=0.02)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_halves_are_rounded_alike_on_every_mesh_and_in_every_batch(precision):
    """With exact sums, log-probabilities agree to 1e-12, except over model, where ranks round partial sums."""

    def written(axes, then=(), batch_size=5):
        def program():
            with Mesh(**axes) as mesh, Mesh(**dict(then or axes)) as other:
                engine = tiny.make_engine(mesh, dtype=dtype_of(precision))
                if then:
                    engine.reshard(other)
                return generate(engine, PROMPTS, stopping=StoppingCriteria(3), log_probs=True, batch_size=batch_size)

        return run_threads(program, tiny.ranks_of(axes))[0]

    with emulated():
        expected = written({"data": 1})
        others = written({"data": 1}, batch_size=2), written({"context": 3}), written({"data": 2}, {"context": 2})
    for texts in others:
        for text, like in zip(texts, expected, strict=True):
            assert text.tokens == like.tokens
            np.testing.assert_allclose(text.log_probs, like.log_probs, rtol=0, atol=1e-12)


def test_texts_end_with_the_tokens_that_the_config_names_where_no_other_file_does(tmp_path):
    config = {"model_type": "llama", "eos_token_id": [5, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_generation_config(tmp_path).ends == (5, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    assert read_generation_config(tmp_path).ends == (6,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_generation_config(tmp_path).ends == ()


ALICE = " the\nQueen to the Queen, and she found it was saying to herself, and\nshe was so much a"


@in_turn(3, axes=[{"data": 1}, {"model": 4}, {"model": 3}, {"context": 2}, {"pipe": 2}])
def test_a_trained_model_writes_its_documented_text(axes, tmp_path):
    pytest.importorskip("glassllm", reason="needs the model in PyPI's glassllm: pip install '.[test]'")
    folder = tmp_path / "glass"
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "convert_glassllm.py"))["convert"]("en", folder)
    tokenizer = read_tokenizer(folder)
    prompt = tokenizer.encode("Alice was beginning to")
    assert prompt == [494, 160, 729, 633, 111]

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(name=str(folder)), mesh)
            stopping = StoppingCriteria(24)
            return generate(
                engine, [prompt], sampling=SamplingOptions(), stopping=stopping, tokenizer=tokenizer, log_probs=True
            )

    for (found,) in run_threads(program, tiny.ranks_of(axes)):
        assert found.text == ALICE and abs(found.log_probs[0] + 1.5998) < 1e-4
