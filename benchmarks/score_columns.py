"""Reads steps of transformers from any table: each column is recognized by one of its usual names.

``NAMES`` lists the columns with their other names; case, spaces and signs are ignored. A step's time may be given in
seconds, or as a rate of tokens, samples or FLOPs. The shape of a model given by name is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.planning.machine.machine import read_machine

#: The quantities used, and the names of their columns.
NAMES: Mapping[str, Sequence[str]] = {
    "layers": ("layers", "layer", "depth", "l"),
    "hidden": ("hidden", "hidden_size", "width", "d_model", "dim", "embedding", "embedding_size", "embd", "h"),
    "heads": ("heads", "attention_heads", "head", "a"),
    "kv_heads": ("kv_heads", "key_value_heads", "query_groups"),
    "ffn": ("ffn", "ffn_size", "ffn_hidden_size", "intermediate_size", "mlp", "mlp_hidden", "d_ff"),
    "gated": ("gated", "swiglu", "gated_mlp", "glu"),
    "vocabulary": ("vocabulary", "vocab", "vocab_size", "vocabulary_size"),
    "sequence": ("sequence", "seq", "seq_len", "seqlen", "sequence_length", "seq_length", "context", "seqlen_t", "s"),
    "model": ("model", "model_name", "case", "size", "name"),
    "gpu": ("gpu", "gpu_type", "device", "accelerator", "hardware", "machine", "system"),
    "gpus": ("gpus", "gpu_count", "gpu_num", "world_size", "devices", "ranks"),
    "nodes": ("nodes", "servers"),
    "per_node": ("gpus_per_node", "per_node", "ranks_per_node"),
    "between": ("node_gbps", "interconnect_gbps", "internode_gbps", "network_gbps"),  # of a node
    "tp": ("tp", "tensor", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "model_parallel")
    + ("t",),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size")
    + ("p",),
    "virtual": ("virtual", "virtual_chunks", "vpp", "vp", "chunks", "interleave", "virtual_pipeline"),
    "dp": ("dp", "data", "data_parallel", "data_parallel_size", "dp_fsdp", "d"),
    "cp": ("cp", "context_parallel", "context_parallel_size"),
    "ep": ("ep", "expert_parallel", "expert_parallel_size"),
    "zero": ("zero", "zero_stage", "sharding", "sharding_strategy"),
    "fsdp": ("fsdp", "dp_fsdp", "fully_sharded"),
    "sequence_parallel": ("sequence_parallel", "sequence_parallelism", "sp"),
    "micro_batch": ("micro_batch", "micro_batch_size", "microbatch", "microbatch_size", "microbatchsize", "mbs")
    + ("micro_bsz",),
    "accumulation": ("accumulation", "grad_accumulation", "gradaccum", "gradient_accumulation", "ga", "micro_num"),
    "global_batch": ("global_batch", "global_batch_size", "globalbatchsize", "gbs", "batch_size", "batch"),
    "recompute": ("recompute", "recomputation", "activation_checkpointing", "activation_ckpt", "checkpointing", "ckpt"),
    "flash": ("flash", "flash_attention", "flash_attn", "fused_attention"),
    "precision": ("precision", "dtype"),
    "framework": ("framework", "library", "codebase"),
}  # fmt: skip


def _units(unit: float, names: str) -> dict[str, float]:
    return dict.fromkeys(names.split(), unit)


#: Columns of a step's time or of a rate that determines it, with their factors to the unit in the key.
SPEEDS: Mapping[str, Mapping[str, float]] = {
    "seconds": _units(1.0, "seconds step_seconds iteration_seconds step_s iteration_s time_s step_time step_time_s")
    | _units(1.0, "iteration_time iteration_time_s seconds_per_iteration time_per_global_step_s")
    | _units(1e-3, "iteration_ms step_ms step_time_ms iteration_time_ms ms elapsed_time_per_iteration_ms"),
    "tokens of a GPU": _units(1.0, "tokens_per_second_per_gpu tokens_per_sec_per_gpu tokens_s_gpu tokens_sec_gpu")
    | _units(1.0, "tokens_per_gpu_per_second tokens_gpu_s throughput_t_s_gpu tps_gpu tgs"),
    "tokens": _units(1.0, "tokens_per_second tokens_per_sec tokens_per_s tokens_s tokens_sec throughput_t_s"),
    "samples of a GPU": _units(1.0, "samples_per_second_per_gpu samples_per_gpu_per_second samples_s_gpu"),
    "samples": _units(1.0, "samples_per_second samples_per_sec samples_s throughput_s_s"),
    "model FLOPs of a GPU": _units(1e12, "model_tflops_per_gpu model_tflops model_tflop_sec_gpu model_tflops_sec_gpu"),
    "FLOPs of a GPU": _units(1e12, "tflops_per_gpu tflops tflop_s_per_gpu tflop_s tflops_gpu tflops_s_gpu")
    | _units(1e12, "achieved_tflops achieved_tflops_per_gpu achieved_teraflop_s_per_gpu hardware_tflops_per_gpu"),
    "of the peak, by the model's FLOPs": _units(1.0, "mfu mfu_percent"),
}
#: Columns of a GPU's peak memory, with their factors to GiB; tools print GiB as GB.
MEMORIES = _units(1.0, "memory_gib peak_memory_gib max_memory_gib memory_gb peak_memory_gb gpu_memory_gb memory")
MEMORIES |= _units(1.0, "peak_memory") | _units(1 / 1024, "memory_mib peak_memory_mib peak_allocated_mib")
TIME_NAMES = "step_seconds", "iteration_ms", "tokens_per_second_per_gpu", "tflops_per_gpu", "memory_gib"  #: some
#: Values of missing columns; 0: derived from others.
DEFAULTS = {
    "sequence": 2048, "vocabulary": 51200, "tp": 1, "pp": 1, "dp": 0, "micro_batch": 0, "virtual": 1, "zero": 0,
    "accumulation": 0, "global_batch": 0, "kv_heads": 0, "ffn": 0, "gpus": 0, "nodes": 0, "per_node": 0, "cp": 1,
    "ep": 1, "between": 0,
}  # fmt: skip
TOLD = "sequence", "vocabulary", "tp", "pp", "dp", "gpu"  #: reported if a default is used
#: The fields of a run that are given directly.
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "tp", "pp", "dp", "micro_batch", "global_batch")
SIZES += "virtual", "zero"
SHARDED = {"full_shard": 3, "fsdp": 3, "zero3": 3, "hybrid_shard": 3, "shard_grad_op": 2, "no_shard": 0, "ddp": 0}
FULLY_SHARDED = "fsdp", "fsdp2", "fsdp_gpt", "torchtitan"
NOT = "", "0", "no", "false", "n/a"  #: cells that mean no
RECOMPUTED = {"block": "full", "uniform": "full", "partial": "selective"}
GPUS = {"a100": "a100", "a800": "a100", "h100": "h100", "h800": "h100", "h200": "h200"}
#: Llamas (Touvron et al., 2023; Dubey et al., 2024): layers, width, heads, key heads, MLP width, vocabulary.
LLAMAS = {
    "llama7b": (32, 4096, 32, 32, 11008, 32000), "llama13b": (40, 5120, 40, 40, 13824, 32000),
    "llama30b": (60, 6656, 52, 52, 17920, 32000), "llama65b": (80, 8192, 64, 64, 22016, 32000),
    "llama270b": (80, 8192, 64, 8, 28672, 32000), "llama38b": (32, 4096, 32, 8, 14336, 128256),
    "llama370b": (80, 8192, 64, 8, 28672, 128256), "llama3405b": (126, 16384, 128, 8, 53248, 128256),
}  # fmt: skip


@dataclass(frozen=True)
class TransformerRun:
    """A row: sizes of a transformer, its parallelism, and the measurements."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    global_batch: int
    seconds: float | None  #: of a step
    memory: float | None = None  #: GiB of the GPU with the most
    kv_heads: int | None = None  #: None: equal to heads
    ffn: int | None = None  #: None: four times the width
    gated: bool = False
    virtual: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    gpu: str = "a100"
    recompute: str | None = None  #: none, selective or full; None: not given
    flash: bool | None = None
    framework: str = ""
    per_node: int = 8  #: GPUs per node
    between: int = 0  #: Gbit/s between nodes; 0: as in the machine file

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def repeats(self) -> str:
        """The recomputation; if not given, full, or none with fused attention or ZeRO-3."""
        return self.recompute or ("none" if self.flash or self.zero == 3 else "full")

    def flops(self, *, repeated: bool) -> float:
        """FLOPs of a step per rank: those of the model, or including full recomputation. Masked scores count too."""
        d, f = self.hidden, self.ffn or 4 * self.hidden
        keys = (self.kv_heads or self.heads) / self.heads
        weights = self.layers * ((2 + 2 * keys) * d * d + (3 if self.gated else 2) * d * f)
        blocks = 2 * weights + 4 * self.layers * self.sequence * d  # per token, of the forward
        passes = 4 if repeated and self.repeats == "full" else 3
        return self.global_batch * self.sequence * (passes * blocks + 6 * self.vocabulary * d) / self.ranks


