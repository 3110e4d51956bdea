"""Injects faults into small jobs of 4 ranks, and prints a table of what the jobs do.

    python scripts/faults.py                 all faults, in about ten minutes on two cores
    python scripts/faults.py stop kill       those whose names contain one of these words

Columns: the job's exit code; seconds until the report and until the end of the job; the steps lost, which are those
after the last remaining checkpoint; and the message. The run then continues without the fault to its last step:
``same`` is whether its losses and checkpoint equal those of an undisturbed run to the bit, or the exit code if it ended
earlier.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spmd_engine.checkpoints import Checkpoint, CheckpointFolder
from spmd_engine.checkpoints.digest import digest_of_checkpoint, digest_text
from spmd_engine.errors import CheckpointError
from spmd_engine.runtime.mpi_job import MPIJob, find_mpiexec, is_open_mpi
from spmd_engine.training.observers import MetricsFile

RANKS, STEPS, EVERY, TIMEOUT = 4, 8, 2, 8
JOB = ["--model", "two-layers", "--data", "data", "--steps", str(STEPS), "--save-every", str(EVERY)]
JOB += ["--batch-size", "4", "--eval-every", "0", "--eval-samples", "4", "--dtype", "float64"]
JOB += ["--timeout", str(TIMEOUT), "--check-replicas-every", "2", "--mesh", "data=4", "--seed", "3"]
NOISE = ("Abort(", "[mpiexec", "[proxy", "=====", "=   ", "YOUR APPLICATION", "Traceback", "  File", "    ")


@dataclass
class Fault:
    """A fault and the expected behaviour of the job."""

    name: str
    inject: str = ""  #: see inject_fault.py
    code: tuple[int, ...] = (1,)  #: expected exit codes
    says: str = ""  #: text expected in the report
    options: Sequence[str] = ()
    launch: bool = False  #: whether the job is started by ``launch``
    signal: int = 0  #: sent to the launcher during training
    early: bool = False  #: instead a second after the start, when nothing is saved
    again: bool = False  #: sent again 0.3 s later
    lost: int | None = None  #: most steps that may be lost
    rest: Sequence[str] = field(default=())  #: options of the continuation


def killed() -> list[Fault]:
    """SIGKILL of ranks at all places."""
    places = ("forward", "reduction", "optimizer", "save")
    codes = (1, 9, 137, -9)  # depends on the launcher
    kills = [
        Fault(f"kill -9 of rank {rank} in {place}", f"kill {place} {rank} {6 if place == 'save' else 5}", codes)
        for rank in (0, 1, RANKS - 1)
        for place in places
    ]
    kills.append(Fault("kill -9 of rank 0 in the commit", "kill commit 0 6", codes))
    kills.append(Fault("kill -9 of rank 2, under launch", "kill optimizer 2 5", (0,), "continues from", launch=True))
    return kills


FAULTS = [
    *killed(),
    Fault("SIGSTOP of rank 2", "stop forward 2 5", says="its process is stopped (SIGSTOP)"),
    Fault("SIGSTOP of rank 1 in a save", "stop save 1 6", says="rank 1 came to"),
    Fault("rank 3 sleeps", "sleep data 3 5", says="rank 3 came to"),
    Fault("rank 0 computes for ever", "compute data 0 5", says="rank 0 came to"),
    Fault("SIGSTOP of rank 2, under launch", "stop forward 2 5", (0,), "continues from", launch=True),
    Fault("everyone receives", "receive data -1 5", says="wait for each other"),
    Fault("rank 1 makes another call", "other data 1 5", says="does not match"),
    Fault("an exception on rank 1", "raise forward 1 5", says="rank 1 of 4 failed"),
    Fault("disk full on rank 1", "full save 1 6", (2,), "could not be saved"),
    Fault("disk full on rank 0's commit", "full commit 0 6", (2,), "could not be saved"),
    Fault("disk full, --go-on-unsaved", "full save 1 6", (2,), "could not be saved", ["--go-on-unsaved"]),
    Fault("NaN in a gradient of rank 2", "nan reduction 2 5", (0,), "the gradient's norm is nan"),
    Fault("inf in a summed gradient of rank 2 alone", "inf norm 2 5", says="rank 2 of 4 found something"),
    Fault("a flipped bit in rank 3's replica", "flip data 3 5", says="rank 3 differs"),
    Fault("SIGTERM to rank 1", "interrupt data 1 5", (143,), "SIGTERM", lost=0),
    *(
        Fault(f"{sig.name} to {to}", code=(128 + sig,), says=sig.name, launch=to == "launch", signal=sig, lost=0)
        for to in ("mpiexec", "launch")
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        if (to, sig) != ("mpiexec", signal.SIGHUP)  # it kills the ranks
    ),
    Fault("SIGINT twice to launch", code=(130,), says="SIGINT", launch=True, signal=signal.SIGINT, again=True, lost=0),
    *(
        Fault(
            f"SIGTERM to {to}, early", "", (75,), "SIGTERM", ["--requeue"], to == "launch", signal.SIGTERM, early=True
        )
        for to in ("mpiexec", "launch")
    ),
]


def main() -> int:
    if find_mpiexec() is None:
        print("no mpiexec: pip install -e '.[mpich]'", file=sys.stderr)
        return 2
    # Open MPI's launcher forwards SIGUSR1 only: at other signals it ends the ranks without a save.
    ends = (
        ("SIGINT to mpiexec", "SIGTERM to mpiexec", "SIGTERM to mpiexec, early")
        if is_open_mpi(find_mpiexec()[0])
        else ()
    )
    faults = [fault for fault in FAULTS if not (ends and fault.name.startswith(ends))]
    chosen = [fault for fault in faults if not sys.argv[1:] or any(word in fault.name for word in sys.argv[1:])]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="spmd-faults-") as name:
        root = Path(name)
        reference = prepared(root / "whole")
        code, _ = started(reference, Fault("none"), [])
        assert code == 0, "the job fails without any fault"
        print("| fault | exit | reported after | ended after | steps lost | same | message |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for number, fault in enumerate(chosen):
            folder = prepared(root / str(number))
            line, fine = befall(fault, folder, reference)
            wrong += not fine
            print(line, flush=True)
            shutil.rmtree(folder)
    print(f"{len(chosen)} faults, {wrong} unexpected")
    return int(wrong > 0)


def prepared(folder: Path) -> Path:
    """A folder to run in, with training data and the code that injects faults."""
    folder.mkdir()
    (folder / "data").write_text("something to learn from, again and again\n" * 300)
    shutil.copy(Path(__file__).with_name("inject_fault.py"), folder / "sitecustomize.py")
    return folder


def befall(fault: Fault, folder: Path, reference: Path) -> tuple[str, bool]:
    """Run a fault; its line of the table, and whether the job did what is expected."""
    code, output = started(folder, fault, fault.options)
    ended = time.time()
    moment = float((folder / "moment").read_text()) if (folder / "moment").exists() else ended
    first = next(((when, text) for when, text in output if fault.says and fault.says in text), None)
    if first is None:
        first = next(
            ((when, text) for when, text in output if when > moment and not text.startswith(NOISE)), (ended, "")
        )
    (folder / "moment").unlink(missing_ok=True)
    saved, steps = newest(folder), steps_made(folder)
    has_checkpoint = saved is not None
    resume_options = ["--resume", "--timeout", "120"] if has_checkpoint else []
    rest, after = (0, []) if code == 0 else started(folder, Fault("none"), resume_options)
    same = rest == 0 and digest(folder) == digest(reference) and losses(folder) == losses(reference)
    lost = max(0, steps - (saved or 0)) if code else 0
    fine = code in fault.code and (not fault.says or fault.says in first[1]) and not left_over(folder)
    fine &= fault.lost is None or lost <= fault.lost
    fine &= same or "NaN" in fault.name
    words = first[1].strip()[:110].replace("|", "/")
    is_same = f"ended with {rest}" if rest else "yes" if same else "no"
    cells = [fault.name, str(code), seconds(first[0] - moment), seconds(ended - moment), str(lost)]
    remark = "" if fine else "  <-- unexpected"
    if rest:
        remark += f"; the continued run ended with: {after[-1][1].strip() if after else 'nothing'}"
    return f"| {' | '.join([*cells, is_same, words])} |{remark}", fine


def started(folder: Path, fault: Fault, options: Sequence[str]) -> tuple[int, list[tuple[float, str]]]:
    """Run the job in a folder; its exit code, and each line of its output with the time."""
    train = ["train", "--run", "./run", *(JOB if "--resume" not in options else []), *options]
    command = [sys.executable, "-m", "spmd_engine"]
    if fault.launch:
        command += ["launch", "-n", str(RANKS), "--", *train]
    else:
        command = [*find_mpiexec(), "-n", str(RANKS), *command, *train]
    environment = {"SPMD_FAULT": fault.inject, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    output: list[tuple[float, str]] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with MPIJob(command, env=environment, cwd=folder, **pipes) as job:
        reader = threading.Thread(target=lambda: output.extend((time.time(), line) for line in job.process.stdout))
        reader.start()
        if fault.signal:
            began = time.monotonic()
            while steps_made(folder) < 3 and job.process.poll() is None:
                time.sleep(0.05)
                if fault.early and time.monotonic() - began > 1:
                    break
            (folder / "moment").write_text(str(time.time()))
            job.process.send_signal(fault.signal)
            if fault.again:
                time.sleep(0.3)
                job.process.send_signal(fault.signal)
        with suppress(subprocess.TimeoutExpired):
            job.process.wait(120)
        code = job.process.poll()
    reader.join()
    return (code if code is not None else 999), output


def newest(folder: Path) -> int | None:
    """The step of the newest readable checkpoint."""
    try:
        path = CheckpointFolder(folder / "run").newest()
        return Checkpoint(path).manifest.step if path else None
    except CheckpointError:
        return None


def digest(folder: Path) -> str:
    return digest_text(digest_of_checkpoint(Checkpoint(folder / "run")))


def losses(folder: Path) -> list[str]:
    """The recorded losses, by step."""
    lines = (folder / "run" / MetricsFile.NAME).read_text().splitlines()
    return [line.partition('"grad_norm"')[0] for line in lines]


def steps_made(folder: Path) -> int:
    path = folder / "run" / MetricsFile.NAME
    return len(path.read_text().splitlines()) if path.exists() else 0


def left_over(folder: Path) -> list[str]:
    """The processes that still run in this folder."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "cwd") == str(folder):
                processes.append(process.name)
    return processes


def seconds(since: float) -> str:
    return f"{since:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
