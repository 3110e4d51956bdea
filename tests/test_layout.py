"""Layouts: where each letter lives."""

from types import SimpleNamespace

import pytest

from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import Layout


def layout_of(*axes, **options):
    return Layout.for_mesh(SimpleNamespace(axes=dict.fromkeys(axes, 2)), **options)


@pytest.mark.parametrize(
    "axes, specs",
    [
        (("data",), {"b s d": "b/data s d", "d f": "d f", "v d": "v d"}),
        (("model",), {"b s d": "b s d", "d f": "d f/model", "v d": "v/model d", "h k": "h/model k"}),
        (("data", "model"), {"b s d": "b/data s d", "b s v": "b/data s v/model", "f d": "f/model d"}),
    ],
)
def test_the_customary_layout(axes, specs):
    layout = layout_of(*axes)
    for dims, written in specs.items():
        assert str(layout.spec(dims)) == str(layout.spec(dims, "residual")) == written


def test_sequence_parallel_cuts_the_stream_alone():
    layout = layout_of("data", "model", sequence_parallel=True)
    assert str(layout.spec("b s d")) == "b/data s d"
    assert str(layout.spec("b s d", "residual")) == "b/data s/model d"
    assert str(layout.spec("d f")) == "d f/model"


def test_sequence_parallel_needs_a_model_axis():
    assert layout_of("data", sequence_parallel=True) == layout_of("data")


def test_an_axis_without_a_custom():
    with pytest.raises(MeshError, match="no customary layout for axis 'rows'; name it data or model, or pass"):
        layout_of("data", "rows")


def test_letters_that_are_not_named_are_whole():
    layout = Layout({"b": ("x",)}, {"b": ("x",), "s": ("y", "z")})
    assert layout.axes("b") == ("x",) and layout.axes("d") == ()
    assert layout.axes("s") == () and layout.axes("s", "residual") == ("y", "z")
    assert str(layout.spec("b s d", "residual")) == "b/x s/y,z d"
    assert str(Layout().spec("b s d")) == "b s d"


def test_two_letters_on_one_axis_are_an_error_that_says_where():
    layout = Layout(inside={"h": ("model",), "f": ("model",)}, residual={})
    with pytest.raises(NotationError) as error:
        layout.spec("h f")
    for words in ('axis "model" cuts h and f', "dims 'h f' inside a layer"):
        assert words in str(error.value)
