"""Makes one rank fail at one place of a training; scripts/faults.py installs it in the jobs that it starts.

    SPMD_FAULT="kill optimizer 1 5"     rank 1 is killed at the optimizer of step 5

Imported by every rank as ``sitecustomize``, before anything else.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import time

#: Places of a step: the module, class and method that a rank calls there.
PLACES = {
    "data": ("spmd_engine.training.trainer", "Trainer", "_step"),
    "forward": ("spmd_engine.layers.linear", "Linear", "forward"),
    "reduction": ("spmd_engine.engine.zero.storage", "GroupStorage", "start_reduce"),
    "optimizer": ("spmd_engine.engine.optimizers", "AdamW", "_update"),
    "norm": ("spmd_engine.engine.zero.parameter_store", "StoredEngine", "gradient_norm"),
    "save": ("spmd_engine.checkpoints.save", "Save", "_write"),
    "commit": ("spmd_engine.checkpoints.format.folder", "CheckpointFolder", "commit"),
}


def happen(fault: str, arguments: tuple) -> object:
    """Cause the fault on this rank; ``arguments`` are those of the patched method."""
    with open("moment", "w") as file:
        file.write(str(time.time()))
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "sleep":
        time.sleep(1000)
    elif fault == "compute":
        while True:
            pass
    elif fault == "raise":
        raise RuntimeError("something that was not foreseen")
    elif fault == "interrupt":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "full":  # no file can grow any more
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
    elif fault == "receive":
        arguments[0].engine.receive((arguments[0].engine.mesh.rank + 1) % arguments[0].engine.mesh.size)
    elif fault == "other":
        arguments[0].engine.barrier()
    elif fault == "nan":  # in this rank's part of the sum
        arguments[0].whole_gradients[0] = float("nan")
    elif fault == "inf":  # in this rank's copy of the sum
        next(iter(arguments[0].gradients.values())).reshape(-1)[0] = float("inf")
    elif fault == "flip":
        next(iter(arguments[0].engine.parameters.values())).reshape(-1).view("u8")[0] ^= 1 << 20
    return None


def install(fault: str, place: str, victim: int, step: int) -> None:
    """Patch the chosen rank once it has imported the modules; other ranks and restarted ones are unchanged."""
    rank = next((os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), None)
    if rank is None or (int(rank) != victim and victim >= 0) or os.environ.get("SPMD_RESTARTS", "0") != "0":
        return
    state = {"step": 0, "done": False}

    def patch(place: str, before) -> None:
        module, kind, method = PLACES[place]
        owner = getattr(importlib.import_module(module), kind)
        real = getattr(owner, method)

        def patched(*arguments, **options):
            before(*arguments)
            return real(*arguments, **options)

        setattr(owner, method, patched)

    def count(trainer, *_) -> None:
        state["step"] = trainer.steps_done + 1

    def fail(*arguments) -> None:
        if state["step"] == step and not state["done"]:
            state["done"] = True
            happen(fault, arguments)

    patch(place, fail)
    patch("data", count)


if os.environ.get("SPMD_FAULT"):
    fault, where, whom, when = os.environ["SPMD_FAULT"].split()
    install(fault, where, int(whom), int(when))
