"""Launches whose programs wait for one another: refused where they have no room on the GPU at once.

A program that waits for one which has yet to begin, and which begins when somebody ends, waits for
ever, and the GPU with it. How many programs a multiprocessor takes follows from the registers and
the shared memory of the compiled kernel, which are known before it is launched (engine.md A3, t5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.triton_compat import INTERPRETED, TRITON

if TRITON:
    from triton.runtime import driver
    from triton.runtime._async_compile import FutureKernel
else:  # pragma: no cover
    driver = FutureKernel = None

WARP = 32
#: Registers of a multiprocessor, of 32 bits, on every GPU since Volta; a quarter for each of its four
#: parts, among which the warps are shared out. A warp takes them in steps of 8 a thread.
REGISTERS = 65536
PARTS = 4
STEP = 8
#: Warps that one takes, at most, and programs that one of any of these GPUs takes.
WARPS = 64
PROGRAMS = 16
#: Bytes of shared memory that each program costs beside its own.
SHARED_BESIDE = 1024

#: Kernels that were found to fit, by what they are compiled for.
_fitting: set[object] = set()


class GridError(RuntimeError):
    """A grid whose programs wait for one another has more of them than fit on the GPU at once."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU has for programs.

    Args:
        multiprocessors: how many.
        threads: that one of them takes.
        shared: bytes of shared memory that a program on it may have, if it is alone.
    """

    multiprocessors: int
    threads: int
    shared: int

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Programs of a compiled kernel that a multiprocessor takes at once.

        Args:
            registers: of a thread.
            shared: bytes of a program.
            warps: of a program.
        """
        of_a_warp = -(-registers // STEP) * STEP * WARP
        return min(
            PROGRAMS,
            self.threads // (WARP * warps),
            REGISTERS // PARTS // of_a_warp * PARTS // warps,
            self.shared // (shared + SHARED_BESIDE),
        )


def room_of(device: torch.device) -> Room:
    """The room that a GPU has."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = torch.cuda.get_device_properties(index)
    # Torch does not say in all versions what shared memory there is.
    shared: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Room(found.multi_processor_count, found.max_threads_per_multi_processor, shared)


def launch_at_once(
    kernel: Any, programs: int, device: torch.device, *args: object, **how: Any
) -> None:
    """Launch a kernel whose programs wait for one another.

    Whether they fit is looked at before the first launch with some options on a device, which a
    warm-up makes, before anything is captured.

    Args:
        kernel: jitted.
        programs: of the grid.
        device: it is launched on.
        args: of the kernel.
        how: its constants and options, by name.

    Raises:
        GridError: fewer programs than these fit on the GPU at once; nothing is launched.
    """
    what = (kernel.__name__, programs, device, *how.values())
    if not INTERPRETED and what not in _fitting:
        compiled = kernel.warmup(*args, grid=(programs,), **how)
        if isinstance(compiled, FutureKernel):
            return  # kernels are made ready, and none runs
        _check(kernel.__name__, compiled, programs, room_of(device))
        _fitting.add(what)
    kernel[(programs,)](*args, **how)


def _check(name: str, compiled: Any, programs: int, room: Room) -> None:
    compiled._init_handles()  # its registers are known when it is loaded
    registers, meta = compiled.n_regs, compiled.metadata
    each = room.programs(registers, meta.shared, meta.num_warps)
    most = each * room.multiprocessors
    if programs > most:
        raise GridError(
            f"{name}: its programs wait for one another and must be on the GPU at once: expected at"
            f" most {most} ({each} on each of {room.multiprocessors} multiprocessors, with"
            f" {meta.num_warps} warps, {registers} registers a thread and {meta.shared} bytes of"
            f" shared memory), got {programs}"
        )
