"""Which library computes products: measured once, kept until something changes, and the same on all ranks."""

import json
import threading

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import products as in_arrays
from spmd_engine.arrays.products import DTYPES, NUMPY, SIZES, in_use
from spmd_engine.cli import main
from spmd_engine.errors import CheckpointError
from spmd_engine.models.names import located
from spmd_engine.planning.machine import product_choice, products
from spmd_engine.planning.machine.machine import calibrated_file, default_machine
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.planning.machine.products import kept_rates, measure_products, rates_file

CLASSES = [(dtype, size) for dtype in DTYPES for size in SIZES]


class Numpy2:
    """A library that computes as NumPy does."""

    rounds = False

    def __init__(self, name, version="1", factor=1):
        self.name, self.version, self._factor = name, version, factor

    def convolve(self, kind, x, w, y, rows, columns):
        return False

    def multiply(self, a, b, out):
        np.matmul(self._factor * a.astype(np.float32), b.astype(np.float32), out=out)
        return True


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_MACHINE", str(tmp_path / "folder" / "machine.toml"))
    yield
    in_arrays.use({})


@pytest.fixture
def installed(monkeypatch):
    """Libraries by name, which ``load`` finds, or errors, which it raises."""
    found = {}

    def load(name):
        if isinstance(found.get(name), Exception):
            raise found[name]
        return found.get(name)

    for module in (products, product_choice):
        monkeypatch.setattr(module, "load", load)
    return found


@pytest.fixture
def measured(monkeypatch):
    """The libraries of each measurement. NumPy has a rate of 100; oneDNN 200 for large products, 104 for others."""
    calls = []

    def measure(libraries, sizes):
        calls.append([library.name for library in libraries])
        speeds = {name: {NUMPY: 100.0, "onednn": 200.0 if name == "large" else 104.0, "mkl": 120.0} for name in sizes}
        names = {NUMPY, *calls[-1]}
        return {
            dtype: {size: {name: speed[name] for name in names} for size, speed in speeds.items()} for dtype in DTYPES
        }

    monkeypatch.setattr(products, "measure_products", measure)
    return calls


def choose(choice="auto", **options):
    with Mesh() as mesh:
        return choose_products(mesh.group(), choice, **options)


def used():
    return {(dtype, size, name) for dtype, names in in_use().items() for size, name in names.items() if name != NUMPY}


def test_auto_takes_what_was_measured_as_clearly_faster(installed, measured):
    installed["onednn"] = Numpy2("onednn")
    assert choose() == []
    assert used() == {(dtype, "large", "onednn") for dtype in DTYPES}
    assert choose() == []
    assert measured == [["onednn"]]  # once


def test_a_library_of_one_thread_is_left_out_where_blas_has_more(installed, measured, monkeypatch):
    installed["mkl"] = Numpy2("mkl")
    for threads, names in (1, {"mkl"}), (2, set()):
        monkeypatch.setattr(products, "blas_threads", lambda threads=threads: threads)
        choose()
        assert {name for _, _, name in used()} == names


def test_another_version_and_a_damaged_file_are_measured(installed, measured, tmp_path, caplog):
    installed["onednn"] = Numpy2("onednn")
    choose()
    installed["onednn"] = Numpy2("onednn", version="2")
    choose()
    assert len(measured) == 2
    installed["onednn"] = Numpy2("onednn")
    choose()
    assert len(measured) == 2  # both are kept
    (file,) = [file for file in tmp_path.glob("*/*.json") if file == rates_file([installed["onednn"]])]
    kept = file.read_text()
    damaged = ["[", "[]", "[" * 9999, json.dumps(dict.fromkeys(DTYPES, 3)), kept + " " * (1 << 16)]
    damaged += [kept.replace("200.0", value) for value in ('"fast"', "NaN", "-1", "true", "[]")]
    for number, content in enumerate(damaged, start=1):
        file.write_text(content)
        assert choose() == [] and used() == {(dtype, "large", "onednn") for dtype in DTYPES}
        assert len(measured) == 2 + number and file.read_text() == kept
    assert caplog.messages == [f"{file} is damaged: products of matrices are measured again"] * len(damaged)
    kept_rates(["onednn"], again=True)
    assert len(measured) == 3 + len(damaged)
    assert len(list(tmp_path.glob("*/*"))) == 2  # no temporary files


