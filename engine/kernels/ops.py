"""The operations a model is written in, as tables: torch twins, or Triton kernels.

An operation NAME of a module exists as NAME_torch and NAME_triton with one signature, documented at
the twin. A model takes all of its operations from one table, so that a whole pass can be run by
either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Literal

from torch import Tensor

from engine.kernels.inputs import Inputs
from engine.kernels.mhc import HcIn
from engine.kernels.router import Routing

Implementation = Literal["torch", "triton"]

#: Operation -> module of engine.kernels that has it.
MODULES = {
    "embed": "embed",
    "linear": "linear",
    "linears": "linear",
    "norm_linear": "linear",
    "attention_output": "linear",
    "hc_in": "mhc",
    "hc_out": "mhc",
    "hc_turn": "mhc",
    "hc_head": "mhc",
    "window_keys": "window",
    "store_window": "window",
    "attend": "attention",
    "attention_inputs": "inputs",
    "compress": "compress",
    "store_state": "compress",
    "index_keys_from_latent": "index",
    "choose": "select",
    "engram_lookup": "engram",
    "engram_apply": "engram",
    "store_history": "engram",
    "route": "router",
    "norm_route": "norm_route",
    "group": "grouping",
    "moe": "moe",
    "sample": "sampler",
}


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation; see the modules for what each does.

    Args:
        name: "torch" or "triton".
    """

    name: Implementation
    embed: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linears: Callable[..., tuple[Tensor, ...]]
    norm_linear: Callable[..., tuple[Tensor, ...]]
    attention_output: Callable[..., Tensor]
    hc_in: Callable[..., HcIn]
    hc_out: Callable[..., Tensor]
    hc_turn: Callable[..., tuple[Tensor, HcIn]]
    hc_head: Callable[..., Tensor]
    window_keys: Callable[..., Tensor]
    store_window: Callable[..., None]
    attend: Callable[..., Tensor]
    attention_inputs: Callable[..., Inputs]
    compress: Callable[..., Tensor | None]
    store_state: Callable[..., None]
    index_keys_from_latent: Callable[..., None]
    choose: Callable[..., tuple[Tensor, Tensor | None]]
    engram_lookup: Callable[..., Tensor]
    engram_apply: Callable[..., Tensor]
    store_history: Callable[..., None]
    route: Callable[..., Routing]
    norm_route: Callable[..., tuple[Tensor, Tensor, Routing]]
    group: Callable[..., tuple[Tensor, Tensor, Tensor]]
    moe: Callable[..., Tensor]
    sample: Callable[..., tuple[Tensor, Tensor]]


def ops(name: Implementation) -> Ops:
    """Give the table of one implementation.

    Raises:
        AttributeError: an operation is missing; a bug of a kernel module.
    """
    names = [field.name for field in fields(Ops) if field.name != "name"]
    found = {
        op: getattr(import_module(f"engine.kernels.{MODULES[op]}"), f"{op}_{name}") for op in names
    }
    return Ops(name=name, **found)
