"""CUDA kernels compiled for the host, once a session."""

import pytest

import cuda_on_host
from cuda_on_host import HostCuda
from spmd_engine.arrays.backend import register_backend, unregister_backend


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if cuda_on_host.COMPILER is None:
        pytest.skip("no C++ compiler")
    return cuda_on_host.compile_for_the_host(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(library):
    backend = HostCuda(library)
    register_backend(backend)
    HostCuda.launched.clear()
    yield backend
    unregister_backend(backend)
