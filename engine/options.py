"""How the engine is run, as one frozen value: limits, sizes, device.

Says nothing of the model's shape (engine.config) and loads no torch, so that a command line can
build it in a process that serves another backend.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from engine.api import PREFILL_MODES, EngineError

#: Positions that the default pool covers where one full context needs fewer.
DEFAULT_POOL_TOKENS = 65_536
#: Rows of a step by default: a CPU's products gain nothing from more, a GPU's do.
BATCHED_TOKENS = 512
GPU_BATCHED_TOKENS = 8192
GPU_MIXED_TOKENS = 1024
#: Rows of decode steps that the fast runner prepares; others run in the next larger one.
DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
#: Rows of prompts' tails that are captured: all for which it was measured to be faster.
TAIL_BUCKETS = (128, 256, 384, 512, 768, 1024)
#: Rows of passes over prompts that are captured; longer ones keep the device busy anyway.
PROMPT_BUCKETS = (128, 256, 512, 1024)
#: Weights for which a further CPU thread pays.
BYTES_PER_THREAD = 64_000_000


@dataclass(frozen=True, slots=True)
class Rule:
    """How an option is declared.

    Args:
        about: what it sets, for a command line and for the table in the documentation.
        choices: all values, where it is one of a few words.
        least: its smallest value, where it is a number.
        resolvable: whether a value that the user left open ("auto", None) is filled in at start-up;
            see engine.resolve, which may set no other.
        file: whether it is a file that is read ("old") or written ("new").
    """

    about: str
    choices: tuple[str, ...] = ()
    least: int | None = None
    resolvable: bool = False
    file: Literal["", "old", "new"] = ""

    @property
    def accepted(self) -> str:
        """What may be given, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.file:
            return "a file that exists" if self.file == "old" else "a file in a folder that exists"
        return "on or off" if self.least is None else f"a whole number of at least {self.least}"

    def parse(self, text: str) -> Any:
        """Read a value as a command line or a variable has it.

        Raises:
            ValueError: it is none of what `accepted` says.
        """
        if self.file:
            return old_file(text) if self.file == "old" else new_file(text)
        if self.least is not None:
            number = int(text)
            if number < self.least:
                raise ValueError
            return number
        words: dict[str, Any] = {word: word for word in self.choices} or {"on": True, "off": False}
        if text not in words:
            raise ValueError
        return words[text]


def new_file(text: str) -> Path:
    """Read the path of a file that can be written.

    Raises:
        ValueError: it is a folder, or in none that exists.
    """
    path = Path(text).expanduser()
    if not text or path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError
    return path


def old_file(text: str) -> Path:
    """Read the path of a file.

    Raises:
        ValueError: there is none.
    """
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError
    return path


