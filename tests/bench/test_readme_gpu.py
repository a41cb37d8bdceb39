"""README's GPU tables: what is there is shown, targets in bold where they are met, nothing else needed."""

from __future__ import annotations

from typing import Any

import pytest

from bench.readme_gpu import gpu

Row = dict[str, Any]


def spread(median: float) -> Row:
    return {"median": median, "p10": median * 0.99, "p90": median * 1.01, "n": 7}


def decode(batch: int, ms: float, tokens: int = 128, mode: str = "fused") -> Row:
    return {
        "bench": "decode", "mode": mode, "batch": batch, "prompt_tokens": tokens,
        "new_tokens": 256 if mode == "fused" else 16, "ms_step": spread(ms), "bound_share": 0.5,
        "kernels": 136, "host_us": spread(120.0),
    }  # fmt: skip


def rows() -> dict[str, list[Row]]:
    """A result of every kind; each second figure misses its target."""
    replay: Row = {"bench": "ttft", "prompt_tokens": 8192, "ttft_ms": spread(900.0)}
    held: Row = {"load_s": 15.0, "pin_gb_s": 3.8, "gpu_peak_gb": 136.0, "host_peak_gb": 47.0}
    paged: Row = {"bench": "paged", "offloaded_gb": 40.0, "slots": 40, "batch": 1}
    return {
        "gpu-engine-v4-flash-8l": [
            decode(1, 1.29) | {"sm_mhz": 1980, "watts": 500},
            decode(4, 1.85),
            decode(64, 8.0) | {"sm_mhz": 1740, "watts": 693},
            decode(1, 1.5, 65536),
            {"bench": "ttft", "prompt_tokens": 8192, "ttft_ms": spread(120.0)},
            {"bench": "cached", "cached_tokens": 65536, "new_prompt_tokens": 500,
             "ttft_ms": spread(61.0)},
            {"bench": "beside", "batch": 8, "prompt_tokens": 32768, "mixed": 1024, "itl_p99_ms": 9.0,
             "itl_p99_over_median_alone": 2.9, "ttft_ms": 1500.0},
            {"bench": "load", "batch": 1000, "aborted": 50, "lost": 0, "blocks_held_at_the_end": 0,
             "late_kernels": [], "peak_gb": 30.0, "planned_gb": 31.0, "peak_over_planned": 0.968},
        ],
        "gpu-engine-v41-8l": [decode(1, 1.9)],
        "gpu-step-v4-flash-8l": [
            {"bench": "step", "batch": 1, "prompt_tokens": 256, "ms_step": spread(1.25)}
        ],
        "gpu-start": [
            {"mode": "first", "seconds": 90.0}, {"mode": "second", "seconds": 41.0},
        ],
        "gpu-start-v41-8l": [{"mode": "first", "seconds": 95.0}],
        "gpu-ablation-v4-flash-8l": [
            decode(1, 400.0, 16, "eager"), decode(1, 90.0, 16, "graph"), decode(64, 24.0, 16, "graph")
        ],
        "gpu-greedy-tiny": [
            {"bench": "greedy", "mode": "fused", "equal": 198, "prompts": 200, "ties": [[3, 1, 0.0]],
             "otherwise": [[4, 2, 0.5, 1, 2]]},
            {"bench": "load", "requests": 1000, "aborted": 90, "lost": 0, "crossed": [],
             "blocks_held_at_the_end": 0},
        ],
        "gpu-peers": [
            {"bench": "peer", "what": "sample", "mode": "ours", "batch": 1, "top_p": 0.95, "us": 40.0},
            {"bench": "peer", "what": "top_k", "mode": "flashinfer", "batch": 1, "prompt_tokens": 64,
             "us": 12.0},
            {"bench": "peer", "what": "experts", "mode": "torch", "batch": 1, "prompt_tokens": 8192,
             "geometry": "qwen", "us": 900.0},
        ],
        "gpu-replay-v41-40l": [
            {**replay, "mode": "off", "ttft_ratio": 1.0, "tflop_s": 300.0},
            {**replay, "mode": "bounded", "ttft_ratio": 0.55},
            {**replay, "mode": "exact", "ttft_ratio": 0.69},
            {**replay, "mode": "bounded", "ttft_ratio": 0.75, "tail_graphs": False},
        ],
        "gpu-replay-v41-40l-many": [
            {"bench": "many", "mode": "bounded", "batch": 16, "prompt_tokens": 32768,
             "new_tokens": 1, "ttft_ratio": 0.55, "throughput_ratio": 1.8},
            {"bench": "cached", "mode": "exact", "ttft_ms": spread(100.0)},
        ],
        "gpu-replay-v41-40l-tails": [
            {"bench": "tail", "mode": "eager", "rows": 128, "ms": spread(36.0), "ratio": 1.0,
             "pool_mb": 9.0},
            {"bench": "tail", "mode": "graph", "rows": 128, "ms": spread(27.0), "ratio": 0.75,
             "pool_mb": 9.0},
            {**replay, "mode": "bounded", "chunk": 2048, "ttft_ratio": 0.538},
        ],
        "gpu-engine-qwen": [
            {**decode(4, 4.9), "tok_s": spread(816.0)},
            {"bench": "ttft", "prompt_tokens": 8192, "ttft_ms": spread(159.0)},
        ],
        "gpu-paged-pins-qwen": [
            {**paged, "mode": "paged", "pins": 32, "load_s": 22.0, "pin_s": 20.0, "host_gb": 43.5, "pin_gb_s": 2.2}
        ],
        "gpu-paged-qwen": [
            {**paged, "mode": "paged", "hit_rate": 0.901, "tok_s": 106.0, "over_formula": 1.02,
             "resident_ms": 2.2, "full_hit_ms": 2.53, "load_s": 18.0, "pin_s": 16.0, "host_gb": 58.0,
             "pin_gb_s": 3.6},
            {**paged, "mode": "paged", "hit_rate": 0.95, "tok_s": 7.0, "batch": 4, "over_formula": 1.0},
        ],
        "gpu-paged-prefetch-qwen": [
            {**paged, "trace": "reuse 0.9", "prefetch_accuracy": 0.8, "over_without": 0.4},
        ],
        "gpu-paged-qwen-baselines": [
            {**paged, "mode": "paged", "hit_rate": 1.0, "tok_s": 300.0, "over_formula": 1.0},
            {**paged, "mode": "paged", "trace": "reuse 0.9", "tok_s": 30.0},
            {"bench": "paged_baseline", "way": "cpu", "batch": 1, "tok_s": 20.0, "threads": 8},
        ],
        "gpu-paged-v4-flash-43l": [
            {**paged, "trace": "reuse 1.0", "hit_rate": 1.0, "tok_s": 140.0},
            {**paged, "trace": "reuse 0.9", "hit_rate": 0.9, "tok_s": 99.0, **held},
        ],
        "gpu-paged-v4-flash-43l-80gb": [
            {**paged, "trace": "reuse 0.9", "hit_rate": 0.899, "tok_s": 71.0, **held},
        ],
        "gpu-beyond-v4-flash-43l": [
            {"bench": "beyond", "new_tokens": 256, "tok_s": 95.0, "hit_rate": 0.9, **held},
        ],
        "gpu-paged-qwen-fp8": [
            {**paged, "trace": "reuse 0.9", "hit_rate": 0.9, "tok_s": 180.0, "over_formula": 1.2},
        ],
        "gpu-paged-sweep-qwen": [
            {**paged, "trace": "zipf", "hit_rate": 0.8, "tok_s": 60.0},
            {"bench": "paged_prompt", "prompt_tokens": 8192, "slots": 64, "ttft_ms": spread(544.0),
             "copy_ms": 538.0, "compute_ms": 249.0, "over_longer": 1.01, "hit_rate": 0.5},
        ],
        "gpu-speculate-v41-8l": [
            {"batch": 1, "block": 5, "mode": "fixed acceptance 3.5", "tok_s": spread(900.0),
             "times_plain": 2.1, "times_plain_at_bound": 1.26, "acceptance_length": 3.5,
             "ms_step": spread(4.0), "plain_ms_step": spread(1.6), "bound_ms": 2.34, "bound_share": 0.585,
             "plain_bound_ms": 0.85, "experts_over_plain": 5.17}
        ],
        "gpu-speculate-v4-flash-8l": [
            {"batch": 1, "block": 1, "mode": "fixed acceptance 1.8", "tok_s": spread(800.0),
             "times_plain": 2.2, "times_plain_at_bound": 1.31, "acceptance_length": 1.8,
             "ms_step": spread(2.0), "plain_ms_step": spread(1.2), "bound_ms": 1.1, "bound_share": 0.55,
             "plain_bound_ms": 0.66, "experts_over_plain": 1.98}
        ],
    }  # fmt: skip


