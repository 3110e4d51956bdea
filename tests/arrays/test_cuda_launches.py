"""CUDA kernels are launched once a chain, have every function with its signature, and refuse other arrays."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.arrays import activations, cuda, cuda_images, normalization, rotary, updates
from spmd_engine.arrays.activations import gelu, relu
from spmd_engine.arrays.cuda import CudaFunctions
from spmd_engine.arrays.cuda_images import CudaImages
from spmd_engine.arrays.normalization import layer_norm, layer_norm_backward, layer_norm_backward_parameters
from spmd_engine.arrays.numba.images import FastImages
from spmd_engine.arrays.updates import adamw, momentum_sgd
from support.fake_cupy import events
from support.numerics import normals

# --- one launch a chain

X, ROWS = normals(4, 6), normals(6, seed=1)
OPTIONS = {"rate": 0.1, "decay": 0.1}
LAUNCHES = {
    "gelu": (gelu, [X], {}, ["gelu"]),
    "gelu without slope": (gelu, [X, False], {}, ["gelu_value"]),
    "relu": (relu, [X], {}, ["relu"]),
    "layer_norm": (layer_norm, [X, ROWS, ROWS, 1e-5], {}, ["moments", "normalize"]),
    "layer_norm_backward": (layer_norm_backward, [X, X, X[:, 0], ROWS], {}, ["row_sums", "normalize_backward"]),
    "layer_norm_backward_parameters": (layer_norm_backward_parameters, [X, X], {}, ["column_sums"]),
    "silu_gate": (activations.silu_gate, [X, X], {}, ["silu_gate"]),
    "silu_gate without slopes": (activations.silu_gate, [X, X, False], {}, ["silu_gate_value"]),
    "rms_norm": (normalization.rms_norm, [X, ROWS, 1e-5], {}, ["root_mean_square", "normalize"]),
    "adamw": (adamw, [ROWS] * 4, OPTIONS | {"step": 1, "betas": (0.9, 0.95), "epsilon": 1e-8}, ["adamw"]),
    "sgd": (momentum_sgd, [ROWS, ROWS, None], OPTIONS | {"momentum": 0.0}, ["sgd"]),
    "momentum_sgd": (momentum_sgd, [ROWS] * 3, OPTIONS | {"momentum": 0.9}, ["momentum_sgd"]),
    "softmax_backward": (activations.softmax_backward, [X, X, X[:, :1]], {}, ["softmax_backward"]),
    "exponentiate": (activations.exponentiate, [X, X[:, :1]], {}, ["exponentiate"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_a_chain_is_one_launch(case, cuda):
    function, args, options, launches = LAUNCHES[case]
    args = [cuda.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    events().clear()
    function(*args, **options)
    assert events().launches == launches


# --- the house

#: What other code calls on a device alone.
UNMARKED = {"takes", "matmul_halves", "sum_of_squares", "add_rows", "count_each", "bernoulli", "uniform", "normal"}


def fused_functions():
    modules = (activations, normalization, rotary, updates)
    own = [f for module in modules for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    return {f.__name__: f for f in own if hasattr(f, "__wrapped__") and not hasattr(FastImages, f.__name__)}


def test_the_kernels_have_every_function_that_is_marked_fused():
    files = Path(inspect.getfile(activations)).parent.glob("*.py")
    trees = [ast.parse(path.read_text()) for path in files]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    marked = {f.name for f in functions if {"fused", "fused_sums"} & set(map(ast.unparse, f.decorator_list))}
    brought = {name for name in vars(CudaFunctions) if not name.startswith("_")}
    assert marked == brought - UNMARKED == fused_functions().keys()


@pytest.mark.parametrize("name", fused_functions())
def test_signatures_agree(name):
    own = inspect.signature(fused_functions()[name])
    others = inspect.signature(getattr(CudaFunctions, name)).parameters.values()
    described = [(p.name, p.kind, p.default) for p in own.parameters.values()]
    assert [(p.name, p.kind, p.default) for p in list(others)[1:]] == described


@pytest.mark.parametrize("module", [cuda, cuda_images], ids=lambda module: module.__name__)
def test_every_kernel_is_launched_somewhere(module):
    text = inspect.getsource(module)
    assert all(f"_launch.{name}(" in text for name in module.ELEMENTWISE | module.REDUCTIONS)


def test_a_device_has_the_same_functions_of_images_as_the_host():
    own, others = ({k: v for k, v in vars(each).items() if k[0] != "_"} for each in (CudaImages, FastImages))
    assert own.keys() == others.keys()
    for name, function in own.items():
        assert list(inspect.signature(function).parameters) == list(inspect.signature(others[name]).parameters)


def test_a_host_array_among_the_device_s_is_refused(cuda):
    with pytest.raises(TypeError, match="array of the host"):
        layer_norm(cuda.asarray(X), cuda.asarray(ROWS), ROWS, 1e-5)


def test_arrays_of_different_dtypes_are_refused(cuda):
    with pytest.raises(AssertionError, match="normalize: S is"):
        layer_norm(cuda.asarray(X), cuda.asarray(ROWS.astype(np.float32)), cuda.asarray(ROWS), 1e-5)
