"""Kernels that begin before the one before them has ended, on GPUs that can (Hopper on).

Between two kernels of a stream memory stands idle for a microsecond or two. A kernel launched with
`launch_pdl` may start as soon as every program of the kernel before has called `begin_next`; until
it has called `await_previous` it must touch nothing that an earlier kernel writes or still reads,
so what it does before that is little: index arithmetic, small constants. (engine.kernels.paging reads
a layer's tables before it waits; for that every router waits before it lets the next begin.) A kernel that neither
waits nor lets the next begin is served correctly too: the next simply starts when it has ended.

Measured on an H200 with V4-Flash's whole step: at 4 rows overlapping gains 3 %, nearly all of it
between kernels that are no large products; at 16 rows the products and what lies between them gain
1.5 %; at 64 attention's kernels lose 1.6 %. At one row, letting the next kernel begin before waiting
oneself, so that several wait in a row, costs 9 %; fetching the first tiles of a product's weights
into the level-2 cache while it waits costs 2.5 % (an SM reads what was fetched for it 15 % faster
than from memory, and what is on the critical path queues behind it). Of V4's weights only
the small matrices of engine.kernels.mhc and a router's gate are fetched ahead, and the shared
expert's first product begins (engine.kernels.moe_decode). Products of a single row with plain
weights, and the second product of plain experts, ask for theirs ahead; Qwen's dense products of 2 to
16 rows do not: asking for all of a weight while waiting costs 1.5 to 2.5 % of a step.
"""

from __future__ import annotations

import functools

import torch

from engine.kernels.triton_compat import INTERPRETED, TRITON, tl, triton

if TRITON and not INTERPRETED:
    from triton.language.extra import cuda
else:
    cuda = None


#: Most rows of a pass whose kernels gain from overlapping where `overlapping` is asked.
FEW_ROWS = 8
#: Cleared to measure what overlapping gains.
ENABLED = True


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU can overlap kernels and multiplies bfloat16 in pairs."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def overlaps(device: torch.device) -> bool:
    """Whether kernels are launched so that they overlap."""
    return ENABLED and is_hopper(device)


def overlapping(device: torch.device, rows: int = 1, most: int | None = None) -> dict[str, bool]:
    """Launch options of a kernel that waits and lets the next begin as its flag OVERLAP says.

    Args:
        device: of the kernel.
        rows: of the pass; of more than `most` the programs fill the GPU, and early ones of the
            next kernel take room from them (measured with Qwen's steps of 16 and 64 rows, and with
            V4's of 64: 1.6 % of the step).
        most: as said, FEW_ROWS if None.
    """
    on = overlaps(device) and rows <= (FEW_ROWS if most is None else most)
    return {"OVERLAP": on, "launch_pdl": on}


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until what earlier kernels of the stream have written can be read."""
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def begin_next(OVERLAP: tl.constexpr):
    """Let the next kernel of the stream begin, as far as this program is concerned."""
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(places, nbytes, LINES: tl.constexpr):
    """Ask for nbytes from each place, at most LINES * 128, to be put into the level-2 cache."""
    for line in tl.static_range(LINES):
        tl.inline_asm_elementwise(
            asm="prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            constraints="=r,l",
            args=[places.to(tl.int64) + tl.minimum(line * 128, nbytes - 1)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