def text(of: dict[str, list[Row]]) -> str:
    return gpu(lambda name: of.get(name, []), lambda row: "its source")


@pytest.mark.parametrize(
    "line",
    [
        "| step at batch 1, ms | **1.29 (1.28-1.30)** [1.25] | 1.30 | 50 % | 3.25 |",
        "| step at batch 4, ms | 1.85 (1.83-1.87) | 1.80 | 50 % | 3.36 |",
        "The GPU's processors ran at 1980 MHz at batch 1 (500 W), 1740 MHz at batch 64 (693 W).",
        "| step at batch 1, 65536 tokens of context, ms | 1.50 (1.16x) | 1.15x | 50 % | |",
        "| first token of 8192 tokens, ms | **120 (119-121)** | 139 | 139 |",
        "| first token after 65536 cached and 500 new tokens, ms | 61 (60-62) | 60 | |",
        "first token takes 1500 ms; ms (to the median alone) | **9.0 (2.90x)** | 3x | |",
        "**0 lost, 0 blocks held at the end, 0 kernels compiled late**. Memory: 30.0 GB",
        "planned 31.0 GB (96.8 %).",
        "| step at batch 1, ms | 1.90 (1.88-1.92) | 1.30 | **50 %** |",
        "| start to first token, `v4-flash-8l`, s | measured | target | vLLM 0.26.0 |",
        "| start to first token, `v41-8l`, s | measured | target |\n|---|---|---|\n| the first ever | **95** | 180 |",
        "where steps take long: eager, graph: 16 and 16; fused: 128 and 256:",
        "| the first ever | **90** | 180 | over 480 |",
        "| with compiled kernels | 41 | 40 | 62 |",
        "| eager | 1 | 400.00 | 17 | 120 |",
        "At batch 64 fused steps are **3.00x** as fast as unfused ones.",
        "fused: 198 of 200 equal, 1 up to a tie, 1 otherwise",
        "Of 1000 requests with 90 random aborts: **0 lost, 0 with another one's tokens",
        "| draw, batch 1, top_p 0.95 | 40 | - | - |",
        "| 512 best entries of 64 tokens at ratio 4, batch 1 | - | 12 | - |",
        "| experts of a prompt of 8192 tokens, `qwen` | - | - | 900 |",
        "| 8192 | 900 (891-909) | **300** | **0.550** | 0.56 | 0.690 | 0.68 |",
        "16 prompts of 32768 at once, 1 new tokens: last first token 0.550 of `off`, throughput **1.80x**",
        "after 64k cached ones, ms: exact 100 (99-101).",
        "(memory of the pool): 128 rows: 36.0 to 27.0 (0.75x, 9 MB more).",
        "relative to `off`: chunks of 2048, 8192 tokens: bounded 0.538.",
        "all on the GPU, through the whole engine: 128-token prompts, 256 new tokens, greedy; tokens per",
        "| 4 | **816** | 800 | 50 % | 621 |",
        "| first token of 8192 tokens, ms | 159 (157-161) | 158 | | |",
        "| 0.901 | **106** | 105 | **1.02x** |",
        "(2.20 ms, of the same model wholly on the GPU in the same run; paged, with every choice in a slot, it takes 1.15 times",
        "Loading: with 32 experts of each layer staying on the GPU 22.0 s, of it 20.0 s of pinning 44 GB (2.20 GB/s); with none 18.0 s",
        "Other ways: misses computed on the CPU by torch at h = 0.9: 20.0 tokens per second on 8 cores; "
        "paged experts in the same run: 30.0, **1.50x** of the strongest.",
        "tokens per second (to the formula): h 0.900: 180 (1.20x).",
        "tokens per second by slots: K 40: 60 at h 0.800.",
        "tokens at K = 64, at h 0.500: 544 ms, **1.01x** of the longer of copying (538 ms) and computing (249 ms), target 1.1x.",
        "Prefetch at reuse 0.9, tokens per second to those without: 0.40x with 80 % right guesses.",
        "Four sequences at once: h 0.950: 7 (**1.00x**).",
        "within 80 GB of the GPU, tokens per second: 71 at h 0.899; ready in 15 s, 3.8 GB/s pinned",
        "256 tokens: 95 tokens per second as the client sees them, at h 0.900;",
        "off the GPU: 99 tokens per second at a hit rate of 0.900 (target 100), 140 at h 1.000; ready in 15 s",
        "900 tokens per second, **2.10x** of plain decoding (target 2x: steps of 2.80 ms, at 84 % of the",
        "memory bound; 4.00 ms now, at 58 %; plain decoding is at 53 %; were both at their bounds, 1.26x",
        "800 tokens per second, 2.20x of plain decoding (2.00 ms now, at 55 %; plain decoding is at 55 %;",
        "the 2 rows of a request read 2.0 times the experts of one).",
    ],
)
def test_every_kind_of_row_has_its_line(line: str) -> None:
    """A figure stands beside its target, bold where it is met."""
    assert line in text(rows())


