"""Damaged files of every kind that others write: each is read, or is one clear error that names the file."""

import gzip
import json
import os
import shutil
import threading
import zipfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmd_engine import foreign
from spmd_engine.checkpoints import Checkpoint
from spmd_engine.checkpoints.hf.weights import Pretrained, adapter_options
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import documents, find_files
from spmd_engine.formats.token_file import TokenFacts, add_to_digest, layout, open_token_file
from spmd_engine.models.names import ends_at, load_config, tokenizer_at
from spmd_engine.training.data.images import find_images
from spmd_engine.training.train_config import TrainConfig
from support.altered import gguf_of, in_bytes, in_words
from support.damaged import JSON, Kind, check_damaged, in_array, in_object, text_file
from support.labelled_images import write_folder, write_idx, write_npz

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in (GOLDEN / "decoders").iterdir())
TEXT = "Hello world, naïve 数字 🙂 1234\n  end"


def in_header(content, rng):
    """The JSON header of a safetensors file, of another length."""
    end = 8 + int.from_bytes(content[:8], "little")
    text = rng.choice((in_object, in_words))(content[8:end], rng)
    return len(text).to_bytes(8, "little") + text + content[end:]


def in_member(content, rng):
    """The header of an array in a .npz, with the checksum that belongs to it."""
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        wanted = rng.choice(old.namelist())
        for name in old.namelist():
            array = old.read(name)
            new.writestr(name, in_array(array, rng) if name == wanted else array)
    return out.getvalue()


def in_facts(content, rng):
    """A GGUF file with another first fact: of any kind, also of lists in lists."""
    depth = rng.choice([0, 1, 63, 64, 65, 5000, 100_000])
    kind, value = rng.choice([(7, b"\2"), (4, b"\0\0\0\1"), (8, (1 << 60).to_bytes(8, "little")), (10, b"\1" * 8)])
    kinds = [9] * depth + [kind]  # of a list follow the kind of what is in it, and how many there are
    one = (1).to_bytes(8, "little")
    fact = kinds[0].to_bytes(4, "little") + b"".join(each.to_bytes(4, "little") + one for each in kinds[1:]) + value
    name = rng.choice([b"general.alignment", b"general.architecture", b"llama.block_count", b"x"])
    count = int.from_bytes(content[16:24], "little") + 1
    return content[:16] + count.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name + fact + content[24:]


def copied(source, name):
    def write(folder):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return folder / name

    return write


def tokenizer_files(name):
    def write(folder):
        library = pytest.importorskip("tokenizers")
        made = library.Tokenizer(library.models.BPE())
        made.pre_tokenizer, made.decoder = library.pre_tokenizers.ByteLevel(), library.decoders.ByteLevel()
        after = library.processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
        made.post_processor = after
        letters = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False
        )
        made.train_from_iterator([TEXT * 3], trainer)
        config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|end|>", "add_bos_token": True}
        config |= {"chat_template": [{"name": "default", "template": "x"}], "model_max_length": 10**30}
        (folder / "tokenizer.json").write_text(made.to_str())
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder / name

    return write


def token_file(folder):
    documents = [np.arange(number, 3 * number + 1, dtype="<u2") for number in range(9)]
    learnt = [(each % 2).astype("u1") for each in documents]
    ends = np.cumsum([len(each) for each in documents])
    tokenizer = json.dumps({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}).encode()
    digests = []
    for tokens, counted in zip(documents, learnt, strict=True):
        digest = sha256()
        add_to_digest(digest, tokens, "<u4")
        add_to_digest(digest, counted, "<u1")
        digests.append(digest.digest())
    facts = TokenFacts(
        *(int(ends[-1]), int(ends[6]), 9, 7, int(sum(map(np.sum, learnt))), 300),
        *("0" * 64, "", 1),
    )
    facts = facts.changed(sha256=sha256(b"".join(digests)).hexdigest())
    header, offsets = layout(facts, True, tokenizer)
    content = bytearray(offsets["end"])
    arrays = {"tokens": np.concatenate(documents), "ends": ends.astype("<i8"), "learnt": np.concatenate(learnt)}
    for name, part in [*((name, each.tobytes()) for name, each in arrays.items()), ("tokenizer", tokenizer)]:
        content[offsets[name] : offsets[name] + len(part)] = part
    (folder / "x.tokens").write_bytes(header + content[len(header) :])
    return folder / "x.tokens"


def read_tokens(path):
    file = open_token_file(path)
    if sha256(file.digests(0, file.facts.documents)).hexdigest() != file.facts.sha256:
        raise UsageError(f"{path}: its digest differs")
    assert isinstance(file.tokenizer, dict)
    return file.tokens.tolist(), file.ends.tolist()


def read_tokenizer(path):
    read = tokenizer_at(path.parent if path.suffix == ".json" else path)
    read.decode([*read.encode(TEXT), 0, 299, 10**6])
    if path.suffix == ".gguf":
        ends_at(path)


def gguf_vocabulary(folder):
    letters = [chr(33 + number) for number in range(40)]
    tokens = [*letters, *"ab", "ab", "<|end|>"]
    facts = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * (len(tokens) - 1) + [3]}
    facts = {f"tokenizer.ggml.{name}": each for name, each in (facts | {"merges": ["a b"], "eos_token_id": 41}).items()}
    facts["tokenizer.chat_template"] = "x"
    (folder / "x.gguf").write_bytes(gguf_of(facts))
    return folder / "x.gguf"


def read_weights(path):
    found = Pretrained(path if path.suffix == ".gguf" else path.parent)
    for name in found:
        found[name][...]
    found.check_files()


def read_plain(path):
    found = Checkpoint(path)
    return [found[name][...] for name in found]


