"""What ranks say to each other when they join a world: messages and bytes that grow with log2(n) and n."""

from collections import Counter
from math import ceil, log2

import pytest

from spmd_engine import run_threads
from spmd_engine.comm.agreement.tree import gather_texts
from spmd_engine.comm.communicators.threads import ThreadCommunicator, current_thread_communicator


@pytest.mark.parametrize(("longest", "rounds"), [(100, 1), (1000, 2)])
@pytest.mark.parametrize("ranks", [1, 5, 16])
def test_texts_of_all_ranks_take_a_logarithm_of_messages(monkeypatch, ranks, longest, rounds):
    messages, nbytes, start_send = Counter(), Counter(), ThreadCommunicator.start_send

    def counted(self, data, to, tag):
        messages[self.rank] += 1
        nbytes[self.rank] += data.nbytes
        return start_send(self, data, to, tag)

    monkeypatch.setattr(ThreadCommunicator, "start_send", counted)
    texts = ["é" * (longest // 2 if rank == ranks - 1 else rank) for rank in range(ranks)]

    def program():
        comm = current_thread_communicator()
        gathered = gather_texts(comm, texts[comm.rank])
        sent = messages[comm.rank], nbytes[comm.rank]  # before messages of the end
        return gathered, sent

    for gathered, (count, size) in run_threads(program, ranks):
        assert gathered == texts
        assert count == rounds * ceil(log2(ranks))
        assert size <= rounds * (ranks * (longest + 136) + 100 * ceil(log2(ranks)))


def test_some_ranks_gather_texts_among_themselves():
    def program():
        comm = current_thread_communicator()
        return gather_texts(comm, str(comm.rank), [rank for rank in range(5) if rank % 2 == comm.rank % 2])

    assert run_threads(program, 5) == [["0", "2", "4"], ["1", "3"]] * 2 + [["0", "2", "4"]]
