"""Records which experts real steps are routed to, for `bathyal engine plan --trace`.

The router of a model's operations is replaced by one that notes what it gave. That waits for the
device in every layer, so an engine that records does not capture decode steps and is slow; what it
computes stays the same.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.kernels.ops import Ops
from engine.kernels.router import Routing
from engine.kernels.rows import Rows
from engine.routing_trace import RoutingTrace, Step, write_trace

#: Steps of a layer that are kept; the oldest go first.
MOST_STEPS = 65_536


class RoutingRecorder:
    """Notes the choices of a model's routers.

    Args:
        path: of the file.
        gates: router [E, d] of each layer, by which a layer is known.
        per_row: experts a row is routed to.
    """

    def __init__(self, path: Path, gates: Sequence[Tensor], per_row: int) -> None:
        self._path = path
        self._layer_of = {gate.data_ptr(): layer for layer, gate in enumerate(gates)}
        self._num_experts = len(gates[0])
        self._per_row = per_row
        self._steps: list[deque[Step]] = [deque(maxlen=MOST_STEPS) for _ in gates]

    def watch(self, plain: Ops) -> Ops:
        """Give operations that note what the router chooses."""

        def route(x: Tensor, gate: Tensor, *args: Any, **how: Any) -> Routing:
            routing = plain.route(x, gate, *args, **how)
            self._note(gate, routing, args[2] if len(args) > 2 else how["rows"])
            return routing

        def norm_route(
            h: Tensor, parts: Tensor, norm: Tensor, eps: float, gate: Tensor, rows: Rows, *, k: int
        ) -> tuple[Tensor, Tensor, Routing]:
            h, x, routing = plain.norm_route(h, parts, norm, eps, gate, rows, k=k)
            self._note(gate, routing, rows)
            return h, x, routing

        return dataclasses.replace(plain, route=route, norm_route=norm_route)

    def _note(self, gate: Tensor, routing: Routing, rows: Rows) -> None:
        layer = self._layer_of.get(gate.data_ptr())
        if layer is None:  # a draft stage is none of the layers
            return
        chosen = routing.experts.cpu().numpy()
        real = chosen[(chosen >= 0).all(1)]
        if len(real):
            self._steps[layer].append(Step(real.astype(np.int16), not rows.is_decode))

    def begin(self) -> None:
        """Record from now on: what was routed so far was of nobody."""
        for steps in self._steps:
            steps.clear()

    def close(self) -> None:
        """Write the file."""
        layers = tuple(map(tuple, self._steps))
        write_trace(self._path, RoutingTrace(self._num_experts, self._per_row, layers))
