"""Files that describe other systems as data: the tensors that they save of a block, and the work that they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from spmd_engine.errors import UsageError
from spmd_engine.foreign import parse_toml, read_text, reading

_LISTS = "bytes", "products", "reached", "repeated"  #: fields of an operation that are lists
RECOMPUTED = ("none", "selective", "full")
WHERE = ("inside", "residual")  #: place of a tensor or a pass: inside the block, or on the residual stream
_DIMS, _MATRICES = ("dims", "product", "each", "fused", "elements", "gather", "reduce"), ("matrices", "first", "last")
_LETTERS = "bsthrkdfv"
PARTS = ("first", "attention", "mlp", "last")  #: before the blocks, in a block, and after the blocks


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block keeps for its backward."""

    what: str
    dims: str  #: letters, as in "b s d"
    bytes: int  #: per element
    where: str  #: "inside" the block, or on the "residual" stream
    kept_by: tuple[str, ...]  #: kinds of recomputation under which it is kept: none, selective, full
    times: int = 1  #: number of such tensors
    of: str = "block"  #: or "last": after the blocks

    def __post_init__(self) -> None:
        if self.bytes not in (1, 2, 4, 8):
            raise ValueError(f"{self.what}: an element of {self.bytes} bytes; there are 1, 2, 4 and 8")


@dataclass(frozen=True)
class SystemWork:
    """One operation of a layer: exactly one of a matrix product, a pass over elements, or a collective.

    Dims are letters, and may start with a numeric factor: "3 h k".
    """

    part: str  #: one of PARTS
    what: str
    #: "b s, d, 3 h k": [b s, d] by [d, 3 h k]; in the backward the two products of its gradients
    product: str | None = None
    each: str = ""  #: of a product: its batch dims
    weights: bool = False  #: of a product: whether the second factor is a parameter
    fused: str | None = None  #: "s, k, t": [s k] by [k t], computed and used tile by tile in one kernel
    products: tuple[float, float] = (0, 0)  #: of a fused operation: number of such products, forward and backward
    reached: tuple[float, float] = (1, 1)  #: of a fused operation: fraction of the device's speed, forward and backward
    elements: str | None = None  #: dims of an elementwise pass
    where: str = "inside"  #: of an elementwise pass: "inside" or "residual"
    bytes: tuple[float, float] = (0, 0)  #: read and written per element, forward and backward
    gather: str | None = None  #: the letter across whose ranks the residual stream is gathered
    reduce: str | None = None  #: the letter over whose ranks the output is summed
    repeated: tuple[str, ...] = ()  #: kinds of recomputation, except full, under which it is repeated

    def __post_init__(self) -> None:
        kinds = [self.product, self.fused, self.elements, self.gather, self.reduce]
        if sum(kind is not None for kind in kinds) != 1 or self.part not in PARTS:
            raise ValueError(
                f"{self.what}: one of product, fused, elements, gather, reduce, and a part of {', '.join(PARTS)}"
            )
        if (self.product or self.fused or ",,").count(",") != 2:
            raise ValueError(f"{self.what}: a product has rows, summed dims, and columns")


@dataclass(frozen=True)
class System:
    """The memory and the work of another system."""

    name: str
    state: Mapping[str, float]  #: bytes per parameter, by kind
    matrices: Mapping[str, str]  #: matrices of a block: dims by name
    saved: tuple[SavedTensor, ...]
    first: Mapping[str, str] = field(default_factory=dict)  #: matrices before the blocks
    last: Mapping[str, str] = field(default_factory=dict)  #: matrices after the blocks
    work: tuple[SystemWork, ...] = ()  #: in the order of the forward
    update: float = 0  #: bytes read and written per updated parameter
    overlap: bool = False  #: whether reductions of input gradients overlap with weight gradients
    accumulate: float = 0  #: bytes read and written per parameter to accumulate a gradient


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int = 1  #: unused by systems with blocks only
    hidden: int | None = None  #: width inside the MLP; None: four times the width
    key_value_heads: int | None = None  #: None: equal to heads

    @property
    def sizes(self) -> dict[str, int]:
        width, pairs = self.width, self.key_value_heads or self.heads
        heads = {"h": pairs, "r": self.heads // pairs, "k": width // self.heads}
        return heads | {"d": width, "f": self.hidden or 4 * width, "t": self.sequence, "v": self.vocabulary}


def read_system(name: str | Path) -> System:
    """Read a system by the name of a file in this folder ("megatron"), or by a path. A file with ``like`` inherits
    missing fields from the system named there.

    Raises UsageError, in one line, for a file that cannot be read, and for unknown or missing fields.
    """
    path = Path(__file__).parent / f"{name}.toml"
    with reading(f"{name}: no description of a system"):
        content = parse_toml(path.read_text() if path.is_file() else read_text(name))
        like = read_system(content.pop("like")) if "like" in content else None
        readers = {"saved": _saved, "work": _operation}
        for key in readers.keys() & content.keys():
            content[key] = tuple(readers[key](entry, name) for entry in content[key])
        return _checked(replace(like, **content) if like else System(**content))


def _checked(instance: Any) -> Any:
    """Return ``instance``; raise ValueError for an invalid value of a field."""
    types = get_type_hints(type(instance))
    for item in fields(instance):
        if not _fits(value := getattr(instance, item.name), types[item.name]):
            raise ValueError(f"{item.name} is {value!r:.60}, where {item.type} is needed")
        if item.name == "where" and value not in WHERE:
            raise ValueError(f"where is {value!r:.60}: choose one of {', '.join(WHERE)}")
        dims = [value] if item.name in _DIMS else value.values() if item.name in _MATRICES else []
        for dim in " ".join(filter(None, dims)).replace(",", " ").split():
            if dim not in _LETTERS and not (dim.isdecimal() and isinstance(instance, SystemWork)):
                raise ValueError(f"{item.name} has the dim {dim!r:.60}; there are {', '.join(_LETTERS)}")
    return instance


def _fits(value: Any, kind: Any) -> bool:
    of, inner = get_origin(kind), get_args(kind)
    if of is Mapping:
        return isinstance(value, Mapping) and all(_fits(element, inner[1]) for element in value.values())
    if of is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if of is not None:  # str | None
        return any(_fits(value, option) for option in inner)
    if kind in (int, float):
        return type(value) in (int, kind) and 0 <= value < float("inf")
    return isinstance(value, kind)


def _saved(content: Mapping[str, Any], name: str | Path) -> SavedTensor:
    try:
        return _checked(SavedTensor(**content | {"kept_by": tuple(content["kept_by"])}))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: a tensor that is saved has wrong fields: {error}") from error


def _operation(content: Mapping[str, Any], name: str | Path) -> SystemWork:
    try:
        lists = {key: tuple(content[key]) for key in _LISTS if key in content}
        return _checked(SystemWork(**content | lists))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: an operation has wrong fields: {error}") from error
