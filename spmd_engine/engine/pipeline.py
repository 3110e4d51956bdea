"""Layers that run one after the other on a rank, and the execution of a schedule on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.group import Group
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.schedules import schedule as schedules
from spmd_engine.engine.state.buffers_and_side_outputs import Extras
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.errors import UsageError
from spmd_engine.layers.deferred import wait_for
from spmd_engine.layers.layer import Extra, ForwardContext, Layer
from spmd_engine.models.model import Model
from spmd_engine.sharding.shards import Shards


class LayerSegment(NamedTuple):
    """Neighbours among the layers of a chunk: if ``recomputed``, a forward keeps only what goes into them."""

    layers: range
    recomputed: bool = False


@dataclass
class Saved:
    """What a forward of a segment leaves for its backward."""

    ctx: ForwardContext
    x: Array | None  #: what went in, if the forward is to be repeated
    of_layers: list[Any] = field(default_factory=list)  #: what each layer saved, if not
    decided: dict[int, Any] = field(default_factory=dict)  #: by layer: what a repetition must not decide anew


class Chunk:
    """Consecutive layers of a model, with everything that one pass through them needs."""

    def __init__(
        self,
        segments: Sequence[LayerSegment],
        layers: Sequence[tuple[str, Layer]],
        shards: Sequence[Shards],
        unsharder: Unsharder,
        reducer: Reducer,
        extras: Extras | None = None,
    ) -> None:
        """``extras`` keeps what forwards return beside their outputs; without it, that is lost."""
        self._segments, self._layers, self._shards = segments, layers, shards
        self._unsharder, self._reducer, self._extras = unsharder, reducer, extras
        self._numbers = [number for segment in segments for number in segment.layers]
        self._losses = {number: losses for number in self._numbers if (losses := _losses_of(layers[number][1]))}

    @contextmanager
    def wrapped(self, wrap: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """Meanwhile ``wrap(name, layer)`` takes the place of each layer."""
        layers, self._layers = self._layers, [(name, wrap(name, layer)) for name, layer in self._layers]
        try:
            yield
        finally:
            self._layers = layers

    def forward(self, x: Array, ctx: ForwardContext) -> tuple[Array, list[Saved]]:
        """The output, and what the backward needs."""
        saved = []
        for segment in self._segments:
            again = segment.recomputed and ctx.training
            kept = Saved(ctx, x if again else None)
            x = self._forward(segment, x, replace(ctx, saving=False) if again else ctx, kept)
            saved.append(kept)
        return x, saved

    def _forward(self, segment: LayerSegment, x: Array, ctx: ForwardContext, kept: Saved) -> Array:
        for number in segment.layers:
            p = self._unsharder.unshard(number, prefetch=self._after(number))
            x, saved, *extra = self._layers[number][1].forward(self._shards[number], p, x, ctx)
            if ctx.training:
                if ctx.saving:
                    kept.of_layers.append(saved)
                if extra:
                    self._take(number, ctx, extra[0], kept)
        return x

    def _take(self, number: int, ctx: ForwardContext, extra: Extra, kept: Saved) -> None:
        if self._extras is not None:
            self._extras.take(number, ctx, extra)
        if not ctx.saving and extra.decided is not None:
            kept.decided[number] = extra.decided

    def backward(self, saved: list[Saved], dy: Array, on_input_gradient: Callable[[Any], None]) -> None:
        """Both parts of the backward, layer by layer: the weights' gradients while what they need is at hand.

        ``on_input_gradient`` is called with the input's gradient as soon as it is known: another stage may wait for
        it, while none waits for the gradients of the first layer's weights.
        """
        layers = self._backward_input(saved, dy, on_input_gradient)
        del dy  # only they need it, and not for long
        for number, rest in layers:
            self._backward_weight(number, rest)
            del rest  # before the next layer makes its own

    def backward_input(self, saved: list[Saved], dy: Array) -> tuple[Any, list[tuple[int, Any]]]:
        """The input's gradient, and what ``backward_weight`` needs."""
        gradients: list[Any] = []
        rests = list(self._backward_input(saved, dy, gradients.append))
        return gradients[0], rests

    def backward_weight(self, rests: list[tuple[int, Any]]) -> None:
        """The gradients of the weights, in the order of the backward."""
        while rests:
            self._backward_weight(*rests.pop(0))

    def _backward_input(
        self, saved: list[Saved], dy: Array, on_input_gradient: Callable[[Any], None]
    ) -> Iterator[tuple[int, Any]]:
        for segment in reversed(self._segments):
            kept = saved.pop()
            keep: Sequence[int] = ()
            if kept.x is not None:
                keep = segment.layers  # what the forward gathers now, the backward uses at once
                self._repeat(segment, kept)
            for number in reversed(segment.layers):
                p = self._unsharder.unshard(number, keep=keep, prefetch=self._before(number))
                side = self._side_gradients(number, kept.ctx)
                dy, rest = self._layers[number][1].backward_input(
                    self._shards[number], p, kept.of_layers.pop(), dy, *side
                )
                if number == self._numbers[0]:
                    on_input_gradient(wait_for(dy))
                    dy = None
                yield number, rest
                del rest
                dy = wait_for(dy)  # only now: it may have travelled while the weights got their gradients

    def _repeat(self, segment: LayerSegment, kept: Saved) -> None:
        x, kept.x = kept.x, None
        for number in segment.layers:
            p = self._unsharder.unshard(number, keep=segment.layers, prefetch=self._before(segment.layers[0]))
            ctx = replace(kept.ctx, decided=kept.decided[number]) if number in kept.decided else kept.ctx
            x, saved, *_ = self._layers[number][1].forward(self._shards[number], p, x, ctx)
            kept.of_layers.append(saved)

    def _side_gradients(self, number: int, ctx: ForwardContext) -> tuple[dict[str, float], ...]:
        """The gradients of a layer's own losses, if it has any: each is so much of the step's loss."""
        return (dict.fromkeys(self._losses[number], ctx.share),) if number in self._losses else ()

    def _backward_weight(self, number: int, rest: Any) -> None:
        self._layers[number][1].backward_weight(self._shards[number], rest, self._reducer.sums(number))
        self._reducer.layer_done(number)

    def _after(self, number: int) -> range:
        return range(number + 1, self._numbers[-1] + 1)

    def _before(self, number: int) -> range:
        return range(number - 1, self._numbers[0] - 1, -1)


