"""The least communicator: threads that exchange bytes by queues, with no method but those that a communicator needs."""

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue

import numpy as np

from spmd_engine.comm.communicators import threads
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Progress
from spmd_engine.errors import RankAborted


class Job:
    """What the threads share: queues by (communicator, sender, receiver, tag), ends, and the first error."""

    def __init__(self):
        self.queues, self.ended, self.error = defaultdict(SimpleQueue), set(), None
        self.changed = threading.Condition()


class QueueCommunicator(Communicator):
    def __init__(self, job, members, rank, progress, name=()):
        super().__init__(members, rank, ["a host"] * len(members), progress)
        self.job, self.name, self.subsets = job, name, defaultdict(int)

    def start_send(self, data, to, tag):
        with self.job.changed:
            self.job.queues[self.name, self.rank, to, tag].put(data.tobytes())
            self.job.changed.notify_all()
        return []

    def start_receive(self, data, source, tag):
        with self.job.changed:
            return [(self.job.queues[self.name, source, self.rank, tag], data.reshape(-1).view(np.uint8), [])]

    def done(self, requests):
        for queue, data, arrived in requests:
            try:
                message = np.frombuffer(b"" if arrived else queue.get_nowait(), np.uint8)
            except Empty:
                return False
            data[: message.size] = message
            arrived.append(True)
        return True

    def create_subset(self, ranks, timeout):
        ranks = tuple(ranks)
        self.subsets[ranks] += 1
        members, name = [self.members[rank] for rank in ranks], (*self.name, ranks, self.subsets[ranks])
        return QueueCommunicator(self.job, members, ranks.index(self.rank), self.progress, name)

    def pause(self, idle, messages=True):
        if self.job.error is not None:
            raise RankAborted("another rank failed")
        with self.job.changed:
            self.job.changed.wait(1e-3)

    def announce_end(self):
        self.job.ended.add(self.members[self.rank])

    def ended(self, awaited):
        return [rank for rank in awaited if self.members[rank] in self.job.ended]


class Queues(int):
    """A number of ranks that ``on_ranks`` runs on queues."""

    def run(self, program, args=()):
        """Like ``run_threads``."""
        job, results = Job(), [None] * self

        def body(rank):
            threads._current.communicator = comm = QueueCommunicator(job, range(self), rank, Progress())
            try:
                results[rank] = program(*args)
                Group(comm, "world", Ledger()).leave()
            except BaseException as error:
                job.error = job.error or error

        ranks = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        if job.error is not None:
            raise job.error
        return results
