"""Files of tokens: the same whoever writes them, and rows that hold every target once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import Document
from spmd_engine.formats.token_file import is_token_file, open_token_file
from spmd_engine.tokens import ByteTokenizer
from spmd_engine.training import Run, TrainConfig, Trainer
from spmd_engine.training.data.prepare import _encoded, prepare, prepare_with_summary
from spmd_engine.training.data.token_data import PreparedData, check_digests, check_file, whole_documents, windows
from spmd_engine.training.observers import Observer
from spmd_engine.training.workload import make_trainer, open_workload
from support import tiny
from support.token_files import PAIRS, TEXTS, KeptTokenizer, prepared

pytestmark = pytest.mark.usefixtures("narrow")


def documents_in(file):
    begins = [0, *file.ends[:-1]]
    return [file.tokens[begin:end] for begin, end in zip(begins, file.ends)]


def test_a_file_is_the_same_however_many_ranks_write_it(texts, tmp_path):
    files = [tmp_path / f"{ranks}.tokens" for ranks in (1, 2, 5)]
    for ranks, output in zip((1, 2, 5), files):
        prepared(texts, output, ranks)
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.tokens", "2.tokens", "5.tokens", "texts"]


def test_a_summary_counts_the_rows_of_all_ranks(tmp_path):
    rows = [{"text": "some words " * (number % 3)} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows[:7]))

    def program(ranks):
        with Mesh(data=ranks) as mesh:
            paths = [str(tmp_path / name) for name in ("a.jsonl", "b.json")]
            return prepare_with_summary(mesh.group(), paths, ByteTokenizer(), tmp_path / f"{ranks}.tokens")[1]

    alone, shared = (run_threads(program, ranks, args=(ranks,)) for ranks in (1, 3))
    assert shared == alone * 3
    assert [(each.rows, each.documents, each.left_out) for each in alone[0]] == [
        (30, 20, {"empty": 10}),
        (7, 4, {"empty": 3}),
    ]
    assert (tmp_path / "1.tokens").read_bytes() == (tmp_path / "3.tokens").read_bytes()


def test_what_is_in_it(texts, tmp_path):
    file = prepared(texts, tmp_path / "x.tokens")
    found = [ByteTokenizer().decode(each[:-1]) for each in documents_in(file)]
    held_out = TEXTS[10::20]
    assert found == [text for text in TEXTS if text not in held_out] + held_out
    assert all(each[-1] == 256 for each in documents_in(file))
    facts = file.facts
    assert (facts.documents, facts.train_documents, facts.files) == (40, 38, 6)
    assert facts.tokens == sum(map(len, TEXTS)) + 40 == facts.learnt
    assert facts.train_tokens == file.ends[37] and facts.tokenizer_sha256 == ByteTokenizer.sha256
    check_digests(file, file.digests(0, facts.documents))
    assert is_token_file(file.path)


def test_half_a_pair_of_surrogates_is_a_replacement_mark(tmp_path):
    (tmp_path / "x.jsonl").write_text(r'{"text": "a\ud83d\ude00b\ud83dc\uDE00"}')
    file = prepared(str(tmp_path / "x.jsonl"), tmp_path / "x.tokens")
    assert ByteTokenizer().decode(file.tokens[:-1]) == "a\N{GRINNING FACE}b\ufffdc\ufffd"


@pytest.mark.parametrize("ranks", [1, 2])
def test_large_and_small_files_are_the_same_documents(tmp_path, monkeypatch, ranks):
    """A file is read in parts, a long line is not, and both are one document each."""
    long = "some words, " * 700
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("short")
    (tmp_path / "texts" / "b.txt").write_text(long)
    (tmp_path / "texts" / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in ("x", long, "y")))
    whole = prepared(str(tmp_path / "texts"), tmp_path / "whole.tokens", ranks)
    monkeypatch.setattr("spmd_engine.training.data.prepare.TOGETHER", 1000)
    monkeypatch.setattr("spmd_engine.formats.text_documents.CHUNK", 100)
    parts = prepared(str(tmp_path / "texts"), tmp_path / "parts.tokens", ranks)
    assert Path(parts.path).read_bytes() == Path(whole.path).read_bytes() and whole.facts.documents == 5


def test_the_size_of_a_short_document_is_not_asked_for_each_of_the_others():
    class Text(str):
        def __len__(self):
            asked.append(self)
            return super().__len__()

    asked = []
    found = list(_encoded((Document(Text(number)) for number in range(500)), ByteTokenizer()))
    assert len(found) == 500 and len(asked) < 5 * 500


def test_only_completions_and_ends_are_learnt(pairs, tmp_path):
    file = prepared(pairs, tmp_path / "x.tokens")
    begins = [0, *file.ends[:-1]]
    for prompt, completion in PAIRS[:10]:  # the eleventh is to validate on
        begin, end = begins.pop(0), begins[0]
        assert ByteTokenizer().decode(file.tokens[begin : end - 1]) == prompt + completion
        assert file.learnt[begin:end].tolist() == [0] * len(prompt) + [1] * (len(completion) + 1)
    assert file.facts.learnt == file.learnt.sum()


def test_a_damaged_file_is_told(texts, tmp_path):
    path = tmp_path / "x.tokens"
    prepared(texts, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match="it is truncated or damaged; .*prepare it again"):
        open_token_file(path)
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(UsageError, match="a damaged file of tokens"):
        open_token_file(path)
    header, data = whole[8 : 8 + int.from_bytes(whole[:8], "little")], whole[8 + int.from_bytes(whole[:8], "little") :]
    for old, new in (
        (b'"documents\\": 40', b'"documents\\": 4e'),
        (b'"train_documents\\": 38', b'"train_documents\\": 88'),
        (b'"files\\": 6', b'"files\\": -'),
        (b'"ends"', b'"tokens"'),
        (b'"data_offsets":[0,320]', b'"data_offsets":[8,328]'),
    ):
        assert old in header
        changed = header.replace(old, new)
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data)
        with pytest.raises(UsageError, match="a damaged file of tokens|its facts"):
            open_token_file(path)
    flipped = bytearray(whole)
    flipped[-200] ^= 1
    path.write_bytes(flipped)
    file = open_token_file(path)
    with pytest.raises(UsageError, match="its documents are not what was written"):
        check_digests(file, file.digests(0, file.facts.documents))


@pytest.mark.parametrize("where", ["tokens", "learnt", "ends", "tokenizer"])
def test_what_a_file_holds_is_compared_with_its_digest(pairs, tmp_path, where):
    path = tmp_path / "x.tokens"
    file = prepared(pairs, path, tokenizer=KeptTokenizer())
    spoiled = bytearray(path.read_bytes())
    if where == "tokenizer":
        spoiled = spoiled.replace(KeptTokenizer.sha256.encode(), b"0" * 64)
    else:
        array = file.arrays[where]
        spoiled[array.offset + np.dtype(array.dtype).itemsize * (array.shape[0] // 2)] ^= 1

    def program():
        with Mesh(data=3) as mesh:
            check_file(mesh.group(), open_token_file(path))

    run_threads(program, 3)
    path.write_bytes(spoiled)
    what = "tokenizer is" if where == "tokenizer" else "documents are"
    with pytest.raises(UsageError, match=rf"x\.tokens is damaged: its {what} not what was written \(SHA-256 differs"):
        run_threads(program, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\nnonsense\n', "at byte 14: this line cannot be read as JSON"),
        ('{"prompt": "a"}\n', 'a document is {"text": ...}'),
        ('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n', "texts and instructions do not go together"),
        ("", "there is nothing to read in it"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "has no chat template"),
    ],
)
def test_what_cannot_be_prepared(content, message, tmp_path):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message):
        prepared(str(tmp_path / "x.jsonl"), tmp_path / "x.tokens", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


# --- rows


def test_what_cannot_be_written_leaves_nothing_behind(texts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def program(output):
        with Mesh() as mesh:
            prepare(mesh.group(), [texts], ByteTokenizer(), output)

    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="--output .*/folder: a folder; name the file"):
        program(tmp_path / "folder")
    monkeypatch.setattr("spmd_engine.training.data.prepare._copy", full)
    with pytest.raises(UsageError, match="--output .*/c.tokens: .*No space left on device"):
        program(tmp_path / "c.tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "texts"]


def test_what_is_no_file_is_neither_written_through_nor_replaced(texts, tmp_path):
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / ".x.tokens.unfinished").symlink_to(tmp_path / "victim")
    prepared(texts, tmp_path / "x.tokens")
    assert (tmp_path / "victim").read_text() == "theirs"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="--output .*/pipe: a device or a pipe; name a file"):
        prepared(texts, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_windows_tell_every_target_once():
    packed = windows(3, 26, 5)
    places, pieces = packed.rows(np.arange(len(packed)))
    assert places.ravel().tolist() == list(range(3, 23)) and not pieces.any()


@pytest.mark.parametrize("truncate", [False, True])
def test_whole_documents_tell_every_target_once_and_none_of_another(truncate):
    ends = np.cumsum([4, 1, 13, 3, 3, 5, 27, 2])
    begins = np.array([0, *ends[:-1]])
    packed = whole_documents(begins, ends, 6, truncate=truncate)
    places, pieces = packed.rows(np.arange(len(packed)))
    limit = 6 if truncate else 100
    wanted = [place for begin, end in zip(begins, ends) for place in range(begin, min(end - 1, begin + limit))]
    assert sorted(places[places >= 0]) == wanted
    for line, numbers in zip(places, pieces):
        assert (np.diff(numbers) >= 0).all() and (line[:-1][line[1:] < 0] <= line.max()).all()
        for number in set(numbers[line >= 0]):
            own = line[numbers == number]
            assert (np.diff(own) == 1).all() and len({int(np.searchsorted(ends, at, side="right")) for at in own}) == 1


@pytest.mark.parametrize("with_flags", [False, True])
def test_targets_of_a_row_are_counted_without_its_tokens(with_flags):
    ends = np.cumsum([4, 1, 13, 3, 3, 5, 27, 2])
    begins = np.array([0, *ends[:-1]])
    flags = np.random.default_rng(0).integers(0, 2, ends[-1]).astype(np.uint8) if with_flags else None
    packed = whole_documents(begins, ends, 6, truncate=with_flags, learnt=flags)
    places, _ = packed.rows(np.arange(len(packed)))
    counted = places >= 0
    if flags is not None:
        counted &= flags[places + 1] > 0
    assert packed.targets_of_rows.tolist() == counted.sum(axis=1).tolist()


def test_an_epoch_has_every_row_once(texts, tmp_path):
    data = PreparedData.of(prepared(texts, tmp_path / "x.tokens"), 16, seed=1)
    rows = len(data.train_rows)
    with Mesh() as mesh:
        engine = build_engine(ModelConfig(), mesh)
        batches = [data.batch(engine, step, size=50, micro_batches=2) for step in range(8)]
    seen = [row.tolist() for batch in batches for micro in batch.micro_batches for row in micro.inputs]
    whole = data.train.rows(np.arange(rows))[0]
    for epoch in (seen[:rows], seen[rows : 2 * rows]):
        assert sorted(epoch) == sorted(data.file.tokens[whole].tolist())
    assert seen[:rows] != seen[rows : 2 * rows]


# --- training


def losses(axes, options):
    def program():
        with Mesh(**axes) as mesh:
            options_here = {"model": "gpt-nano", "dtype": "float64", "batch_size": 4, "length": 24, "seed": 3}
            workload = open_workload(TrainConfig.of(**options_here, mesh=axes, **options), mesh)
            trainer = make_trainer(workload)
            return [trainer.step().loss, trainer.evaluate(workload.validation)]

    return run_threads(program, tiny.ranks_of(axes))[0]


@pytest.mark.parametrize(
    ("documents", "meshes"),
    [("joined", [{"context": 3}]), ("apart", [{"data": 2}, {"context": 3}]), (None, [{"data": 2}])],
    ids=["joined", "apart", "instructions"],
)
def test_training_is_the_same_on_every_mesh(texts, pairs, tmp_path, documents, meshes):
    """None: instructions, whose prompts do not count."""
    path = tmp_path / "x.tokens"
    prepared(texts if documents else pairs, path)
    options = {"data": str(path), "documents": documents, "micro_batches": 2, "eval_samples": 6}
    expected = losses({"data": 1}, options)
    for axes in meshes:
        np.testing.assert_allclose(losses(axes, options), expected, rtol=1e-10)


def test_the_loss_is_the_mean_over_what_is_learnt(pairs, tmp_path):
    file = prepared(pairs, tmp_path / "x.tokens")
    data = PreparedData.of(file, 64, seed=1)
    with Mesh() as mesh:
        engine = build_engine(ModelConfig("gpt-nano", dtype="float64"), mesh)
        batch = data.batch(engine, 0, size=5, micro_batches=2)
        loss, total, count = engine.step(batch), 0.0, 0
        with engine.inference():
            for micro in batch.micro_batches:
                for row, (inputs, numbers) in enumerate(zip(micro.inputs, micro.documents.numbers)):
                    for number in set(numbers):
                        own = numbers == number
                        learnt = micro.mask[row, own] > 0
                        scores = engine.forward(inputs[own][None])[0]  # its positions begin at 0: with restarted ones
                        likely = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
                        total -= likely[np.arange(own.sum()), micro.targets[row, own]][learnt].sum()
                        count += learnt.sum()
    assert batch.count == count
    assert abs(loss - total / count) > 0  # positions were not restarted
    with Mesh() as mesh:
        engine = build_engine(ModelConfig("gpt-nano", dtype="float64"), mesh)
        restarted = PreparedData.of(file, 64, "restarted", seed=1).batch(engine, 0, size=5, micro_batches=2)
        np.testing.assert_allclose(engine.step(restarted), total / count, rtol=1e-12)


@pytest.mark.parametrize("documents", ["apart", "restarted"])
def test_instructions_cut_off_before_what_is_learnt_make_no_rows(documents, tmp_path):
    """They would be steps and a validation loss of 0, over no targets."""
    cut_off, whole = {"prompt": "x" * 90, "completion": "yes"}, {"prompt": "a", "completion": "b" * 20}
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [whole, cut_off] * 4 + [cut_off]))
    file = prepared(str(tmp_path / "x.jsonl"), tmp_path / "x.tokens")
    data = PreparedData.of(file, 32, documents)
    assert len(data.train_rows) + len(data.held_out_rows) == 4
    with Mesh() as mesh:
        engine = build_engine(ModelConfig(), mesh)
        (batch,) = data.validation_batches(engine, samples=9, size=9)
        assert batch.count == 21 * len(data.held_out_rows)
    lost = "5 documents left out: nothing to learn in their first 32 tokens"
    assert str(data).endswith(f"3 rows, 1 more of them to validate on ({file.path}); {lost}")
    (tmp_path / "y.jsonl").write_text(f"{json.dumps(cut_off)}\n" * 5)
    none = prepared(str(tmp_path / "y.jsonl"), tmp_path / "y.tokens")
    with pytest.raises(UsageError, match=r"make 0 row\(s\) of 32 with something to learn in them: .* longer context"):
        PreparedData.of(none, 32, documents)


def test_a_run_tells_no_validation_loss_of_no_targets(tmp_path):
    class Told(Observer):
        losses = []

        def evaluated(self, step, loss):
            self.losses.append(loss)

    with Mesh() as mesh:
        engine = build_engine(ModelConfig(), mesh)
        tokens = np.zeros((2, 8), np.int64)
        nothing = make_batch(lambda rows: (tokens[rows], tokens[rows], np.zeros((len(rows), 8))), 2, 1, engine)
        batch = make_batch(lambda rows: (tokens[rows], tokens[rows]), 2, 1, engine)
        trainer = Trainer(engine, SGD(), lambda step: batch, lambda step: 0.1)
        observers = [Told()]
        assert Run(tmp_path / "r", trainer, validation=[nothing], observers=observers).train(1) is None
    assert not Told.losses