def read_images(path):
    found = find_images(str(path))
    return found.x[:].tobytes(), found.y.tolist()


def picture_file(ending):
    def write(folder):
        write_folder(folder)
        for path in folder.rglob("*.png"):
            with Image.open(path) as picture:
                picture.save(path.with_suffix(f".{ending}"))
            path.unlink()
        return folder / "class1" / f"01.{ending}"

    return write


def image_table(folder):
    write_folder(folder)
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.png"))]
    (folder / "x.csv").write_text("path,label\n" + "".join(f"{path},{path.parent}\n" for path in paths))
    return folder / "x.csv"


JOB = TrainConfig.of(model="mlp", mesh={"data": 2, "model": 2}, zero=1, steps=3, data="texts").as_json()
LINES = "".join(json.dumps(each) + "\n" for each in ({"text": "a"}, {"prompt": "b", "completion": "c"}) * 3)
ROWS = [{"text": f'n\u00famero {number}, "quoted"\n'} for number in range(9)]


def read_documents(path):
    return [each.content() for each in documents(find_files([str(path)]), 0, 1 << 60, 1 << 60)]


def text_of_rows(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet_table(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(ROWS), folder / "x.parquet")
    return folder / "x.parquet"


KINDS = {
    "job": Kind(text_file("x.json", json.dumps(JOB)), TrainConfig.read, JSON),
    "documents": Kind(
        text_file("x.jsonl", LINES),
        read_documents,
        JSON[:2],
    ),
    "array": Kind(text_file("x.json", json.dumps(ROWS)), read_documents, JSON),
    "table": Kind(
        text_file("x.csv", "id,text\n" + "".join(f'{n},"{n} ""a"""\n' for n in range(9))), read_documents
    ),
    "utf-16": Kind(text_of_rows("x.txt", ("n\u00famero \U0001f642\n" * 50).encode("utf-16")), read_documents),
    "packed": Kind(text_of_rows("x.jsonl.gz", gzip.compress(json.dumps(ROWS[0]).encode())), read_documents),
    "parquet": Kind(parquet_table, read_documents),
    "adapter": Kind(
        copied(GOLDEN / "adapter" / "llama", "adapter_config.json"), lambda path: adapter_options(path.parent), JSON
    ),
    "tokenizer": Kind(tokenizer_files("tokenizer.json"), read_tokenizer, JSON),
    "tokenizer_config": Kind(tokenizer_files("tokenizer_config.json"), read_tokenizer, JSON),
    "vocabulary": Kind(gguf_vocabulary, read_tokenizer, (in_bytes, in_facts)),
    "gguf": Kind(copied(GOLDEN / "gguf", "llama.gguf"), read_weights, (in_bytes, in_facts)),
    "experts": Kind(copied(GOLDEN / "gguf", "qwen3moe.gguf"), read_weights, (in_bytes, in_facts)),
    "safetensors": Kind(
        copied(GOLDEN / "decoders" / "mixtral", "model.safetensors"), read_weights, (in_bytes, in_header)
    ),
    "plain": Kind(copied(GOLDEN / "decoders" / "llama", "model.safetensors"), read_plain, (in_bytes, in_header)),
    "tokens": Kind(token_file, read_tokens, (in_bytes, in_header), True),
    "npz": Kind(lambda folder: write_npz(folder / "x.npz"), read_images, (in_bytes, in_member)),
    "compressed": Kind(lambda folder: write_npz(folder / "x.npz", True), read_images, (in_bytes, in_member)),
    "idx": Kind(
        lambda folder: write_idx(folder) / "train-images-idx3-ubyte", lambda path: read_images(path.parent)
    ),
    "idx.gz": Kind(
        lambda folder: write_idx(folder, True) / "train-images-idx3-ubyte.gz", lambda path: read_images(path.parent)
    ),
    "images": Kind(
        lambda folder: write_folder(folder) / "class1" / "01.png",
        lambda path: read_images(path.parents[1]),
        is_proven=True,
    ),
    "jpeg": Kind(picture_file("jpg"), lambda path: read_images(path.parents[1])),
    "tiff": Kind(picture_file("tif"), lambda path: read_images(path.parents[1])),
    "table of images": Kind(image_table, lambda path: find_images(str(path)).y.tolist(), JSON[:2]),
} | {
    f"config of {family}": Kind(
        copied(GOLDEN / "decoders" / family, "config.json"), lambda path: len(Pretrained(path.parent)), JSON
    )
    for family in FAMILIES
}  # fmt: skip


@pytest.mark.parametrize("count", [4, pytest.param(140, marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.parametrize("name", KINDS)
def test_what_was_damaged_is_read_or_is_one_line(name, count, tmp_path):
    check_damaged(KINDS[name], name, count, tmp_path)


@pytest.mark.parametrize("name, value", [("rope_parameters", 5), ("rope_scaling", [1]), ("layer_types", 7)], ids=str)
def test_a_field_of_another_kind_is_named(name, value, tmp_path):
    content = json.loads((GOLDEN / "decoders" / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(UsageError, match=rf"config.json: {name} is .*: it must be an? (object|list)"):
        load_config(tmp_path)


def test_what_has_no_end_is_refused():
    with pytest.raises(UsageError, match="/dev/zero cannot be read as JSON: it has more than"):
        TrainConfig.read("/dev/zero")


def test_a_pipe_that_nothing_is_written_to_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "PATIENCE", 0.05)
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe cannot be read as JSON: it is a pipe to which no program has written"):
        foreign.json_at(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["[3]"])
    monkeypatch.setattr(foreign, "PATIENCE", 20.0)
    writer.start()
    assert foreign.json_at(pipe) == [3]
    writer.join()
