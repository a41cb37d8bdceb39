"""Decides which rows of a prompt the last layers process: `off`, `exact` or `bounded` (engine.md A1).

In a V4.1 model the layers from the last KV source `s` on own no compressed entries beside those
that `s` itself writes; all they leave behind for later tokens is a window of W rows each. So once
`s` has written entries and index keys for every row of a prompt, the *tail*, layers s..L-1, need
only process rows near its end:

* `off`: every row, as in any other model.
* `exact`: every row on which an output depends that somebody wants. Layer l is W - 1 rows wider
  than layer l + 1, since its rows are what the window of the next layer reaches back to. Equal to
  `off` but for rounding.
* `bounded`: the last W rows in every layer. Their windows end at the first of them, so that what
  layers above s know of the text before is what its compressed entries say: an approximation.

One number places it all: the *anchor*, the first row whose output is wanted. That is a prompt's
last row or, with prompt log-probabilities, the first row that scores one. From the anchor follows
for every layer a *low*: the first row it processes, which is also its floor: the lowest position
any window of the request may reach in that layer. Rows at and behind the low are processed once,
whatever the chunks are, so that results do not depend on them.

What a request leaves in memory is then a function of its tokens, its mode and its anchor, which is
what decides whether a snapshot fits another request (`Tail.fits`).

Pure: counts and positions; no tensors, so that every path of the model shares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.api import EngineError, GenerateRequest, PrefillMode
from engine.plan.step import Chunk

if TYPE_CHECKING:
    from engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Tail:
    """The layers of a model that need not process a whole prompt.

    Args:
        first: the last KV source s, the first layer of the tail.
        num_layers: L, of the whole model.
        window: W, positions a window covers.
    """

    first: int
    num_layers: int
    window: int

    def low(self, mode: PrefillMode, anchor: int, layer: int) -> int:
        """First position that a layer processes, and the lowest that its windows reach."""
        if mode == "off" or layer < self.first:
            return 0
        reach = self.num_layers - layer if mode == "exact" else 1
        return max(0, anchor - reach * (self.window - 1))

    def halo(self, mode: PrefillMode) -> int:
        """Rows before the anchor that the tail's first layer processes."""
        far = self.num_layers * self.window
        return far - self.low(mode, far, self.first) if mode != "off" else 0

    def fits(
        self, mode: PrefillMode, anchor: int, length: int, kept_anchor: int, *, same: bool
    ) -> bool:
        """Whether a request can go on from the state that another one of its mode left.

        The layers below the tail are the same in any case. The tail's windows are needed unless
        the request's own rows begin behind the state's end; they hold what is needed if the other
        request's tail began no later than this one's does.

        Args:
            mode: of both requests.
            anchor: of the request.
            length: tokens the state stands after; at most the anchor of a request that begins.
            kept_anchor: of the request that left the state.
            same: whether the request has run before, so that bounded results must be those it
                had: its windows cannot be exchanged for another's.
        """
        if self.low(mode, anchor, self.first) >= length:
            return True
        if mode == "bounded" and same:
            return kept_anchor == anchor
        return kept_anchor <= anchor

    def resumed_anchor(self, mode: PrefillMode, anchor: int, length: int, kept_anchor: int) -> int:
        """Anchor of a request that goes on from a state that fits.

        In bounded mode, a request whose rows would begin before the state's end goes on with the
        state's windows as a decode would: all its rows run, and what it sees begins where it began
        for the request before it.
        """
        needs_windows = self.low(mode, anchor, self.first) < length
        return kept_anchor if mode == "bounded" and needs_windows else anchor


@dataclass(frozen=True, slots=True)
class Stage:
    """From one layer on, what is left of each chunk, in the order of the plan's chunks.

    Args:
        layer: the first layer of the stage.
        firsts: first position processed; the chunk's end where none is.
        floors: lowest position that the windows of the chunk's rows may reach; 0 where none of
            them would reach below it anyway.
    """

    layer: int
    firsts: tuple[int, ...]
    floors: tuple[int, ...]


