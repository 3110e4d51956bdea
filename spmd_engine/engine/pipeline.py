"""Layers that run one after the other on a rank, and the execution of a schedule on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.arrays.precision import is_half, rounded
from spmd_engine.comm.group import Group
from spmd_engine.comm.pending import then, wait_for
from spmd_engine.engine.schedules import schedule as schedules
from spmd_engine.engine.state.buffers_and_side_outputs import Extras
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models.model import Model
from spmd_engine.sharding.shards import Shards


class LayerSegment(NamedTuple):
    """Consecutive layers of a chunk; if ``recomputed``, a forward keeps only their input."""

    layers: range
    recomputed: bool = False


@dataclass
class Saved:
    """What a forward of a segment saves for its backward."""

    ctx: ForwardContext
    x: Array | None  #: the input, if the backward repeats the forward
    of_layers: list[Any] = field(default_factory=list)  #: what each layer saved, otherwise
    decided: dict[int, Any] = field(default_factory=dict)  #: by layer: decisions that the repeated forward must reuse


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
        stash: Any = None,
        dtype: Any = None,
    ) -> None:
        """``extras`` stores what forwards return in addition to outputs; without it, that is dropped. ``stash`` keeps
        what they save; without it, that stays in memory. Between layers, arrays of wider floats than ``dtype`` are
        rounded to it, if it has 16 bits."""
        self._segments, self._layers, self._shards = segments, layers, shards
        self.stash = stash
        self._unsharder, self._reducer, self._extras = unsharder, reducer, extras
        self._half: Any = dtype if dtype is not None and is_half(dtype) else None
        self._numbers = [number for segment in segments for number in segment.layers]
        self._later = {number: range(number + 1, self._numbers[-1] + 1) for number in self._numbers}
        self._earlier = {number: range(number - 1, self._numbers[0] - 1, -1) for number in self._numbers}
        outputs = {number: layers[number][1].side_outputs.items() for number in self._numbers}
        self._losses = {number: [name for name, output in of if output.loss] for number, of in outputs.items()}

    @contextmanager
    def wrapped(self, wrap: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """In this context ``wrap(name, layer)`` replaces each layer."""
        layers, self._layers = self._layers, [(name, wrap(name, layer)) for name, layer in self._layers]
        try:
            yield
        finally:
            self._layers = layers

    def forward(self, x: Array, ctx: ForwardContext) -> tuple[Array, list[Saved]]:
        """The output, and what the backward needs."""
        saved = []
        for segment in self._segments:
            repeated = segment.recomputed and ctx.training
            record = Saved(ctx, self._put(x) if repeated else None)
            x = self._forward(segment, x, replace(ctx, saving=False) if repeated else ctx, record)
            saved.append(record)
        return x, saved

    def _forward(self, segment: LayerSegment, x: Array, ctx: ForwardContext, record: Saved) -> Array:
        unshard, layers, shards, later = self._unsharder.unshard, self._layers, self._shards, self._later
        for number in segment.layers:
            p = unshard(number, prefetch=later[number])
            result = layers[number][1].forward(shards[number], p, x, ctx)
            x = result[0] if self._half is None else self._between(number, result[0], ctx)
            if ctx.training:
                if ctx.saving:
                    record.of_layers.append(self._put(result[1], p))
                if len(result) > 2:
                    if self._extras is not None:
                        self._extras.take(number, ctx, result[2])
                    if not ctx.saving and result[2].decided is not None:
                        record.decided[number] = result[2].decided
        return x

    def _between(self, number: int, x: Array, ctx: ForwardContext) -> Array:
        """``x`` as the next layer gets it; the last one's logits for sampling stay wide."""
        wanted = ctx.wanted is not None and number == self._numbers[-1]
        return x if wanted or getattr(x, "dtype", self._half).kind != "f" else rounded(x, self._half)

    def _put(self, saved: Any, parameters: Any = ()) -> Any:
        return self.stash.put(saved, parameters) if self.stash else saved

    def _take_back(self, saved: Any, before: Sequence[Saved]) -> Any:
        """What ``_put`` was given; the last of what the records ``before`` hold is expected soon."""
        if not self.stash:
            return saved
        taken = self.stash.take(saved)
        for record in reversed(before):
            if record.x is not None or record.of_layers:
                self.stash.expect(record.x if record.x is not None else record.of_layers[-1])
                break
        return taken

    def backward(self, saved: list[Saved], dy: Array, on_input_gradient: Callable[[Any], None]) -> None:
        """Both parts of the backward, layer by layer: weights' gradients while the arrays that they need are in memory.

        ``on_input_gradient`` is called with the input's gradient as soon as it is known: another stage may wait for
        it, while none waits for the gradients of the first layer's weights.
        """
        layers = self._backward_input(saved, dy, on_input_gradient)
        del dy  # only the generator needs it, and not for long
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
        if not self._numbers:  # a chunk without layers passes on what it gets
            on_input_gradient(dy)
        for segment in reversed(self._segments):
            record = saved.pop()
            keep: Sequence[int] = ()
            repeated = record.x is not None
            if repeated:
                keep = segment.layers  # the backward uses at once what this forward gathers
                record.x = self._take_back(record.x, saved)
                self._repeat(segment, record)
            for number in reversed(segment.layers):
                p = self._unsharder.unshard(number, keep=keep, prefetch=self._earlier[number])
                # The gradients of auxiliary losses are their share in the step's loss.
                losses, factor = self._losses[number], record.ctx.share * record.ctx.scale
                side = (dict.fromkeys(losses, factor),) if losses else ()
                dy, rest = self._layers[number][1].backward_input(
                    self._shards[number], p, self._pop(record, None if repeated else saved), dy, *side
                )
                if self._half is not None:
                    dy = then(dy, lambda dx: dx if dx is None else rounded(dx, self._half))
                if number == self._numbers[0]:
                    on_input_gradient(wait_for(dy))
                    dy = None
                yield number, rest
                del rest
                dy = wait_for(dy)  # not before: its transfer overlaps the weights' gradients

    def _pop(self, record: Saved, before: Sequence[Saved] | None) -> Any:
        """What the last layer of a record saved; None: it is in memory, since the forward has just been repeated."""
        saved = record.of_layers.pop()
        return saved if before is None else self._take_back(saved, [*before, record])

    def _repeat(self, segment: LayerSegment, record: Saved) -> None:
        x, record.x = record.x, None
        for number in segment.layers:
            p = self._unsharder.unshard(number, keep=segment.layers, prefetch=self._earlier[segment.layers[0]])
            ctx = replace(record.ctx, decided=record.decided[number]) if number in record.decided else record.ctx
            x, saved, *_ = self._layers[number][1].forward(self._shards[number], p, x, ctx)
            if self._half is not None:
                x = self._between(number, x, ctx)
            record.of_layers.append(saved)

    def _backward_weight(self, number: int, rest: Any) -> None:
        self._layers[number][1].backward_weight(self._shards[number], rest, self._reducer.sums(number))
        self._reducer.layer_done(number)