def test_a_user_without_a_home_measures_and_plans_without_a_cache(installed, measured, monkeypatch):
    """As in a container whose user has no entry among the users of the system."""
    for name in "HOME", "XDG_CACHE_HOME", "SPMD_MACHINE", "HF_HOME":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    installed["onednn"] = Numpy2("onednn")
    assert choose() == choose() == [] and len(measured) == 2
    assert calibrated_file() is None and default_machine().name == "cpu"
    with pytest.raises(CheckpointError, match="org/name is no model: there is no such folder, and no snapshot"):
        located("org/name")
    with pytest.raises(SystemExit):
        main(["calibrate"])


def test_the_first_of_two_jobs_that_measure_decides(installed, measured, monkeypatch):
    installed["onednn"] = Numpy2("onednn")
    measure = products.measure_products

    def measure_slowly(libraries, sizes):
        monkeypatch.setattr(products, "measure_products", measure)
        first = kept_rates(["onednn"])  # of another job, meanwhile
        assert first["float32"]["large"]["onednn"] == 200
        return {dtype: {size: {NUMPY: 100.0, "onednn": 1.0} for size in sizes} for dtype in DTYPES}

    monkeypatch.setattr(products, "measure_products", measure_slowly)
    choose()
    assert used() == {(dtype, "large", "onednn") for dtype in DTYPES}


def test_a_file_that_cannot_be_written(installed, measured, tmp_path):
    installed["onednn"] = Numpy2("onednn")
    (tmp_path / "folder").write_text("no folder")
    assert choose() == []
    assert used()


def test_named_libraries_compute_all_that_they_take(installed, measured):
    installed["onednn"] = Numpy2("onednn")
    assert choose("onednn") == []
    assert used() == {(*key, "onednn") for key in CLASSES}
    assert choose("numpy") == []
    assert not used()
    assert not measured


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"device": "cuda"}], ids=str)
def test_numpy_alone_computes_float64(installed, options):
    installed["onednn"] = Numpy2("onednn")
    choose("onednn")
    assert choose("onednn", **options) == []
    assert not used()


def test_a_missing_library_is_one_notice_if_it_was_named(installed):
    assert choose() == []
    (notice,) = choose("onednn")
    assert notice == "--products onednn: it is not installed: pip install 'spmd_engine[onednn]'; NumPy computes"
    assert not used()


def test_a_broken_library_is_one_notice(installed):
    installed["onednn"] = OSError("libgomp.so.1: cannot open shared object file")
    (notice,) = choose()
    assert notice == "products: onednn cannot be used (libgomp.so.1: cannot open shared object file); NumPy computes"
    assert not used()


@pytest.mark.parametrize("others", [None, Numpy2("onednn", version="2"), OSError("no libgomp")], ids=type)
def test_ranks_use_what_all_have(installed, measured, others, monkeypatch):
    def load(name):
        if name != "onednn":
            return None
        if threading.current_thread().name == "rank 1":
            if isinstance(others, Exception):
                raise others
            return others
        return Numpy2("onednn")

    for module in (products, product_choice):
        monkeypatch.setattr(module, "load", load)

    def program():
        with Mesh(data=3) as mesh:
            return choose_products(mesh.group()), used()

    results = run_threads(program, ranks=3)
    assert all(result == results[0] for result in results)
    (notices, names) = results[0]
    assert len(notices) == 1
    assert not names


def test_ranks_use_the_same_libraries(installed, measured):
    installed["onednn"] = Numpy2("onednn")

    def program():
        with Mesh(data=3) as mesh:
            return choose_products(mesh.group()), used()

    assert run_threads(program, ranks=3) == [([], {(dtype, "large", "onednn") for dtype in DTYPES})] * 3
    assert len(measured) == 1  # on rank 0


def test_only_rank_0_loads_a_library_that_is_not_the_fastest(installed, measured, monkeypatch):
    loaded = []

    def load(name):
        loaded.append((threading.current_thread().name, name))
        return Numpy2(name) if name == "onednn" else None

    monkeypatch.setattr(products, "MARGIN", 9)
    for module in (products, product_choice):
        monkeypatch.setattr(module, "load", load)

    def program():
        with Mesh(data=3) as mesh:
            return choose_products(mesh.group()), used()

    assert run_threads(program, ranks=3) == [([], set())] * 3
    assert {rank for rank, _ in loaded} == {"rank 0"}


def test_rates_are_positive_and_wrong_results_are_left_out(monkeypatch):
    monkeypatch.setattr(products, "POOL", 1 << 12)
    libraries = [Numpy2("right"), Numpy2("wrong", factor=2)]
    rates = measure_products(libraries, {"tiny": (8, 9, 10)})
    assert {name for by_size in rates.values() for name in by_size["tiny"]} == {NUMPY, "right"}
    assert all(rate > 0 for by_size in rates.values() for rate in by_size["tiny"].values())
