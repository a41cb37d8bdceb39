"""Work that would hold the event loop up, done beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Bodies from this size on are worked on in a thread: the codec encodes about 1.2 us a token, and
#: nothing may hold the event loop for 5 ms.
THREAD_FROM_BYTES = 4 * 1024
#: Likewise what copies a prompt from this many tokens on.
LONG_PROMPT = 32 * 1024
#: Likewise what copies so many bytes.
LONG_COPY = 1 << 20


async def in_thread_if(long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work`, in a worker thread where it is long."""
    return await in_thread(work, *args, **kwargs) if long else work(*args, **kwargs)


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
