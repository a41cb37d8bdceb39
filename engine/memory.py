"""Who gets what memory and why, before anything is loaded: `bathyal engine plan`.

Every request and every snapshot has a slot of fixed size, and blocks grow with the tokens in memory.
Weights are held dequantised by the reference runner, and as the checkpoint packs them by the fast
one, which has static buffers for decode steps beside them. Pool sizes come from the table that the
pools are made of (engine.plan.layout), so they are exact; so are those of the weights. Loads no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine import qwen3_memory
from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.expert_paging import paging_of
from engine.memory_items import Item, step_buffers
from engine.model.names import (
    DSPARK_UNUSED,
    FP4_GROUP,
    MTP_UNUSED,
    TABLE_GROUP,
    TensorSpec,
    part,
    tensor_specs,
)
from engine.options import PROMPT_BUCKETS, TAIL_BUCKETS, EngineConfig, buckets_up_to
from engine.plan.layout import ALIGNMENT, Drafting, Group, PoolTensor, pool_tensors
from engine.plan.records import Forms, forms_of
from engine.plan.replay import tail_of
from engine.qwen3_config import Qwen3Config
from engine.speculation import draft_tokens, drafting_of, speculative_buckets

#: Share of a budget that is left to the allocator and kernels. A rule of thumb.
RESERVE = 0.1
#: Files with a container's memory limit in bytes: cgroup v2, then v1.
LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
#: Scores of index keys that are worked out at a time (engine.kernels.select).
CHUNK_SCORES = 1 << 25
#: Rows of a captured pass for each prompt that it has room for (engine.device.prompt_graphs).
PROMPT_ROWS = 64
#: cgroup v1 says "no limit" by a number near 2**63.
NO_LIMIT = 2**60

_GROUPS: dict[Group, str] = {
    "window": "window rings",
    "state": "compressor state",
    "index_state": "index compressor state",
    "draft": "window rings of draft stages",
    "carry": "streams between draft stages",
    "history": "n-gram history",
    "entries": "compressed entries",
    "index_keys": "index keys",
}
#: Who drafts -> why its weights are not read otherwise.
_DRAFTS: dict[Drafting, str] = {"dspark": DSPARK_UNUSED, "mtp": MTP_UNUSED}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine allocates, and what would fit.

    Args:
        items: by owner.
        budget: bytes of the device; None if nobody said.
        block_nbytes: bytes of one block over all layers.
        num_blocks: blocks that the engine makes, the dummy not counted.
        blocks_wanted: blocks for all requests at full context at once.
        block_size: tokens per block.
    """

    items: tuple[Item, ...]
    budget: int | None
    block_nbytes: int
    num_blocks: int
    blocks_wanted: int
    block_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget that are allocated."""
        return sum(item.nbytes for item in self.items if item.owner != "host")

    @property
    def token_nbytes(self) -> float:
        """Bytes that a token of context takes, beside its request's slot."""
        return self.block_nbytes / self.block_size

    @property
    def reserve(self) -> int:
        """Bytes of the budget that are left to the allocator and kernels."""
        return 0 if self.budget is None else math.ceil(self.budget * RESERVE)

    @property
    def fits(self) -> bool:
        """Whether everything fits; True if no budget is known."""
        return self.budget is None or self.nbytes + self.reserve <= self.budget

    @property
    def blocks_possible(self) -> int | None:
        """Most blocks the budget has room for beside weights and slots; None without a budget."""
        if self.budget is None:
            return None
        fixed = self.nbytes - self.num_blocks * self.block_nbytes
        free = self.budget - self.reserve - fixed
        # A model of window layers only has blocks of no size.
        return max(0, free) // self.block_nbytes if self.block_nbytes else self.num_blocks


def container_memory(files: Iterable[Path] = LIMIT_FILES) -> int | None:
    """Give the container's memory limit in bytes, None where there is none.

    The machine's whole memory (MemTotal) is not asked: it may belong to others.

    Args:
        files: places of the limit, the first that can be read counts.
    """
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if not text.isdecimal():  # "max"
            return None
        return None if int(text) >= NO_LIMIT else int(text)
    return None


