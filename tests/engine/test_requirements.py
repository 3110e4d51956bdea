"""What options need of a mesh, a model and each other: every declaration, by a case that does not meet it."""

from dataclasses import fields

import pytest

from spmd_engine.axes import parse_axes
from spmd_engine.engine.parallel_config import REQUIREMENTS, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models.names import build_model

#: Fields that need nothing of a mesh or of other options, and why.
FREE = {
    "recompute": "it concerns the layers of a chunk: the engine refuses what they lack",
    "group_threshold": "any size works, on any mesh",
    "group_cap": "any size works, on any mesh",
}

REFUSED = {
    "axes of uneven stages": ({}, "pipe=2,data=1|2", "", "uneven stages with --mesh pipe=2,data=1|2: only axis model"),
    "interleaved chunks": ({"chunks": 2}, "pipe=2", "", "--chunks 2 with --mesh pipe=2: several chunks a stage are "),
    "replicas of shards": ({}, "replicate=2", "", "axis 'replicate' with --mesh replicate=2: it says that state is in"),
    "axes of shares": ({"shares": "data=3:1"}, "data=3", "", "it says 2 shares of data, which has 3 ranks. Give"),
    "axes of state_shares": ({"state_shares": "data=3:1"}, "shard=2", "", "shard=2: there is no axis 'data'. Give a"),
    "order of ranks": ({"rank_order": "0,2"}, "data=2", "", "--mesh data=2: the ranks are 0 to 1. Name each rank once"),
    "pipeline of stages": ({"stages": "0,3"}, "data=2", "", "--mesh data=2: the mesh has no pipeline. Omit it"),
    "layers of chunks": ({}, "pipe=4", "mlp", "layer_2), too few for 4 stages; take fewer stages"),
    "first layers of chunks": ({"stages": "0,3,7"}, "pipe=2", "gpt-nano", "0,3,7: 2 ascending numbers are needed"),
    "overlap of equal stages": ({"overlap_layers": "1"}, "pipe=2,model=1|2", "", "1|2: it needs stages of equal sizes"),
    "overlap of single chunks": (
        {"overlap_layers": "1", "schedule": "interleaved"}, "pipe=2", "gpt-nano",
        "stages of several chunks cannot overlap. Add --overlap-layers 0, or choose --schedule 1f1b",
    ),
    "overlap of neighbours": ({"overlap_layers": "1:4"}, "pipe=3", "mlp", "has 1 ranges for 2 boundaries"),
    "compression of parts": ({"compress": "top-k:0.1", "zero": 1}, "data=2", "", "ZeRO needs parts of sums. Choose"),
    "parameters to offload": ({"offload": "parameters", "zero": 2}, "data=2", "", "with --zero 2 every rank holds"),
    "layers of helper ranks": ({"assign": "head:rank2"}, "model=2", "gpt-nano", "axis model splits these layers"),
    "axes of experts": ({"experts_over": "data,row"}, "data=2", "", "there is no axis 'row'. Name axes of the mesh"),
}  # fmt: skip

NOTED = {
    "effect of schedule": ({"schedule": "gpipe"}, "data=2", "", "--mesh data=2: there is no axis pipe of 2 or more"),
    "effect of chunks": ({"schedule": "interleaved", "chunks": 2}, "pipe=1", "", "--chunks 2 has no effect with"),
    "effect of stages": ({"stages": "cost"}, "data=2", "", "--stages cost has no effect with --mesh data=2"),
    "effect of overlap_layers": ({"overlap_layers": "1"}, "data=2", "", "--overlap-layers 1 has no effect with --mesh"),
    "effect of zero": ({"zero": 2}, "model=2", "", "with --mesh model=2: there is no axis data, shard"),
    "effect of state_shares": ({"state_shares": "data=3:1"}, "data=2", "", "without --zero: nothing is stored in"),
    "effect of min_tensor_size": ({"min_tensor_size": "1KiB"}, "data=2", "", "--min-tensor-size 1024 has no effect"),
    "effect of offload_to": ({"offload_to": "host"}, "data=2", "", "--offload-to host has no effect without --offload"),
    "effect of offload_dir": ({"offload_dir": "/x"}, "data=2", "", "--offload-dir /x has no effect without --offload"),
    "effect of context_method": ({"context_method": "ring"}, "data=2", "", "there is no axis context"),
    "effect of reshard_after": ({"reshard_after": 1}, "data=2", "", "there is no axis rows or columns"),
    "effect of sequence_parallel": ({"sequence_parallel": True}, "data=2", "", "--sequence-parallel has no effect"),
    "size of halos": ({}, "rows=8,columns=8", "convnet", "shards the images of convnet so thin that ranks fetch more"),
    "parts of experts": ({"rebalance_every": 2}, "data=2", "gpt-moe-nano", "experts are not in parts here"),
    "shared keys": ({}, "model=8", "llama-nano", "every rank along model=8 computes all 2 key heads of llama-nano"),
}  # fmt: skip


@pytest.mark.parametrize("name", [requirement.name for requirement in REQUIREMENTS])
def test_a_case_without_what_is_needed_is_refused_or_noted_in_a_line(name):
    options, mesh, model_name, text = (REFUSED | NOTED)[name]
    composition, axes = ParallelConfig(**options), parse_axes(mesh)
    model = build_model(model_name) if model_name else None
    (unmet,) = [unmet for unmet in composition.unmet(axes, model) if unmet.requirement.name == name]
    assert text in unmet.text and "\n" not in unmet.text
    if name in NOTED:
        assert unmet.text in composition.check(axes, model)
    else:
        with pytest.raises(UsageError) as error:
            composition.check(axes, model)
        assert str(error.value) == unmet.text


def test_each_requirement_has_a_name_and_words_of_its_own():
    names = [requirement.name for requirement in REQUIREMENTS]
    assert sorted(names) == sorted({*REFUSED, *NOTED})
    assert all(requirement.needs and "\n" not in requirement.needs for requirement in REQUIREMENTS)
    assert {each.name for each in REQUIREMENTS if each.nearest is not None} == REFUSED.keys()


def test_each_option_has_a_requirement_or_is_free():
    usual = {field.name: field.default for field in fields(ParallelConfig)}
    declared = {option for requirement in REQUIREMENTS for option in requirement.options}
    assert sorted(usual) == sorted([*declared, *FREE])
    assert {usual[option] for requirement in REQUIREMENTS for option in requirement.left_out} == {None}


def test_several_options_that_do_not_fit_are_left_out_each_for_its_reason():
    model = build_model("gpt-nano")
    saved = ParallelConfig(stages="0,3,7", overlap_layers="2:4,6:8", state_shares="data=3:1", zero=1)
    fitted, notices = saved.fitted({"pipe": 2}, model)
    assert fitted == ParallelConfig(zero=1)
    assert [notice.split(" (")[0] for notice in notices] == [
        "continues without --state-shares data=3:1",
        "continues without --stages 0,3,7",
        "continues without --overlap-layers 2:4,6:8",
    ]


def test_an_option_that_was_given_is_refused_by_what_it_does_not_fit():
    saved = ParallelConfig(schedule="interleaved", chunks=5)
    with pytest.raises(UsageError, match="too few for 12 stages of 5 chunks"):  # not: Add --schedule interleaved
        saved.fitted({"pipe": 12}, build_model("gpt-nano"), given={"chunks"})