def _losses_of(layer: Layer) -> list[str]:
    return [name for name, output in layer.side_outputs.items() if output.loss]


# --- Which activations are recomputed in the backward instead of kept: memory for time


class Recompute(Enum):
    """What a forward does not keep."""

    NONE = "none"  #: everything is kept
    #: of each block (layers whose names share what stands before "/") only its input is kept: Chen et al., "Training
    #: Deep Nets with Sublinear Memory Cost" (2016)
    BLOCK = "block"
    #: of attention only its input: Korthikanti et al., "Reducing Activation Recomputation" (2022)
    ATTENTION = "attention"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise UsageError(f"no recompute {value!r}; there are: {', '.join(each.value for each in cls)}")


def check_recompute(model: Model, recompute: Recompute) -> None:
    """Raise UsageError if a model has nothing of what is to be recomputed."""
    everything = segments(model, range(len(model.layers)), recompute)
    if recompute is not Recompute.NONE and not any(segment.recomputed for segment in everything):
        has_blocks = any("/" in name for name, _ in model.layers)
        nearest = "block or none" if has_blocks else "none"
        raise UsageError(f"recompute {recompute.value}: {model.name} has no {recompute.value}; choose {nearest}")


def segments(model: Model, layers: Iterable[int], recompute: Recompute) -> list[LayerSegment]:
    """Consecutive layers, split into segments that are recomputed together or kept."""

    def part(number: int) -> tuple[str, bool]:
        name, layer = model.layers[number]
        block, slash, _ = name.partition("/")
        if recompute is Recompute.BLOCK and slash:
            return block, True
        if recompute is Recompute.ATTENTION and layer.attends:
            return name, True
        return "", False

    return [LayerSegment(range((n := list(numbers))[0], n[-1] + 1), key[1]) for key, numbers in groupby(layers, part)]


# --- Carries out a schedule: the instructions of one step, on this rank's chunks of layers


Key = tuple[int, int]  # micro-batch and chunk


class PipelineNeighbours:
    """The stages before and after this one: chunk c of all chunks lives on stage c modulo the number of stages."""

    def __init__(self, pipe: Group | None, chunks: int, backend: Backend) -> None:
        self._pipe: Any = pipe  # None on a single stage, which sends nothing
        self.chunks, self._backend = chunks, backend
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

    ``contexts`` describe the micro-batches, ``inputs`` go into the first chunk; ``loss_gradient``
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
        """The gradient of a chunk's input is known: the chunk before needs it, so it is sent at once."""
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
