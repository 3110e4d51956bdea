"""Records of families: the documentation lists them, and a new one is read and written without other changes."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.hf.read_config import MODEL_TYPES, read_config
from spmd_engine.models.hf.write_config import config_json
from spmd_engine.models.weight_map import weight_map
from support.script_module import script

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_documentation_has_the_tables_of_the_records():
    tables, text = script("family_table"), DOCS.read_text()
    for table in (tables.model_types(), tables.architectures()):
        assert "\n".join(table) in text, "run scripts/family_table.py and copy its tables into docs/models.md"


def test_a_record_is_all_that_a_new_model_type_needs(monkeypatch):
    record = replace(FAMILIES["llama"], model_type="llama", fields=FAMILIES["llama"].fields | {"width": ("breadth", 8)})
    monkeypatch.setitem(FAMILIES, "llama", record)
    monkeypatch.setitem(MODEL_TYPES, "llama", record)
    config = {"model_type": "llama", "vocab_size": 23, "num_attention_heads": 2, "num_hidden_layers": 1}
    shape = read_config(config | {"intermediate_size": 12}, "config.json")[0]
    assert shape.width == 8 and config_json(shape)["breadth"] == 8


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_record_names_only_fields_of_a_decoder(name):
    record, known = FAMILIES[name], {field.name for field in fields(DecoderConfig)}
    named = {*record.fields, *record.constants, *record.also_read, *record.implied}
    assert {field.split(".")[0] for field in named} <= known


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_weight_map_of_a_record_has_every_parameter(name):
    sizes = {field: 48 for field in ("hidden_size", "n_embd", "d_model")} | {
        field: 2 for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    }
    sizes |= {field: 6 for field in ("num_attention_heads", "n_head", "n_heads", "num_heads")}
    sizes |= {"intermediate_size": 16, "ffn_dim": 16, "vocab_size": 23, "num_local_experts": 0}
    used = {field for field, _ in FAMILIES[name].fields.values()} | {"num_local_experts"}
    config = {field: size for field, size in sizes.items() if field in used}
    if FAMILIES[name].experts is not None:
        config |= {FAMILIES[name].experts.field: 4, "num_experts_per_tok": 2}
    elif name != "granitemoehybrid":
        del config["num_local_experts"]
    if name == "granitemoehybrid":
        config |= {"layer_types": ["attention"] * 2}
    if name == "ministral3":
        config |= {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    if name == "gptj":
        config |= {"rotary_dim": 4}
    if name == "gpt-neo":
        config |= {"attention_layers": ["global", "local"]}
    config |= {"num_key_value_heads": 2} if "num_key_value_heads" in used else {}
    shape = read_config({"model_type": FAMILIES[name].model_type, **config}, "config.json")[0]
    names = dict(weight_map(shape))
    assert names.keys() == {own for own, _ in decoder(shape).parameters()} and all(names.values())


def test_json_of_earlier_versions_is_read_and_written_under_the_new_names():
    renamed = {old: field.name for field in fields(DecoderConfig) for old in field.metadata.get("old_names", ())}
    values = {"norms": "both", "unturned": "1", "windowed": "0", "rotary_in_window": {"theta": 5.0}}
    values |= dict.fromkeys(renamed.keys() - values.keys(), True)
    assert len(values) == 9
    config = DecoderConfig.from_json(values)
    written = config.as_json()
    for old, new in renamed.items():
        assert old not in written and getattr(config, new) == values[old] or old == "rotary_in_window"
    assert config.window_rotary.theta == 5 and DecoderConfig.from_json(written) == config