# --- Recomputation of activations in the backward: memory for time


class Recompute(Enum):
    """The activations that a forward does not keep."""

    NONE = "none"  #: it keeps all
    #: keeps only the input of each block (layers with the same name before "/"): Chen et al., "Training Deep Nets with
    #: Sublinear Memory Cost" (2016)
    BLOCK = "block"
    #: keeps only the input of attention: Korthikanti et al., "Reducing Activation Recomputation" (2022)
    ATTENTION = "attention"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise UsageError(f"no recompute {value!r}; there are: {', '.join(kind.value for kind in cls)}")


def check_recompute(model: Model, recompute: Recompute) -> None:
    """Raise UsageError if a model has no layers of the kind to recompute."""
    all_segments = segments(model, range(len(model.layers)), recompute)
    if recompute is not Recompute.NONE and not any(segment.recomputed for segment in all_segments):
        has_blocks = any("/" in name for name, _ in model.layers)
        nearest = "block or none" if has_blocks else "none"
        raise UsageError(f"recompute {recompute.value}: {model.name} has no {recompute.value}; choose {nearest}")


def segments(model: Model, layers: Iterable[int], recompute: Recompute) -> list[LayerSegment]:
    """Split consecutive layers into segments that are recomputed together or kept."""

    def part(number: int) -> tuple[str, bool]:
        name, layer = model.layers[number]
        block, slash, _ = name.partition("/")
        if recompute is Recompute.BLOCK and slash:
            return block, True
        if recompute is Recompute.ATTENTION and layer.attends:
            return name, True
        return "", False

    return [LayerSegment(range((n := list(numbers))[0], n[-1] + 1), key[1]) for key, numbers in groupby(layers, part)]


