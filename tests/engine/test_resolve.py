"""What an engine runs with: every open value is filled in once, and says by which rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, strategies as st

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.architectures import read_config
from engine.config import ModelConfig
from engine.memory import plan_memory
from engine.options import EngineConfig, rule_of
from engine.resolve import Facts, Resolved, Resolver, facts_of, resolve
from tests.engine.model import build

CPU = Facts(gpu=None, cores=4, weight_bytes=17_000_000, context=4096)
GPU = Facts(gpu="Some GPU", cores=16, weight_bytes=9_000_000_000, context=65_536)


def test_every_value_says_where_it_comes_from() -> None:
    """One line a field: what counts, and whether the user, a default or a rule set it."""
    found = resolve(EngineConfig(max_num_seqs=8, dtype="float32"), GPU)

    assert found.lines() == [
        "device = cuda (found Some GPU)",
        "dtype = float32 (user)",
        "runner = fast (device is cuda)",
        "kernels = triton (device is cuda)",
        "graphs = on (device is cuda)",
        "lookahead = on (default)",
        "max_model_len = 65536 (the model's context)",
        "max_num_seqs = 8 (user)",
        "max_batched_tokens = 8192 (device is cuda)",
        "max_mixed_tokens = 1024 (device is cuda)",
        "block_size = 128 (default)",
        "num_blocks = 512 (65,536 positions, one context or 65,536)",
        "prefix_cache = on (default)",
        "prefill = off (default)",
        "tail_graphs = off (prefill is off, device is cuda)",
        "speculation = off (default)",
        "max_snapshots = 64 (default)",
        "expert_slots = unset (default)",
        "expert_slots_file = unset (default)",
        "resident_layers = 0 (default)",
        "expert_host_gb = unset (default)",
        "expert_prefetch = off (default)",
        "record_routing = unset (default)",
        "cpu_threads = 15 (16 cores, 9,000 MB of weights)",
    ]


@pytest.mark.parametrize(
    ("options", "facts", "value", "why"),
    [
        ({"prefill": "bounded"}, GPU, True, "prefill is bounded, device is cuda"),
        ({"prefill": "exact"}, GPU, False, "prefill is exact, device is cuda"),
        ({"prefill": "bounded", "graphs": False}, GPU, False, "prefill is bounded, device is cuda"),
        ({"prefill": "bounded", "runner": "fast"}, CPU, False, "prefill is bounded, device is cpu"),
        ({"prefill": "bounded", "runner": "reference"}, GPU, False, "prefill is bounded, device is cuda"),
        (
            {"prefill": "bounded"},
            dataclasses.replace(GPU, eager_tails="experts are paged"),
            False,
            "experts are paged",
        ),
        ({"prefill": "off", "tail_graphs": True}, GPU, True, "user"),
        ({"prefill": "bounded", "tail_graphs": False}, GPU, False, "user"),
    ],
)  # fmt: skip
def test_tails_are_captured_where_they_are_used(
    options: dict[str, Any], facts: Facts, value: bool, why: str
) -> None:
    """By default with bounded prompts and captured decode steps, and never against the user."""
    found = resolve(EngineConfig(**options), facts)

    assert found.config.tail_graphs is value
    (source,) = {d.source for d in found.decisions if d.field == "tail_graphs"}
    assert source == why


def test_without_a_gpu_the_reference_runs() -> None:
    """On the CPU the eager model in float32 serves, and nothing is captured."""
    config = resolve(EngineConfig(), CPU).config

    assert (config.device, config.dtype, config.runner) == ("cpu", "float32", "reference")
    assert (config.kernels, config.graphs, config.max_batched_tokens) == ("torch", False, 512)
    assert (config.max_model_len, config.cpu_threads) == (4096, 1)


@given(
    st.sampled_from(["auto", "cpu", "cuda"]),
    st.sampled_from(["auto", "reference", "fast"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 100, 4096]),
    st.sampled_from([CPU, GPU]),
)
def test_what_the_user_set_stays(
    device: str, runner: str, graphs: bool | None, context: int | None, facts: Facts
) -> None:
    """No rule changes a value that was given, and afterwards none is open; twice changes nothing."""
    options = EngineConfig(
        device=device,  # type: ignore[arg-type]
        runner=runner,  # type: ignore[arg-type]
        graphs=graphs,
        max_model_len=context,
    )
    found = resolve(options, facts)

    for item in dataclasses.fields(options):
        asked, got = getattr(options, item.name), getattr(found.config, item.name)
        assert got == asked or (asked in ("auto", None) and rule_of(item.name).resolvable)
        assert got not in ("auto", None) or not rule_of(item.name).resolvable
    assert resolve(found.config, facts).config == found.config


def test_rules_may_only_fill_in_what_is_declared_open() -> None:
    """A pass that sets another field, sets one twice or leaves one open is a fault."""
    resolver = Resolver(EngineConfig())

    with pytest.raises(RuntimeError, match="max_num_seqs may not be resolved; a rule tried to"):
        resolver.decide("max_num_seqs", 4, "a rule")
    resolver.decide("device", "cpu", "a rule")
    with pytest.raises(RuntimeError, match="device is decided twice, the second time by another"):
        resolver.decide("device", "cuda", "another")
    with pytest.raises(RuntimeError, match="dtype is still open after a rule"):
        resolver.decide("dtype", "auto", "a rule")
    with pytest.raises(RuntimeError, match="dtype: no rule has filled it in"):
        resolver.finish()
    with pytest.raises(KeyError):
        resolver.decide("colour", "red", "a rule")


def test_options_that_do_not_fit_the_model_are_refused() -> None:
    """The model's context stands in the message."""
    with pytest.raises(EngineError, match="the model's context is 4096 tokens, got 5000"):
        resolve(EngineConfig(max_model_len=5000), CPU)


