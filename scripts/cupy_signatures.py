"""Write tests/support/cupy_14.json, for fake_cupy.py there: CuPy's functions, methods, loops of ufuncs that NumPy has.

Run it where CuPy 14 is installed; it needs no GPU and no driver: python scripts/cupy_signatures.py
"""

import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import cupy
import numpy as np

TABLE = Path(__file__).parent.parent / "tests" / "support" / "cupy_14.json"


def signature(function) -> str:
    """The parameters, as text; of compiled functions, they are in the first line of the documentation."""
    try:
        bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        return str(inspect.Signature(bare))[1:-1].replace("<class 'float'>", "float").replace("<class 'int'>", "int")
    except ValueError:
        text = re.sub(r"\) *->.*", ")", inspect.getdoc(function).splitlines()[0])
        parameters = text.partition("(")[2].rpartition(")")[0].split(", ")
        return ", ".join(re.sub(r"^(int|Py_ssize_t|_ndarray_base) ", "", each) for each in parameters)


def functions(module: ModuleType, of_numpy: ModuleType) -> dict[str, str]:
    shared = {name: getattr(module, name) for name in dir(module) if name[0] != "_" and hasattr(of_numpy, name)}
    kinds = (type, ModuleType, cupy.ufunc)
    return {
        name: signature(function)
        for name, function in shared.items()
        if callable(function)
        and not isinstance(function, kinds)
        and type(function).__name__ not in ("nd_grid", "RClass")
    }


def main() -> None:
    ufuncs = {name: f for name, f in vars(cupy).items() if isinstance(f, cupy.ufunc) and hasattr(np, name)}
    methods = {name: getattr(cupy.ndarray, name) for name in dir(cupy.ndarray) if name[0] != "_"}
    table = {
        "version": cupy.__version__,
        "functions": functions(cupy, np) | {"asnumpy": signature(cupy.asnumpy)},
        "linalg": functions(cupy.linalg, np.linalg),
        "methods": {name: signature(method) for name, method in methods.items() if callable(method)},
        "ufuncs": {name: " ".join(ufunc.types) for name, ufunc in ufuncs.items()},
    }
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