# --- Execution of a schedule: the instructions of one step, on this rank's chunks of layers


Key = tuple[int, int]  # micro-batch and chunk


class PipelineNeighbours:
    """The stages before and after this one: chunk c of all chunks lives on stage ``places[c]``."""

    def __init__(self, pipe: Group | None, places: Sequence[int], backend: Backend) -> None:
        self._pipe: Any = pipe  # None on a single stage, which sends nothing
        self.places, self.chunks, self._backend = places, len(places), backend
        self.stages = pipe.size if pipe else 1
        self.stage = pipe.rank if pipe else 0
        self.first = 0  #: chunks before it need no gradient, though others are between it and them
        self._first_channel = self._used = 0

    def begin(self, micro_batches: int) -> None:
        """Use other channels than the last step, so that messages of a step that failed do not reach this one."""
        self._first_channel += self._used
        self._used = 2 * micro_batches * self.chunks

    def order(self, what: str, contexts: Sequence[ForwardContext], number: int | None = None) -> int:
        """Begin a pass with these micro-batches: a "step", a "forward", or the "backward" of the forward with this
        number. Returns the number of a forward."""
        self.begin(len(contexts))
        return 0

    def here(self, chunk: int) -> bool:
        """Whether a chunk lives on this rank."""
        return self.places[chunk] == self.stage

    def start_send(self, x: Array, m: int, chunk: int, to: int, ctx: ForwardContext | None = None) -> Any:
        """Begin to send the result of ``chunk`` for micro-batch ``m``, described by ``ctx``, to the rank of chunk
        ``to``."""
        return self._pipe.start_send(
            self.places[to], x, channel=self._channel(m, chunk, to), label="input" if to > chunk else "gradient"
        )

    def start_receive(self, m: int, chunk: int, source: int, ctx: ForwardContext | None = None) -> Any:
        """Begin to receive the result of chunk ``source`` for micro-batch ``m``, which ``chunk`` needs."""
        label = "input" if chunk > source else "gradient"
        channel = self._channel(m, source, chunk)
        return self._pipe.start_receive(self.places[source], like=self._backend, channel=channel, label=label)

    def move_gradients(self, m: int, chunk: int) -> None:
        """See the instruction ``MoveGradients``."""
        raise UsageError(f"chunk {chunk} is computed where its weights are")

    def _channel(self, m: int, source: int, to: int) -> int:
        """A channel for each message, since several micro-batches are sent and awaited in different orders."""
        return self._first_channel + 2 * (m * self.chunks + source) + (to < source)


