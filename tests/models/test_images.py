"""Networks on images, cut every way: what one device computes, running statistics included."""

import pytest

from pictures import assert_same, small_convnet, small_resnet, train
from spmd_engine.engine.recompute import Recompute

MODELS = {"convnet": small_convnet, "resnet": small_resnet}
ALONE = {}


def alone(name):
    """What one device computes, once for all tests."""
    if name not in ALONE:
        ALONE[name] = train(MODELS[name](), {"data": 1})[0]
    return ALONE[name]


WAYS = {
    "samples": ("convnet", {"data": 3}, {}),
    "rows": ("resnet", {"rows": 2}, {}),
    "rows, of which some ranks have none": ("convnet", {"rows": 6}, {"recompute": Recompute.BLOCK}),
    "columns": ("resnet", {"columns": 3}, {"recompute": Recompute.BLOCK}),
    "channels": ("convnet", {"model": 4}, {}),
    "channels of a residual network": ("resnet", {"model": 2}, {"zero": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_way(way):
    name, axes, how = WAYS[way]
    assert_same(train(MODELS[name](), axes, **how), alone(name))