def test_every_field_is_declared_with_help() -> None:
    """No option is without a sentence that says what it sets."""
    for item in dataclasses.fields(EngineConfig):
        assert len(rule_of(item.name).about) > 20
        assert rule_of(item.name).accepted


def test_paging_takes_the_fast_runner_and_recording_no_graphs() -> None:
    """Where only the fast runner serves, it is taken on the CPU too; nothing is captured while recording."""
    found = resolve(EngineConfig(), dataclasses.replace(CPU, only_fast="experts are paged"))
    assert "runner = fast (experts are paged)" in found.lines()
    found = resolve(EngineConfig(), dataclasses.replace(GPU, eager="routing is recorded"))
    assert "graphs = off (routing is recorded)" in found.lines()
    assert resolve(EngineConfig(graphs=True), found_eager()).config.graphs is True


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"graphs": True}, "graphs are asked for"),
        ({"tail_graphs": True}, "graphs are asked for"),
        ({"kernels": "triton"}, "Triton's kernels are asked for"),
        ({"expert_slots": 3}, "experts are paged"),
    ],
)
def test_what_only_the_fast_runner_has_brings_it(options: dict[str, Any], why: str) -> None:
    """On a CPU, too, where it says what is missing for them."""
    asked = EngineConfig(**options)
    config = read_config(TINY_CHECKPOINT)
    facts = facts_of(config, asked, gpu=None, gpu_nbytes=None, cores=2, weight_bytes=1)
    assert f"runner = fast ({why})" in resolve(asked, facts).lines()


def found_eager() -> Facts:
    """A GPU on which decode steps are not captured; who asks for graphs is refused later."""
    return dataclasses.replace(GPU, eager="routing is recorded")


def test_decode_steps_over_paged_experts_are_captured_with_prefetch_and_without() -> None:
    """On a GPU; copies ahead are part of the graph."""
    config = read_config(TINY_CHECKPOINT)
    for prefetch in (True, False):
        options = EngineConfig(expert_slots=4, expert_prefetch=prefetch)
        facts = facts_of(
            config, options, gpu="NVIDIA H200", gpu_nbytes=None, cores=16, weight_bytes=10**9
        )
        assert "graphs = on (device is cuda)" in resolve(options, facts).lines()


#: V4.1 with a long context, of which a GPU does not hold what all requests might ask for.
LONG = ModelConfig.from_dict(build.v41(max_position_embeddings=1 << 20))


def on_gpu(gpu_nbytes: int | None, **options: Any) -> Resolved:
    """What counts on a GPU of some memory."""
    asked = EngineConfig(**options)
    facts = facts_of(LONG, asked, gpu="GPU", gpu_nbytes=gpu_nbytes, cores=2, weight_bytes=1)
    return resolve(asked, facts)


@given(st.integers(0, 40 << 30), st.sampled_from(["float32", "bfloat16", "auto"]))
def test_blocks_fill_a_gpu_and_no_more(gpu_nbytes: int, dtype: str) -> None:
    """One block more would not fit, unless that is what a single request needs anyway."""
    found = on_gpu(gpu_nbytes, dtype=dtype, max_model_len=1 << 17, max_num_seqs=8)
    (why,) = (d.source for d in found.decisions if d.field == "num_blocks")
    blocks, least, wanted = found.config.num_blocks, 1024, 8 * 1024
    assert blocks is not None
    itemsize = 4 if dtype == "float32" else 2
    plan = plan_memory(LONG, found.config, itemsize=itemsize, budget=gpu_nbytes, packed=True)

    assert least <= blocks <= wanted
    assert plan.fits or blocks == least
    free = gpu_nbytes - plan.reserve - plan.nbytes
    assert free < plan.block_nbytes or blocks == wanted
    assert ("all requests" in why) is (blocks == wanted)


@pytest.mark.parametrize(
    ("gpu_nbytes", "options", "blocks"),
    [
        (None, {}, 8192),  # nobody knows the memory: one context
        (1 << 60, {}, 16 * 8192),
        (1 << 60, {"device": "cpu"}, 8192),
        (1 << 60, {"runner": "reference"}, 8192),
        (1 << 60, {"expert_slots": 2}, 8192),  # slots get what is left
        (1 << 60, {"num_blocks": 9000}, 9000),
    ],
)
def test_blocks_are_many_only_where_memory_is_planned(
    gpu_nbytes: int | None, options: dict[str, Any], blocks: int
) -> None:
    """On a GPU whose memory is known, for the fast runner, unless the user has said."""
    assert on_gpu(gpu_nbytes, **options).config.num_blocks == blocks
