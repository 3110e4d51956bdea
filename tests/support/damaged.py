"""Files that are damaged in any place: each is read, or is one clear error that names the file."""

import json
import random
import time
from typing import NamedTuple

from spmd_engine.errors import UsageError
from support.altered import in_bytes, in_json, in_words

MOST_SECONDS = 20.0  #: of the processor, for a case


class Kind(NamedTuple):
    """A kind of file."""

    write: object  #: writes sound files into a folder; returns the one to be damaged
    read: object  #: reads it, or the folder that it is in, entirely, and returns something of it
    alter: tuple = (in_bytes,)
    is_proven: bool = False  #: whether the format has a checksum: what is read is the same, or is refused


def in_object(content, rng):
    return json.dumps(in_json(json.loads(content), rng)).encode()


def in_array(content, rng):
    """The header of an .npy file, of another length."""
    end = 10 + int.from_bytes(content[8:10], "little")
    text = in_words(content[10:end], rng)[: (1 << 16) - 1]
    return content[:8] + len(text).to_bytes(2, "little") + text + content[end:]


def text_file(name, text):
    def write(folder):
        (folder / name).write_text(text)
        return folder / name

    return write


JSON, TOML = (in_bytes, in_words, in_object, in_object), (in_bytes, in_words, in_words)


def check_damaged(kind, name, count, tmp_path):
    """Assert that ``count`` damaged files, drawn by the name, are read, or refused in one line that names them."""
    path = kind.write(tmp_path)
    sound, expected = path.read_bytes(), kind.read(path)
    for number in range(count):
        rng = random.Random(f"{name} {number}")
        path.write_bytes(content := rng.choice(kind.alter)(sound, rng))
        begin = time.process_time()
        try:
            found = kind.read(path)
        except UsageError as error:
            assert "\n" not in str(error) and len(str(error)) <= 4010, (number, str(error)[:500])
            assert str(tmp_path) in str(error), (number, str(error)[:500])
        except Exception as error:
            error.add_note(f"case {number}: {content[:300]!r}")
            raise
        else:
            assert not kind.is_proven or found == expected, number
        assert time.process_time() - begin < MOST_SECONDS, number
