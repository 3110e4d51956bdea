"""IDX and .npz: what is read is what was written, and what is damaged is one line."""

import gzip
import tracemalloc
import zipfile

import numpy as np
import pytest

from spmd_engine.errors import UsageError
from spmd_engine.formats.array_files import npz_names, read_idx, read_npz
from spmd_engine.formats.tensor import MappedArray
from support.labelled_images import CODES, PIXELS, idx, write_npz


def opened(array):
    return array.open() if isinstance(array, MappedArray) else array


# --- IDX


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (0, 2)], ids=str)
def test_idx_of_any_dtype_and_shape_is_mapped(tmp_path, dtype, shape):
    array = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    (tmp_path / "a").write_bytes(idx(array, dtype))
    found = read_idx(tmp_path / "a")
    assert isinstance(found, MappedArray)
    np.testing.assert_array_equal(found.open(), array)
    assert found.open().dtype == dtype and found.open().shape == shape


def test_compressed_idx_is_known_by_its_content_whatever_its_name(tmp_path):
    (tmp_path / "images").write_bytes(gzip.compress(idx(PIXELS)))
    np.testing.assert_array_equal(read_idx(tmp_path / "images"), PIXELS)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no IDX file: it begins with nothing"),
        (b"\x89PNG and so on", "no IDX file: it begins with 89 50 4e 47"),
        (idx(PIXELS)[:9], "ends within its header"),
        (idx(PIXELS)[:-1], "its header says 23 x 6 x 5, 690 bytes, but 689 follow"),
        (idx(PIXELS) + b"x", "690 bytes, but 691 follow"),
        (gzip.compress(idx(PIXELS))[:-9], "is damaged"),
        (gzip.compress(idx(PIXELS))[:20] + b"\0" * 30, "is damaged"),
        (gzip.compress(idx(PIXELS)[:-1]), "690 bytes, but 689 follow"),
        (gzip.compress(idx(PIXELS) + bytes(9)), "690 bytes, but more follow"),
    ],
    ids=range(9),  # not the bytes: gzip writes the time into them
)
def test_damaged_idx_is_one_line_that_names_the_file(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_idx(tmp_path / "a")
    assert str(caught.value).startswith(f"{tmp_path}/a") and "Fetch it again" in str(caught.value)


# --- npz


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "compressed"])
@pytest.mark.parametrize("dtype", ["u1", "f4", ">f8", "i8"])
def test_npz_is_mapped_where_it_is_not_compressed(tmp_path, dtype, compressed):
    arrays = {"first": np.arange(5), "x": PIXELS.astype(dtype), "fortran": np.asfortranarray(PIXELS)}
    file = write_npz(tmp_path / "a.npz", compressed, **arrays)
    assert npz_names(file) == ("first", "x", "fortran")
    for name, array in arrays.items():
        found = read_npz(file, name)
        assert isinstance(found, MappedArray) == (not compressed and name != "fortran")
        np.testing.assert_array_equal(opened(found), array)
        assert opened(found).dtype == array.dtype


def test_a_mapped_array_is_read_where_it_is_looked_at(tmp_path):
    found = read_npz(write_npz(tmp_path / "a.npz"), "x").open()
    assert isinstance(found, np.memmap) and not found.flags.writeable


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "compressed"])
def test_damaged_npz_is_one_line_that_names_the_file(tmp_path, compressed):
    whole = write_npz(tmp_path / "a.npz", compressed).read_bytes()
    middle = whole.index(PIXELS[9].tobytes()) if not compressed else 300
    changed = whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :]
    for damaged in (whole[:-30], whole[: len(whole) // 2], changed, b"PK"):
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(UsageError, match="is damaged or cannot be read") as caught:
            npz_names(tmp_path / "a.npz")
            read_npz(tmp_path / "a.npz", "x")
        assert str(caught.value).startswith(f"{tmp_path}/a.npz") and "\n" not in str(caught.value)


def test_arrays_of_objects_are_refused(tmp_path):
    file = write_npz(tmp_path / "a.npz", x=np.array([{}, []], object))
    with pytest.raises(UsageError, match="a.npz: array 'x' is damaged or cannot be read"):
        read_npz(file, "x")


ZEROS = 20_000_000


def gzip_bomb(folder):
    """An IDX file with the header of a small array."""
    with gzip.open(folder / "a.gz", "wb", compresslevel=1) as file:
        file.write(idx(PIXELS))
        file.writelines(bytes(1_000_000) for _ in range(ZEROS // 1_000_000))
    return folder / "a.gz", read_idx


def npz_bomb(folder):
    """An array whose header claims to be long."""
    with (
        zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w") as file,
    ):
        file.write(b"\x93NUMPY\x02\0" + ZEROS.to_bytes(4, "little"))
        file.writelines(bytes(1_000_000) for _ in range(ZEROS // 1_000_000))
    return folder / "a.npz", lambda path: read_npz(path, "x")


@pytest.mark.parametrize("write", [gzip_bomb, npz_bomb])
def test_what_is_compressed_is_unpacked_no_further_than_its_header_says(tmp_path, write):
    """Each file has less than 100 kB and would take 20 MB."""
    path, read = write(tmp_path)
    tracemalloc.start()
    with pytest.raises(UsageError, match=rf"{path.name}.*(but more follow|is damaged)"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
