"""CUDA kernels compiled for the host, once for all processes that share the tests."""

import os
from pathlib import Path

import pytest

import cuda_on_host
from cuda_on_host import HostCuda
from spmd_engine.arrays.backend import register_backend, unregister_backend


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if cuda_on_host.COMPILER is None:
        pytest.skip("no C++ compiler")
    shared = os.environ.get("SPMD_TEST_SHARED")
    return cuda_on_host.compile_for_the_host(Path(shared) if shared else tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(library):
    backend = HostCuda(library)
    register_backend(backend)
    HostCuda.launched.clear()
    yield backend
    unregister_backend(backend)
