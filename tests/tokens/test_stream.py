"""Text that comes bit by bit: no broken characters, nothing of a stop string."""

import pytest

from spmd_engine.tokens import ByteTokenizer, TextStream

TEXT = "naïve – 数 🙂 end"


def fed(text, stop=()):
    stream = TextStream(ByteTokenizer(), stop=stop)
    pieces = [stream.feed(token) for token in ByteTokenizer().encode(text)]
    return stream, [*pieces, stream.finish()]


def test_characters_come_whole():
    stream, pieces = fed(TEXT)
    assert "".join(pieces) == TEXT == stream.text
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[2:4] == ["", "ï"]


def test_an_incomplete_character_is_returned_at_the_end():
    stream = TextStream(ByteTokenizer())
    assert [stream.feed(token) for token in (97, 0xE6, 0x95)] == ["a", "", ""]
    assert stream.finish() == "\ufffd" and stream.text == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "told", "stopped"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one twtwo", ("two",), "one tw", "two"),
        ("one tw", ("two",), "one tw", None),
        ("aab aaab", ("aaab",), "aab ", "aaab"),
        ("one two three", ("three", "two"), "one ", "two"),
        ("数字", ("字",), "数", "字"),
        ("stop", ("stop",), "", "stop"),
        ("nothing", ("",), "nothing", None),
    ],
)
def test_stop_strings(text, stop, told, stopped):
    stream, pieces = fed(text, stop)
    assert "".join(pieces) == told == stream.text
    assert stream.stopped == stopped
    assert stream.feed(97) == ("" if stopped else "a")


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(ByteTokenizer(), stop=("\n\n",))
    assert [stream.feed(token) for token in b"a\nb\n\nc"] == ["a", "", "\nb", "", "", ""]