def stages(tail: Tail | None, chunks: Sequence[Chunk]) -> tuple[Stage, ...]:
    """Plan the tail of a step; rows only ever become fewer from stage to stage.

    Args:
        tail: of the model; None for a model without.
        chunks: of the step, in any mix of modes.

    Returns:
        ascending by layer; nothing where every layer processes every row with its whole window.

    Raises:
        ValueError: a row whose logits are wanted would not be processed, or a chunk asks for a
            tail that the model does not have.
    """
    if all(chunk.prefill == "off" or chunk.start >= chunk.anchor for chunk in chunks):
        return ()  # from the anchor on, windows reach no further than the lows: decode, mostly
    if tail is None:
        raise ValueError("a chunk asks for a tail, but the model has none")
    found: list[Stage] = []
    starts = tuple(chunk.start for chunk in chunks)
    before = Stage(0, starts, (0,) * len(chunks))
    for layer in range(tail.first, tail.num_layers):
        lows = [tail.low(chunk.prefill, chunk.anchor, layer) for chunk in chunks]
        stage = Stage(
            layer,
            tuple(min(max(c.start, low), c.end) for c, low in zip(chunks, lows, strict=True)),
            tuple(
                low if low > max(c.start, low) - tail.window + 1 else 0
                for c, low in zip(chunks, lows, strict=True)
            ),
        )
        if (stage.firsts, stage.floors) != (before.firsts, before.floors):
            found.append(stage)
            before = stage
    for chunk, first in zip(chunks, before.firsts, strict=True):
        wanted = chunk.first_wanted
        if wanted is not None and wanted < first:
            raise ValueError(
                f"request {chunk.request_id}: row {wanted} is wanted, but the tail of mode"
                f" {chunk.prefill} with anchor {chunk.anchor} begins at row {first}"
            )
    return tuple(found)


def tail_problems(config: ModelConfig, built: int | None = None) -> Iterator[str]:
    """Say why the tail of a model may not skip rows, one sentence per condition (engine.md P1-P5).

    Args:
        config: of the model.
        built: layers this process runs; None for all.
    """
    sources = config.kv_source_layer_ids
    if not sources:
        kind = "V4.1" if config.is_v41 else "V4"
        yield f"P1: no layer is named as a KV source (a {kind} model without kv_source_layer_ids)"
        return
    first = max(sources)
    layer, above = config.layers[first], config.layers[first + 1 :]
    candidates = config.candidate_source_layer_id
    if layer.index_source not in (None, first):
        yield f"P2: layer {first} reads the choice of layer {layer.index_source}"
    if candidates not in (None, first):
        yield f"P2: candidates come from layer {candidates}, expected {first} or none"
    for other in above:
        if other.ratio not in (0, 1):
            yield f"P3: layer {other.index} has compress ratio {other.ratio}, expected 0 or 1"
    for other in (layer, *above):
        if other.engram is not None:
            yield f"P4: layer {other.index} has an Engram table"
        if other.hash_routed:
            yield f"P4: layer {other.index} routes experts by token id"
    if built is not None and built != config.num_hidden_layers:
        yield f"P5: {built} of {config.num_hidden_layers} layers run here, expected all of them"


def tail_of(config: ModelConfig, built: int | None = None) -> Tail | None:
    """Give a model's tail; None where `tail_problems` has something to say."""
    if any(tail_problems(config, built)):
        return None
    return Tail(max(config.kv_source_layer_ids), config.num_hidden_layers, config.sliding_window)


