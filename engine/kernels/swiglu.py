"""The gated product of experts, as kernels compute it (twin: engine.kernels.reference.swiglu)."""

from __future__ import annotations

from engine.kernels.triton_compat import tl, triton


@triton.jit
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, +-limit) of float32 tiles."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up
