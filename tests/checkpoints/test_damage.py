"""Files that were altered, in whatever way, are a clear error: never a load in silence, never a foreign traceback."""

import hashlib
import json
import random
import shutil

import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.manifest import Manifest
from spmd_engine.checkpoints.rewrite import problems
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint's folder."""
    folder = tmp_path_factory.mktemp("sound")

    def program():
        with Mesh(data=2) as mesh:
            save_checkpoint(folder, tiny.make_engine(mesh), AdamW(), step=1, seed=0)

    run(program, 2)
    return CheckpointFolder(folder).newest()


@pytest.fixture
def copied(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copied")


def load(folder):
    with Mesh() as mesh:
        load_checkpoint(folder, tiny.make_engine(mesh), AdamW())


def mutated(content, how, rng):
    """A file's bytes, altered."""
    at = rng.randrange(len(content))
    if how == "bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if how == "cut":
        return content[:at]
    if how == "longer":
        return content + bytes(rng.randrange(1, 99))
    if how == "zeroed":
        end = min(len(content), at + rng.randrange(1, 4096))
        return content[:at] + bytes(end - at) + content[end:]
    other = rng.randrange(len(content))  # swapped
    size = min(64, len(content) - max(at, other), abs(at - other))
    first, second = sorted((at, other))
    return (
        content[:first] + content[second : second + size] + content[first + size : second]
        + content[first : first + size] + content[second + size :]
    )


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(n, marks=pytest.mark.soak) for n in range(60, 3000))])
def test_a_file_that_was_altered_is_a_clear_error(copied, seed):
    rng = random.Random(seed)
    path = rng.choice(sorted(copied.iterdir()))
    content = path.read_bytes()
    altered = mutated(content, rng.choice(["bit", "cut", "longer", "zeroed", "swapped"]), rng)
    path.write_bytes(altered)
    if altered == content:
        load(copied)
        return
    try:
        load(copied)
    except UsageError as error:
        assert str(copied) in str(error)
    else:  # what a load need not look at: headers and padding, which verify does
        head = 8 + int.from_bytes(content[:8], "little")
        assert path.suffix == ".safetensors" and altered[head:] == content[head:]
    if path.suffix == ".safetensors" and altered[: len(content)] == content:
        with pytest.raises(CheckpointError):
            Checkpoint(copied)


def test_a_missing_file_is_named(copied):
    (copied / "optimizer-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*optimizer-00001.safetensors"):
        load(copied)


def signed(content):
    """A manifest's text, with the SHA-256 that belongs to it: as somebody would write it who means harm."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest})


def _change(path, value):
    def change(content):
        *way, last = path
        for each in way:
            content = content[each]
        content[last] = value

    return change


BLOCK = ("sections", "model", "norm/scale", "blocks", 0)
LIES = {
    "no part of it": _change((*BLOCK, 1), [99]),
    "hold 11 of 12 elements": _change((*BLOCK, 1), [11]),
    "where a text like": _change((*BLOCK, 2), "../../etc/passwd"),
    "where a whole number should be": _change((*BLOCK, 3), -1),
    "an array of shape": _change(("sections", "model", "norm/scale", "shape"), [1 << 40, 1 << 40]),
    "a dtype 'OBJECT'": _change(("sections", "model", "norm/scale", "dtype"), "OBJECT"),
    "version 2; this program reads version 1": _change(("version",), 2),
    "where an object should be": _change(("sections", "model"), []),
    "no section 'model'": _change(("sections",), {}),
    "KeyError": lambda content: content.pop("facts"),
    "overlap": lambda content: content["sections"]["model"]["norm/scale"]["blocks"].append(
        content["sections"]["model"]["norm/scale"]["blocks"][0]
    ),
    "but|bytes, .* were written": _change((*BLOCK, 3), 1 << 50),
}


@pytest.mark.parametrize("message", LIES)
def test_a_manifest_that_lies_is_refused_even_if_it_is_signed(copied, message):
    content = json.loads((copied / "manifest.json").read_text())
    LIES[message](content)
    (copied / "manifest.json").write_text(signed(content))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(copied)


def test_a_manifest_that_was_altered_is_refused(sound):
    content = json.loads((sound / "manifest.json").read_text())
    content["facts"]["seed"] = 1
    with pytest.raises(CheckpointError, match="here is damaged, or none of ours: its SHA-256 of itself differs"):
        Manifest.parse(json.dumps(content), "here")
    for text in ("", "[" * 100_000, "[]", "{}", "nan"):
        with pytest.raises(CheckpointError, match="here is damaged, or none of ours"):
            Manifest.parse(text, "here")


def test_all_that_is_wrong_is_found(copied):
    assert list(problems(Checkpoint(copied))) == []
    model, optimizer = copied / "model-00000.safetensors", copied / "optimizer-00001.safetensors"
    for path, at in ((model, -3), (optimizer, -1), (optimizer, 30)):
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)
    found = list(problems(Checkpoint(copied)))
    assert len(found) == 3
    assert sum("is not what was written" in each for each in found) == 2
    assert any(str(optimizer) in each and "header" in each for each in found)
