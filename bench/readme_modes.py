"""README's GPU figures of modes: bounded replay, paged experts, speculation."""

from __future__ import annotations

from bench.readme_cells import Read, Row, met, spread

#: prompt tokens -> TTFT relative to `off`: issue 6's targets for bounded and exact.
RATIOS = {1024: (0.85, 1.02), 8192: (0.56, 0.68), 32768: (0.53, 0.56), 65536: (0.53, 0.54)}
#: (prompts at once, tokens of each) -> issue 6's bound for the ratio of first tokens, and for the gain.
MANY = {(16, 1024): (1.05, None), (16, 32768): (None, 1.7)}
#: Files of prompts that come at once.
REPLAY_MANY = ("gpu-replay-v41-40l-many", "gpu-replay-v41-40l-many-128")
#: Rate of `off` at 8192 tokens, as a share of 790 TFLOP/s.
RATE, OFF_SHARE = 790, 0.35
#: hit rate -> tokens per second of Qwen3-30B with 40 of 61 GB off the GPU: issue 7's targets.
PAGED = {0.9: 105, 0.95: 165, 0.99: 320}
#: batch -> tokens per second of Qwen3-30B in bfloat16, resident: issue 7's target and vLLM.
RESIDENT = {1: (450, 242), 4: (800, 621), 16: (1450, 1319), 64: (3700, 3635)}
#: Milliseconds to the first token of 8192 tokens, resident; tokens per second beyond the GPU.
RESIDENT_PROMPT, BEYOND = 158, 100
#: A prompt over paged experts, in the longer of its copying and its computing.
LONGER = 1.10
#: Shapes that draft, V4.1 by DSpark and V4 by MTP -> how many times plain decoding is issue 5's target.
SPECULATED: dict[str, int | None] = {"v41-8l": 2, "v4-flash-8l": None}
WAYS = {
    "cpu": "misses computed on the CPU by torch at h = 0.9",
    "stream": "layers copied whole each step",
}


def modes(read: Read) -> list[tuple[list[str], str]]:
    """Tables, each with the file it comes from."""
    return [
        (_replay(read), "gpu-replay-v41-40l"),
        *((_replay_many(read, name), name) for name in REPLAY_MANY),
        (_replay_parts(read), "gpu-replay-v41-40l-tails"),
        (_resident(read), "gpu-engine-qwen"),
        (_paged(read), "gpu-paged-qwen"),
        (_other_ways(read), "gpu-paged-qwen-baselines"),
        (_prefetch(read), "gpu-paged-prefetch-qwen"),
        (_pins(read), "gpu-paged-pins-qwen"),
        (_in_fp8(read), "gpu-paged-qwen-fp8"),
        (_sweep(read), "gpu-paged-sweep-qwen"),
        (_beyond(read), "gpu-paged-v4-flash-43l"),
        (_smaller(read), "gpu-paged-v4-flash-43l-80gb"),
        (_served(read), "gpu-beyond-v4-flash-43l"),
        *((_speculation(read, shape), f"gpu-speculate-{shape}") for shape in SPECULATED),
    ]


