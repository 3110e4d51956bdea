"""einsum against numpy.einsum. Operands hold small whole numbers, so that sums are exact in any order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_engine.arrays import einsum
from spmd_engine.arrays.einsum_lowering import _plan
from spmd_engine.errors import NotationError

SIZES = {"b": 2, "s": 3, "d": 4, "f": 5, "h": 3, "k": 2, "v": 7}
PATTERNS = [
    "bd,df->bf",
    "bsd,df->bsf",
    "bsd,bsf->df",
    "bsd,dhk->bshk",
    "bshk,hkd->bsd",
    "bshk,bshk->bhs",
    "bsd,vd->bsv",
    "bsv,bsd->vd",
    "bd,df->fb",
    "bsd,hd->sbh",
    "hbs,kbs->bkhs",
    "d,d->",
    "b,d->bd",
    "b,d->db",
    "bs,bs->bs",
    ",bd->db",
    "bsd,f->s",
    "bsd,bd->b",
    "bsf->f",
    "bsd->dbs",
    "bsd->",
    "->",
]


def whole_numbers(shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def operands_of(pattern, dtype=np.float64, sizes=SIZES):
    terms = pattern.partition("->")[0].split(",")
    return [whole_numbers([sizes[c] for c in term], dtype, seed) for seed, term in enumerate(terms)]


def strided(x, kind):
    """The values of ``x`` in another arrangement of memory."""
    if kind == "transposed":
        return x.T.copy().T
    if kind == "reversed" and x.ndim:
        return x[::-1].copy()[::-1]
    if kind == "sliced" and x.ndim:
        wide = np.full([2 * n + 1 for n in x.shape], 99, x.dtype)
        wide[tuple(slice(1, None, 2) for _ in x.shape)] = x
        return wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return x.copy()


KINDS = st.sampled_from(["contiguous", "transposed", "sliced", "reversed"])


@st.composite
def problems(draw):
    """A pattern and its operands, of any sizes and strides."""
    sizes = {c: draw(st.integers(0, 4)) for c in "abcde"}
    term = st.lists(st.sampled_from("abcde"), unique=True, max_size=4).map("".join)
    terms = draw(st.lists(term, min_size=1, max_size=2))
    output = draw(st.lists(st.sampled_from(sorted(set("".join(terms))) or [""]), unique=True).map("".join))
    pattern = ",".join(terms) + "->" + output
    return pattern, [strided(x, draw(KINDS)) for x in operands_of(pattern, sizes=sizes)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_numpy(pattern):
    operands = operands_of(pattern)
    np.testing.assert_array_equal(einsum(pattern, *operands), np.einsum(pattern, *operands), strict=True)


@settings(max_examples=60)
@given(problems())
def test_any_pattern_sizes_and_strides(problem):
    pattern, operands = problem
    before = [x.copy() for x in operands]
    result, expected = einsum(pattern, *operands), np.einsum(pattern, *operands)
    np.testing.assert_array_equal(result, expected)
    assert result.shape == np.shape(expected)
    for x, same in zip(operands, before):
        np.testing.assert_array_equal(x, same)


@given(problems(), KINDS, st.booleans())
def test_out_of_any_strides(problem, kind, accumulate):
    pattern, operands = problem
    expected = np.asarray(np.einsum(pattern, *operands))
    out = strided(np.full(expected.shape, 3.0), kind)
    assert einsum(pattern, *operands, out=out, accumulate=accumulate) is out
    np.testing.assert_array_equal(out, expected + 3.0 if accumulate else expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.int64, np.float16, np.float32, np.complex128])
def test_dtype_is_kept(pattern, dtype):
    operands = operands_of(pattern, dtype)
    result, expected = einsum(pattern, *operands), np.einsum(pattern, *operands)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_two_dtypes_give_the_wider():
    x, w = whole_numbers((2, 3), np.float32), whole_numbers((3, 4), np.float64)
    assert einsum("bd,df->bf", x, w).dtype == np.float64
    out = np.empty((2, 4), np.float32)
    np.testing.assert_array_equal(einsum("bd,df->bf", x, w, out=out), x @ w)


def test_spaces_are_allowed():
    x, w = operands_of("bd,df->bf")
    np.testing.assert_array_equal(einsum("b d, d f -> b f", x, w), x @ w)


@pytest.mark.parametrize("pattern", ["bsf,fd->bsd", "bsv,bsd->vd", "bsv,bsd->dv", "bshk,hkd->bsd"])
def test_the_result_is_contiguous(pattern):
    """A reduction in place needs that, and a transposed product would cost a copy."""
    assert einsum(pattern, *operands_of(pattern)).flags.c_contiguous


def test_the_product_is_written_straight_into_out(monkeypatch):
    x, w = operands_of("bsd,df->bsf")
    out, targets = np.empty((2, 3, 5)), []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *a, out=None: targets.append(out) or matmul(*a, out=out))
    einsum("bsd,df->bsf", x, w, out=out)
    assert len(targets) == 1 and np.shares_memory(targets[0], out)


def test_a_pattern_is_planned_once():
    x, w = operands_of("sd,df->sf")
    _plan.cache_clear()
    for _ in range(3):
        einsum("sd,df->sf", x, w)
    assert _plan.cache_info().misses == 1


A, B = np.ones((2, 3)), np.ones((4, 5))


@pytest.mark.parametrize(
    "pattern, operands, words",
    [
        ("bd,df->bf", (A, B), ['"bd,df->bf"', '"d" is 3', "4 in the other", "(2, 3)", "(4, 5)", "sharded"]),
        ("bsd,df->bsf", (A, B), ['"bsd" does not fit shape (2, 3)']),
        ("b,df->bf", (A, B), ['"b" does not fit shape (2, 3)']),
        ("bd,ef->bq", (A, B), ['"q" of the result is in no operand']),
        ("bb->b", (A,), ['"bb" must be distinct letters']),
        ("bd->dd", (A,), ['"dd" must be distinct letters']),
        ("b1->b", (A,), ['"b1" must be distinct letters']),
        ("b...->b", (A,), ["must be distinct letters"]),
        ("bd,df", (A, B), ['write one or two operands and "->"']),
        ("bd,df,fg->bg", (A, B, A), ["write one or two operands"]),
        ("bd,df->bf", (A,), ["2 operands expected, got 1"]),
        ("bd->db", (A, B), ["1 operands expected, got 2"]),
    ],
)
def test_errors_name_what_is_wrong(pattern, operands, words):
    with pytest.raises(NotationError) as error:
        einsum(pattern, *operands)
    for word in (f'einsum "{pattern}"', *words):
        assert word in str(error.value)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (4, 2, 3)])
def test_out_must_have_the_shape_of_the_result(shape, accumulate):
    with pytest.raises(NotationError, match=r"the result has shape \(2, 3\), out has"):
        einsum("bd,df->bf", np.ones((2, 4)), np.ones((4, 3)), out=np.zeros(shape), accumulate=accumulate)


def test_a_sum_of_all_numbers_keeps_its_digits():
    x = np.full((1000, 1000, 1), 0.1, np.float32)
    for pattern in ("abc->", "abc->c"):
        np.testing.assert_allclose(einsum(pattern, x), 1e6 * np.float64(x[0, 0, 0]), rtol=1e-6)
