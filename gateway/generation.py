"""Generations: token deltas of a backend in, frames of an exchange out.

The only place where a backend's end, fault or silence about its end becomes a decision. A backend
that stops without a finish reason has failed: a reply cut off must never look like one that ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Literal

from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    GenerateRequest,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from gateway.backends import Backend
from gateway.call import Call
from gateway.deadlines import Deadline, Limits
from gateway.errors import RefusedError, ServerError
from gateway.metrics import Metrics
from gateway.prefill import DEFAULT_PREFILL, Prefill
from gateway.recorder import Tape
from gateway.threads import LONG_PROMPT, in_thread, in_thread_if
from parsers import LONG_REPLY, NO_NOTE, ClientError, Completion, Exchange, PromptNote

Reply = Exchange | Completion
"""Both are driven in the same way."""
_FAILED = (FinishReason.ERROR, FinishReason.ABORT)
_AGAIN = 1 << 40
"""Changes a seed for a second try, to one that no other choice has."""


class Generations:
    """Drives generations and counts what they do.

    Args:
        backend: where the tokens come from.
        stop_token_ids: ids that end one.
        limits: how long one may take.
        metrics: what is counted.
    """

    def __init__(
        self,
        backend: Backend,
        stop_token_ids: tuple[int, ...],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._backend = backend
        self._stop_token_ids = stop_token_ids
        self._limits = limits
        self._metrics = metrics

    def frames(
        self,
        exchange: Reply,
        call: Call,
        *,
        request_id: str,
        scripts: Sequence[str] = (),
        prefill: Prefill = DEFAULT_PREFILL,
        tape: Tape | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[list[bytes], None]:
        """Generate, and yield the frames of each step that has some.

        Several choices are several generations at once, over one prompt; the frames come in the
        order in which they are made.

        Args:
            exchange: just opened; the first of its choices.
            call: takes the counts of tokens and the time of the first.
            request_id: unique among the live requests.
            scripts: for the scripted backend: the line of the first generation, and those of
                further ones where a forced call needs them; the last line stands for all after it.
            prefill: how the prompt is to be processed.
            tape: takes the steps where the exchange is recorded.
            settle: awaited between the end of the (only) choice and its last frames: what a client
                may rely on once it has seen them.

        Raises:
            RefusedError: the backend refuses this request, before its first token.
            ClientError: it refuses to go on with a reply that has begun, for a forced call.
            ServerError: the backend failed, took too long, or ended without saying why.
        """
        pace = _Pace(self._metrics, call)
        choices: Sequence[Reply] = exchange.choices
        running = [
            self._choice(choice, request_id, index, pace, scripts, prefill, tape, settle)
            for index, choice in enumerate(choices)
        ]
        return running[0] if len(running) == 1 else _together(running)

    async def _choice(
        self,
        exchange: Reply,
        request_id: str,
        index: int,
        pace: _Pace,
        scripts: Sequence[str],
        prefill: Prefill,
        tape: Tape | None,
        settle: Callable[[], Awaitable[None]] | None,
    ) -> AsyncGenerator[list[bytes], None]:
        request = self._request(exchange, request_id, index, scripts, prefill, pace.call.salt)
        deadline = Deadline(self._limits, lambda: self._backend.abort(request.id))
        begun, cached, last, completion_tokens = False, 0, 0.0, 0
        gap, gathers, generation = self._metrics.gaps.add, not exchange.stream, 0
        try:
            while True:
                finish: Literal["stop", "length"] | None = None
                frames: list[bytes] = []
                async with aclosing(self._backend.generate(request)) as deltas:
                    deadline.waiting = True
                    async for delta in deltas:
                        deadline.steps += 1
                        now, reason = monotonic(), delta.finish_reason
                        if reason is not None and reason in _FAILED:
                            why = delta.error or "the backend gave up without a reason"
                            raise _backend_error(why)
                        if begun:
                            frames = []
                        else:
                            begun = True
                            cached = 0 if delta.usage is None else delta.usage.cached_tokens
                            frames = exchange.start(len(request.prompt_ids), cached)
                            pace.begin(index, now, len(request.prompt_ids), cached)
                            scores = delta.prompt_logprobs or ()
                            note = await in_thread_if(
                                len(scores) >= LONG_REPLY, _note, delta, prefill
                            )
                            if note != NO_NOTE:
                                exchange.note_prompt(note)
                                pace.note(index, note)
                                if tape is not None:
                                    tape.note(index, note)
                        if token_ids := delta.token_ids:
                            if completion_tokens:
                                gap(now - last)
                            last = now
                            completion_tokens += len(token_ids)
                            logprobs = None if delta.logprobs is None else _logprobs(delta.logprobs)
                            if tape is not None:
                                tape.step(index, token_ids, logprobs)
                            if gathers and logprobs is None and exchange.gather(token_ids):
                                if reason is None and not frames:
                                    continue
                                made = []
                            elif exchange.heavy(token_ids):
                                made = await in_thread(exchange.receive, token_ids, logprobs)
                            else:
                                made = exchange.receive(token_ids, logprobs)
                            frames = frames + made if frames else made
                        # finished without a reason of the backend's: a stop string, a last call
                        if reason is not None or exchange.finished:
                            finish = "length" if reason is FinishReason.LENGTH else "stop"
                            break
                        if frames:
                            deadline.waiting = False
                            yield frames
                            deadline.waiting = True
                    deadline.waiting = False
                if finish is None:
                    raise deadline.expired or _backend_error(
                        "the backend ended without a finish reason"
                    )
                self._backend.abort(request.id)  # harmless after a normal end
                more = (
                    None
                    if finish == "length"
                    else await in_thread_if(
                        len(request.prompt_ids) >= LONG_PROMPT
                        or exchange.heavy_close(completion_tokens),
                        exchange.continuation,
                    )
                )
                if more is None:
                    break
                if frames:
                    yield frames
                if tape is not None:
                    tape.again(index)
                generation += 1
                seed = request.sampling.seed
                if more.again and seed is not None:
                    seed ^= _AGAIN
                request = replace(
                    request,
                    id=f"{request.id}-call",
                    prompt_ids=more.prompt_ids,
                    sampling=replace(request.sampling, max_tokens=more.max_tokens, seed=seed),
                    script=scripts[min(generation, len(scripts) - 1)] if scripts else None,
                    prompt_logprobs=None,
                )
            frames += await in_thread_if(
                exchange.heavy_close(completion_tokens), exchange.close, finish, completion_tokens
            )
            pace.finish(finish)
            if tape is not None:
                tape.end(index, finish, completion_tokens, cached)
            if settle is not None:
                await settle()
            if frames:
                yield frames
        except EngineDeadError as error:
            raise ServerError(str(error), status=503, code="backend_unavailable") from error
        except EngineError as error:
            too_long = isinstance(error, PromptTooLongError)
            code = "context_length_exceeded" if too_long else "unsupported_request"
            refusal = ClientError if pace.begun else RefusedError
            raise refusal(str(error), code=code) from error
        finally:
            deadline.close()
            self._backend.abort(request.id)
            pace.end(completion_tokens)
            if isinstance(exchange, Exchange):
                self._metrics.take_report(exchange.report)

    def _request(
        self,
        exchange: Reply,
        request_id: str,
        index: int,
        scripts: Sequence[str],
        prefill: Prefill,
        salt: str,
    ) -> GenerateRequest:
        """Build what the backend is asked for on behalf of one choice."""
        sampling = exchange.sampling
        seed, scoring = sampling.seed, sampling.scoring
        return GenerateRequest(
            id=f"{request_id}-{index}" if index else request_id,
            prompt_ids=exchange.prompt_ids,
            sampling=SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                # choices with one seed would all be the same
                seed=None if seed is None else seed ^ index,
                top_logprobs=sampling.top_logprobs,
                presence_penalty=sampling.moves.presence,
                frequency_penalty=sampling.moves.frequency,
                logit_bias=sampling.moves.bias,
                stop_token_ids=self._stop_token_ids,
            ),
            script=scripts[0] if scripts else None,
            prefill=prefill.mode,
            trainer_parity=prefill.parity,
            prompt_logprobs=None if scoring is None else scoring.rivals,
            prompt_logprobs_start=0 if scoring is None else scoring.start,
            images=exchange.images,
            cache_salt=salt,
        )


class _Pace:
    """The counts of a reply's tokens, for the counters and the call's log line."""

    def __init__(self, metrics: Metrics, call: Call) -> None:
        self._metrics = metrics
        self.call = call
        self.begun = False  # some choice has
        self._accepted = monotonic()

    def begin(self, index: int, now: float, prompt_tokens: int, cached_tokens: int) -> None:
        self.begun = True
        self._metrics.prompt_tokens.inc(prompt_tokens)
        if cached_tokens:
            self._metrics.cached_tokens.inc(cached_tokens)
        if not index:
            self._metrics.first_token.observe(now - self._accepted)
            self.call.notes["prompt_tokens"] = prompt_tokens
            self.call.notes["ttft_ms"] = round((now - self._accepted) * 1000, 1)

    def note(self, index: int, note: PromptNote) -> None:
        if not index and note.prefill is not None:
            self.call.notes["prefill"] = note.prefill["mode"]
            self.call.notes["tail_rows"] = note.prefill["tail_rows"]

    def finish(self, finish: str) -> None:
        self.call.notes["finish"] = finish

    def end(self, tokens: int) -> None:
        self._metrics.completion_tokens.inc(tokens)
        before = self.call.notes.get("completion_tokens", 0)
        self.call.notes["completion_tokens"] = before + tokens


async def _together(
    choices: Sequence[AsyncGenerator[list[bytes], None]],
) -> AsyncGenerator[list[bytes], None]:
    """Run generations at once and yield what each yields; the first failure ends all."""
    ready: asyncio.Queue[list[bytes] | Exception | None] = asyncio.Queue(maxsize=len(choices))

    async def pump(choice: AsyncGenerator[list[bytes], None]) -> None:
        try:
            async with aclosing(choice):
                async for frames in choice:
                    await ready.put(frames)
        except Exception as error:  # told to whoever reads the queue
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _note(delta: TokenDelta, asked: Prefill) -> PromptNote:
    """What a first delta tells of the prompt; how it was processed only where that is news."""
    usage, scores, shown = delta.usage, delta.prompt_logprobs, None
    if usage is not None and (asked != DEFAULT_PREFILL or usage.prefill != "off"):
        shown = {
            "mode": usage.prefill,
            "tail_rows": usage.tail_rows,
            **({"reason": usage.prefill_reason} if usage.prefill_reason else {}),
        }
    if scores is None:
        return PromptNote(shown, None)
    return PromptNote(shown, [None if s is None else (s.logprob, s.top) for s in scores])


def _logprobs(
    logprobs: Sequence[TokenLogprob],
) -> list[tuple[float, Sequence[tuple[int, float]]]]:
    return [(logprob.logprob, logprob.top) for logprob in logprobs]


def _backend_error(message: str) -> ServerError:
    return ServerError(message, status=502, code="backend_error")
