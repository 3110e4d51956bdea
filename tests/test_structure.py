"""The structure: packages import only from floors below, and everything public has a docstring."""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import spmd_engine

ROOT = Path(spmd_engine.__file__).parent
FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]

#: Packages from the lowest to the highest floor. Packages of one line do not import each other; those above training
#: are tools.
FLOORS = [
    {"errors"},
    {"arguments", "importing", "units"},
    {"files"},
    {"axes", "configuration", "foreign", "pictures"},
    {"requirements"},
    {"runtime"},
    {"arrays", "formats", "tokens"},
    {"comm"},
    {"sharding"},
    {"losses"},
    {"layers"},
    {"models"},
    {"engine"},
    {"optim", "strategies", "checkpoints"},
    {"training"},
    {"verification", "planning", "adaptive", "serving", "observability"},
    {"jobs"},
    {"spmd_engine"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}

#: Packages that may import only these, although others are below them.
ONLY = {
    "strategies": {"errors", "importing", "arrays", "comm", "sharding", "engine"},  # never layers or models
}

#: Tools that may import others of their line.
TOOLS_USE = {"adaptive": {"planning"}, "observability": {"adaptive", "planning"}}

#: Module-level state that changes at run time, with the reason why it may.
STATE = {
    "arguments.py: _exact": "the cache of a pure function",
    "arguments.py: _parameters": "the cache of a pure function",
    "arguments.py: _signature": "the cache of a pure function",
    "arrays/attention.py: _parts": "the cache of a pure function",
    "arrays/attention.py: _rows_and_keys": "the cache of a pure function",
    "arrays/backend.py: ones": "the cache of a pure function",
    "formats/image_files.py: _silence_libtiff": "a library is told once",
    "formats/text_documents.py: _alone_among": "the cache of a pure function",
    "formats/text_documents.py: _notice": "which notices were logged",
    "formats/text_documents.py: _usual_among": "the cache of a pure function",
    "arrays/backend.py: CPU": "the host's backend, and its compiled loops, found once",
    "arrays/backend.py: _device_backends": "the devices that were asked for",
    "arrays/einsum_lowering.py: _plan": "the cache of a pure function",
    "arrays/fused.py: _kernel": "the cache of a pure function",
    "arrays/precision.py: _sums": "the dtype of sums of 16-bit floats: of the emulation, inside its context",
    "arrays/products.py: _chosen": "the libraries that the job has chosen",
    "arrays/products.py: kind_of": "the cache of a pure function",
    "arrays/products.py: unfit": "counts of this process",
    "arrays/numba/places.py: places_of_outputs": "the cache of a pure function",
    "arrays/numba/places.py: places_of_taps": "the cache of a pure function",
    "arrays/meta/meter.py: _current": "which rank's step this thread runs on shapes",
    "arrays/meta/array.py: _phantom": "the cache of a pure function",
    "arrays/meta/functions.py: _resolved": "the cache of a pure function",
    "arrays/meta/functions.py: _reduced_dtype": "the cache of a pure function",
    "layers/attention/qk_norm_rope.py: rotary_with": "the cache of a pure function",
    "engine/gather.py: _plan_to_whole": "the cache of a pure function",
    "strategies/names.py: STRATEGIES": "a table; a page is imported when it is asked for",
    "configuration.py: settings_of": "the cache of a pure function",
    "configuration.py: _types": "the cache of a pure function",
    "configuration.py: _checked_default": "the cache of a pure function",
    "configuration.py: _type": "the cache of a pure function",
    "checkpoints/format/blocks.py: _name_of": "the cache of a pure function",
    "sharding/placement.py: _first_holders": "the cache of a pure function",
    "sharding/placement.py: along": "the cache of a pure function, for one call of another",
    "sharding/routes.py: _parts": "the cache of a pure function",
    "sharding/halos.py: plan_halos": "the cache of a pure function",
    "sharding/resharding.py: _exchange_plan": "the cache of a pure function",
    "tokens/encoding.py: _process": "the process that runs chat templates, started once",
    "training/data/array_data.py: epoch_order": "the cache of a pure function",
    "comm/notation.py: parse": "the cache of a pure function",
    "comm/communicators/threads.py: _libraries": "the libraries of linear algebra, until more modules are loaded",
    "comm/shared_memory/arena.py: memory_here": "the process's memory, asked for once",
    "comm/shared_memory/cross_memory.py: _process_vm_readv": "the system's function, found once",
    "comm/transports/shared_memory.py: _split_at_cache_lines": "the cache of a pure function",
    "comm/nccl_ranks.py: _open": "which ranks a wait for the device watches",
    "comm/communicators/threads.py: _ports": "where virtual ranks of two worlds find each other",
    "comm/communicators/threads.py: _current": "which virtual rank this thread is",
    "runtime/mpi_job.py: find_mpiexec": "where it is does not change",
    "runtime/mpi_job.py: is_open_mpi": "nor which it is",
    "comm/world.py: _process_world": "a process joins MPI once",
    "training/trainer.py: _private_bytes": "the memory of the process, for a tenth of a second",
    "importing.py: _modules_by_name": "what the source of a package says",
}


@cache
def tree_of(file):
    """The syntax tree of a file, parsed by the first test that uses it, not during collection."""
    return ast.parse((ROOT / file).read_text())


@cache
def nodes_of(file):
    return list(ast.walk(tree_of(file)))


def floor(module):
    """``spmd_engine.comm.mesh`` -> comm; the package itself is also a floor."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def floor_of_file(file):
    name = file.split("/")[0].removesuffix(".py")
    return "spmd_engine" if name == "__init__" else name


def imports(nodes):
    """All modules that these nodes import, also inside functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module == "spmd_engine":  # from spmd_engine import comm
                yield from (f"spmd_engine.{a.name}" for a in node.names if a.name in HEIGHT)


@cache
def imported(file):
    return list(imports(nodes_of(file)))


def own(modules):
    return {module for module in modules if module.split(".")[0] == "spmd_engine"}


# --- floors


def test_a_floor_imports_only_from_floors_below():
    for file in FILES:
        here = floor_of_file(file)
        assert here in HEIGHT, f"{file}: a new floor; say in FLOORS how high it lies"
        others = {m for m in own(imported(file)) if floor(m) not in {here, *TOOLS_USE.get(here, ())}}
        above = {m for m in others if HEIGHT[floor(m)] >= HEIGHT[here]}
        assert not above, f"{file} is on floor {here!r} and imports {sorted(above)}"


def test_a_core_test_imports_no_tool():
    """Nor does a module of tests/support that it imports, nor a program in a text of it; nor what joins the tools."""
    tests = Path(__file__).parent
    core = {name for name in HEIGHT if HEIGHT[name] <= HEIGHT["training"]}
    public = {name: inspect.getmodule(getattr(spmd_engine, name)).__name__ for name in spmd_engine.__all__}
    waiting, seen = [path for name in core for path in tests.glob(f"{name}/**/*.py")], set()
    assert len(waiting) > 100
    while waiting:
        text = (path := waiting.pop()).read_text()
        named = {name for name in re.findall(r"\bspmd_engine\.(\w+)", text) if name in HEIGHT}
        named |= {floor(public.get(name, "spmd_engine.arrays")) for name in imported_from("spmd_engine", text)}
        assert named <= core, f"{path} imports {sorted(named - core)}"
        assert not re.search(r'-m("?,)? "?spmd_engine', text), f"{path} starts a command"
        used = {*re.findall(r"from support\.(\w+)", text), *imported_from("support", text)}
        helpers = {path for name in used if (path := tests / "support" / f"{name}.py").exists()}
        waiting += helpers - seen
        seen |= helpers


def imported_from(package, text):
    """The names in ``from PACKAGE import ...`` of a text."""
    for names in re.findall(rf"from {package} import (?:\(([^)]*)\)|(.*))", text):
        yield from re.findall(r"\w+", " ".join(names).partition("#")[0])


def test_floors_that_keep_to_themselves():
    for file in FILES:
        here = floor_of_file(file)
        allowed = ONLY.get(here, set(HEIGHT)) | {here}
        assert {floor(module) for module in own(imported(file))} <= allowed, file


def test_imports_are_absolute():
    for file in FILES:
        assert not [module for module in imported(file) if module.startswith(".")], file


def test_kernels_and_layers_ask_the_backend_for_their_array_module():
    products = "arrays/products.py", "arrays/product_libraries/"  # libraries of the host
    free = "arrays/backend.py", "arrays/dtypes.py", "arrays/random.py", *products
    for file in FILES:
        may = file.startswith((*free, "arrays/numba/", "arrays/meta/"))
        if floor_of_file(file) in ("arrays", "layers", "models") and not may:
            assert not {"numpy", "cupy"} & {module.split(".")[0] for module in imported(file)}, file


# --- features

#: Features: a pattern of their identifiers, and the files where these may stand. A feature that enters another file
#: needs an extension point there instead; one that leaves a file leaves this table.
ROOMS = {
    "offloading": (
        r"offload",
        """
        engine/offload/array.py engine/offload/config.py engine/offload/file.py engine/offload/stash.py
        engine/offload/target.py engine/parallel_config.py
        engine/state/assignment.py planning/search/neighbours.py planning/search/plan_search.py
        planning/search/search_space.py
        """,
    ),
    "helper ranks": (
        r"helper|helped|parse_assign|assigned_layers|follow_orders|AssignedLayers",
        """
        cli/verify.py engine/build.py engine/helpers.py engine/layered.py engine/parallel_config.py
        engine/reshape.py engine/state/engine_state.py planning/dry_run/analyze.py training/run.py
        """,
    ),
    "idle ranks": (
        r"is_idle|is_placed|OtherRanks|mesh_beside",
        """
        comm/mesh.py comm/other_ranks.py engine/layered.py engine/state/engine_state.py jobs/resolve.py
        """,
    ),
    "overlapping layers": (
        r"overlap_layers|overlaps|within_overlap|parse_overlap|_overlap_of|^Overlap$",
        """
        adaptive/adapter.py adaptive/candidates.py engine/parallel_config.py engine/reshape.py
        engine/state/assignment.py planning/dry_run/analyze.py planning/search/estimate.py
        planning/search/layer_costs.py planning/search/plan_search.py planning/search/search_space.py
        """,
    ),
    "half precision": (
        r"is_half|HALF_DTYPES|masters?$|HalfPrecision|HalfRows",
        """
        arrays/einsum_lowering.py arrays/elementwise.py arrays/fused.py arrays/images.py arrays/numba/kernels.py
        arrays/precision.py arrays/products.py checkpoints/read.py comm/blocks.py comm/collectives.py
        engine/optimizers.py engine/pipeline.py engine/zero/compression.py losses.py sharding/shards.py
        """,
    ),
    "uneven stages and shares": (
        r"uneven",
        """
        adaptive/candidates.py axes.py checkpoints/load_in_place.py cli/plan.py comm/views.py
        engine/parallel_config.py engine/state/assignment.py engine/state/engine_state.py engine/uneven_stages.py
        models/layouts.py planning/dry_run/analyze.py planning/dry_run/model_shards.py planning/dry_run/rank_classes.py
        planning/search/neighbours.py planning/search/plan_search.py
        planning/search/search_space.py planning/search/shares.py
        """,
    ),
}


@cache
def identifiers(file):
    """The names in a file that its author has chosen: of variables, attributes, arguments, functions and classes."""
    fields = [getattr(node, name, "") for node in nodes_of(file) for name in ("id", "attr", "arg", "name", "asname")]
    return "\n".join({name for name in fields if isinstance(name, str)})


@pytest.mark.parametrize("feature", ROOMS)
def test_a_feature_stays_in_its_files(feature):
    pattern, files = ROOMS[feature]
    found = {file for file in FILES if re.search(pattern, identifiers(file), re.IGNORECASE | re.MULTILINE)}
    assert found == set(files.split())


# --- files


def test_everything_public_has_a_docstring():
    for file in FILES:
        silent = [] if ast.get_docstring(tree_of(file)) else ["the module"]
        for node in tree_of(file).body:
            named = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                silent.append(node.name)
        assert not silent, f"{file}: no docstring: {', '.join(silent)}"


# --- state

MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "local"}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
WRITES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}


