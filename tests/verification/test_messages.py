"""What ranks send each other is data: reading it runs no code that the message names."""

import json
import pickle
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import spmd_engine
from spmd_engine.runtime.activity import CallRecord, State, WaitRecord
from spmd_engine.runtime.other_nodes import OtherNodes
from spmd_engine.verification.bindings import Name
from spmd_engine.verification.report import Cause, Element, Finding


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.flags.writeable
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        for each in zip(found, expected, strict=True):
            assert_equal(*each)
    elif isinstance(expected, dict):
        assert_equal(list(found.items()), list(expected.items()))
    else:
        assert found == expected or found != found and expected != expected


def test_a_value_of_a_verification_is_read_as_it_was_sent():
    from spmd_engine.verification.comparison import packed, unpacked

    rng = np.random.default_rng(0)
    arrays = [rng.random((2, 3)).T, np.arange(7, dtype=np.uint8), np.empty((0, 4)), np.array(True)]
    arrays += [np.float32(0.1), rng.random(3).astype(ml_dtypes.bfloat16), np.array([1, 2], ">i4")]
    finding = Finding(Cause.STALE, "old \N{SNOWMAN}", ("data",), 1.5)
    found = finding, Element((1,), 0, {"data": 1}, 2, float("inf"))
    records = {Name("a.py", 3, "x"): [(arrays[0], 2)], 5: {"a", "b"}, "found": found}
    value = [None, True, 1 << 70, -0.5, float("nan"), ("f4", "s"), arrays, records]
    assert_equal(unpacked(packed(value)), value)


@pytest.mark.parametrize("kind", ["os:system", "builtins:eval", "spmd_engine.verification.report:escape"])
def test_a_message_that_names_code_is_refused(kind):
    from spmd_engine.verification.comparison import unpacked

    head = json.dumps([kind, "true"]).encode()
    with pytest.raises(ValueError, match=f"a message has a value of {kind}, which is no record"):
        unpacked(np.frombuffer(len(head).to_bytes(8, "little") + head, np.uint8))


class SentMessages:
    """Side messages without MPI."""

    def __init__(self):
        self.data = []

    def send(self, data, ranks, tag):
        self.data += [(rank, data) for rank in ranks]

    def receive(self, tag):
        taken, self.data = self.data, []
        return taken


class Harmful:
    def __reduce__(self):
        return Harmful.run, ()

    @staticmethod
    def run():
        pytest.fail("code of a message runs")


def test_the_states_of_other_nodes_are_read_as_they_were_sent():
    messages, call = SentMessages(), CallRecord((0, 1, 5), 2, 9, "all_reduce", "data", "loss")
    wait = WaitRecord(call, 31.5, True, "a sum", (5,), "mine.py:7")
    states = [State(0, 11, (call,), wait, "step 4", 2.5, "a.py:1\nb.py:2", 0.1, "", 3.0)]
    states += [State(1, 12, (), None, "", 0.0, "", 0.0)]
    node = OtherNodes(messages, 3, [2])
    node.send_states(states)
    assert node.heard() == states
    messages.data = [(0, pickle.dumps([Harmful()]))]
    with pytest.raises(ValueError):
        node.heard()


def test_no_module_reads_pickles():
    """Reading a pickle runs what it names. NumPy's files may hold some: each reader forbids it."""
    imports = re.compile(r"^\s*(?:import|from) (pickle|cPickle|dill|cloudpickle|shelve)\b", re.MULTILINE)
    sources = {path: path.read_text() for path in Path(spmd_engine.__file__).parent.rglob("*.py")}
    assert not [str(path) for path, text in sources.items() if imports.search(text) or "allow_pickle=True" in text]
