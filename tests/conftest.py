"""Configuration of all tests: the MPI harness, property tests with the same examples on every rank, Ctrl-C."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from support import comparison

# Numba loops have their own tests; all other tests run the NumPy code that these loops replace.
os.environ["SPMD_FAST"] = "0"
os.environ.pop("SLURM_NTASKS", None)  # in an allocation, tests would be refused as one process of several


def writable_cache():
    """The user's folder for what is compiled once on a machine, keyed by its source; None: it cannot be written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spmd_engine"
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None


# Another clone of the repository compiles neither loops nor kernels again.
if CACHE := writable_cache():
    os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

pytest_plugins = ["mpi_harness.plugin"]
comparison.install()

# Ranks with different examples would call different collectives; a busy machine must not cause failures.
settings.register_profile("spmd", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("spmd")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Undo what a training run has chosen for this process: the libraries of products."""
    if products := sys.modules.get("spmd_engine.arrays.products"):
        products.use({})


@pytest.fixture(scope="module")
def narrow():
    """Make the built-in gpt-nano and gpt-moe-nano of this process have fewer and narrower layers."""
    from dataclasses import replace

    from spmd_engine.models.decoder import GPT_SIZES

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gpt-nano", "gpt-moe-nano"):
            patch.setitem(GPT_SIZES, name, replace(GPT_SIZES[name], layers=2, width=24))
        yield


@pytest.fixture(scope="module")
def few_evaluations():
    """Let the number of evaluations end a search for a plan soon: its time would depend on how busy the machine is."""
    from spmd_engine.planning.search import plan_search

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_search, "EVALUATIONS", 1500)
        yield


@pytest.fixture
def sigint_is_heard():
    """Handle SIGINT here and in child processes: a background job, and so its Python, starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def library(pytestconfig):
    """The CUDA kernels compiled for the host, once for all processes and runs of this user."""
    from support import cuda_on_host

    if cuda_on_host.COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = (CACHE or pytestconfig.rootpath / ".pytest_cache" / "d") / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return cuda_on_host.compile_for_the_host(folder)


@pytest.fixture
def cuda(library):
    """The backend of the stand-in for CuPy, with kernels."""
    from support import fake_cupy

    with fake_cupy.installed(library) as backend:
        yield backend


@pytest.fixture
def device(cuda):
    """The same."""
    return cuda


@pytest.fixture
def texts(tmp_path):
    """A folder of texts."""
    from support.token_files import write_texts

    return write_texts(tmp_path)


@pytest.fixture
def pairs(tmp_path):
    """A file of prompts and completions."""
    from support.token_files import write_pairs

    return write_pairs(tmp_path)
