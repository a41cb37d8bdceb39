"""The GPU's part of README's figures, from bench/results/gpu-*.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Read = Callable[[str], list[Row]]

#: batch -> milliseconds a step: issue 5's target, and vLLM 0.26.0 on the same kind of machine.
STEPS = {1: (1.30, 3.25), 4: (1.80, 3.36), 16: (3.20, 3.94), 64: (7.0, 9.27)}
#: prompt tokens -> milliseconds to the first token: target and vLLM alike.
PROMPTS = {1024: 32, 8192: 139, 32768: 517, 65536: 1030}
#: prompt tokens -> TTFT relative to `off`: issue 6's targets for bounded and exact.
RATIOS = {1024: (0.85, 1.02), 8192: (0.56, 0.68), 32768: (0.53, 0.56), 65536: (0.53, 0.54)}
#: hit rate -> tokens per second of Qwen3-30B with 40 of 61 GB off the GPU: issue 7's targets.
PAGED = {0.9: 105, 0.95: 165, 0.99: 320}
#: batch -> tokens per second of Qwen3-30B in bfloat16, resident: issue 7's target and vLLM.
RESIDENT = {1: (450, 242), 4: (800, 621), 16: (1450, 1319), 64: (3700, 3635)}


def gpu(read: Read, source: Callable[[Row], str]) -> str:
    """Tables of all GPU figures there are; empty without any."""
    parts = [
        _passes(read),
        _experts(read),
        _replay(read),
        _resident(read),
        _paged(read),
        _speculation(read),
    ]
    names = (
        "gpu-step-v4-flash-8l",
        "gpu-experts",
        "gpu-replay-v41-40l",
        "gpu-resident-qwen",
        "gpu-paged-qwen",
        "gpu-speculate-v41-8l",
    )
    found = []
    for lines, name in zip(parts, names, strict=True):
        if lines:
            found += [*lines, "", source(read(name)[0]) + ".", ""]
    if not found:
        return ""
    head = (
        "On one NVIDIA H200, weights drawn from a seed, median (p10-p90). Bold: the target is met."
    )
    return "\n".join([head, "", *found])


def _spread(value: Row, digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['p10']:.{digits}f}-{value['p90']:.{digits}f})"


def _met(text: str, met: bool) -> str:
    return f"**{text}**" if met else text


def _passes(read: Read) -> list[str]:
    rows = read("gpu-step-v4-flash-8l")
    steps = {r["batch"]: r for r in rows if r["bench"] == "step" and r["prompt_tokens"] == 256}
    prompts = {r["prompt_tokens"]: r for r in rows if r["bench"] == "prompt"}
    if not steps and not prompts:
        return []
    lines = [
        "V4-Flash widths, 8 layers, FP8 dense and FP4 experts (`v4-flash-8l`), time of a pass on the "
        "device (vLLM's is that of its whole engine):",
        "",
        "| | measured | target | vLLM 0.26.0 |",
        "|---|---|---|---|",
    ]
    for batch, (target, peer) in STEPS.items():
        if batch in steps:
            step = steps[batch]["ms_step"]
            text = _met(_spread(step), step["median"] <= target)
            lines.append(f"| step at batch {batch}, ms | {text} | {target:.2f} | {peer} |")
    for length, target in PROMPTS.items():
        if length in prompts:
            first = prompts[length]["ttft_ms"]
            text = _met(_spread(first, 0), first["median"] <= target)
            lines.append(f"| prompt of {length} tokens, ms | {text} | {target} | {target} |")
    return lines


def _experts(read: Read) -> list[str]:
    rows = [r for r in read("gpu-experts") if r["geometry"] == "v4-flash"]
    if not rows:
        return []
    best = {
        batch: min((r for r in rows if r["batch"] == batch), key=lambda r: r["us"])
        for batch in sorted({r["batch"] for r in rows})
    }
    shares = ", ".join(
        f"batch {batch}: {r['us']:.0f} us ({100 * r['bandwidth_share']:.0f} % of 4.43 TB/s)"
        for batch, r in best.items()
    )
    return [
        "Most of a step goes to the experts. Best of the kernels tried for one layer's 256 FP4 experts "
        f"and shared FP8 expert: {shares}. The kernel that ships was made after the last measurement.",
    ]


def _replay(read: Read) -> list[str]:
    names = ("gpu-replay-v41-40l", "gpu-step-v41-8l")
    rows = [r for name in names for r in read(name) if r["bench"] == "prompt"]
    if not rows:
        return []
    lines = [
        "V4.1-Flash widths, 128 experts, 40 or 8 layers: time to the first token of `bounded` and "
        "`exact` relative to `off` (docs/bounded-replay.md; the targets are for 40 layers):",
        "",
        "| geometry | prompt | off, ms | TFLOP/s | bounded | target | exact | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, length in dict.fromkeys((r["geometry"], r["prompt_tokens"]) for r in rows):
        own = {
            r["prefill"]: r for r in rows if (r["geometry"], r["prompt_tokens"]) == (shape, length)
        }
        if len(own) < 3:
            continue
        off = own["off"]
        cells = [f"| {shape}", str(length), f"{off['ttft_ms']['median']:.0f}"]
        cells.append(f"{off['tflop_s']:.0f}")
        for mode, target in zip(("bounded", "exact"), RATIOS[length], strict=True):
            ratio = own[mode]["ttft_ratio"]
            cells += [_met(f"{ratio:.3f}", ratio <= target), f"{target:.2f}"]
        lines.append(" | ".join(cells) + " |")
    return lines


def _resident(read: Read) -> list[str]:
    rows = {r["batch"]: r for r in read("gpu-resident-qwen") if r["bench"] == "paged"}
    if not rows:
        return []
    lines = [
        "Qwen3-30B-A3B in bfloat16, all on the GPU, tokens per second:",
        "",
        "| batch | measured | target | vLLM 0.26.0 |",
        "|---|---|---|---|",
    ]
    for batch, (target, peer) in RESIDENT.items():
        if batch in rows:
            speed = rows[batch]["tok_s"]
            lines.append(
                f"| {batch} | {_met(f'{speed:.0f}', speed >= target)} | {target} | {peer} |"
            )
    return lines


def _paged(read: Read) -> list[str]:
    rows = [r for r in read("gpu-paged-qwen") if r["bench"] == "paged"]
    if not rows:
        return []
    lines = [
        f"The same with {rows[0]['offloaded_gb']:.0f} GB of it off the GPU ({rows[0]['slots']} of 128 "
        "experts a layer in slots), by the hit rate that the slots counted; vLLM 0.26.0 with "
        "cpu_offload_gb=40 gives 11.9 tokens per second:",
        "",
        "| hit rate | tokens/s | target | to the formula |",
        "|---|---|---|---|",
    ]
    for row in rows:
        near = next((t for h, t in PAGED.items() if abs(h - row["hit_rate"]) < 0.005), None)
        speed = row["tok_s"]
        text = f"{speed:.0f}" if near is None else _met(f"{speed:.0f}", speed >= near)
        lines.append(
            f"| {row['hit_rate']:.3f} | {text} | {near or ''} | {row['over_formula']:.2f}x |"
        )
    return lines


def _speculation(read: Read) -> list[str]:
    rows = read("gpu-speculate-v41-8l")
    if not rows:
        return []
    row = rows[0]
    text = _met(f"{row['times_plain']:.2f}x", row["times_plain"] >= 2)
    return [
        f"Speculation, `v41-8l`, block of {row['block']}, {row['mode']} (for speed only): "
        f"{row['tok_s']:.0f} tokens per second, {text} of plain decoding (target 2x).",
    ]