def _replay(read: Read) -> list[str]:
    rows = read("gpu-replay-v41-40l")
    firsts = [r for r in rows if r["bench"] == "ttft" and r.get("tail_graphs", True)]
    if not firsts:
        return []
    lines = [
        "V4.1-Flash widths, 40 layers, 128 experts: time to the first token of `bounded` and `exact` "
        "relative to `off` (docs/bounded-replay.md):",
        "",
        "| prompt | off, ms | TFLOP/s | bounded | target | exact | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in dict.fromkeys(r["prompt_tokens"] for r in firsts):
        own = {r["mode"]: r for r in firsts if r["prompt_tokens"] == length}
        if "off" not in own:
            continue
        rate = own["off"].get("tflop_s")
        share = "" if rate is None else met(f"{rate:.0f}", rate >= OFF_SHARE * RATE)
        cells = [f"| {length}", spread(own["off"]["ttft_ms"], 0), share]
        for mode, target in zip(("bounded", "exact"), RATIOS[length], strict=True):
            ratio = own[mode]["ttft_ratio"] if mode in own else None
            cells += [
                "-" if ratio is None else met(f"{ratio:.3f}", ratio <= target),
                f"{target:.2f}",
            ]
        lines.append(" | ".join(cells) + " |")
    return lines


def _replay_many(read: Read, name: str) -> list[str]:
    many = []
    for r in read(name):
        if r["bench"] == "many" and r["mode"] == "bounded":
            most, least = MANY.get((r["batch"], r["prompt_tokens"]), (None, None))
            first = met(f"{r['ttft_ratio']:.3f}", most is not None and r["ttft_ratio"] <= most)
            gain = met(
                f"{r['throughput_ratio']:.2f}x",
                least is not None and r["throughput_ratio"] >= least,
            )
            many.append(
                f"{r['batch']} prompts of {r['prompt_tokens']} at once, {r['new_tokens']} new tokens: "
                f"last first token {first} of `off`, throughput {gain}"
            )
    turns = [f"{r['mode']} {spread(r['ttft_ms'], 0)}" for r in read(name) if r["bench"] == "cached"]
    lines = ["`bounded`: " + "; ".join(many) + "."] if many else []
    if turns:
        lines.append(
            "First token of a turn of 500 new tokens after 64k cached ones, ms: "
            + ", ".join(turns)
            + "."
        )
    return lines


def _replay_parts(read: Read) -> list[str]:
    """Graphs of tails bucket by bucket, and prompts in smaller chunks."""
    rows = read("gpu-replay-v41-40l-tails")
    tails = {(r["rows"], r["mode"]): r for r in rows if r["bench"] == "tail"}
    lines = []
    if tails:
        text = "; ".join(
            f"{count} rows: {tails[count, 'eager']['ms']['median']:.1f} to {row['ms']['median']:.1f} "
            f"({row['ratio']:.2f}x, {row['pool_mb']:.0f} MB more)"
            for (count, mode), row in tails.items()
            if mode == "graph" and (count, "eager") in tails
        )
        lines.append(
            f"Tails of prompts, launch by launch and as graphs, ms (memory of the pool): {text}."
        )
    chunks: dict[tuple[int, int], list[str]] = {}
    for r in rows:
        if r["bench"] == "ttft" and r["mode"] != "off":
            own = chunks.setdefault((r["chunk"], r["prompt_tokens"]), [])
            own.append(f"{r['mode']} {r['ttft_ratio']:.3f}")
    if chunks:
        text = "; ".join(
            f"chunks of {chunk}, {length} tokens: {', '.join(own)}"
            for (chunk, length), own in chunks.items()
        )
        lines.append(f"In smaller chunks, relative to `off`: {text}.")
    return lines


def _resident(read: Read) -> list[str]:
    found = read("gpu-engine-qwen")
    rows = {r["batch"]: r for r in found if r["bench"] == "decode"}
    if not rows:
        return []
    lines = [
        "Qwen3-30B-A3B in bfloat16, all on the GPU, through the whole engine: 128-token prompts, 256 new "
        "tokens, greedy; tokens per second:",
        "",
        "| batch | measured | target | of the bound | vLLM 0.26.0 |",
        "|---|---|---|---|---|",
    ]
    for batch, (target, peer) in RESIDENT.items():
        if batch in rows:
            row = rows[batch]
            speed = row["tok_s"]["median"]
            text = met(f"{speed:.0f}", speed >= target)
            share = f"{100 * row['bound_share']:.0f} %" if "bound_share" in row else ""
            lines.append(f"| {batch} | {text} | {target} | {share} | {peer} |")
    for r in found:
        if r["bench"] == "ttft" and r["prompt_tokens"] == 8192:
            first = r["ttft_ms"]
            text = met(spread(first, 0), first["median"] <= RESIDENT_PROMPT)
            lines.append(f"| first token of 8192 tokens, ms | {text} | {RESIDENT_PROMPT} | | |")
    return lines


def _paged(read: Read) -> list[str]:
    found = read("gpu-paged-qwen")
    rows = [r for r in found if r["bench"] == "paged" and r["batch"] == 1]
    if not rows:
        return []
    lines = [
        f"The same with {rows[0]['offloaded_gb']:.0f} GB of it off the GPU ({rows[0]['slots']} of 128 "
        "experts a layer in slots), captured steps alone, by the hit rate that the slots counted; vLLM "
        "0.26.0 with cpu_offload_gb=40 gives 11.9 tokens per second:",
        "",
        "| hit rate | tokens/s | target | to the formula |",
        "|---|---|---|---|",
    ]
    for row in rows:
        near = next((t for h, t in PAGED.items() if abs(h - row["hit_rate"]) < 0.005), None)
        speed, over = row["tok_s"], row["over_formula"]
        text = f"{speed:.0f}" if near is None else met(f"{speed:.0f}", speed >= near)
        ratio = met(f"{over:.2f}x", over <= 1.15)
        lines.append(f"| {row['hit_rate']:.3f} | {text} | {near or ''} | {ratio} |")
    lines += _formula(rows[0])
    four = _to_formula([r for r in found if r["bench"] == "paged" and r["batch"] == 4])
    return [*lines, "", f"Four sequences at once: {four}."] if four else lines


def _formula(row: Row) -> list[str]:
    """What the formula's resident step is."""
    if "full_hit_ms" not in row:  # as rows were made at first
        step = "the paged model's own with every choice in a slot"
    else:
        ratio = row["full_hit_ms"] / row["resident_ms"]
        step = (
            f"{row['resident_ms']:.2f} ms, of the same model wholly on the GPU in the same run; paged, with "
            f"every choice in a slot, it takes {ratio:.2f} times as long"
        )
    return [
        "",
        f"The formula: the resident step ({step}), and what is missed at 51 GB/s. A step can take less than "
        "that sum: products of a single row read missing experts over the bus while others are computed.",
    ]


def _to_formula(rows: list[Row]) -> str:
    """Tokens per second by hit rate, and what they are of the formula's time."""
    return "; ".join(
        f"h {r['hit_rate']:.3f}: {r['tok_s']:.0f} ("
        + met(f"{r['over_formula']:.2f}x", r["over_formula"] <= 1.15)
        + ")"
        for r in rows
    )


def _other_ways(read: Read) -> list[str]:
    """The other ways at h = 0.9, and paged experts of the same run beside the strongest of them."""
    rows = read("gpu-paged-qwen-baselines")
    ways = [r for r in rows if r["bench"] == "paged_baseline" and r.get("hit_rate", 0.9) == 0.9]
    if not ways:
        return []
    told = "; ".join(
        f"{WAYS[r['way']]}: {r['tok_s']:.1f} tokens per second"
        + (f" on {r['threads']} cores" if "threads" in r else "")
        + (f" ({r['note']})" if "note" in r else "")
        for r in ways
    )
    own = [r["tok_s"] for r in rows if r["bench"] == "paged" and r.get("trace") == "reuse 0.9"]
    if own:
        gain = own[0] / max(r["tok_s"] for r in ways)
        told += f"; paged experts in the same run: {own[0]:.1f}, **{gain:.2f}x** of the strongest"
    return [f"Other ways: {told}."]


def _prefetch(read: Read) -> list[str]:
    rows = [r for r in read("gpu-paged-prefetch-qwen") if "prefetch_accuracy" in r]
    if not rows:
        return []
    text = ", ".join(
        f"{r['over_without']:.2f}x with {100 * r['prefetch_accuracy']:.0f} % right guesses"
        for r in rows
    )
    return [f"Prefetch at {rows[0]['trace']}, tokens per second to those without: {text}."]


def _pins(read: Read) -> list[str]:
    """What loading costs where experts stay on the GPU, beside the same without."""
    rows = {0: read("gpu-paged-qwen"), 1: read("gpu-paged-pins-qwen")}
    if not rows[1]:
        return []
    pins = rows[1][0]["pins"]
    ways = {f"{pins} experts of each layer staying on the GPU": rows[1][0]}
    if rows[0]:
        ways["none"] = rows[0][0]
    text = "; ".join(
        f"with {way} {r['load_s']:.1f} s, of it {r['pin_s']:.1f} s of pinning {r['host_gb']:.0f} GB "
        f"({r['pin_gb_s']:.2f} GB/s)"
        for way, r in ways.items()
    )
    return [f"Loading: {text}."]


def _in_fp8(read: Read) -> list[str]:
    rows = [r for r in read("gpu-paged-qwen-fp8") if r["trace"] != "reuse 1.0"]
    if not rows:
        return []
    text = _to_formula(rows)
    return [f"The same with experts in FP8, tokens per second (to the formula): {text}."]


def _sweep(read: Read) -> list[str]:
    found = read("gpu-paged-sweep-qwen")
    lines = []
    rows = sorted((r for r in found if r.get("trace") == "zipf"), key=lambda r: r["slots"])
    if rows:
        text = "; ".join(f"K {r['slots']}: {r['tok_s']:.0f} at h {r['hit_rate']:.3f}" for r in rows)
        lines.append(f"Choices drawn with weights 1 / rank, tokens per second by slots: {text}.")
    for r in found:
        if r["bench"] == "paged_prompt":
            over = met(f"{r['over_longer']:.2f}x", r["over_longer"] <= LONGER)
            found_there = f", at h {r['hit_rate']:.3f}" if "hit_rate" in r else ""
            lines.append(
                f"A prompt of {r['prompt_tokens']} tokens at K = {r['slots']}{found_there}: "
                f"{r['ttft_ms']['median']:.0f} ms, {over} of the longer of copying "
                f"({r['copy_ms']:.0f} ms) and computing ({r['compute_ms']:.0f} ms), target {LONGER}x."
            )
    return lines


def _beyond(read: Read) -> list[str]:
    found = read("gpu-paged-v4-flash-43l")
    rows = [r for r in found if r["bench"] == "paged" and r["trace"] == "reuse 0.9"]
    if not rows:
        return []
    row = rows[0]
    text = met(f"{row['tok_s']:.0f} tokens per second", row["tok_s"] >= BEYOND)
    others = "; ".join(
        f"{r['tok_s']:.0f} at h {r['hit_rate']:.3f}"
        for r in found
        if r["bench"] == "paged" and r is not row
    )
    return [
        f"V4-Flash whole, 43 layers (`v4-flash-43l`), {row['offloaded_gb']:.0f} GB of its experts off the "
        f"GPU: {text} at a hit rate of {row['hit_rate']:.3f} (target {BEYOND})"
        + (f", {others}" if others else "")
        + f"{_memory(row)}.",
    ]


def _memory(row: Row) -> str:
    """How long a start took, and what both sides held."""
    return (
        f"; ready in {row['load_s']:.0f} s, {row['pin_gb_s']:.1f} GB/s pinned, at most "
        f"{row['gpu_peak_gb']:.0f} GB of the GPU and {row['host_peak_gb']:.0f} GB of the host"
    )


def _smaller(read: Read) -> list[str]:
    rows = [r for r in read("gpu-paged-v4-flash-43l-80gb") if r["trace"] != "reuse 1.0"]
    if not rows:
        return []
    text = ", ".join(f"{r['tok_s']:.0f} at h {r['hit_rate']:.3f}" for r in rows)
    return [f"The same within 80 GB of the GPU, tokens per second: {text}{_memory(rows[0])}."]


def _served(read: Read) -> list[str]:
    return [
        f"Behind the gateway, `/v1/completions`, {r['new_tokens']} tokens: {r['tok_s']:.0f} tokens per "
        f"second as the client sees them, at h {r['hit_rate']:.3f}{_memory(r)}."
        for r in read("gpu-beyond-v4-flash-43l")
    ]


def _speculation(read: Read, shape: str) -> list[str]:
    found = []
    gain = SPECULATED[shape]
    for row in read(f"gpu-speculate-{shape}"):
        speed, times = row["tok_s"]["median"], row["times_plain"]
        text = met(f"{times:.2f}x", gain is not None and times >= gain)
        found.append(
            f"Speculation, `{shape}`, batch {row['batch']}, drafts of {row['block']}, {row['mode']} (for speed "
            f"only): {speed:.0f} tokens per second, {text} of plain decoding{_most(row, gain)}."
        )
    return found


def _most(row: Row, gain: int | None) -> str:
    """The target, and how near the memory bound steps are and would have to be for it."""
    target = ""
    if gain is not None:
        step = row["acceptance_length"] * row["plain_ms_step"]["median"] / gain
        share = row["bound_ms"] / step
        target = (
            f"target {gain}x: steps of {step:.2f} ms, at {100 * share:.0f} % of the memory bound"
            f"{', out of reach here' if share > 1 else ''}; "
        )
    plain = row["plain_bound_ms"] / row["plain_ms_step"]["median"]
    return (
        f" ({target}{row['ms_step']['median']:.2f} ms now, at {100 * row['bound_share']:.0f} %; plain decoding is "
        f"at {100 * plain:.0f} %; were both at their bounds, {row['times_plain_at_bound']:.2f}x, since random "
        f"weights route rows apart, and the {row['block'] + 1} rows of a request read "
        f"{row['experts_over_plain']:.1f} times the experts of one)"
    )
