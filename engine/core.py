"""The engine, one step at a time: plan, run, sample, commit.

Single-threaded and without a clock: whoever calls `step` drives it (engine.thread, a benchmark, a
test). What goes wrong in one request, or in one forward pass, ends the requests concerned and never
the engine; only a bug in the scheduler itself and a lost device are raised.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from engine.api import (
    EngineDeadError,
    EngineError,
    EngineStats,
    ExpertStats,
    FinishReason,
    GenerateRequest,
    PromptTooLongError,
    SpeculationStats,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from engine.device.build import Built, Source, build, settle
from engine.device.runner import StepResult
from engine.device.sampler import Draw, Sample, guided
from engine.options import EngineConfig
from engine.plan.replay import Replay
from engine.plan.request import RequestState
from engine.plan.scheduler import Scheduler
from engine.plan.step import Chunk, StepPlan

logger = logging.getLogger(__name__)

_FORWARD_FAILED = "the model failed while it processed this request; the server's log says more"
_LOGITS_UNUSABLE = "the model gave no usable probabilities for the next token of this request"


class Runner(Protocol):
    """What runs a plan: the reference's runner, the fast one, or a test's twin of them."""

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it launches a step before it has given the results of the one before."""

    @property
    def num_drafts(self) -> int:
        """Tokens it drafts after a stream's newest; 0 for none."""

    @property
    def expert_stats(self) -> ExpertStats:
        """What paged experts have counted; safe from any thread."""

    @property
    def weight_locks(self) -> tuple[str, ...]:
        """Why weights cannot be written in place, one reason each."""

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        """Run a plan and draw one token per chunk that wants logits, in the plan's order."""

    def close(self) -> None:
        """Log and write what was collected while serving; `expert_stats` says all from now on."""


