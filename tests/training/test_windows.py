"""Windows of bytes: what is in them, which class comes next, and that no mesh changes a sample."""

import string
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.models import build_model, gpt, mlp, two_layers
from spmd_engine.models.decoder import GPTSize
from spmd_engine.sharding import Layout
from spmd_engine.tokens.tokenizer import END_OF_FILE, ByteTokenizer
from spmd_engine.training.data.corpus import CLASSES, ByteClasses, BytePairs, Corpus, TokenWindows, classes_of, data_for

TEXT = "def __init__(self, x=1):\n\treturn X[0] # é\n" * 20
CORPUS = Corpus(
    np.array([*ByteTokenizer().encode(TEXT), END_OF_FILE], np.uint16), np.arange(60, dtype=np.uint16), 1, ""
)
WHOLE = SimpleNamespace(batch_span=lambda n: slice(0, n), cut_rows=lambda *rows: rows)  # an engine that cuts nothing


def rows(batch, name):
    return np.concatenate([getattr(micro, name) for micro in batch.micro_batches])


def named(text):
    return [list(CLASSES)[number] for number in classes_of(np.array(ByteTokenizer().encode(text)))]


# --- what is in a sample


def test_every_character_has_the_class_it_should():
    assert named(" \n_7Q") == ["space", "newline", "underscore", "digit", "upper case"]
    assert named("ay") == ["lower-case vowel", "lower-case consonant"]
    assert named("[({})]") == ["bracket"] * 6
    assert named("<=#\"'\\") == ["operator or punctuation"] * 6
    assert named("\t\r\x00é") == ["other"] * 5
    assert classes_of(np.array([END_OF_FILE])) == list(CLASSES).index("other")


def test_classes_are_ten_and_share_no_character():
    characters = "".join(CLASSES.values())
    assert len(CLASSES) == 10 and len(set(characters)) == len(characters)
    assert set(characters) == set(string.printable) - set("\t\r\x0b\x0c")


def test_bits_and_the_class_that_follows():
    corpus = Corpus(np.array([5, END_OF_FILE, 255, ord("a")], np.uint16), np.arange(9, dtype=np.uint16), 1, "")
    (micro,) = ByteClasses(corpus, 24).batch(WHOLE, 0, size=1).micro_batches
    bits = "00000101" + "00000000" + "11111111"
    assert micro.inputs.dtype == np.float32 and micro.inputs.shape == (1, 24)
    assert micro.inputs[0].tolist() == [2 * int(bit) - 1 for bit in bits]
    assert micro.targets.tolist() == [list(CLASSES).index("lower-case vowel")]


def test_pairs_are_one_byte_apart():
    batch = BytePairs(CORPUS, 9, np.float64, seed=1).batch(WHOLE, 0, size=7)
    x, y = rows(batch, "inputs"), rows(batch, "targets")
    assert x.shape == y.shape == (7, 9) and x.dtype == y.dtype == np.float64
    assert np.array_equal(x[:, 1:], y[:, :-1])
    tokens = np.rint((x + 1) * 127.5).astype(int)
    assert all(bytes(row.tolist()) in TEXT.encode() + b"\0" for row in tokens)
    assert batch.count == 7 * 9


def test_every_window_can_be_drawn_the_last_one_too():
    corpus = replace(CORPUS, train=np.arange(12, dtype=np.uint16))
    batch = BytePairs(corpus, 9, np.float64, seed=1).batch(WHOLE, 0, size=100)
    first = np.rint((rows(batch, "inputs")[:, 0] + 1) * 127.5)
    assert set(first) == {0, 1, 2}


# --- samples are functions of the seed and their number alone


def test_samples_go_on_from_step_to_step_and_differ_by_seed():
    data, other = ByteClasses(CORPUS, 80, seed=2), ByteClasses(CORPUS, 80, seed=3)
    long, *short = (rows(data.batch(WHOLE, s, size=n), "inputs") for s, n in [(0, 12), (0, 6), (1, 6)])
    assert np.array_equal(long, np.concatenate(short))
    parts = data.batch(WHOLE, 0, size=12, micro_batches=5)
    assert np.array_equal(long, rows(parts, "inputs")) and len(parts.micro_batches) == 5
    assert not np.array_equal(long, rows(other.batch(WHOLE, 0, size=12), "inputs"))


@pytest.mark.parametrize("model", [mlp((80, 7, 10)), two_layers(9, 4)], ids=lambda model: model.name)
@pytest.mark.parametrize("validation", [False, True], ids=["training", "validation"])
def test_each_rank_has_its_block_of_the_same_samples(model, validation):
    def batch(engine):
        data = data_for(model, CORPUS, seed=4)
        if validation:
            return data.validation_batches(engine, samples=10, size=10)[0]
        return data.batch(engine, 3, size=10, micro_batches=2)

    def program():
        with Mesh(data=3, row=2) as mesh:
            cut = {"b": ("data",), "d": ("row",)}
            engine = LayeredEngine(model, mesh, Layout(cut, cut))
            ours, whole = batch(engine), batch(WHOLE)
            assert ours.count == whole.count
            for mine, all_of_it in zip(ours.micro_batches, whole.micro_batches, strict=True):
                part = engine.batch_span(len(all_of_it.inputs))
                columns = engine.layout.spec("d").block(all_of_it.inputs.shape[1:], mesh)
                assert np.array_equal(mine.inputs, all_of_it.inputs[part][:, *columns])
                cut_alike = columns if model.targets == "b d" else ()
                assert np.array_equal(mine.targets, all_of_it.targets[(part, *cut_alike)])
                assert np.array_equal(mine.samples, all_of_it.samples[part])

    run_threads(program, 6)


def test_validation_windows_are_spread_over_all_that_is_held_out():
    batches = BytePairs(CORPUS, 9).validation_batches(WHOLE, samples=5, size=2)
    starts = [round((row[0] + 1) * 127.5) for batch in batches for row in rows(batch, "inputs")]
    assert starts == [0, 12, 25, 37, 50] and [batch.count for batch in batches] == [18, 18, 9]


# --- which data for which model


def test_data_follow_from_a_models_letters_and_sizes():
    corpus = replace(CORPUS, validation=np.zeros(200, np.uint16))
    classes, pairs = data_for(build_model("mlp"), corpus), data_for(two_layers(9, 4), corpus, np.float64)
    assert isinstance(classes, ByteClasses) and (classes.features, classes.length, classes.terms) == (784, 99, 1)
    assert isinstance(pairs, BytePairs) and (pairs.features, pairs.length, pairs.terms) == (9, 10, 9)
    tokens = data_for(gpt(GPTSize(1, 6, 2, 8)), corpus)
    assert isinstance(tokens, TokenWindows) and (tokens.length, tokens.terms) == (9, 8)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("60 bytes in one part, fewer than a window of 99", lambda: data_for(build_model("mlp"), CORPUS)),
        ("83 is no multiple of 8", lambda: ByteClasses(CORPUS, 83)),
        ("mlp has 7 classes, this data 10: space, newline", lambda: data_for(mlp((80, 7)), CORPUS)),
        ("no data of inputs", lambda: data_for(replace(mlp((80, 10)), inputs="b d e"), CORPUS)),
    ],
)
def test_what_does_not_fit_is_refused(message, make):
    with pytest.raises(UsageError, match=message):
        make()
