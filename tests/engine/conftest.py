"""Fixtures of the engine's tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """TF32 would round the operands of every product on a GPU to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="session", autouse=True)
def language_made_ready_once() -> Iterator[None]:
    """Triton's interpreter makes its language ready again for each call of a device function.

    Going through all names of the language so often is a third of what the kernels' tests do; within
    a kernel, whose own call did it, once is enough.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    make_ready = interpreter._patch_lang

    def make_ready_once(fn: Callable[..., Any]) -> Any:
        seen = [v for v in fn.__globals__.values() if v is language or v is language.core]
        if seen and not any(language.core.is_builtin(names.load) for names in seen):
            return interpreter._LangPatchScope()
        return make_ready(fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", make_ready_once)
        yield