class Execution:
    """The execution of one step or evaluation on this rank, with the arrays between instructions.

    ``contexts`` describe the micro-batches; ``inputs`` are those of the first chunk; ``loss_gradient``
    returns the gradient of a micro-batch's outputs, those of the last chunk.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        neighbours: PipelineNeighbours,
        contexts: Sequence[ForwardContext],
        inputs: Sequence[Array],
        loss_gradient: Callable[[int, Array], Any],
        number: int = 0,
    ) -> None:
        self._chunks, self._neighbours = chunks, neighbours
        self.contexts, self._loss_gradient = contexts, loss_gradient
        self.inputs: dict[Key, Array] = {(m, 0): x for m, x in enumerate(inputs)} if 0 in chunks else {}
        self.outputs: dict[Key, Array] = {}  # until they are sent
        self.saved: dict[Key, Any] = {}
        self.output_gradients: dict[Key, Array] = {}
        self.input_gradients: dict[Key, Any] = {}  # until they are sent; those of the first chunk stay
        self._rests: dict[Key, Any] = {}
        self._under_way: dict[schedules.Instruction, Any] = {}
        self.number = number  #: that of a forward whose backward is another execution

    def run(self, program: Iterable[schedules.Instruction | schedules.Wait]) -> None:
        """Execute all instructions. Raises UsageError for an unknown one."""
        for instruction in program:
            if isinstance(instruction, schedules.Wait):
                self._finish(instruction.started)
                continue
            m, c = key = instruction.m, instruction.chunk
            match instruction:
                case schedules.Forward():
                    self._forward(m, c)
                case schedules.Backward():
                    # Without a local name: the gradient of the logits is large, and the name would keep it alive.
                    self._chunks[c].backward(
                        self.saved.pop(key),
                        self.output_gradients.pop(key),
                        lambda dx, m=m, c=c: self._pass_on(m, c, dx),
                    )
                case schedules.BackwardInput():
                    dx, self._rests[key] = self._chunks[c].backward_input(
                        self.saved.pop(key), self.output_gradients.pop(key)
                    )
                    self._pass_on(m, c, dx)
                    del dx
                case schedules.BackwardWeight():
                    self._chunks[c].backward_weight(self._rests.pop(key))
                case schedules.MoveGradients():
                    self._neighbours.move_gradients(m, c)
                case schedules.StartReceiveInput():
                    self._under_way[instruction] = self._neighbours.start_receive(m, c, c - 1, self.contexts[m])
                case schedules.StartReceiveGradient():
                    self._under_way[instruction] = self._neighbours.start_receive(m, c, c + 1, self.contexts[m])
                case schedules.StartSendOutput():
                    y = self.outputs.pop(key)
                    self._under_way[instruction] = self._neighbours.start_send(y, m, c, c + 1, self.contexts[m])
                    del y
                case schedules.StartSendGradient():
                    self._start_send_gradient(instruction)
                case _:
                    raise UsageError(f"this engine cannot execute {instruction}")

    def _forward(self, m: int, c: int) -> None:
        y, saved = self._chunks[c].forward(self.inputs.pop((m, c)), self.contexts[m])
        if self.contexts[m].training:
            self.saved[m, c] = saved
        if c == self._neighbours.chunks - 1:
            self.output_gradients[m, c] = self._loss_gradient(m, y)
        elif self._neighbours.here(c + 1):
            self.inputs[m, c + 1] = y
        else:
            self.outputs[m, c] = y

    def _pass_on(self, m: int, c: int, dx: Any) -> None:
        """Pass the gradient of a chunk's input to the chunk before; send it at once if another stage waits for it."""
        if c > self._neighbours.first and self._neighbours.here(c - 1):
            self.output_gradients[m, c - 1] = dx
            return
        self.input_gradients[m, c] = dx
        if c > self._neighbours.first:
            self._start_send_gradient(schedules.StartSendGradient(m, c))

    def _start_send_gradient(self, instruction: schedules.StartSendGradient) -> None:
        if instruction not in self._under_way:  # otherwise it was sent before the weights' gradients
            m, c = instruction.m, instruction.chunk
            dx = self.input_gradients.pop((m, c))
            self._under_way[instruction] = self._neighbours.start_send(dx, m, c, c - 1, self.contexts[m])

    def _finish(self, started: schedules.Instruction) -> None:
        result = self._under_way.pop(started).wait()
        key = started.m, started.chunk
        if isinstance(started, schedules.StartReceiveInput):
            self.inputs[key] = result
        elif isinstance(started, schedules.StartReceiveGradient):
            self.output_gradients[key] = result