class EngineCore:
    """Requests in, deltas out.

    Args:
        runner: the model.
        options: limits and sizes.
        max_position_embeddings: the model's own context, in tokens.
        salt: of the prefix cache; differs where equal tokens give another state.
        replay: how prompts are processed.
        source: where the weights came from; without it they cannot be updated.

    Raises:
        EngineError: the options do not fit the model.
    """

    def __init__(
        self,
        runner: Runner,
        options: EngineConfig,
        *,
        max_position_embeddings: int,
        salt: bytes = b"",
        replay: Replay | None = None,
        source: Source | None = None,
    ) -> None:
        self.max_model_len = options.resolve_max_model_len(max_position_embeddings)
        self._options = options
        self._source = source
        self._vocab_size = runner.vocab_size
        self._runner: Runner | None = None
        self._replay = replay or Replay()
        # Any thread asks this, so a runner and those before it are replaced at once, not in parts.
        self._expert_stats: Callable[[], ExpertStats] = ExpertStats
        self._scheduler = self._install(runner, salt)
        # By request id, the scores of the prompt token at each position, until its first delta.
        self._prompt_scores: dict[str, dict[int, TokenLogprob]] = {}
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._prefix_hits = 0
        self._speculation = SpeculationStats()

    @property
    def has_work(self) -> bool:
        """Whether a step would run anything."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def check(self, request: GenerateRequest) -> None:
        """Refuse what can never be served; reads only constants, so any thread may call it.

        Raises:
            PromptTooLongError: the prompt leaves no room for a single token.
            EngineError: the prompt is empty or holds an id that the model does not know, nothing
                is to be generated, or the prompt cannot be processed or scored as asked.
        """
        prompt_ids = request.prompt_ids
        if not prompt_ids:
            raise EngineError("prompt: expected at least one token id, got none")
        if len(prompt_ids) >= self.max_model_len:
            raise PromptTooLongError(len(prompt_ids), self.max_model_len)
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
            where, token_id = next(
                (i, t) for i, t in enumerate(prompt_ids) if not 0 <= t < self._vocab_size
            )
            raise EngineError(
                f"prompt: expected token ids below {self._vocab_size}, got {token_id} at {where}"
            )
        if request.sampling.max_tokens < 1:
            raise EngineError(f"max_tokens: expected at least 1, got {request.sampling.max_tokens}")
        for token_id, _ in request.sampling.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                raise EngineError(
                    f"logit_bias: expected token ids below {self._vocab_size}, got {token_id}"
                )
        first = request.prompt_logprobs_start
        if request.prompt_logprobs is not None and not 0 <= first < len(prompt_ids):
            raise EngineError(
                f"prompt_logprobs_start: expected a position of the prompt of {len(prompt_ids)}"
                f" tokens, got {first}"
            )
        self._replay.resolve(request)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; its first tokens come out of a later step.

        Raises:
            PromptTooLongError: as `check`.
            EngineError: as `check`.
            ValueError: the id is that of a live request.
        """
        self.check(request)
        if request.sampling.seed is None:
            # Drawn once, so that a preempted request goes on as it began.
            sampling = dataclasses.replace(request.sampling, seed=secrets.randbits(63))
            request = dataclasses.replace(request, sampling=sampling)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request without a further delta and free its memory at once. Idempotent."""
        self._scheduler.abort(request_id)
        self._prompt_scores.pop(request_id, None)

    def step(self) -> list[TokenDelta]:
        """Run one step.

        Returns:
            what it adds, at most one delta per request; none for a prompt that is not through yet.

        Raises:
            EngineDeadError: the device is lost.
        """
        plan = self._scheduler.plan()
        if not plan.chunks:
            return []
        self._steps += 1
        assert self._runner is not None
        misguided: dict[str, str] = {}
        draws = self._draws(plan, misguided)
        try:
            result = self._runner.step(plan, draws)
        except EngineDeadError:
            raise  # nothing is left to serve with
        except Exception:
            ids = [chunk.request_id for chunk in plan.chunks]
            logger.exception("step %d failed and ends the requests %s", self._steps, ids)
            return [self._fail(request_id, _FORWARD_FAILED) for request_id in ids]
        samples = iter(result.samples)
        deltas = []
        for chunk in plan.chunks:
            if chunk.request_id in result.unfinished:
                self._scheduler.hold(chunk)
                continue
            drawn = next(samples) if chunk.wants_logits else None
            scored = self._note_scores(chunk, result)
            if not scored or (chunk.wants_logits and drawn is None):
                deltas.append(self._fail(chunk.request_id, _LOGITS_UNUSABLE))
            elif chunk.request_id in misguided:
                error = misguided[chunk.request_id]
                deltas.append(self._fail(chunk.request_id, error, forget=False))
            elif drawn is None:
                self._scheduler.commit(chunk, None)
            else:
                further = result.further.get(chunk.request_id, ())
                deltas.append(self._commit(chunk, drawn, further))
        self._speculation = self._speculation.plus(
            result.drafted, [len(more) for more in result.further.values()], result.plain_rows
        )
        return deltas

    def stats(self) -> EngineStats:
        """Take a snapshot of the counters; safe from any thread."""
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.blocks.num_free + scheduler.blocks.num_idle,
            total_blocks=scheduler.blocks.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            preemptions=scheduler.num_preemptions,
            cached_tokens=self._cached_tokens,
            prefix_hits=self._prefix_hits,
            cached_blocks=scheduler.blocks.num_idle,
            snapshots=len(scheduler.prefix),
            evictions=scheduler.prefix.num_evictions,
            speculation=self._speculation,
            experts=self._expert_stats(),
            tail_rows=tuple((mode, *rows) for mode, rows in list(scheduler.tail_rows.items())),
        )

    def update_weights(self, path: Path, *, in_place: bool = False) -> Built:
        """Serve another checkpoint of the same shape; no request may be live.

        Everything that follows from weights is made anew: joined and packed matrices, captured
        decode steps, and what the prefix cache kept. Counters go on. Takes as long as a start.

        Args:
            path: folder of the checkpoint.
            in_place: whether weights are to be written where they are, which an engine that has
                derived anything from them refuses: the derived state would stay as it was.

        Returns:
            what was built, with the seconds it took.

        Raises:
            EngineError: requests are live, routing is recorded, the engine was built without a
                checkpoint, the new one cannot be served or differs in shape, or `in_place` is
                refused, with the reasons. The engine serves as before.
        """
        runner, source = self._runner, self._source
        if in_place and runner is not None and runner.weight_locks:
            raise EngineError(
                f"weights cannot be written in place: {'; '.join(runner.weight_locks)};"
                " update_weights without in_place drains, loads and rebuilds"
            )
        if source is None:
            raise EngineError(
                "weights cannot be updated: the engine was built without a checkpoint"
            )
        if self._options.record_routing is not None:
            raise EngineError(
                f"weights cannot be updated: routing is recorded to {self._options.record_routing},"
                " and a trace is of one set of weights; stop, and record the new ones from a start"
            )
        if self.has_work:
            live = self._scheduler.num_running + self._scheduler.num_waiting
            raise EngineError(f"weights cannot be updated: expected no live request, got {live}")
        source.check(path)
        if runner is not None:
            runner.close()
        counted = self._expert_stats()
        self._expert_stats = lambda: counted
        # Both sets of weights may not fit: the old one goes first.
        runner = self._runner = None
        self._scheduler.prefix.clear()  # what it kept goes with it, and counts as evicted
        built = source.rebuild(path)
        self._replay = built.replay
        scheduler = self._install(built.runner, built.salt)
        scheduler.continue_counts(self._scheduler)
        self._scheduler = scheduler
        if source.path != path:
            raise EngineError(f"{path}: could not be built; the weights of {source.path} are back")
        settle()
        return built

    def close(self) -> None:
        """Write what was collected while serving; nothing is served afterwards.

        Raises:
            OSError: the file cannot be written.
        """
        if self._runner is not None:
            self._runner.close()

    def check_integrity(self) -> None:
        """Check the scheduler's books.

        Raises:
            RuntimeError: they are wrong; a bug.
        """
        self._scheduler.check_integrity()

    def _install(self, runner: Runner, salt: bytes) -> Scheduler:
        """Take a runner, with memory that is empty so far."""
        options, counted = self._options, self._expert_stats()
        self._runner = runner
        self._expert_stats = lambda: counted.plus(runner.expert_stats)
        return Scheduler(
            num_blocks=options.resolve_num_blocks(self.max_model_len),
            block_size=options.block_size,
            num_slots=options.max_num_seqs,
            max_batched_tokens=options.resolve_max_batched_tokens(),
            max_model_len=self.max_model_len,
            max_mixed_tokens=options.max_mixed_tokens,
            max_snapshots=options.resolve_max_snapshots(),
            salt=salt,
            lookahead=runner.looks_ahead,
            drafts=runner.num_drafts,
            replay=self._replay,
        )

    def _draws(self, plan: StepPlan, misguided: dict[str, str]) -> list[Draw]:
        """What to draw after each chunk that wants logits; notes guides that failed and how."""
        draws = []
        for chunk in plan.chunks:
            if chunk.wants_logits:
                state = self._scheduler.get(chunk.request_id)
                params, guide = state.request.sampling, state.request.guide
                if not state.needs_host:
                    draws.append(Draw(params, state.num_generated))
                    continue
                wanted = params.penalises or guide is not None
                generated = state.token_ids[state.num_prompt :] if wanted else ()
                draw = Draw(
                    params, state.num_generated, generated=generated, guided=guide is not None
                )
                if guide is not None:
                    try:
                        draw = guided(draw, guide, self._vocab_size)
                    except Exception as error:
                        logger.exception("the guide of request %s failed", chunk.request_id)
                        misguided[chunk.request_id] = f"the request's guide failed: {error}"
                draws.append(draw)
        return draws

    def _note_scores(self, chunk: Chunk, result: StepResult) -> bool:
        """Remember the scores of a chunk's prompt tokens; False where one is no number."""
        if not chunk.targets:
            return True
        scores = result.prompt_scores[chunk.request_id]
        self._prompt_scores.setdefault(chunk.request_id, {}).update(scores)
        return not any(math.isnan(score.logprob) for score in scores.values())

    def _commit(self, chunk: Chunk, drawn: Sample, further: Sequence[Sample]) -> TokenDelta:
        request_id = chunk.request_id
        state = self._scheduler.get(request_id)
        is_first = not state.num_generated
        more = tuple(sample.token_id for sample in further) if further else ()
        reason = self._scheduler.commit(chunk, drawn.token_id, more)
        self._completion_tokens += 1 + len(more)
        if is_first:
            self._prompt_tokens += state.num_prompt
            self._cached_tokens += state.cached_tokens
            self._prefix_hits += state.cached_tokens > 0
        return TokenDelta(
            request_id=request_id,
            token_ids=(drawn.token_id, *more),
            logprobs=_logprobs((drawn, *further)) if state.needs_host else None,
            finish_reason=reason,
            usage=_usage(state) if is_first or reason is not None else None,
            prompt_logprobs=self._take_prompt_scores(state.request) if is_first else None,
        )

    def _take_prompt_scores(
        self, request: GenerateRequest
    ) -> tuple[TokenLogprob | None, ...] | None:
        """Give the scores of the prompt's tokens in order, where they were asked for."""
        if request.prompt_logprobs is None:
            return None
        scores = self._prompt_scores.pop(request.id, {})
        positions = range(request.prompt_logprobs_start, len(request.prompt_ids))
        return tuple(scores[at] if at else None for at in positions)

    def _fail(self, request_id: str, error: str, *, forget: bool = True) -> TokenDelta:
        """End a request with an error; `forget`: and all that the prefix cache keeps."""
        state = self._scheduler.get(request_id)
        self._scheduler.remove(request_id, keep=False)
        self._prompt_scores.pop(request_id, None)
        # What went wrong may have gone wrong before, in a state that was kept: forget them all. A
        # guide sees tokens alone: whatever it does, the device has computed what it was to.
        if forget:
            self._scheduler.prefix.clear()
        return TokenDelta(
            request_id=request_id,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            usage=_usage(state),
            error=error,
        )


def load_engine(path: Path, options: EngineConfig) -> EngineCore:
    """Load a checkpoint and make an engine of it, in the thread that will run it.

    Sets the number of torch's CPU threads, which is a property of the calling thread.

    Args:
        path: folder of the checkpoint.
        options: how to run it.

    Raises:
        EngineError: the checkpoint, the device or the options cannot be served; says which.
    """
    built = build(path, options)
    core = EngineCore(
        built.runner,
        built.options,
        max_position_embeddings=built.config.max_position_embeddings,
        salt=built.salt,
        replay=built.replay,
        source=Source(path, options),
    )
    settle()
    return core


def _logprobs(samples: Sequence[Sample]) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of all samples of a request, which asked for them or did not."""
    found = tuple(sample.logprob for sample in samples if sample.logprob is not None)
    return found or None


def _usage(state: RequestState) -> Usage:
    return Usage(
        state.num_prompt,
        state.num_generated,
        state.cached_tokens,
        prefill=state.tail.mode,
        prefill_reason=state.tail.reason,
        tail_rows=state.tail_rows,
    )
