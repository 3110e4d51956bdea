"""Carries out a schedule: the instructions of one step, on this rank's chunks of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.group import Group
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import schedules
from spmd_engine.engine.pipeline.chunk import Chunk
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext

Key = tuple[int, int]  # micro-batch and chunk


class PipelineNeighbours:
    """The stages before and after this one: chunk c of all chunks lives on stage c modulo the number of stages."""

    def __init__(self, pipe: Group | None, chunks: int, backend: Backend) -> None:
        self._pipe, self.chunks, self._backend = pipe, chunks, backend
        self.stages = pipe.size if pipe else 1
        self.stage = pipe.rank if pipe else 0
        self._first_channel = self._used = 0

    def begin(self, micro_batches: int) -> None:
        """Use other channels than the step before: what one that broke off has sent is not for this one."""
        self._first_channel += self._used
        self._used = 2 * micro_batches * self.chunks

    def is_last(self, chunk: int) -> bool:
        return chunk == self.chunks - 1

    def here(self, chunk: int) -> bool:
        """Whether a chunk lives on this rank."""
        return chunk % self.stages == self.stage

    def start_send(self, x: Array, m: int, chunk: int, to: int) -> Pending:
        """Begin to send what ``chunk`` made of micro-batch ``m`` to the rank of the chunk ``to``."""
        return self._pipe.start_send(
            to % self.stages, x, channel=self._channel(m, chunk, to), label="input" if to > chunk else "gradient"
        )

    def start_receive(self, m: int, chunk: int, source: int) -> Pending:
        """Begin to receive what the chunk ``source`` made of micro-batch ``m`` for ``chunk``."""
        label = "input" if chunk > source else "gradient"
        channel = self._channel(m, source, chunk)
        return self._pipe.start_receive(source % self.stages, like=self._backend, channel=channel, label=label)

    def _channel(self, m: int, source: int, to: int) -> int:
        """Chunks of several micro-batches send in another order than they are waited for."""
        return self._first_channel + 2 * (m * self.chunks + source) + (to < source)


class Execution:
    """One step, or one evaluation, of this rank: takes instructions, keeps what is between them.

    ``contexts`` and ``inputs`` tell where each micro-batch is and what goes into the first chunk; ``loss_gradient``
    gives the gradient of a micro-batch's outputs, from the last one.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        neighbours: PipelineNeighbours,
        contexts: Sequence[ForwardContext],
        inputs: Sequence[Array],
        loss_gradient: Callable[[int, Array], Any],
    ) -> None:
        self._chunks, self._neighbours = chunks, neighbours
        self._contexts, self._loss_gradient = contexts, loss_gradient
        self.inputs: dict[Key, Array] = {(m, 0): x for m, x in enumerate(inputs)} if 0 in chunks else {}
        self.outputs: dict[Key, Array] = {}  # until they are sent
        self.saved: dict[Key, Any] = {}
        self.output_gradients: dict[Key, Array] = {}
        self.input_gradients: dict[Key, Any] = {}  # until they are sent; of the first chunk, what the engine gives on
        self._rests: dict[Key, Any] = {}
        self._under_way: dict[schedules.Instruction, Pending] = {}

    def run(self, program: Iterable[schedules.Instruction | schedules.Wait]) -> None:
        """Carry out all instructions. Raises UsageError for one that is not known."""
        for instruction in program:
            if isinstance(instruction, schedules.Wait):
                self._finish(instruction.started)
                continue
            m, c = key = instruction.m, instruction.chunk
            match instruction:
                case schedules.Forward():
                    self._forward(m, c)
                case schedules.Backward():
                    # No name for the gradient here: that of the logits is large, and would outlive its use.
                    self._chunks[c].backward(
                        self.saved.pop(key), self.output_gradients.pop(key), lambda dx, m=m, c=c: self._leaves(m, c, dx)
                    )
                case schedules.BackwardInput():
                    dx, self._rests[key] = self._chunks[c].backward_input(
                        self.saved.pop(key), self.output_gradients.pop(key)
                    )
                    self._leaves(m, c, dx)
                    del dx
                case schedules.BackwardWeight():
                    self._chunks[c].backward_weight(self._rests.pop(key))
                case schedules.StartReceiveInput():
                    self._under_way[instruction] = self._neighbours.start_receive(m, c, c - 1)
                case schedules.StartReceiveGradient():
                    self._under_way[instruction] = self._neighbours.start_receive(m, c, c + 1)
                case schedules.StartSendOutput():
                    self._under_way[instruction] = self._neighbours.start_send(self.outputs.pop(key), m, c, c + 1)
                case schedules.StartSendGradient():
                    self._start_send_gradient(instruction)
                case _:
                    raise UsageError(f"this engine cannot execute {instruction}")

    def _forward(self, m: int, c: int) -> None:
        y, saved = self._chunks[c].forward(self.inputs.pop((m, c)), self._contexts[m])
        if self._contexts[m].training:
            self.saved[m, c] = saved
        if self._neighbours.is_last(c):
            self.output_gradients[m, c] = self._loss_gradient(m, y)
        elif self._neighbours.here(c + 1):
            self.inputs[m, c + 1] = y
        else:
            self.outputs[m, c] = y

    def _leaves(self, m: int, c: int, dx: Any) -> None:
        """The gradient of a chunk's input is known: whoever comes before may go on, so it is sent at once."""
        if c and self._neighbours.here(c - 1):
            self.output_gradients[m, c - 1] = dx
            return
        self.input_gradients[m, c] = dx
        if c:
            self._start_send_gradient(schedules.StartSendGradient(m, c))

    def _start_send_gradient(self, instruction: schedules.StartSendGradient) -> None:
        if instruction not in self._under_way:  # else it left before the weights' gradients were made
            m, c = instruction.m, instruction.chunk
            dx = self.input_gradients.pop((m, c))
            self._under_way[instruction] = self._neighbours.start_send(dx, m, c, c - 1)

    def _finish(self, started: schedules.Instruction) -> None:
        result = self._under_way.pop(started).wait()
        key = started.m, started.chunk
        if isinstance(started, schedules.StartReceiveInput):
            self.inputs[key] = result
        elif isinstance(started, schedules.StartReceiveGradient):
            self.output_gradients[key] = result
