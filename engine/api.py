"""What the engine says and hears: token ids in, token ids out.

Knows nothing of text, tools, HTTP or JSON, and loads no GPU stack: the gateway imports this module
in a process that may never touch torch. Everything here is a frozen value; a field names who sets it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Protocol

#: How a prompt is processed by layers that share the last KV source; see engine.plan.replay.
PrefillMode = Literal["off", "exact", "bounded"]
PREFILL_MODES: tuple[PrefillMode, ...] = ("off", "exact", "bounded")


def listed(problems: Sequence[str], separator: str = "; ") -> str:
    """Join problems for an error's text: the first eight, and how many more there are.

    A wrong folder has one problem per tensor, which is tens of thousands for a large model.
    """
    shown = list(problems[:8])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown):,} more")
    return separator.join(shown)


class EngineError(Exception):
    """The engine cannot do what was asked; the message says why and what would be accepted."""


class PromptTooLongError(EngineError):
    """The prompt alone, or with the tokens asked for, does not fit the model's context.

    Args:
        prompt_tokens: length of the prompt, in tokens.
        max_model_len: the context of the served model, in tokens.
    """

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens does not fit the context of {max_model_len} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class EngineDeadError(EngineError):
    """The engine thread has ended; no request can be served any more."""


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token was sampled; it is the last of the delta's token ids
    LENGTH = "length"  # max_tokens or the context was reached
    ABORT = "abort"  # the caller gave up; no delta follows
    ERROR = "error"  # the backend failed; TokenDelta.error says how


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated by the caller's protocol; the engine trusts the ranges.

    Args:
        max_tokens: most tokens to generate, >= 1.
        temperature: 0 is greedy (lowest id wins a tie).
        top_p: nucleus mass in (0, 1].
        seed: None draws a fresh one; the same seed, prompt and settings give the same tokens,
            whatever else runs in the batch.
        top_logprobs: None for no logprobs, k >= 0 for the chosen token plus the k most likely.
        stop_token_ids: ids that end the generation (the model's EOS is among them).
        ignore_eos: benchmarks only: stop_token_ids do not end the generation.
        presence_penalty: taken from the logit of every token id that was generated before, in
            [-2, 2]; prompt tokens do not count. Before the temperature, as is all below.
        frequency_penalty: likewise, as often as it was generated.
        logit_bias: (token id, value) pairs, each id once: added to the logit, value in [-100, 100].
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether what was generated before has a say."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def moves_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        return self.penalises or bool(self.logit_bias)


class TokenGuide(Protocol):
    """Says which tokens of one request may come next: where constrained decoding fits in."""

    def next(self, generated: Sequence[int]) -> bytes | int | None:
        """Constrain the token that is drawn next.

        Called in the engine's thread before each token, perhaps more than once for the same one (a
        preempted request goes on where it was), so it must be quick and depend on nothing else.

        Args:
            generated: all tokens of the reply so far.

        Returns:
            None where any token may come; a token id that comes whatever the model says; or a mask of
            4 * ceil(V / 32) bytes: bit v % 8 of byte v // 8 says whether token v may come.
        """


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation.

    Args:
        id: unique among live requests; the handle for abort.
        prompt_ids: the whole prompt.
        sampling: how to choose tokens.
        script: used by the scripted backend alone: the name of the line to play.
        prefill: how the prompt is processed; None takes the server's setting.
        trainer_parity: whether logits must be those of a trainer's forward pass up to rounding,
            which rules bounded prefill out.
        prompt_logprobs: None, or k >= 0 for the log-probability of each prompt token plus the k
            most likely at its place.
        prompt_logprobs_start: position of the first prompt token that is scored. Token 0 has
            nothing before it and never is.
        images: those of the prompt as data URLs, in the order of their placeholders; only for models
            with a vision tower.
        cache_salt: only requests with the same one share what the prefix cache keeps, so that
            nobody learns from a hit what another one's prompt was.
        guide: constrains the tokens that are drawn; one that raises or answers wrongly ends its own
            request. Steps are not launched ahead while such a request runs.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    script: str | None = None
    prefill: PrefillMode | None = None
    trainer_parity: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    images: tuple[str, ...] = ()
    cache_salt: str = ""
    guide: TokenGuide | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one sampled token and of its strongest rivals.

    Args:
        logprob: of the sampled token, under the model's unmodified distribution.
        top: (token id, logprob) pairs, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. A sampled stop token counts as a completion token.

    Args:
        prompt_tokens: length of the prompt.
        completion_tokens: tokens sampled so far.
        cached_tokens: of the prompt, found in the prefix cache and not processed again.
        prefill: how the prompt was processed.
        prefill_reason: why not as asked or set; None where it was.
        tail_rows: prompt rows that the last layers processed; prompt_tokens - cached_tokens where
            none was left out.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    prefill: PrefillMode = "off"
    prefill_reason: str | None = None
    tail_rows: int = 0


class TokenDelta(NamedTuple):
    """What one step adds to one request. A named tuple: the one value here made for every token.

    Args:
        request_id: whose.
        token_ids: newly sampled ids, a final stop token included.
        logprobs: one per token id, when asked for.
        finish_reason: set on the last delta, and only there.
        usage: set on the last delta, and on the first so that cached_tokens is known early.
        error: set with FinishReason.ERROR: what failed, fit to be shown to a client.
        prompt_logprobs: set on the first delta where asked for: one per prompt token from
            prompt_logprobs_start on, None for token 0.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculative decoding has come to since the start.

    Args:
        drafted: tokens drafted.
        accepted: of them, those that the model's own draws agreed with.
        lengths: lengths[k] is how many verifications yielded k + 1 tokens: k accepted ones and the
            token drawn after them.
        plain_rows: decode rows that took no part although the engine drafts, by reason.
    """

    drafted: int = 0
    accepted: int = 0
    lengths: tuple[int, ...] = ()
    plain_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verification, on average; 0 before the first."""
        count = sum(self.lengths)
        return 1 + self.accepted / count if count else 0.0

    def plus(
        self, size: int, accepted: Sequence[int], plain_rows: Mapping[str, int]
    ) -> SpeculationStats:
        """Add a step.

        Args:
            size: tokens of each draft.
            accepted: tokens taken of each draft.
            plain_rows: as above.
        """
        if not accepted and not plain_rows:
            return self
        lengths = [*self.lengths, *[0] * (size + 1 - len(self.lengths))]
        for count in accepted:
            lengths[count] += 1
        rows = dict(self.plain_rows)
        for reason, number in plain_rows.items():
            rows[reason] = rows.get(reason, 0) + number
        return SpeculationStats(
            self.drafted + size * len(accepted),
            self.accepted + sum(accepted),
            tuple(lengths),
            rows,
        )


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """What paged experts have come to since the start, all layers together.

    Args:
        hits: experts that a wave asked for and found on the device.
        misses: those that had to come from the host.
        bytes_copied: what came, guesses included.
        waves: sets of experts that were computed together; one for each layer of a decode step.
        prefetched: experts brought in ahead by a guess.
        prefetch_hits: of them, those that the next wave asked for; they are hits too.
    """

    hits: int = 0
    misses: int = 0
    bytes_copied: int = 0
    waves: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0

    def plus(self, other: ExpertStats) -> ExpertStats:
        """Add what a runner before has come to."""
        names = [item.name for item in fields(self)]
        return ExpertStats(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and tests; counts of requests, blocks and tokens.

    Args:
        running: requests that hold memory.
        waiting: requests that hold none.
        free_blocks: blocks no request holds, those included that only the prefix cache holds.
        total_blocks: blocks that requests can hold.
        steps: steps run since the start.
        prompt_tokens: prompt tokens of all requests that got a first token.
        completion_tokens: tokens sampled since the start.
        preemptions: times a running request lost its memory to an older one.
        cached_tokens: of prompt_tokens, those found in the prefix cache.
        prefix_hits: requests of which some were.
        cached_blocks: blocks that only the prefix cache holds.
        snapshots: states the prefix cache keeps.
        evictions: snapshots dropped since the start.
        speculation: of drafted tokens; all zero where none are drafted.
        experts: of paged experts; all zero where every expert is on the device.
        tail_rows: by mode, rows of prompts that the last layers processed and rows that they left
            out; what is processed again after a preemption counts again.
        alive: whether requests can be served.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    prefix_hits: int = 0
    cached_blocks: int = 0
    snapshots: int = 0
    evictions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    experts: ExpertStats = field(default_factory=ExpertStats)
    tail_rows: tuple[tuple[PrefillMode, int, int], ...] = ()
    alive: bool = True


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway must know of the model it serves.

    Args:
        name: name under which it is listed.
        version: which encoding the codec uses; "plain" for a model without a chat format, which
            serves token ids and raw completions alone.
        max_model_len: context in tokens.
        eos_token_ids: ids that end a turn.
        tokenizer_path: path of its tokenizer.json.
        has_vision: whether a vision tower is loaded.
        vocab_size: its token ids are below; None where no model is known, only a tokenizer.
    """

    name: str
    version: Literal["v4", "v4.1", "plain"]
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_path: str
    has_vision: bool = False
    aliases: tuple[str, ...] = field(default=())
    vocab_size: int | None = None
