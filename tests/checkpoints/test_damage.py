"""Files that were altered, in whatever way, are a clear error: never a load in silence, never a foreign traceback."""

import hashlib
import json
import random
import shutil

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.format import manifest
from spmd_engine.checkpoints.format.blocks import HASH
from spmd_engine.checkpoints.format.write import HASHES
from spmd_engine.checkpoints.rewrite import problems
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError
from spmd_engine.strategies import DataParallel
from support import saved, tiny
from support.altered import in_bytes, in_json


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint's folder."""
    folder = tmp_path_factory.mktemp("sound")

    def program():
        with Mesh(data=2) as mesh:
            save_checkpoint(folder, tiny.make_engine(mesh), AdamW(), step=1, seed=0)

    run_threads(program, 2)
    return CheckpointFolder(folder).newest()


@pytest.fixture
def copied(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copied")


def load(folder):
    with Mesh() as mesh:
        load_checkpoint(folder, tiny.make_engine(mesh), AdamW())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a checkpoint with few arrays: many can be altered in little time."""
    folder = tmp_path_factory.mktemp("small")

    def program():
        with Mesh(data=2) as mesh:
            engine = DataParallel(3, 4, mesh)
            engine.initialize(0)
            save_checkpoint(folder, engine, AdamW(), step=1, seed=0, config={"x": [1, 2]})

    run_threads(program, 2)
    return CheckpointFolder(folder).newest()


class Damaged:
    """A checkpoint's folder that is altered, read, and mended again."""

    def __init__(self, folder):
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.arrays, self.facts = self.read()
        self.touched = set()

    def read(self):
        checkpoint = Checkpoint(self.folder)
        sections = {name: checkpoint.section(name) for name in checkpoint.manifest.sections}
        bytes_of = {
            (section, name): (array.shape, array.dtype, array[...].tobytes())
            for section, arrays in sections.items()
            for name, array in arrays.items()
        }
        return bytes_of, (checkpoint.metadata, checkpoint.manifest.config)

    def write(self, name, content):
        self.touched.add(name)
        (self.folder / name).write_bytes(content)

    def mend(self):
        for name in self.touched:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            path.write_bytes(self.files[name])
        self.touched.clear()


def header_of(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def alter(damaged, rng):
    """Alter something; whether a SHA-256 of the manifest that belongs to it was made anew."""
    name = rng.choice(sorted(damaged.files))
    content, how = damaged.files[name], rng.choice(["bytes", "bytes", "json", "signed", "files", "gone"])
    if how == "files":
        other = rng.choice(sorted(damaged.files))
        damaged.write(name, damaged.files[other])
        damaged.write(other, content)
    elif how == "gone":
        damaged.write(name, b"")
        (damaged.folder / name).unlink()
        kind = rng.choice(["nothing", "folder", "link", "empty"])
        if kind == "folder":
            (damaged.folder / name).mkdir()
        elif kind == "link":
            (damaged.folder / name).symlink_to(rng.choice([name, "/dev/null", "/nowhere"]))
        elif kind == "empty":
            (damaged.folder / name).write_bytes(b"")
    elif how == "json" and name.endswith("safetensors"):
        head, data = header_of(content)
        text = json.dumps(in_json(head, rng)).encode()
        text += b" " * (int.from_bytes(content[:8], "little") - len(text))  # so that the data stay where they are
        damaged.write(name, len(text).to_bytes(8, "little") + text + data)
    elif how in ("json", "signed"):
        altered = in_json(json.loads(damaged.files["manifest.json"]), rng)
        damaged.write("manifest.json", (signed(altered) if how == "signed" else json.dumps(altered)).encode())
        return how == "signed"
    else:
        damaged.write(name, in_bytes(content, rng))
    return False


MANY = [pytest.param(begin, 400, marks=pytest.mark.soak) for begin in range(150, 10_150, 400)]


@pytest.mark.parametrize(("begin", "count"), [(0, 150), *MANY])
def test_what_was_altered_is_a_clear_error_or_the_same_to_the_bit(small, tmp_path, begin, count):
    """Also where somebody gave the manifest a hash that fits: then its facts may be others, but no array."""
    folder = shutil.copytree(small, tmp_path / "copied")
    damaged, found = Damaged(folder), 0
    for seed in range(begin, begin + count):
        is_signed = alter(damaged, random.Random(seed))
        try:
            arrays, facts = damaged.read()
        except CheckpointError as error:
            assert str(folder) in str(error) and "\n" not in str(error), seed
            found += 1
        else:
            assert arrays == damaged.arrays or is_signed and arrays.items() < damaged.arrays.items(), seed
            assert facts == damaged.facts or is_signed, seed
        damaged.mend()
    assert found > 0.7 * count
    assert damaged.read() == (damaged.arrays, damaged.facts)


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


def _pieces(change):
    """Change the pieces of one array: their bounds, and their ranks."""
    return lambda content: change(content["pieces"][_scale(content)[3]])


def _scale(content):
    return next(array for array in content["sections"]["model"]["arrays"] if array[0] == "norm/scale")


FILES = ("sections", "model", "files")


def _files(change):
    """Change the ranks, first bytes and hashes of the files of a section."""
    return lambda content: _change(FILES, change(*content["sections"]["model"]["files"]))(content)


LIES = {
    "no part of it": _pieces(_change((0,), [0, 99])),
    "do not cover it: they hold 11 of 12 elements": _pieces(_change((0,), [0, 11])),
    "cannot reshape": _pieces(_change((0,), [0, 12, 3])),
    "has arrays on rank 5, which has no file": _pieces(_change((1,), [5])),
    "where a text like": _change((*FILES, 2), "../../etc/passwd"),
    "where a list of whole numbers should be": _change((*FILES, 1, 0), -1),
    "2 files, which begin at 2 bytes and have 64 digits": _files(
        lambda ranks, firsts, hashes: [ranks, firsts, hashes[64:]]
    ),
    "has arrays on rank 0, which has no file": _files(
        lambda *columns: [column[1:] for column in columns[:2]] + [columns[2][64:]]
    ),
    "an array of shape": lambda content: _change((1,), [1 << 40, 1 << 40])(_scale(content)),
    "a dtype 'OBJECT'": lambda content: _change((2,), "OBJECT")(_scale(content)),
    "version 4; this program reads versions 1 to 3": _change(("version",), 4),
    "where an object should be": _change(("sections", "model"), []),
    "no section 'model'": _change(("sections",), {}),
    "KeyError": lambda content: content.pop("facts"),
    "overlap": _pieces(lambda pieces: pieces.__setitem__(slice(None), [[0, 0, 12, 12], 2 * pieces[1]])),
    "but|bytes, .* were written": _change((*FILES, 1, 0), 1 << 50),
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
        saved.manifest(json.dumps(content))
    for text in ("", "[" * 100_000, "[]", "{}", "nan"):
        with pytest.raises(CheckpointError, match="here is damaged, or none of ours"):
            saved.manifest(text)


def test_a_manifest_means_the_same_in_any_order_of_its_names_and_with_any_spaces(sound):
    path = sound / "manifest.json"
    content = json.loads(path.read_text())
    turned = {name: content[name] for name in reversed(content)}
    for text in (json.dumps(content, indent=2), json.dumps(turned), path.read_text().replace("\n", "\r\n")):
        assert saved.manifest(text).text() == path.read_text()
        with pytest.raises(CheckpointError, match="its SHA-256 of itself differs"):
            saved.manifest(text.replace("12", "13", 1))


def test_a_manifest_in_lines_is_read_without_all_numbers_at_once(sound, monkeypatch):
    """Each list of pieces is a line of its own; what was altered is then read as a whole, to say what is wrong."""
    text, parsed = (sound / "manifest.json").read_text(), []
    monkeypatch.setattr(manifest, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    saved.manifest(text)
    assert len(parsed) == 1 and json.loads(parsed[0])["pieces"] == []
    lines = text.splitlines(keepends=True)
    for altered in (lines + [" x"], lines[:-1], lines[:1] + lines[2:], lines[:2] + lines[1:]):
        with pytest.raises(CheckpointError, match="here is damaged, or none of ours"):
            saved.manifest("".join(altered))


def rows_of(path):
    """The number of blocks in a file, which has their hashes behind them."""
    return header_of(path.read_bytes())[0][HASHES]["shape"][0]


def test_hashes_that_were_altered_are_a_clear_error(copied):
    content = bytearray((copied / "model-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (copied / "model-00000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is damaged: the hashes of its blocks"):
        load(copied)


def test_all_that_is_wrong_is_found(copied):
    assert list(problems(Checkpoint(copied))) == []
    model, optimizer = copied / "model-00000.safetensors", copied / "optimizer-00001.safetensors"
    for path, at in ((model, -3 - HASH * rows_of(model)), (optimizer, -1 - HASH * rows_of(optimizer)), (optimizer, 30)):
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)
    found = list(problems(Checkpoint(copied)))
    assert len(found) == 3
    assert sum("is not what was written" in each for each in found) == 2
    assert any(str(optimizer) in each and "header" in each for each in found)