class PromptTail:
    """What the tail does with one request; settled when the request is first admitted.

    Attributes:
        mode: how its prompt is processed.
        reason: why not as asked or set; None where it is.
        scored_from: first row that scores a prompt token; None where no token is to be scored.
        anchor: as said above; 0 where the mode is off, since every row is there then.
    """

    __slots__ = ("_settled", "_tail", "anchor", "mode", "reason", "scored_from")

    def __init__(
        self,
        tail: Tail | None,
        mode: PrefillMode,
        reason: str | None,
        *,
        num_prompt: int,
        scored_from: int | None,
    ) -> None:
        self._tail = tail
        self._settled = False
        self.mode = mode
        self.reason = reason
        self.scored_from = scored_from
        wanted = num_prompt - 1 if scored_from is None else scored_from
        self.anchor = 0 if mode == "off" else wanted

    @property
    def salt(self) -> bytes:
        """What its state has in common with that of other requests beside the tokens."""
        return b"" if self.mode == "off" else self.mode.encode()

    def fits(self, length: int, kept_anchor: int, *, has_output: bool) -> bool:
        """Whether the request can go on from a state that another one of its mode left.

        Args:
            length: tokens the state stands after.
            kept_anchor: of the request that left it.
            has_output: whether tokens were generated, so that no prompt row is wanted any more.
        """
        if not has_output and self.scored_from is not None and length > self.scored_from:
            return False  # a row that scores must be processed
        if self.mode == "off" or self._tail is None:
            return True
        return self._tail.fits(self.mode, self.anchor, length, kept_anchor, same=self._settled)

    def settle(self, length: int, kept_anchor: int) -> None:
        """Go on from a state that fits, or from nothing: length 0. The anchor stays from then on."""
        if length and not self._settled and self.mode != "off" and self._tail is not None:
            self.anchor = self._tail.resumed_anchor(self.mode, self.anchor, length, kept_anchor)
        self._settled = True

    def rows(self, start: int, end: int) -> int:
        """How many of the positions [start, end) the tail's first layer processes."""
        if self.mode != "off" and self._tail is not None:
            start = max(start, self._tail.low(self.mode, self.anchor, self._tail.first))
        return max(0, end - start)

    def mark(self, position: int, block_size: int) -> int:
        """Where to take a snapshot so that any longer prompt with these tokens can go on from it.

        A prompt that is one token longer still processes a halo of rows in the tail.

        Args:
            position: up to where prompts agree, a block boundary.
            block_size: tokens per block.
        """
        halo = self._tail.halo(self.mode) if self._tail is not None else 0
        return max(0, (position - halo) // block_size * block_size)


class Replay:
    """How an engine processes prompts.

    Args:
        tail: of the model; None where it has none.
        default: mode of requests that do not ask for one.
        problems: why the model has no tail.

    Raises:
        EngineError: the default needs a tail.
    """

    def __init__(
        self,
        tail: Tail | None = None,
        default: PrefillMode = "off",
        problems: Sequence[str] = (),
    ) -> None:
        self.tail = tail
        self._default = default
        self._problems = tuple(problems) or ("it has no shared KV tail",)
        if default != "off" and tail is None:
            raise EngineError(f"engine options: {self._does_not_apply(default)}")

    def resolve(self, request: GenerateRequest) -> PromptTail:
        """Decide how a request's prompt is processed.

        Prompt log-probabilities and trainer parity turn bounded into exact, which is right in
        every row that is asked for.

        Raises:
            EngineError: the model has no tail, or the request contradicts itself.
        """
        num_prompt = len(request.prompt_ids)
        scored_from = None
        if request.prompt_logprobs is not None:
            scored_from = max(request.prompt_logprobs_start, 1) - 1
            if scored_from > num_prompt - 2:
                scored_from = None
        mode, reason = request.prefill or self._default, None
        if mode != "off" and self.tail is None:
            raise EngineError(self._does_not_apply(mode))
        if mode == "bounded" and request.trainer_parity:
            if request.prefill == "bounded":
                raise EngineError(
                    "prefill: expected off or exact together with trainer_parity, since bounded"
                    " is not numerically equal; got bounded"
                )
            mode, reason = "exact", "trainer parity"
        elif mode == "bounded" and scored_from is not None:
            mode, reason = "exact", f"prompt logprobs from row {scored_from}"
        return PromptTail(self.tail, mode, reason, num_prompt=num_prompt, scored_from=scored_from)

    def _does_not_apply(self, mode: PrefillMode) -> str:
        return f"prefill: {mode} does not apply to this model: {'; '.join(self._problems)}"
