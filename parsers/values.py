"""Frozen values that cross the room's border: what is served, how to sample, what is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from parsers.wire import TokenLogprob

ModelVersion = Literal["v4", "v4.1", "plain"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its gateway presents it.

    Args:
        name: public name, listed and accepted in requests.
        version: which prompt encoding the codec uses; "plain" for none, and then only raw
            completions are served.
        tokenizer_path: path of its ``tokenizer.json``.
        max_model_len: context in tokens, prompt and reply together.
        eos_token_ids: ids that end a turn; cut before the codec.
        aliases: further names accepted in requests; a ``*`` in one stands for any characters.
        has_vision: whether a vision tower is loaded.
        vocab_size: the model's token ids are below; None where that is not known.
    """

    name: str
    version: ModelVersion
    tokenizer_path: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    has_vision: bool = False
    vocab_size: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that can be listed, the public one first; not the patterns."""
        return (self.name, *(alias for alias in self.aliases if "*" not in alias))

    def answers_to(self, name: str) -> bool:
        """Whether a request may use a name."""
        return name in self.names or any(
            re.fullmatch(".*".join(map(re.escape, alias.split("*"))), name, re.DOTALL)
            for alias in self.aliases
            if "*" in alias
        )


@dataclass(frozen=True, slots=True)
class LogitMoves:
    """What a request adds to the logits before they are scaled by the temperature.

    Args:
        presence: taken from those of tokens that were generated before, in [-2, 2].
        frequency: likewise, as often as they were.
        bias: (token id, value) pairs that are added, values in [-100, 100].
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


NO_MOVES = LogitMoves()


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Which prompt tokens are to be scored.

    Args:
        rivals: how many of the most likely tokens are told beside each, 0-20.
        start: position of the first.
    """

    rivals: int
    start: int


@dataclass(frozen=True, slots=True)
class PromptNote:
    """What the engine told of a prompt.

    Args:
        prefill: how it was processed, to be shown as it is; None to show nothing.
        scores: one for each prompt token from the asked position on, None for token 0; None where
            nothing was asked for.
    """

    prefill: Mapping[str, Any] | None
    scores: Sequence[TokenLogprob | None] | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine is to choose tokens, resolved from the request.

    Args:
        max_tokens: most tokens to generate, >= 1; prompt plus this fits the context.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        seed: None leaves the choice to the engine.
        top_logprobs: None for no logprobs, else how many rivals to report, 0-20.
        moves: penalties and biases.
        scoring: which prompt tokens are to be scored; None for none.
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None = None
    top_logprobs: int | None = None
    moves: LogitMoves = NO_MOVES
    scoring: PromptScoring | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What constrained decoding would enforce on the answer (the codec's words).

    Args:
        kind: ``json``, ``regex``, ``tool_call`` or ``tool_call_required``.
        schema: the JSON Schema, the regex, or the tools as a compact JSON array; empty for any
            JSON value.
    """

    kind: str
    schema: str


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls a request asks for.

    Args:
        mode: ``none``, ``auto`` or ``required``; a named choice is ``required``.
        names: the tools that may be called, None for any.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None

    @property
    def forced(self) -> bool:
        """Whether the reply has to hold a call."""
        return self.mode == "required"

    @property
    def only(self) -> str | None:
        """The one tool that has to be called; None where there is a choice."""
        if not self.forced or self.names is None or len(self.names) != 1:
            return None
        return next(iter(self.names))


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The JSON that an answer is asked to be.

    Args:
        schema: the JSON Schema it has to meet; None for any JSON object.
        strict: whether the client asked for it to be held.
    """

    schema: Any = None
    strict: bool = False
