"""How the engine is run, as one frozen value: limits, sizes, device.

Says nothing of the model's shape (engine.config) and loads no torch, so that a command line can
build it in a process that serves another backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.api import EngineError

#: Positions that the default pool covers where one full context needs fewer.
DEFAULT_POOL_TOKENS = 65_536
#: Weights for which a further CPU thread pays.
BYTES_PER_THREAD = 64_000_000


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; set by the user, read at start-up, never changed afterwards.

    Args:
        device: "auto" takes the first NVIDIA GPU where there is one, else the CPU.
        dtype: of weights in memory and of activations; "auto" is float32 on the CPU, bfloat16 on a
            GPU.
        max_model_len: context in tokens, prompt and completion together; None takes the model's
            own. A smaller one lets a smaller pool serve.
        max_num_seqs: most requests that hold memory at once; further ones wait.
        max_batched_tokens: rows of one step. Running streams get their row first and prompts share
            the rest, so this bounds how long a step, and with it a running stream, can be held up
            by somebody's prompt.
        block_size: positions per block of compressed entries; a multiple of every compress ratio
            of the model (128 serves V4 and V4.1).
        num_blocks: blocks of the pool; None gives room for one full context or 65,536 positions,
            whichever is more. Requests beyond that wait, or are preempted and recomputed.
        prefix_cache: whether what prompts and generations have in common with earlier ones is
            processed once. Gives the same greedy tokens; logits differ by rounding, since a hit
            cuts the prompt elsewhere.
        max_snapshots: most rolling states the prefix cache keeps beside those of running requests,
            each as large as a request's own; three or four per conversation are in use. Blocks
            that only the cache holds need no room of their own: they are given up when needed.
        cpu_threads: threads of torch's CPU kernels, set in the engine's own thread. None decides by
            cores and weights: see `resolve_cpu_threads`.

    Raises:
        EngineError: a value is out of its range; all such values are named at once.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_batched_tokens: int = 512
    block_size: int = 128
    num_blocks: int | None = None
    prefix_cache: bool = True
    max_snapshots: int = 64
    cpu_threads: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        problems = [
            f"{name}: expected at least {least}, got {value}"
            for name, value, least in (
                ("max_model_len", self.max_model_len, 2),
                ("max_num_seqs", self.max_num_seqs, 1),
                # Every running stream has a row in every step, and a prompt always gets one more.
                ("max_batched_tokens", self.max_batched_tokens, self.max_num_seqs + 1),
                ("block_size", self.block_size, 1),
                ("num_blocks", self.num_blocks, 1),
                ("max_snapshots", self.max_snapshots, 1),
                ("cpu_threads", self.cpu_threads, 1),
            )
            if value is not None and value < least
        ]
        for name, value, accepted in (
            ("device", self.device, ("auto", "cpu", "cuda")),
            ("dtype", self.dtype, ("auto", "float32", "bfloat16")),
        ):
            if value not in accepted:
                problems.append(f"{name}: expected one of {', '.join(accepted)}, got {value!r}")
        if problems:
            raise EngineError("engine options: " + "; ".join(problems))

    def resolve_max_model_len(self, max_position_embeddings: int) -> int:
        """Give the context that is served, in tokens.

        Args:
            max_position_embeddings: the model's own context.

        Raises:
            EngineError: more was asked for than the model has.
        """
        if self.max_model_len is None:
            return max_position_embeddings
        if self.max_model_len > max_position_embeddings:
            raise EngineError(
                f"engine options: max_model_len: the model's context is {max_position_embeddings}"
                f" tokens, got {self.max_model_len}"
            )
        return self.max_model_len

    def resolve_num_blocks(self, max_model_len: int) -> int:
        """Give the number of blocks that requests can use.

        Args:
            max_model_len: the context that is served, in tokens.

        Raises:
            EngineError: the blocks asked for do not hold one request of full length, which could
                then never end.
        """
        needed = -(-max_model_len // self.block_size)
        if self.num_blocks is None:
            return max(needed, -(-DEFAULT_POOL_TOKENS // self.block_size))
        if self.num_blocks < needed:
            raise EngineError(
                f"engine options: num_blocks: one request of max_model_len {max_model_len} needs"
                f" {needed} blocks of {self.block_size} positions, got {self.num_blocks};"
                " raise num_blocks or lower max_model_len"
            )
        return self.num_blocks

    def resolve_max_snapshots(self) -> int:
        """Give the number of snapshots to make room for; 0 without a prefix cache."""
        return self.max_snapshots if self.prefix_cache else 0

    def resolve_num_slots(self) -> int:
        """Give the number of slots of the pool: running requests, snapshots and the dummy."""
        return self.max_num_seqs + self.resolve_max_snapshots() + 1

    def resolve_cpu_threads(self, cores: int, weight_bytes: int) -> int:
        """Give the number of threads of torch's CPU kernels.

        One for every 64 MB of weights, which a decode step reads once: below that a step is
        hundreds of kernels too short to share, and threads that wait for one another in each of
        them make it slower (measured with the checkpoint that ships: half the tokens per second
        with two threads on two cores). One core is always left to the event loop, which parses
        and sends.

        Args:
            cores: cores this process may use.
            weight_bytes: of the checkpoint.
        """
        if self.cpu_threads is not None:
            return self.cpu_threads
        return max(1, min(cores - 1, weight_bytes // BYTES_PER_THREAD))


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the cores this process may use: its affinity, and its container's share of time.

    Args:
        cpu_max: the container's limit, "quota period" in microseconds or "max period"; a file that
            is absent limits nothing.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
