"""Few rows times a large matrix, by parts: against NumPy's own product, in every order in memory."""

import numpy as np
import pytest

from spmd_engine.arrays import einsum, products
from support.numerics import normals


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33])
@pytest.mark.parametrize("stored", ["k n", "n k"])
def test_products_by_parts(dtype, rows, stored, monkeypatch):
    monkeypatch.setattr(products, "PART_BYTES", 40_000)
    monkeypatch.setattr(products, "LEAST_BYTES", 100_000)
    few, large = normals(rows, 301, seed=1, dtype=dtype), normals(301, 517, seed=2, dtype=dtype)
    expected, tolerance = few.astype(np.float64) @ large.astype(np.float64), 1e-12 if dtype == np.float64 else 1e-4
    if stored == "n k":
        large = np.ascontiguousarray(large.T).T
    np.testing.assert_allclose(products.matmul(few, large), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(products.matmul(large.T, few.T), expected.T, rtol=0, atol=tolerance)


def test_the_large_matrix_is_in_parts_only_with_few_rows(monkeypatch):
    counted, whole = [], products._by_parts
    monkeypatch.setattr(products, "_by_parts", lambda few, large: counted.append(len(few)) or whole(few, large))
    large = normals(576, 1536, dtype=np.float32)
    for rows in (1, 8, 200):
        einsum("bsd,df->bsf", normals(rows, 1, 576, dtype=np.float32), large)
    assert counted == [8]
