"""Shifted and mirrored images: against a plain loop, and as functions of seed and place alone."""

import numpy as np
import pytest

from spmd_engine.training.data.images import augmented, shifted

RNG = np.random.default_rng(0)
X = RNG.random((40, 16, 9, 2)).astype(np.float32) + 1  # nowhere 0
PLACES = np.arange(40)


def moved(image, down, right):
    """One image, pixel by pixel."""
    height, width, _ = image.shape
    out = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            if 0 <= i + down < height and 0 <= j + right < width:
                out[i + down, j + right] = image[i, j]
    return out


def test_each_image_moves_by_its_own_pixels_and_0_comes_in():
    down, right = RNG.integers(-16, 17, 40), RNG.integers(-9, 10, 40)
    expected = [moved(*each) for each in zip(X, down, right, strict=True)]
    np.testing.assert_array_equal(shifted(X, down, right), expected)


def test_a_shift_is_at_most_an_eighth_each_way_and_all_of_them_come():
    found = augmented(np.repeat(X[:1], 400, axis=0), np.arange(400), 7, "shift")
    every = {(i, j): moved(X[0], i, j).tobytes() for i in (-2, -1, 0, 1, 2) for j in (-1, 0, 1)}
    assert {image.tobytes() for image in found} == set(every.values())


@pytest.mark.parametrize("how", ["shift", "shift-flip"])
def test_what_is_done_follows_from_seed_and_place_alone(how):
    whole = augmented(X, PLACES, 3, how)
    picked = np.array([17, 2, 39])
    np.testing.assert_array_equal(augmented(X[picked], picked, 3, how), whole[picked])
    assert not np.array_equal(augmented(X, PLACES, 4, how), whole)
    assert not np.array_equal(augmented(X, PLACES + 40, 3, how), whole)
    assert augmented(X[:0], PLACES[:0], 3, how).shape == X[:0].shape


def test_every_second_image_is_mirrored_left_to_right():
    small = np.arange(400 * 6.0).reshape(400, 2, 3, 1)  # too small to be shifted
    found = augmented(small.copy(), np.arange(400), 1, "shift-flip")
    mirrored = (found == small[:, :, ::-1]).all(axis=(1, 2, 3))
    np.testing.assert_array_equal(found[~mirrored], small[~mirrored])
    assert 150 < mirrored.sum() < 250


def test_none_changes_nothing():
    assert augmented(X, PLACES, 3, "none") is X
