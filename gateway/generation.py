"""One generation: token deltas of a backend in, frames of an exchange out.

The only place where a backend's end, fault or silence about its end becomes a decision. A backend
that stops without a finish reason has failed: a reply cut off must never look like one that ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Literal, ParamSpec, TypeVar

from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    GenerateRequest,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
)
from gateway.backends import Backend
from gateway.errors import ServerError
from parsers import ClientError, Exchange

P = ParamSpec("P")
T = TypeVar("T")

#: Bodies and outputs from these sizes on are worked on in a thread: the codec encodes about 1.2 us a
#: token and re-tokenizes the reasoning at the end, and nothing may hold the event loop for 5 ms.
THREAD_FROM_BYTES = 8 * 1024
THREAD_FROM_TOKENS = 2048


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a worker thread; when cancelled, first wait until the thread has let go.

    An exchange is not safe to share, so nobody may touch it while an abandoned thread still does.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def to_request(
    exchange: Exchange, *, request_id: str, stop_token_ids: tuple[int, ...], script: str | None
) -> GenerateRequest:
    """Build what the backend is asked for on behalf of an exchange."""
    sampling = exchange.sampling
    return GenerateRequest(
        id=request_id,
        prompt_ids=exchange.prompt_ids,
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            top_logprobs=sampling.top_logprobs,
            stop_token_ids=stop_token_ids,
        ),
        script=script,
    )


async def reply_frames(
    backend: Backend, exchange: Exchange, request: GenerateRequest
) -> AsyncGenerator[list[bytes], None]:
    """Generate, and yield the frames of each step (none, for an exchange that does not stream).

    Raises:
        ClientError: the backend refuses this request, before its first token.
        ServerError: the backend failed, or ended without saying why.
    """
    started = False
    completion_tokens = 0
    try:
        async with aclosing(backend.generate(request)) as deltas:
            async for delta in deltas:
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise _backend_error(delta.error or "the backend gave up without a reason")
                frames: list[bytes] = []
                if not started:
                    started = True
                    cached = 0 if delta.usage is None else delta.usage.cached_tokens
                    frames += exchange.start(len(request.prompt_ids), cached)
                if delta.token_ids:
                    completion_tokens += len(delta.token_ids)
                    frames += exchange.receive(delta.token_ids, _logprobs(delta))
                # finished without a reason of the backend's: a stop string of the client's was met
                if delta.finish_reason is not None or exchange.finished:
                    finish: Literal["stop", "length"]
                    finish = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
                    if completion_tokens < THREAD_FROM_TOKENS:
                        frames += exchange.close(finish, completion_tokens)
                    else:
                        frames += await in_thread(exchange.close, finish, completion_tokens)
                    yield frames
                    return
                yield frames
    except PromptTooLongError as error:
        raise ClientError(
            str(error), status=400, code="context_length_exceeded", param=None
        ) from error
    except EngineDeadError as error:
        raise ServerError(str(error), status=503, code="backend_unavailable") from error
    except EngineError as error:
        raise ClientError(str(error), status=400, code="unsupported_request", param=None) from error
    finally:
        backend.abort(request.id)  # harmless after a normal end
    raise _backend_error("the backend ended without a finish reason")


def _logprobs(delta: TokenDelta) -> list[tuple[float, Sequence[tuple[int, float]]]] | None:
    if delta.logprobs is None:
        return None
    return [(logprob.logprob, logprob.top) for logprob in delta.logprobs]


def _backend_error(message: str) -> ServerError:
    return ServerError(message, status=502, code="backend_error")
