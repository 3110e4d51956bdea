"""The supervisor: starts a job, and restarts it from its last checkpoint when a rank has died."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from spmd_engine.errors import UsageError
from spmd_engine.runtime.launchers import RESTARTS
from spmd_engine.runtime.mpi_job import MPIJob, find_mpiexec, is_open_mpi
from spmd_engine.runtime.relay import relayed_output
from spmd_engine.runtime.signals import ENDING, REQUEUE, Handlers, Interrupted, exit_code

USAGE_ERROR = 2  #: exit code of a command that would fail again
SIGNALLED = (*(128 + number for number in ENDING), REQUEUE)  #: exit codes of a job that a signal ended after a save
#: Exit codes of a job with a killed rank: launchers differ.
KILLED = (signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL)
LONGEST = 60.0  #: most seconds between two starts
LONG = 600.0  #: seconds after which a script counts as having made progress
UNHANDLED = 10.0  #: most seconds to hold a signal back while no rank has a handler for it


@dataclass
class Supervisor:
    """Runs ``mpiexec -n RANKS`` of a command of this program (``train ...``) or of a script, and restarts it.

    Exit code 0, a signal (``SIGNALLED``) and a usage error (2) end the job. After any other exit it is restarted when
    all its ranks are gone: 'train' with --resume, once there is a checkpoint, and with the last composition of the run,
    which may have changed since the command, if that is for as many ranks; a script with the number of restarts in
    SPMD_RESTARTS. There are at most ``max_restarts`` in a row without progress, which is a new checkpoint, or ten
    minutes of a script; the first after ``pause`` seconds, each next after twice as long, a minute at most. After two
    exits without progress, the job continues with one rank less, down to ``min_ranks``, on the default mesh.
    """

    ranks: int
    arguments: Sequence[str]  #: as in ["train", "--run", "x"], or ["my_script.py", ...]
    max_restarts: int = 3
    min_ranks: int | None = None  #: None: ``ranks``
    hosts: str = ""  #: separated by commas, for mpiexec; "": its default
    newest: Callable[[], Path | None] | None = None  #: the run's newest checkpoint; None: a script without one
    pause: float = 1.0  #: seconds before the first restart
    report: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))

    def __post_init__(self) -> None:
        if not self.arguments:
            raise UsageError("launch: nothing to launch; give a command, as in: launch -n 8 -- train --run NAME")
        if self.ranks < 1 or not 1 <= (self.min_ranks or self.ranks) <= self.ranks:
            raise UsageError(f"launch: -n {self.ranks} with --min-ranks {self.min_ranks}: at least one, at most -n")
        if self.newest is None and self._is_training:
            raise UsageError("launch: give 'train' a --run NAME, so that a restart finds its checkpoint")
        if find_mpiexec() is None:
            raise UsageError("launch: no mpiexec; pip install 'spmd_engine[mpich]', or load your cluster's MPI")

    @property
    def _is_training(self) -> bool:
        return self.arguments[0] == "train"

    def run(self) -> int:
        """Start and restart the job; returns its last exit code."""
        signals: list[int] = []  # that this process received
        with Handlers(lambda number, frame: signals.append(number)):
            return self._run(signals)

    def _run(self, signals: list[int]) -> int:
        ranks, restarts, in_a_row, fruitless = self.ranks, 0, 0, 0
        while True:
            saved, began = self._checkpoint(), time.monotonic()
            code = self._once(ranks, restarts, signals)
            if signals or code in (0, USAGE_ERROR, *SIGNALLED):
                return code
            newest = self._checkpoint()
            progress = newest != saved if self.newest else time.monotonic() - began > LONG
            in_a_row, fruitless = (0, 0) if progress else (in_a_row, fruitless + 1)
            if in_a_row == self.max_restarts:
                self.report(f"launch: {_describe_exit(code)}, after {in_a_row} restart(s) without progress: no more")
                return code
            restarts, in_a_row = restarts + 1, in_a_row + 1
            if fruitless >= 2 and ranks > (self.min_ranks or self.ranks):
                ranks, fruitless = ranks - 1, 0
            action = f"continues from {newest.name}" if newest and self._is_training else "begins again"
            pause = min(LONGEST, self.pause * 2 ** (in_a_row - 1))
            self.report(
                f"launch: {_describe_exit(code)}; {action} on {ranks} ranks in {pause:g} s, "
                f"restart {in_a_row} of {self.max_restarts}"
            )
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and not signals:
                time.sleep(min(0.1, pause))
            if signals:
                return exit_code(Interrupted(signals[0]), self.arguments)

    def command(self, ranks: int) -> list[str]:
        """The next command, on ``ranks`` ranks: a run with a checkpoint resumes from it."""
        mpiexec = find_mpiexec()
        assert mpiexec
        launcher = [*mpiexec, "-n", str(ranks)]
        if self.hosts:
            launcher += ["--host" if is_open_mpi(mpiexec[0]) else "-hosts", self.hosts]
        if not self._is_training:
            return [*launcher, sys.executable, *self.arguments]
        arguments = list(self.arguments)
        if self._checkpoint() is not None and "--resume" not in arguments:
            arguments = [*_remove_option(arguments, "--config"), "--resume"]  # the run's own job is resumed
        if ranks != self.ranks:
            arguments = _remove_option(arguments, "--mesh")
        return [*launcher, sys.executable, "-m", "spmd_engine", *arguments]

    def _checkpoint(self) -> Path | None:
        return self.newest() if self.newest else None

    def _once(self, ranks: int, restarts: int, signals: Sequence[int]) -> int:
        """Run the job once, until all its processes have ended; returns its exit code. Forwards ``signals`` to it."""
        with relayed_output() as output:
            job, forwarded, since = MPIJob(self.command(ranks), env={RESTARTS: str(restarts)}, **output), 0, 0.0
            try:
                while (code := job.process.poll()) is None:
                    if forwarded < len(signals):
                        since = since or time.monotonic()
                        anyhow = bool(self.hosts) or time.monotonic() - since > UNHANDLED
                        if job.signal(signals[forwarded], anyhow):
                            forwarded, since = forwarded + 1, 0.0
                    with suppress(TimeoutExpired):
                        job.process.wait(0.2)
            finally:
                began = time.monotonic()
                alive = job.stop(patience=30)
                if alive:
                    self.report(f"launch: processes {alive} are still there after {time.monotonic() - began:.0f} s")
        if signals and code not in (0, *SIGNALLED):
            code = exit_code(Interrupted(signals[0]), self.arguments)
        return code if code >= 0 else 128 - code


def _describe_exit(code: int) -> str:
    return f"exit code {code}" + (" (a rank was killed: out of memory, perhaps)" if code in KILLED else "")


def _remove_option(arguments: Sequence[str], option: str) -> list[str]:
    """A command line without an option and its value."""
    pairs = zip(["", *arguments], arguments)  # each after the one before
    return [given for before, given in pairs if option not in (before, given) and not given.startswith(f"{option}=")]
