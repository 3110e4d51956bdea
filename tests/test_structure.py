"""The house: floors import only from those below, everything public says what it is."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import spmd_engine

ROOT = Path(spmd_engine.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
every_file = pytest.mark.parametrize("file", TREES)

#: From the ground up; those of one line are neighbours, and do not import each other.
FLOORS = [
    {"errors", "signals"},
    {"configuration"},
    {"arrays", "formats"},
    {"comm"},
    {"sharding"},
    {"layers"},
    {"models"},
    {"engine"},
    {"strategies"},
    {"training", "verify"},
    {"spmd_engine"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}

#: What a floor may import less than its height allows.
ONLY = {
    "strategies": {"errors", "arrays", "comm", "sharding", "engine"},  # never layers or models
    "spmd_engine": {"comm", "engine", "training"},
}

#: Module-level state that changes while the program runs, and why it may.
STATE = {
    "arrays/backend.py: CPU": "the host's backend, and its compiled loops, found once",
    "arrays/backend.py: _device_backends": "the devices that were asked for",
    "arrays/einsum.py: _plan": "the cache of a pure function",
    "sharding/halos.py: plan_halos": "the cache of a pure function",
    "sharding/moves.py: _exchange_plan": "the cache of a pure function",
    "sharding/notation.py: _parsed": "the cache of a pure function",
    "comm/threads.py: _current": "which virtual rank this thread is",
    "comm/world.py: _process_world": "a process joins MPI once",
}


def floor(module):
    """``spmd_engine.comm.mesh`` -> comm; the package itself is a floor, too."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def floor_of_file(file):
    name = file.split("/")[0].removesuffix(".py")
    return "spmd_engine" if name == "__init__" else name


def imports(tree):
    """All modules that a file imports anywhere in it, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module == "spmd_engine":  # from spmd_engine import comm
                yield from (f"spmd_engine.{a.name}" for a in node.names if a.name in HEIGHT)


def own_imports(tree):
    return {module for module in imports(tree) if module.split(".")[0] == "spmd_engine"}


# --- floors


@every_file
def test_a_floor_imports_only_from_floors_below(file):
    here = floor_of_file(file)
    assert here in HEIGHT, f"{file}: a new floor; say in FLOORS how high it lies"
    above = {m for m in own_imports(TREES[file]) if floor(m) != here and HEIGHT[floor(m)] >= HEIGHT[here]}
    assert not above, f"{file} is on floor {here!r} and imports {sorted(above)}"


@every_file
def test_floors_that_keep_to_themselves(file):
    here = floor_of_file(file)
    allowed = ONLY.get(here, set(HEIGHT)) | {here}
    assert {floor(module) for module in own_imports(TREES[file])} <= allowed


@every_file
def test_imports_are_absolute(file):
    assert not [module for module in imports(TREES[file]) if module.startswith(".")]


@pytest.mark.parametrize("file", [f for f in TREES if floor_of_file(f) in ("arrays", "layers", "models")])
def test_kernels_and_layers_ask_the_backend_for_their_array_module(file):
    own = "backend", "random", "shaped", *(path.stem for path in FILES if path.stem.startswith("fast_"))
    if file not in [f"arrays/{name}.py" for name in own]:
        assert not {"numpy", "cupy"} & {module.split(".")[0] for module in imports(TREES[file])}


# --- files


@every_file
def test_everything_public_has_a_docstring(file):
    silent = [] if ast.get_docstring(TREES[file]) else ["the module"]
    for node in TREES[file].body:
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        if named and not ast.get_docstring(node):
            silent.append(node.name)
    assert not silent, f"{file}: no docstring: {', '.join(silent)}"


# --- state

MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "local"}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]
OWN_CLASSES = {node.name for node in NODES if isinstance(node, ast.ClassDef)}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
WRITES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}


def called(node):
    """The last name of what a call calls: ``local`` of ``threading.local()``."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def assignments(tree):
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def written():
    """Names that are changed in place somewhere: ``x[i] = ...``, ``del x[i]``, ``x.append(...)``."""
    for node in NODES:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", getattr(node.value, "attr", ""))
        elif called(node) in WRITES and isinstance(node.func, ast.Attribute):
            yield getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))


def test_tables_are_never_written():
    """A module's UPPER_CASE list or dict is a constant; so nobody may change it, here or elsewhere."""
    tables = {
        name
        for tree in TREES.values()
        for name, value in assignments(tree)
        if isinstance(value, DISPLAYS) and name.isupper()
    }
    assert "GPT_SIZES" in tables
    assert not tables & set(written())


def test_no_module_level_state_but_that_listed():
    state = set()
    for file, tree in TREES.items():
        for name, value in assignments(tree):
            made = isinstance(value, DISPLAYS) and not name.isupper() and name != "__all__"
            if made or called(value) in MUTABLE | OWN_CLASSES:
                state.add(f"{file}: {name}")
        for node in ast.walk(tree):
            decorators = map(ast.unparse, getattr(node, "decorator_list", []))
            if any("cache" in decorator and decorator != "cached_property" for decorator in decorators):
                state.add(f"{file}: {node.name}")
    assert state == STATE.keys()


@every_file
def test_no_function_rebinds_a_global(file):
    assert not [node.names for node in ast.walk(TREES[file]) if isinstance(node, ast.Global)]


# --- circles, and classes


def test_no_circle_of_imports():
    """Within a floor, too; what is imported for annotations alone does not count."""
    uses = {}
    for file in TREES:
        module = "spmd_engine." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        tree = ast.parse((ROOT / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        uses[module.removesuffix(".__init__")] = {
            name for name in own_imports(tree) if name != module and f"{name.replace('.', '/')}.py" in MODULE_FILES
        }
    while uses:
        done = {module for module, used in uses.items() if not used & uses.keys()}
        assert done, f"a circle of imports among: {', '.join(sorted(uses))}"
        uses = {module: used for module, used in uses.items() if module not in done}


MODULE_FILES = {f"spmd_engine/{path.relative_to(ROOT).as_posix()}" for path in FILES}
#: What users subclass, and what they call on it, may be many methods; of ``Group`` and its bases there are more still.
MANY_METHODS = {"ShardedEngine", "Group", "Door", "Messages", "Reductions", "Exchanges", "Collectives", "Mesh"}


@every_file
def test_classes_are_no_heaps(file):
    """At most two bases, and 25 public methods through them, without those of what users subclass."""
    name = file.removesuffix(".py").replace("/", ".").removesuffix("__init__").strip(".")
    if name == "__main__":
        return
    module = importlib.import_module(f"spmd_engine.{name}".strip("."))
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ != module.__name__ or name in MANY_METHODS:
            continue
        assert len(kind.__bases__) <= 2, f"{name} has {len(kind.__bases__)} bases"
        common = [base for base in kind.__mro__ if base.__name__ in MANY_METHODS or base.__module__ in BUILTINS]
        given = {each for base in common for each in vars(base)}
        own = {each for each in dir(kind) if not each.startswith("_") and callable(getattr(kind, each, None))} - given
        assert len(own) <= 25, f"{name} has {len(own)} public methods"


BUILTINS = {"builtins", "abc", "enum", "typing", "collections.abc", "collections", "weakref", "threading"}
