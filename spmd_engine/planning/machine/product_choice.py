"""Which library computes which matrix products in a job: the same on all ranks."""

from __future__ import annotations

from spmd_engine.arrays import products
from spmd_engine.arrays.product_libraries.installed import LIBRARIES, load
from spmd_engine.arrays.product_libraries.library import ProductLibrary
from spmd_engine.arrays.products import DTYPES, NUMPY, SIZES
from spmd_engine.comm.agreement.rank_zero import gather_json, json_from_rank_zero
from spmd_engine.comm.group import Group


def choose_products(
    group: Group, choice: str = "auto", *, again: bool = False, dtype: str = "float32", device: str = "cpu"
) -> list[str]:
    """Let the libraries compute products that ``choice`` names, the same on all ranks; return notices. Collective.

    ``auto`` takes the fastest library that all ranks have, by dtype and size class, as rank 0 has measured now or in an
    earlier job; it measures ``again`` if asked to. A library that is missing or broken on any rank is left out
    everywhere, with one notice. NumPy alone computes for models in float64, the reference of every comparison.
    """
    if choice == NUMPY or dtype == "float64" or device != "cpu":
        products.use({})
        return []
    libraries, why_not = _loaded(choice)
    mine = {name: library.version for name, library in libraries.items()}
    by_rank = gather_json(group, [mine, why_not], label="products")
    notices = [why for _, why in by_rank if why][:1]
    usable = [name for name in libraries if all(versions.get(name) == mine[name] for versions, _ in by_rank)]
    if not notices and any(versions != by_rank[0][0] for versions, _ in by_rank):
        notices = ["products: ranks have different libraries installed; those that not all have are not used"]

    def chosen() -> list[tuple[str, str, str]]:
        if choice == "auto":
            from spmd_engine.planning.machine.products import fastest  # which imports much, on rank 0 alone

            return fastest(usable, again) if usable else []
        return [(dtype, size, choice) for dtype in DTYPES for size in SIZES if choice in usable]

    table = json_from_rank_zero(group, chosen)
    products.use({(dtype, size): libraries[name] for dtype, size, name in table})
    return notices


def _loaded(choice: str) -> tuple[dict[str, ProductLibrary], str]:
    """The libraries of a choice that this process can load, and why one of them cannot be, in one line."""
    libraries, why_not = {}, ""
    for name in LIBRARIES if choice == "auto" else {choice} & set(LIBRARIES):
        try:
            if (library := load(name)) is not None:
                libraries[name] = library
            elif choice == name:
                hint = ": pip install 'spmd_engine[onednn]'" if name == "onednn" else ""
                why_not = f"--products {name}: it is not installed{hint}; NumPy computes"
        except (OSError, AttributeError) as error:  # AttributeError: a function is missing
            why_not = f"products: {name} cannot be used ({str(error).splitlines()[0]}); NumPy computes"
    return libraries, why_not