def test_rows_of_earlier_runs_say_what_they_are() -> None:
    """A formula whose resident step was the paged model's."""
    found = rows()
    for row in found["gpu-paged-qwen"]:
        row.pop("full_hit_ms", None)

    shown = text(found)

    assert "resident step (the paged model's own with every choice in a slot)" in shown


def test_a_target_beyond_the_bound_says_so() -> None:
    """A gain for which steps would have to read faster than memory does is out of reach."""
    found = rows()
    found["gpu-speculate-v41-8l"][0] |= {"times_plain": 1.5, "bound_ms": 3.0}

    assert "at 107 % of the memory bound, out of reach here;" in text(found)


def test_prompts_have_a_file_of_their_own() -> None:
    """Where there is one its rows stand, with its source, and the engine's file has the rest."""
    found = rows()
    first: Row = {"bench": "ttft", "prompt_tokens": 8192, "ttft_ms": spread(130.0), "own": True}
    found["gpu-prompts-v4-flash-8l"] = [first]

    shown = gpu(lambda name: found.get(name, []), lambda row: f"own {row.get('own', False)}")

    assert "| first token of 8192 tokens, ms | **130 (129-131)** | 139 | 139 |" in shown
    assert "**120" not in shown
    assert "61 (60-62)" in shown
    assert "own True" in shown


def test_figures_of_another_commit_say_so() -> None:
    """What was taken at another commit than its table says at which, and is no part of a ratio."""
    found = rows()
    for row in [*found["gpu-engine-v4-flash-8l"], *found["gpu-step-v4-flash-8l"]]:
        row["commit"] = (
            "older" if row.get("batch") == 64 or row.get("prompt_tokens", 0) > 128 else "newer"
        )

    shown = text(found)

    assert "| step at batch 64, ms | 8.00 (7.92-8.08), at older | 7.00 |" in shown
    assert "| step at batch 1, 65536 tokens of context, ms | 1.50, at older |" in shown
    assert "| step at batch 4, ms | 1.85 (1.83-1.87) |" in shown
    assert "| step at batch 1, ms | **1.29 (1.28-1.30)** |" in shown, "the device's step is another"


@pytest.mark.parametrize("name", rows())
def test_any_file_may_be_absent(name: str) -> None:
    """What was not measured is left out, and the rest is shown as before."""
    found = rows()
    del found[name]

    assert text(found)
    assert text({name: rows()[name]}) or name in ("gpu-step-v4-flash-8l",)


def test_nothing_measured_is_nothing_said() -> None:
    """Without rows there is no section."""
    assert text({}) == ""
