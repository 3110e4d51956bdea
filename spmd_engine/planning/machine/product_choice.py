"""Which library computes which matrix products in a job: the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection

from spmd_engine.arrays import products
from spmd_engine.arrays.product_libraries.installed import LIBRARIES, load
from spmd_engine.arrays.product_libraries.library import ProductLibrary
from spmd_engine.arrays.products import DTYPES, NUMPY, SIZES
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import gather_json, json_from_rank_zero


def choose_products(
    group: Group, choice: str = "auto", *, again: bool = False, dtype: str = "float32", device: str = "cpu"
) -> list[str]:
    """Let the libraries compute products that ``choice`` names, the same on all ranks; return notices. Collective.

    ``auto`` takes the fastest library that all ranks have, by dtype and size class, as rank 0 has measured now or in an
    earlier job; it measures ``again`` if asked to. Only rank 0 loads those that are not the fastest. A library that is
    missing or broken on any rank, or has another version there, is left out everywhere, with one notice. NumPy alone
    computes for models in float64, the reference of every comparison.
    """
    if choice == NUMPY or dtype == "float64" or device != "cpu":
        products.use({})
        return []
    left_out, notices = set[str](), list[str]()

    def chosen() -> tuple[list[tuple[str, str, str]], str]:
        if choice != "auto":
            return [(dtype, size, choice) for dtype in DTYPES for size in SIZES if choice not in left_out], ""
        from spmd_engine.planning.machine.products import fastest

        usable, why_not = _loaded(LIBRARIES.keys() - left_out)
        return fastest([*usable], again) if usable else [], why_not

    while True:
        table, why_not = json_from_rank_zero(group, chosen)
        notices += [why_not] if why_not else []
        libraries = dict[str, ProductLibrary]()
        if names := {name for *_, name in table}:
            libraries, why_not = _loaded(names, choice)
            mine = {name: library.version for name, library in libraries.items()}
            by_rank = gather_json(group, [mine, why_not], label="products")
            notices += [why for _, why in by_rank if why]
            versions = {name: {versions.get(name) for versions, _ in by_rank} for name in names}
            if lacking := {name for name, found in versions.items() if len(found) > 1 or None in found}:
                notices.append(
                    "products: ranks have different libraries installed; those that not all have are not used"
                )
                left_out |= lacking
                continue
        products.use({(dtype, size): libraries[name] for dtype, size, name in table})
        return notices[:1]


def _loaded(names: Collection[str], choice: str = "auto") -> tuple[dict[str, ProductLibrary], str]:
    """Those of these libraries that this process can load, and why one of them cannot be, in one line: it is broken, or
    it is the ``choice`` and is not installed."""
    libraries, why_not = {}, ""
    for name in (name for name in LIBRARIES if name in names):
        try:
            if (library := load(name)) is not None:
                libraries[name] = library
            elif choice == name:
                hint = ": pip install 'spmd_engine[onednn]'" if name == "onednn" else ""
                why_not = f"--products {name}: it is not installed{hint}; NumPy computes"
        except (OSError, AttributeError) as error:  # AttributeError: a function is missing
            why_not = f"products: {name} cannot be used ({str(error).splitlines()[0]}); NumPy computes"
    return libraries, why_not
