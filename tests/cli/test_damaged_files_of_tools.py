"""Damaged files that tools read: machines, systems, plans, options of generation, inputs."""

import json
from contextlib import suppress
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from other_systems import description
from other_systems.description import Transformer, read_system
from other_systems.memory import memory_of
from other_systems.work import model_of

from spmd_engine.cli.infer import read_inputs
from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.plan_result import PlanFile
from spmd_engine.planning.planner import planned_model
from spmd_engine.serving.sampling import read_generation_config
from support.altered import in_bytes
from support.damaged import JSON, TOML, Kind, check_damaged, in_array, text_file


def read_system_file(path):
    system, transformer = read_system(path), Transformer(4, 64, 4, 32, 100)
    with suppress(UsageError):  # these name the system
        for recompute in ("none", "selective"):
            memory_of(system, transformer, {"data": 2}, micro_batch=1, micro_batches=2, recompute=recompute)
            model_of(system, transformer, recompute)


def npy(folder):
    np.save(folder / "x.npy", np.arange(24.0).reshape(4, 6))
    return folder / "x.npy"


MACHINES = resources.files("spmd_engine.planning") / "machines"
MACHINE = (MACHINES / "a100.toml").read_text() + '[topology]\nkind = "fat-tree"\nleaf = 4\n'
SYSTEM = Path(description.__file__).with_name("megatron-deepspeed.toml").read_text()
PLAN = PlanFile(ranks=2, machine="x").as_json()
MODEL = "layers = 2\nwidth = 8\nheads = 2\ncontext = 16\nvocabulary = 300\ntied = true\nepsilon = 1e-5\n"
GENERATION = {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": [1, 2], "max_new_tokens": 9}
KINDS = {
    "machine": Kind(text_file("x.toml", MACHINE), read_machine, TOML),
    "system": Kind(text_file("x.toml", SYSTEM), read_system_file, TOML),
    "sizes": Kind(text_file("x.toml", MODEL), lambda path: planned_model(str(path)), TOML),
    "plan": Kind(text_file("x.json", json.dumps(PLAN)), PlanFile.read, JSON),
    "generation": Kind(
        text_file("generation_config.json", json.dumps(GENERATION)),
        lambda path: read_generation_config(path.parent),
        JSON,
    ),
    "npy": Kind(npy, lambda path: read_inputs(str(path)), (in_bytes, in_array)),
}  # fmt: skip


@pytest.mark.parametrize("count", [4, pytest.param(140, marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.parametrize("name", KINDS)
def test_what_was_damaged_is_read_or_is_one_line(name, count, tmp_path):
    check_damaged(KINDS[name], name, count, tmp_path)
