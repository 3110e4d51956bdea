"""All stages of a pipeline together: their messages, their results and what they keep."""

from itertools import product
from types import SimpleNamespace

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.backend import CPU
from spmd_engine.engine import schedules
from spmd_engine.engine.pipeline import LayerSegment, PipelineNeighbours
from spmd_engine.engine.schedules.schedule import peak_activations, timeline
from support.toy_layers import Stand, execution_of, through


@pytest.mark.parametrize("stages, per_stage, micro_batches", [(2, 1, 3), (3, 1, 5), (4, 2, 4), (2, 3, 5)])
def test_both_ends_of_a_transfer_agree_and_no_two_share_a_channel(stages, per_stage, micro_batches):
    said = {}

    def stage_of(rank):
        def note(way):
            def start(peer, *args, channel, label, like=None):
                said.setdefault((way, rank, peer), []).append((channel, label))

            return start

        pipe = SimpleNamespace(size=stages, rank=rank, start_send=note("send"), start_receive=note("receive"))
        return PipelineNeighbours(pipe, [*range(stages)] * per_stage, CPU)

    ranks = [stage_of(rank) for rank in range(stages)]
    last = stages * per_stage - 1
    for m, chunk in product(range(micro_batches), range(last)):
        for source, to in ((chunk, chunk + 1), (chunk + 1, chunk)):
            ranks[source % stages].start_send(None, m, source, to)
            ranks[to % stages].start_receive(m, to, source)
    for (way, rank, peer), calls in said.items():
        channels = [channel for channel, _ in calls]
        assert len(set(channels)) == len(channels)
        assert way == "receive" or calls == said["receive", peer, rank]
    assert {label for calls in said.values() for _, label in calls} == {"input", "gradient"}


def test_without_a_pipeline_all_chunks_are_here():
    alone = PipelineNeighbours(None, [0] * 3, CPU)
    assert (alone.stages, alone.stage) == (1, 0)
    assert [alone.here(chunk) for chunk in range(3)] == [True] * 3


NAMES = ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"]


@pytest.mark.parametrize("stages, micro_batches", [(2, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_computes_what_one_stage_does_and_keeps_what_its_schedule_says(name, stages, micro_batches):
    schedule = schedules.named(name)
    layers_each = 2  # in a chunk
    count = stages * schedule.chunks
    peaks = peak_activations(timeline(schedule, stages, micro_batches))

    def program():
        with Mesh(pipe=stages) as mesh:
            stand = Stand(count * layers_each)
            stage, kept, lost = mesh.rank, [], {}
            chunks = {
                c: stand.chunk(LayerSegment(range(c * layers_each, (c + 1) * layers_each)))
                for c in range(stage, count, stages)
            }
            neighbours = PipelineNeighbours(mesh.group("pipe"), [*range(stages)] * schedule.chunks, CPU)
            execution = execution_of(stand, neighbours, chunks, micro_batches, lambda m, y: lost.setdefault(m, y))

            def watched(instructions):
                for instruction in instructions:
                    yield instruction
                    kept.append(stand.kept)

            execution.run(watched(schedule.program(stages, micro_batches, stage)))
            assert stand.kept == 0
            assert not (execution.saved or execution.outputs or execution.inputs or execution.output_gradients)
            assert max(kept) == peaks[stage] * layers_each * schedule.chunks
            assert stand.log.count("weight 0") == (micro_batches if stage == 0 else 0)
            return lost, execution.input_gradients

    results = run_threads(program, stages)
    outputs = {m: [through(range(count * layers_each), 1.0 + m)] for m in range(micro_batches)}
    assert {m: y.tolist() for m, y in results[-1][0].items()} == outputs
    assert not any(lost for lost, _ in results[:-1])
    gradients = {(m, 0): [2.0 ** (count * layers_each) * y[0]] for m, y in outputs.items()}
    assert {key: dx.tolist() for key, dx in results[0][1].items()} == gradients
    assert not any(left for _, left in results[1:])