def _option(
    default: Any,
    about: str,
    *,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    resolvable: bool = False,
    file: Literal["", "old", "new"] = "",
) -> Any:
    return field(default=default, metadata={"rule": Rule(about, choices, least, resolvable, file)})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; set by the user, read at start-up, never changed afterwards.

    Each field is declared once, with its help, what it accepts and whether it may be left open.

    Raises:
        EngineError: a value is out of its range; all such values are named at once.
    """

    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto",
        "where the engine runs; auto takes the first NVIDIA GPU where there is one",
        choices=("auto", "cpu", "cuda"),
        resolvable=True,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _option(
        "auto",
        "of activations, and of weights where they are not packed; auto is float32 on the CPU,"
        " bfloat16 on a GPU",
        choices=("auto", "float32", "bfloat16"),
        resolvable=True,
    )
    runner: Literal["auto", "reference", "fast"] = _option(
        "auto",
        "what runs steps: fast has packed weights, captured decode steps and lookahead, reference"
        " is the eager model it is compared with; auto is fast on a GPU",
        choices=("auto", "reference", "fast"),
        resolvable=True,
    )
    kernels: Literal["auto", "torch", "triton"] = _option(
        "auto",
        "of the fast runner: fused kernels, or their twins in plain torch; auto is triton on a GPU",
        choices=("auto", "torch", "triton"),
        resolvable=True,
    )
    graphs: bool | None = _option(
        None,
        "whether the fast runner captures decode steps as CUDA graphs, and passes over up to 1024 rows"
        " of prompts to DeepSeek models whose experts are resident; left open: on a GPU",
        resolvable=True,
    )
    lookahead: bool = _option(
        True,
        "whether the fast runner launches a decode step before the results of the last are read",
    )
    max_model_len: int | None = _option(
        None,
        "context served, prompt and reply together; left open: the model's own. A smaller one lets"
        " a smaller pool serve",
        least=2,
        resolvable=True,
    )
    max_num_seqs: int = _option(
        16, "most requests that hold memory at once; further ones wait", least=1
    )
    # Running streams get their row first and prompts share the rest, so this bounds how long a step
    # can be held up by somebody's prompt.
    max_batched_tokens: int | None = _option(
        None,
        "rows of one step, more than max_num_seqs; left open: 512 on the CPU, 8192 on a GPU",
        least=2,
        resolvable=True,
    )
    # Streams wait for a slice of a prompt's pass, a layer of its rows at least.
    max_mixed_tokens: int | None = _option(
        None,
        "rows of prompts in a step that has running streams, which wait for them; left open: as"
        " max_batched_tokens on the CPU, 1024 on a GPU",
        least=1,
        resolvable=True,
    )
    block_size: int = _option(
        128,
        "positions per block of compressed entries, a multiple of every compress ratio of the model"
        " (128 serves V4 and V4.1)",
        least=1,
    )
    num_blocks: int | None = _option(
        None,
        "blocks of the pool; left open: room for one full context or 65,536 positions, whichever is"
        " more; on a GPU for all requests at full context, or what nine tenths of its memory have"
        " room for. Requests beyond that wait, or are preempted and recomputed",
        least=1,
        resolvable=True,
    )
    # A hit gives the same greedy tokens; logits differ by rounding, since it cuts the prompt elsewhere.
    prefix_cache: bool = _option(
        True,
        "whether what prompts and generations have in common is processed once; those of different"
        " API keys stay apart",
    )
    prefill: Literal["off", "exact", "bounded"] = _option(
        "off",
        "how prompts of requests that do not say are processed: by every layer whole (off), or by"
        " late layers only as far as their end needs it (exact, bounded), where the model can",
        choices=PREFILL_MODES,
    )
    tail_graphs: bool | None = _option(
        None,
        "whether the late layers of bounded prompts run as CUDA graphs, by rows; left open: where"
        " decode steps are captured and prefill is bounded",
        resolvable=True,
    )
    # Off until a checkpoint's own drafts are measured: how many are taken is a property of its weights.
    speculation: Literal["off", "auto", "dspark", "mtp"] = _option(
        "off",
        "whether tokens are drafted and verified several at a time, to the same tokens: by the"
        " checkpoint's DSpark or MTP stages, by those it has (auto), or not at all (off). Up to 64 rows"
        " of verifications in a step; beyond that steps are plain",
        choices=("off", "auto", "dspark", "mtp"),
        resolvable=True,
    )
    # Each is as large as a request's own state; three or four per conversation are in use. Blocks
    # that only the cache holds need no room of their own: they are given up when needed.
    max_snapshots: int = _option(
        64, "most states the prefix cache keeps beside those of running requests", least=1
    )
    # With fewer slots than experts the host, and then the checkpoint's files, hold the rest.
    expert_slots: int | None = _option(
        None,
        "routed experts of each layer that the device holds, at least as many as a token is routed"
        " to; the host holds all of a paged layer. Left open: every expert is on the device",
        least=1,
    )
    expert_slots_file: Path | None = _option(  # noqa: RUF009 - a declaration, as all
        None,
        "file with the slots of each layer and the experts that stay in them, as bathyal engine plan"
        " --trace writes it, in place of expert_slots",
        file="old",
    )
    resident_layers: int = _option(
        0, "first layers whose experts all stay on the device beside expert_slots", least=0
    )
    expert_host_gb: int | None = _option(
        None,
        "host memory for paged experts, in GB; those beyond it are read from the checkpoint's files"
        " when they are needed, and decode steps are not captured then. Left open: all that is"
        " needed",
        least=1,
    )
    expert_prefetch: bool = _option(
        False,
        "whether experts that the next layer's router would choose for this layer's input are brought"
        " in ahead of it, beside what it computes. Changes no result; pays where nearly all guesses are right",
    )
    record_routing: Path | None = _option(  # noqa: RUF009 - a declaration, as all
        None,
        "file to write when the engine ends: which experts each step was routed to, for bathyal"
        " engine plan --trace. Decode steps are not captured meanwhile",
        file="new",
    )
    cpu_threads: int | None = _option(
        None,
        "threads of torch's CPU kernels, in the engine's own thread; left open: by cores and weights",
        least=1,
        resolvable=True,
    )

    def __post_init__(self) -> None:
        """Check the ranges."""
        problems = []
        for item in fields(self):
            value, rule = getattr(self, item.name), rule_of(item.name)
            if rule.choices and value not in rule.choices:
                problems.append(
                    f"{item.name}: expected one of {', '.join(rule.choices)}, got {value!r}"
                )
            if rule.least is not None and value is not None:
                least = rule.least
                if item.name == "max_batched_tokens":
                    # Every running stream has a row in every step, and a prompt always gets one more.
                    least = self.max_num_seqs + 1
                if value < least:
                    problems.append(f"{item.name}: expected at least {least}, got {value}")
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

    @property
    def itemsize(self) -> int:
        """Bytes of an element: of float32, or of bfloat16, which a GPU takes if left open."""
        return 4 if self.dtype == "float32" else 2

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

    def resolve_max_batched_tokens(self, *, on_gpu: bool = False) -> int:
        """Give the rows of one step; always more than there are streams."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        return max(GPU_BATCHED_TOKENS if on_gpu else BATCHED_TOKENS, self.max_num_seqs + 1)

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


def rule_of(name: str) -> Rule:
    """Give the declaration of a field.

    Raises:
        KeyError: there is no such field.
    """
    found: Rule = _RULES[name]
    return found


def shown(value: Any) -> str:
    """Give a value of an option as a command line or a log line has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def buckets_up_to(most: int, buckets: Sequence[int] = DECODE_BUCKETS) -> tuple[int, ...]:
    """Buckets needed for up to `most` rows: those below, and the first that holds them."""
    ordered = sorted(buckets)
    below = [bucket for bucket in ordered if bucket < most]
    return (*below, *ordered[len(below) : len(below) + 1])


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


_RULES = {item.name: item.metadata["rule"] for item in fields(EngineConfig)}