def plan_memory(
    config: AnyConfig,
    options: EngineConfig,
    *,
    itemsize: int,
    budget: int | None,
    packed: bool = False,
) -> MemoryPlan:
    """Work out what the engine allocates for a model.

    Args:
        config: of the model.
        options: how it will be run; max_model_len None plans for the model's own context.
        itemsize: bytes of an element of the engine's dtype, 2 for bfloat16, 4 for float32.
        budget: bytes of the device.
        packed: whether the fast runner will serve it; Qwen's models no other does.

    Raises:
        EngineError: the options do not fit the model.
    """
    context = options.resolve_max_model_len(config.max_position_embeddings)
    num_blocks = options.resolve_num_blocks(context)
    wanted = options.max_num_seqs * -(-context // options.block_size)
    if isinstance(config, Qwen3Config):
        found = qwen3_memory.items(
            config, options, context=context, num_blocks=num_blocks, itemsize=itemsize
        )
        each = qwen3_memory.block_nbytes(config, options.block_size, itemsize)
        return MemoryPlan(tuple(found), budget, each, num_blocks, wanted, options.block_size)
    forms = forms_of(is_v41=config.is_v41, is_quantised=packed and config.is_quantised)
    drafting = drafting_of(options)
    parts = list(
        pool_tensors(config, options.block_size, itemsize, forms, drafting, ring_history=packed)
    )
    weights = _packed_weights(config, itemsize, drafting) if packed else _weights(config, itemsize)
    steps: tuple[Item, ...] = ()
    if packed:
        steps = (
            *_steps(config, options, context),
            *_tails(config, options, context),
            *_prompt_graphs(config, options, context, itemsize),
            *_prompts(config, options, context, itemsize),
        )
    items = (*weights, *_pools(parts, forms, options, num_blocks, itemsize, packed=packed), *steps)
    return MemoryPlan(
        items=items,
        budget=budget,
        block_nbytes=sum(p.nbytes(itemsize) for p in parts if p.per_block),
        num_blocks=num_blocks,
        blocks_wanted=wanted,
        block_size=options.block_size,
    )


def blocks_for_gpu(
    config: AnyConfig, options: EngineConfig, nbytes: int, *, itemsize: int
) -> tuple[int, str]:
    """Say how many blocks the fast runner makes on a GPU where the user has left it open.

    Args:
        config: of the model.
        options: how it will be run; its num_blocks does not count.
        nbytes: of the GPU's memory.
        itemsize: as in plan_memory.

    Returns:
        blocks, and what they are: enough for all requests at full context, or what there is room
        for, but never fewer than one request needs.

    Raises:
        EngineError: the options do not fit the model.
    """
    options = dataclasses.replace(options, num_blocks=None)
    plan = plan_memory(config, options, itemsize=itemsize, budget=nbytes, packed=True)
    least, possible = plan.num_blocks, plan.blocks_possible
    assert possible is not None
    if plan.blocks_wanted <= max(least, possible):
        return max(least, plan.blocks_wanted), "all requests at full context"
    return max(least, possible), "what the GPU has room for"


def _weights(config: ModelConfig, itemsize: int) -> Iterator[Item]:
    """Weights in memory, by part; engine.model.weights says what is fused and multiplied in."""
    sizes: defaultdict[str, int] = defaultdict(int)
    tensors: defaultdict[str, int] = defaultdict(int)
    tables = 0
    for name, spec in tensor_specs(config).items():
        size = math.prod(spec.shape)
        if spec.unused:
            continue
        if spec.role == "table":
            # On disk in FP8 with a scale byte per 32 values, or in bfloat16.
            tables += size + size // 32 if config.is_quantised else 2 * size
        elif not name.endswith(("_scale", ".k_weight")):  # multiplied into others at load
            width = {"linear": itemsize, "expert": itemsize, "ids": 8}.get(spec.role, 4)
            copies = 2 if name.endswith(".ape") else 1  # with zeros for the kv half
            sizes[part(name)] += size * width * copies
            tensors[part(name)] += 1
    for what, nbytes in sorted(sizes.items(), key=lambda pair: -pair[1]):
        why = (
            f"{tensors[what]:,} tensors; {itemsize} bytes an element of a linear or expert, else 4"
        )
        yield Item("weights", what, nbytes, why)
    if tables:
        yield Item("host", "Engram tables", tables, "mapped from disk, read row by row")


def _packed_weights(config: ModelConfig, itemsize: int, drafting: Drafting) -> Iterator[Item]:
    """Weights as engine.model.packed holds them; official checkpoints pack linears and experts."""
    sizes: defaultdict[str, int] = defaultdict(int)
    tensors: defaultdict[str, int] = defaultdict(int)
    for name, spec in tensor_specs(config).items():
        # Multiplied into others at load: scales of streams, and one of Engram's gate weights.
        unused = spec.unused and spec.unused != _DRAFTS.get(drafting)
        if unused or name.endswith(("_scale", ".k_weight")):
            continue
        sizes[part(name)] += _packed_size(config, name, spec, itemsize)
        tensors[part(name)] += 1
    block = config.weight_block_size
    how = "FP8 linears, FP4 experts, with their scales" if block else "plain"
    for what, nbytes in sorted(sizes.items(), key=lambda pair: -pair[1]):
        yield Item("weights", what, nbytes, f"{tensors[what]:,} tensors; {how}")


def _packed_size(config: ModelConfig, name: str, spec: TensorSpec, itemsize: int) -> int:
    size, block = math.prod(spec.shape), config.weight_block_size
    if spec.role == "table":
        return size + size // TABLE_GROUP if config.is_quantised else 2 * size
    if spec.role == "ids":
        return 4 * size
    is_matrix = len(spec.shape) == 2 and name.endswith(".weight")
    if block is None or spec.role not in ("linear", "expert"):
        return size * (itemsize if is_matrix else 4)
    if spec.role == "expert":
        return size // 2 + size // FP4_GROUP
    rows, columns = spec.shape
    return size + -(-rows // block) * -(-columns // block)


def _steps(config: ModelConfig, options: EngineConfig, context: int) -> Iterator[Item]:
    """What captured decode steps read and write beside the pools (engine.device.buffers)."""
    yield from step_buffers(config.vocab_size, options, context)
    drafts = draft_tokens(config, drafting_of(options))
    if drafts:
        fitting = speculative_buckets(buckets_up_to(options.max_num_seqs), drafts)
        yield Item(
            "steps",
            "logits of drafts and verifications",
            sum(fitting) * (2 * drafts + 1) * config.vocab_size * 4,
            f"float32 of {', '.join(map(str, fitting))} requests, drafts of {drafts} tokens",
        )
    context += drafts
    yield Item(
        "steps",
        "rotary tables",
        2 * context * config.qk_rope_head_dim * 4,
        f"cosines and sines of {context:,} positions, for two bases",
    )


def _tails(config: ModelConfig, options: EngineConfig, context: int) -> Iterator[Item]:
    """What captured tails of prompts hold (engine.device.tail_graphs): a GPU's, in bfloat16."""
    tail, wanted = tail_of(config), options.tail_graphs
    if wanted is None:
        paged = paging_of(config, options, options.itemsize).is_paged
        wanted = options.prefill == "bounded" and options.graphs is not False and not paged
    buckets = [bucket for bucket in TAIL_BUCKETS if bucket <= context]
    if not wanted or tail is None or context <= tail.window or not buckets:
        return
    c, rows = config, buckets[-1]
    sequences = rows // max(1, tail.window // 4) + 1
    blocks = _table_width(context, options)
    parts = c.num_experts_per_tok + 1
    streams = 2 * c.hc_mult * c.hidden_size
    mixing = 4 * c.hc_mult * (2 + c.hc_mult)
    row = streams + 2 * parts * c.hidden_size + mixing + 8 + 3 * 4
    yield Item(
        "steps",
        "buffers of tails",
        rows * row + sequences * 4 * (5 + blocks),
        f"{rows} rows: streams, parts, positions, block tables",
    )
    yield Item(
        "steps",
        f"tail of {rows} rows",
        _pass_nbytes(config, rows, context, 2),
        f"an estimate; those of {', '.join(map(str, buckets[:-1]))} rows lie in the same pool",
    )


def _prompt_graphs(
    config: ModelConfig, options: EngineConfig, context: int, itemsize: int
) -> Iterator[Item]:
    """What captured passes over prompts hold (engine.device.prompt_graphs)."""
    on_gpu = itemsize == 2 and options.device != "cpu"
    wanted = on_gpu if options.graphs is None else options.graphs
    paged = paging_of(config, options, itemsize).is_paged
    longest = min(context, options.resolve_max_batched_tokens(on_gpu=on_gpu))
    buckets = [bucket for bucket in PROMPT_BUCKETS if bucket <= longest]
    if not wanted or paged or not buckets:
        return
    c, rows = config, buckets[-1]
    sequences = rows // PROMPT_ROWS + 1
    yield Item(
        "steps",
        "buffers of prompts",
        rows * (8 + 3 * 4) + sequences * 4 * (4 + _table_width(context, options)),
        f"{rows} rows: ids, positions, block tables",
    )
    # What flows out of all layers, and out of those before a tail, is held for each bucket.
    parts = c.num_experts_per_tok + 1
    row = itemsize * (c.hc_mult + parts + 2) * c.hidden_size
    held = sum(buckets) * row * (1 if tail_of(config) is None else 2)
    yield Item(
        "steps",
        f"passes of up to {rows} rows of prompts",
        held + _pass_nbytes(config, rows, context, itemsize),
        f"an estimate; those of {', '.join(map(str, buckets))} rows lie in one pool",
    )


def _table_width(context: int, options: EngineConfig) -> int:
    """Blocks of a table in static buffers of prompts (engine.device.row_buffers)."""
    return -(-context // options.block_size // 16) * 16


def _prompts(
    config: ModelConfig, options: EngineConfig, context: int, itemsize: int
) -> Iterator[Item]:
    """What a pass over prompts takes while it runs."""
    rows = min(context, options.resolve_max_batched_tokens(on_gpu=itemsize == 2))
    yield Item(
        "prompts",
        f"pass of {rows} rows",
        _pass_nbytes(config, rows, context, itemsize),
        "an estimate: streams, queries, outputs of experts, scores of entries",
    )


def _pass_nbytes(config: ModelConfig, rows: int, context: int, itemsize: int) -> int:
    """Most that lives at once in a pass; an estimate.

    That is a layer's streams and the parts of its output, before and after it, its queries and what
    is attended, hidden values of experts, the widest matrix in its unpacked form, and scores.
    """
    c, parts = config, config.num_experts_per_tok + 1
    heads = c.num_attention_heads * c.head_dim
    matrix = max(c.q_lora_rank * heads, c.o_lora_rank * max(heads, c.o_groups * c.hidden_size))
    row = 2 * (c.hc_mult * c.hidden_size + parts * c.hidden_size) + 2 * heads
    row += parts * c.moe_intermediate_size
    return itemsize * (rows * row + matrix) + 4 * min(CHUNK_SCORES, rows * context)


def _pools(
    parts: list[PoolTensor],
    forms: Forms,
    options: EngineConfig,
    num_blocks: int,
    itemsize: int,
    *,
    packed: bool,
) -> Iterator[Item]:
    running, snapshots = options.max_num_seqs, options.resolve_max_snapshots()
    slots = f"({running} requests + {snapshots} snapshots + 1 spare)"
    blocks = f"({num_blocks} of {options.block_size} tokens + 1 spare)"
    shapes: defaultdict[tuple[Group, tuple[int, ...]], list[PoolTensor]] = defaultdict(list)
    for tensor in parts:
        shapes[tensor.group, tensor.shape].append(tensor)
    for (group, shape), same in shapes.items():
        each = same[0].nbytes(itemsize)
        if not each:
            continue
        count = num_blocks + 1 if same[0].per_block else options.resolve_num_slots()
        owner = "blocks" if same[0].per_block else "slots"
        if group == "history" and not packed:
            owner = "host"
        why = f"{each:,} bytes x {blocks if owner == 'blocks' else slots}"
        if group != "history":
            why = f"{_stored(same[0], forms)}layers {', '.join(str(tensor.layer) for tensor in same)}: {why} each"
        what = _GROUPS[group]
        if owner == "blocks":
            what += f", ratio {options.block_size // shape[0]}"
        yield Item(owner, what, each * len(same) * count, why)
    held = len(parts) - (not packed)  # without the history, the last
    yield Item(
        "slots",
        "alignment",
        held * ALIGNMENT,
        f"{held} tensors of slots and blocks begin at multiples of {ALIGNMENT} in one arena",
    )


def _stored(tensor: PoolTensor, forms: Forms) -> str:
    """How the rows of a pool lie, where they are not plain numbers."""
    if tensor.kind != "bytes":
        return ""
    form = {"window": forms.window, "draft": forms.window, "entries": forms.entries}.get(
        tensor.group, forms.index
    )
    return f"{form}, {tensor.shape[-1]} bytes a row; "