def called(node):
    """The last name of the called object: ``local`` of ``threading.local()``."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def assignments(tree):
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def written():
    """Names that are changed in place somewhere: ``x[i] = ...``, ``del x[i]``, ``x.append(...)``."""
    for node in (node for file in FILES for node in nodes_of(file)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", getattr(node.value, "attr", ""))
        elif called(node) in WRITES and isinstance(node.func, ast.Attribute):
            yield getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))


def test_classes_have_names_of_their_own():
    """Class names are unique, except that a strategy may have the name of the layer that it explains."""
    found = {}
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef) and not file.startswith("strategies/"):
                found.setdefault(node.name, []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_tables_are_never_written():
    """An UPPER_CASE list or dict of a module is a constant, so no code may change it."""
    tables = {
        name
        for file in FILES
        for name, value in assignments(tree_of(file))
        if isinstance(value, DISPLAYS) and name.isupper()
    }
    assert "GPT_SIZES" in tables
    assert not tables & set(written())


def test_no_module_level_state_but_that_listed():
    classes = [node for file in FILES for node in nodes_of(file) if isinstance(node, ast.ClassDef)]
    own_classes = {
        node.name for node in classes if "frozen=True" not in " ".join(map(ast.unparse, node.decorator_list))
    }
    state = set()
    for file in FILES:
        for name, value in assignments(tree_of(file)):
            made = isinstance(value, DISPLAYS) and not name.isupper() and name != "__all__"
            if made or called(value) in MUTABLE | own_classes:
                state.add(f"{file}: {name}")
        for node in nodes_of(file):
            decorators = map(ast.unparse, getattr(node, "decorator_list", []))
            if any("cache" in decorator and decorator != "cached_property" for decorator in decorators):
                state.add(f"{file}: {node.name}")
    assert state == STATE.keys()


def test_no_function_rebinds_a_global():
    for file in FILES:
        assert not [node.names for node in nodes_of(file) if isinstance(node, ast.Global)], file


# --- import cycles, and classes


def test_no_circle_of_imports():
    """Also within a floor; imports for annotations do not count."""
    uses = {}
    for file in FILES:
        module = "spmd_engine." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        unneeded = {
            each
            for node in nodes_of(file)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for statement in node.body
            for each in ast.walk(statement)
        }
        uses[module.removesuffix(".__init__")] = {
            name
            for name in own(imports(node for node in nodes_of(file) if node not in unneeded))
            if name != module and f"{name.replace('.', '/')}.py" in MODULE_FILES
        }
    while uses:
        done = {module for module, used in uses.items() if not used & uses.keys()}
        assert done, f"a circle of imports among: {', '.join(sorted(uses))}"
        uses = {module: used for module, used in uses.items() if module not in done}


def test_nothing_hangs_on_the_clock_that_people_set():
    """It may go backwards. Deadlines, durations and orders use a monotonic clock or numbers."""
    wall = {"time", "time_ns", "ctime", "localtime", "gmtime"}
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not wall & {each.name for each in node.names}, file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert node.attr not in wall, file
            assert not (isinstance(node, ast.Attribute) and node.attr.startswith("st_mtime")), file


MODULE_FILES = {f"spmd_engine/{file}" for file in FILES}
#: Classes that users subclass or call may have many methods.
MANY_METHODS = {"ShardedEngine", "EngineDefinition", "Group", "Collectives", "Mesh"}


def test_classes_are_no_heaps():
    """At most two bases and 25 public methods, inherited ones included, except those of MANY_METHODS."""
    for file in FILES:
        name = file.removesuffix(".py").replace("/", ".").removesuffix("__init__").strip(".")
        if name == "__main__":
            continue
        module = importlib.import_module(f"spmd_engine.{name}".strip("."))
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != module.__name__ or name in MANY_METHODS:
                continue
            assert len(kind.__bases__) <= 2, f"{name} has {len(kind.__bases__)} bases"
            common = [base for base in kind.__mro__ if base.__name__ in MANY_METHODS or base.__module__ in BUILTINS]
            given = {each for base in common for each in vars(base)}
            public = {each for each in dir(kind) if not each.startswith("_") and callable(getattr(kind, each, None))}
            assert len(public - given) <= 25, f"{name} has {len(public - given)} public methods"


BUILTINS = {"builtins", "abc", "enum", "typing", "collections.abc", "collections", "weakref", "threading", "numpy"}


def test_no_test_leaves_a_folder_on_the_path():
    """Otherwise the next test file in the process would import modules of that folder instead of its own."""
    changes = "sys" + ".path."
    assert [str(path) for path in Path(__file__).parent.rglob("*.py") if changes in path.read_text()] == []