@dataclass(frozen=True)
class Columns:
    """The columns of a table by quantity, and the missing quantities."""

    found: Mapping[str, str]  #: quantity -> column
    time: tuple[str, str, float] | None  #: quantity, column, unit
    memory: tuple[str, float] | None  #: column, and its unit in GiB
    missing: Sequence[str]
    assumed: Mapping[str, int | str]
    unused: Sequence[str] = field(default=())

    @classmethod
    def of(cls, names: Sequence[str]) -> Columns:
        """The quantities of a table with these columns."""
        plain = {plain_name(name): name for name in reversed(names)}  # of equal names, the first
        columns = {quantity: plain[first] for quantity, aliases in NAMES.items() if (first := _first(aliases, plain))}
        time = next(
            (
                (quantity, plain[name], unit)
                for quantity, aliases in SPEEDS.items()
                for name, unit in aliases.items()
                if name in plain
            ),
            None,
        )
        memory = next(((plain[name], unit) for name, unit in MEMORIES.items() if name in plain), None)
        missing = []
        if not columns.keys() >= {"layers", "hidden"} and "model" not in columns:
            missing += [quantity for quantity in ("layers", "hidden") if quantity not in columns]
        if "global_batch" not in columns and not columns.keys() >= {"micro_batch", "accumulation"}:
            missing.append("global_batch")
        if time is None and memory is None:
            missing.append("a step's time or memory")
        defaults = DEFAULTS | {"gpu": "a100"}
        looked_up = {"vocabulary"} if "layers" not in columns else set()
        assumed = {
            quantity: defaults[quantity]
            for quantity in TOLD
            if quantity not in columns.keys() | looked_up and defaults[quantity]
        }
        if "recompute" not in columns:
            assumed["recompute"] = "full, or none with fused attention or ZeRO-3"
        used = {*columns.values(), *(time[1:2] if time else ()), *(memory[:1] if memory else ())}
        return cls(columns, time, memory, missing, assumed, [name for name in names if name not in used])

    @property
    def help(self) -> str:
        """The accepted names of missing columns."""
        names = {quantity: NAMES.get(quantity, ()) for quantity in self.missing}
        names["a step's time or memory"] = TIME_NAMES
        return "; ".join(f"{quantity} (as {', '.join(names[quantity][:6])})" for quantity in self.missing)

    def run(self, row: Mapping[str, str]) -> TransformerRun | str:
        """The run of a row, or the reason why it cannot be used."""
        cells = {quantity: (row.get(column) or "").strip() for quantity, column in self.found.items()}
        try:
            values = {
                quantity: whole(cells[quantity], self.found[quantity]) for quantity in DEFAULTS if cells.get(quantity)
            }
            values = {quantity: value for quantity, value in values.items() if value is not None}
            shape = self._shape(cells)
            gpu = self._gpu(cells.get("gpu", ""))
        except (ValueError, UsageError) as error:
            return str(error)
        if not re.search("16|mixed|amp|half|^$", cells.get("precision", "").lower()):
            return f"precision {cells['precision']!r} is not predicted here: products are of 16 bits"
        n = DEFAULTS | shape | values
        per_node, gated = n["per_node"] or 8, yes(cells.get("gated", "")) or bool(shape.get("gated"))
        gpus = n["gpus"] or n["nodes"] * per_node or n["tp"] * n["pp"] * max(n["dp"], 1)
        for quantity in ("cp", "ep"):
            if n[quantity] > 1:
                return f"{quantity} above 1 is not predicted here"
        framework = plain_name(cells.get("framework", ""))
        if "zero" not in values and (framework in FULLY_SHARDED or cells.get("fsdp", "").lower() not in NOT):
            n["zero"] = 3
        n["dp"] = n["dp"] or max(gpus // (n["tp"] * n["pp"]), 1)
        if n["tp"] * n["pp"] * n["dp"] != gpus:
            return "tp x pp x dp is not the number of GPUs"
        accumulation = n["accumulation"] or 1
        at_once = n["global_batch"] // (n["dp"] * accumulation) if n["pp"] == 1 or n["accumulation"] else 1
        n["micro_batch"] = n["micro_batch"] or max(at_once, 1)
        n["global_batch"] = n["global_batch"] or n["micro_batch"] * n["dp"] * accumulation
        if n["global_batch"] % (n["micro_batch"] * n["dp"]):
            return "global_batch is no multiple of micro_batch x dp"
        if not n.get("layers") or not n.get("hidden"):
            return "layers or hidden is missing"
        n["heads"] = n.get("heads") or max(n["hidden"] // 128, 1)
        if n["hidden"] % n["heads"]:
            return "hidden is no multiple of heads"
        run = TransformerRun(
            **{name: n[name] for name in SIZES},
            seconds=None,
            kv_heads=n["kv_heads"] or None,
            ffn=n["ffn"] or None,
            gated=gated,
            sequence_parallel=n["tp"] > 1 and yes(cells.get("sequence_parallel", "")),
            gpu=gpu,
            recompute=_recompute(cells.get("recompute", "")),
            flash=yes(cells["flash"]) if cells.get("flash") else None,
            framework=framework,
            per_node=per_node,
            between=n["between"],
        )
        return self._measured(run, row)

    def _shape(self, cells: Mapping[str, str]) -> dict[str, int]:
        """The model's shape from its columns, otherwise from its name."""
        if cells.get("layers") and cells.get("hidden"):
            shape = {
                quantity: whole(cells[quantity], self.found[quantity])
                for quantity in ("layers", "hidden", "heads")
                if cells.get(quantity)
            }
            return {quantity: value for quantity, value in shape.items() if value is not None}
        name = cells.get("model", "")
        if name.lower() in GPT_SIZES:
            size = GPT_SIZES[name.lower()]
            return {"layers": size.layers, "hidden": size.width, "heads": size.heads, "vocabulary": size.vocabulary}
        short = re.sub(r"[^a-z0-9]", "", name.lower())
        short = re.sub(r"^llama31(?=8b|70b|405b)", "llama3", re.sub(r"^(meta)?llama2(?=7b|13b)", "llama", short))
        if short not in LLAMAS:
            raise ValueError(f"the shape of model {name!r} is not known, and layers or hidden is missing")
        names = "layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary"
        return dict(zip(names, LLAMAS[short], strict=True)) | {"gated": 1}

    def _gpu(self, cell: str) -> str:
        """The machine of a GPU, or the machine file that a row names."""
        if not cell:
            return "a100"
        if cell.endswith(".toml"):
            read_machine(cell)
            return cell
        machine_name = next((machine for name, machine in GPUS.items() if name in cell.lower()), None)
        if machine_name is None:
            raise ValueError(
                f"there is no machine file for GPU {cell!r}; there are: {', '.join(sorted({*GPUS.values()}))}"
            )
        return machine_name

    def _measured(self, run: TransformerRun, row: Mapping[str, str]) -> TransformerRun | str:
        """The run with its time and memory; one of them is required."""
        memory = number(row.get(self.memory[0]) or "") if self.memory else None
        memory = memory * self.memory[1] if memory and self.memory else None
        value = number(row.get(self.time[1]) or "") if self.time else None
        if self.time is None or value is None:
            columns = [*(self.time[1:2] if self.time else ()), *(self.memory[:1] if self.memory else ())]
            return replace(run, memory=memory) if memory else f"{' and '.join(columns)} is no number above 0"
        quantity, _, unit = self.time
        value *= unit
        samples, tokens = run.global_batch, run.global_batch * run.sequence
        match quantity:
            case "seconds":
                seconds = value
            case "tokens of a GPU":
                seconds = tokens / (value * run.ranks)
            case "tokens":
                seconds = tokens / value
            case "samples of a GPU":
                seconds = samples / (value * run.ranks)
            case "samples":
                seconds = samples / value
            case "FLOPs of a GPU":
                seconds = run.flops(repeated=True) / value
            case "model FLOPs of a GPU":
                seconds = run.flops(repeated=False) / value
            case _:  # a fraction of the peak, or percent
                reached = value / 100 if value > 1 else value
                seconds = run.flops(repeated=False) / (reached * peak(run.gpu))
        return replace(run, seconds=seconds, memory=memory)


@lru_cache
def peak(gpu: str) -> float:
    """FLOP/s of 16-bit matrix products."""
    return read_machine(gpu).nodes[0].speeds["float16"].most


def plain_name(name: str) -> str:
    """A name in lower case, with single underscores between letters and digits, without a leading "number of"."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return re.sub(r"^(number_of|num|n|no_of)_", "", plain)


def number(cell: str) -> float | None:
    """A finite number above 0, possibly with commas; None for anything else."""
    try:
        value = float(cell.replace(",", "").strip().removesuffix("%"))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def whole(cell: str, column: str) -> int | None:
    """The whole number in a cell; None for n/a. Raises ValueError for anything else."""
    text = cell.replace(",", "").strip().lower()
    if text in ("", "n/a", "na", "-", "none", "auto"):
        return None
    if plain_name(text) in SHARDED:
        return SHARDED[plain_name(text)]
    try:
        value = float(text.removesuffix("b")) if column.lower().startswith("zero") else float(text)
    except ValueError:
        raise ValueError(f"{column} is no whole number: {cell!r}") from None
    if value != int(value) or value < 0:
        raise ValueError(f"{column} is no whole number from 0: {cell!r}")
    return int(value)


def yes(cell: str) -> bool:
    """Whether a cell means yes."""
    return cell.strip().lower() in ("yes", "true", "1", "on", "y", "t")


def _recompute(cell: str) -> str | None:
    text = plain_name(cell)
    if text in ("", "n_a"):
        return None
    if text in ("none", "selective", "full"):
        return text
    return RECOMPUTED.get(text) or ("full" if yes(cell) else "none")


def _first(aliases: Sequence[str], names: Mapping[str, str]) -> str | None:
    return next((name for name in aliases if name in names), None)
