"""The GPU's part of README's figures, from bench/results/gpu-*.jsonl: what a client of the engine sees."""

from __future__ import annotations

from collections.abc import Callable

from bench.readme_cells import Read, Row, met, spread, taken
from bench.readme_modes import modes

#: batch -> milliseconds a step: issue 5's target, and vLLM 0.26.0 on the same kind of machine.
STEPS = {1: (1.30, 3.25), 4: (1.80, 3.36), 16: (3.20, 3.94), 64: (7.0, 9.27)}
#: prompt tokens -> milliseconds to the first token: target and vLLM alike.
PROMPTS = {1024: 32, 8192: 139, 32768: 517, 65536: 1030}
#: start -> seconds to the first token: issue 5's target, and vLLM's.
STARTS = {"first": (180, "over 480"), "second": (40, "62")}
#: Shapes whose starts are shown, and the file of each.
STARTED = {"v4-flash-8l": "gpu-start", "v41-8l": "gpu-start-v41-8l"}
#: A step at 64k of context is to last at most so many short ones.
LONG = 1.15
#: Milliseconds to the first token of 500 new tokens after 64k that are cached.
CACHED = 60
#: A stream's slowest tokens beside a long prompt, in medians without it.
BESIDE = 3.0
#: Share of the memory bound that a V4.1 step at batch 1 is to reach.
V41_SHARE = 0.45
#: Whose kernels are compared.
PEERS = {"ours": "ours", "flashinfer": "FlashInfer", "torch": "torch"}
#: Rows of the largest step.
MOST = max(STEPS)


def gpu(read: Read, source: Callable[[Row], str]) -> str:
    """Tables of all GPU figures there are; empty without any."""
    parts = [
        (_engine(read, "v4-flash-8l"), "gpu-engine-v4-flash-8l"),
        (_prompts(read, "v4-flash-8l"), _prompts_file(read, "v4-flash-8l")),
        (_engine(read, "v41-8l"), "gpu-engine-v41-8l"),
        (_prompts(read, "v41-8l"), _prompts_file(read, "v41-8l")),
        *((_starts(read, shape), name) for shape, name in STARTED.items()),
        (_ablation(read), "gpu-ablation-v4-flash-8l"),
        (_greedy(read), "gpu-greedy-tiny"),
        (_peers(read), "gpu-peers"),
        *modes(read),
    ]
    found = []
    for lines, name in parts:
        if lines:
            found += [*lines, "", source(read(name)[0]) + ".", ""]
    if not found:
        return ""
    head = (
        "On one NVIDIA H200, weights drawn from a seed, median (p10-p90). Bold: the target is met."
    )
    return "\n".join([head, "", *found])


def _engine(read: Read, shape: str) -> list[str]:
    """What the engine gives, beside the device's part of a step and vLLM's."""
    rows = read(f"gpu-engine-{shape}")
    steps = {r["batch"]: r for r in rows if r["bench"] == "decode" and r["prompt_tokens"] == 128}
    if not steps:
        return []
    # Of another commit it says nothing of this step.
    device = {
        r["batch"]: r["ms_step"]["median"]
        for r in read(f"gpu-step-{shape}")
        if r["bench"] == "step" and r["prompt_tokens"] == 256 and not taken(r, rows[0])
    }
    brackets = "; in brackets the device alone" if device else ""
    is_v4 = shape.startswith("v4-")
    widths = "V4-Flash" if is_v4 else "V4.1"
    peer = " | vLLM 0.26.0" if is_v4 else ""
    lines = [
        f"{widths} widths, 8 layers (`{shape}`), through the whole engine: 128-token prompts, 256 new "
        f"tokens, greedy{brackets}. Bound: every weight that the step needs and the KV read once at "
        "4.43 TB/s:",
        "",
        f"| | measured | target | of the bound{peer} |",
        "|---|---|---|---|" + ("---|" if is_v4 else ""),
    ]
    for batch, (target, theirs) in STEPS.items():
        if batch in steps:
            row = steps[batch]
            text = met(spread(row["ms_step"]), row["ms_step"]["median"] <= target)
            if batch in device:
                text += f" [{device[batch]:.2f}]"
            text += taken(row, rows[0])
            share = met(
                f"{100 * row['bound_share']:.0f} %",
                not is_v4 and batch == 1 and row["bound_share"] >= V41_SHARE,
            )
            tail = f" {theirs} |" if is_v4 else ""
            lines.append(f"| step at batch {batch}, ms | {text} | {target:.2f} | {share} |{tail}")
    lines += _long(rows, steps, is_v4)
    for more in (_clocks(steps), _load(rows)):
        lines += ["", *more] if more else []
    return lines


def _clocks(steps: dict[int, Row]) -> list[str]:
    """How fast the processors ran: at their power limit boards differ."""
    told = [
        f"{row['sm_mhz']:.0f} MHz at batch {batch} ({row['watts']:.0f} W)"
        for batch, row in steps.items()
        if "sm_mhz" in row
    ]
    return [f"The GPU's processors ran at {', '.join(told)}."] if told else []


def _prompts_file(read: Read, shape: str) -> str:
    """The file that has a shape's rows of prompts: its own, or that of the whole engine."""
    own = f"gpu-prompts-{shape}"
    return own if read(own) else f"gpu-engine-{shape}"


def _prompts(read: Read, shape: str) -> list[str]:
    """First tokens, cached turns, and streams beside a prompt."""
    rows = read(_prompts_file(read, shape))
    if not rows:
        return []
    cached = [r for r in read(f"gpu-engine-{shape}") if r["bench"] == "cached"]
    firsts = {r["prompt_tokens"]: r for r in rows if r["bench"] == "ttft"}
    is_v4 = shape.startswith("v4-")
    body = []
    for length, target in PROMPTS.items():
        if length in firsts:
            first = firsts[length]["ttft_ms"]
            text = met(spread(first, 0), first["median"] <= target)
            tail = f" {target} |" if is_v4 else ""
            body.append(f"| first token of {length} tokens, ms | {text} | {target} |{tail}")
    body += [*_cached(cached, rows[0], is_v4), *_beside(rows, is_v4)]
    if not body:
        return []
    head = "| measured | target |" + (" vLLM 0.26.0 |" if is_v4 else "")
    return [
        f"Prompts (`{shape}`), the prefix cache off but for cached turns:",
        "",
        f"| {head}",
        "|---|---|---|" + ("---|" if is_v4 else ""),
        *body,
    ]


def _long(rows: list[Row], steps: dict[int, Row], is_v4: bool) -> list[str]:
    lines = []
    end = " |" if is_v4 else ""
    for row in rows:
        if row["bench"] == "decode" and row["prompt_tokens"] > 128:
            step, batch = row["ms_step"]["median"], row["batch"]
            text, target = f"{step:.2f}{taken(row, rows[0])}", ""
            if batch == 1 and 1 in steps and not taken(row, steps[1]):
                ratio = step / steps[1]["ms_step"]["median"]
                text, target = met(f"{step:.2f} ({ratio:.2f}x)", ratio <= LONG), f"{LONG}x"
            lines.append(
                f"| step at batch {batch}, {row['prompt_tokens']} tokens of context, ms | {text} | "
                f"{target} | {100 * row['bound_share']:.0f} % |{end}"
            )
    return lines


def _cached(rows: list[Row], first: Row, is_v4: bool) -> list[str]:
    return [
        f"| first token after {r['cached_tokens']} cached and {r['new_prompt_tokens']} new tokens, ms | "
        f"{met(spread(r['ttft_ms'], 0), r['ttft_ms']['median'] <= CACHED)}{taken(r, first)} | {CACHED} |"
        + (" |" if is_v4 else "")
        for r in rows
        if r["bench"] == "cached"
    ]


def _beside(rows: list[Row], is_v4: bool) -> list[str]:
    lines = []
    for r in rows:
        if r["bench"] == "beside":
            ratio = r["itl_p99_over_median_alone"]
            text = met(f"{r['itl_p99_ms']:.1f} ({ratio:.2f}x)", ratio <= BESIDE)
            lines.append(
                f"| p99 between tokens of {r['batch']} streams beside a prompt of {r['prompt_tokens']}, of which "
                f"{r['mixed']} rows at a time, whose first token takes {r['ttft_ms']:.0f} ms; ms (to the median alone) | {text} | {BESIDE:.0f}x |"
                + (" |" if is_v4 else "")
            )
    return lines


def _load(rows: list[Row]) -> list[str]:
    found = []
    for r in rows:
        if r["bench"] == "load":
            good = not r["lost"] and not r["blocks_held_at_the_end"] and not r["late_kernels"]
            text = met(
                f"{r['lost']} lost, {r['blocks_held_at_the_end']} blocks held at the end, "
                f"{len(r['late_kernels'])} kernels compiled late",
                good,
            )
            over = r["peak_over_planned"]
            memory = met(f"{100 * over:.1f} %", abs(over - 1) <= 0.03)
            found.append(
                f"{r['batch']} requests of mixed length, {r['aborted']} of them aborted at random moments: "
                f"{text}. Memory: {r['peak_gb']:.1f} GB at most, planned {r['planned_gb']:.1f} GB "
                f"({memory}){taken(r, rows[0])}."
            )
    return found


def _starts(read: Read, shape: str) -> list[str]:
    rows = {r["mode"]: r for r in read(STARTED[shape])}
    if not rows:
        return []
    is_v4 = shape.startswith("v4-")
    lines = [
        f"| start to first token, `{shape}`, s | measured | target |"
        + (" vLLM 0.26.0 |" if is_v4 else ""),
        "|---|---|---|" + ("---|" if is_v4 else ""),
    ]
    names = {"first": "the first ever", "second": "with compiled kernels"}
    for mode, (target, theirs) in STARTS.items():
        if mode in rows:
            row = rows[mode]
            text = met(f"{row['seconds']:.0f}", row["seconds"] <= target)
            lines.append(
                f"| {names[mode]} | {text} | {target} |" + (f" {theirs} |" if is_v4 else "")
            )
    return lines


def _ablation(read: Read) -> list[str]:
    rows = [r for r in read("gpu-ablation-v4-flash-8l") if r["bench"] == "decode"]
    if not rows:
        return []
    fused = [
        r
        for r in read("gpu-engine-v4-flash-8l")
        if r["bench"] == "decode" and r["prompt_tokens"] == 128
    ]
    kinds = {", ".join(sorted({r["mode"] for r in part})): part for part in (rows, fused) if part}
    lengths = "; ".join(f"{modes}: {_lengths(part)}" for modes, part in kinds.items())
    rows = [*rows, *fused]
    lines = [
        "What graphs and fusion gain (`v4-flash-8l`): `eager` launches torch's operations one by one, `graph` "
        "replays them captured, `fused` replays the kernels; experts are ours in all three, since torch has "
        f"nothing that reads FP4. Prompt and new tokens of a stream, fewer where steps take long: {lengths}:",
        "",
        "| mode | batch | step, ms | kernels a layer | host, us a step |",
        "|---|---|---|---|---|",
    ]
    order = ("eager", "graph", "fused")
    for row in sorted(rows, key=lambda r: (order.index(r["mode"]), r["batch"])):
        lines += [
            f"| {row['mode']} | {row['batch']} | {row['ms_step']['median']:.2f} | "
            f"{row['kernels'] / 8:.0f} | {row['host_us']['median']:.0f} |"
        ]
    return [*lines, *_fusion(rows)]


def _lengths(rows: list[Row]) -> str:
    """Prompt and new tokens of streams."""
    pairs = sorted({(r["prompt_tokens"], r["new_tokens"]) for r in rows})
    return ", ".join(f"{prompt} and {new}" for prompt, new in pairs)


def _fusion(rows: list[Row]) -> list[str]:
    """What fusion gains for the most rows; issue 5 asks that it is never slower there."""
    steps = {r["mode"]: r["ms_step"]["median"] for r in rows if r["batch"] == MOST}
    if not steps.keys() >= {"graph", "fused"}:
        return []
    times = steps["graph"] / steps["fused"]
    return [
        "",
        f"At batch {MOST} fused steps are {met(f'{times:.2f}x', times >= 1)} as fast as unfused ones.",
    ]


def _greedy(read: Read) -> list[str]:
    rows = read("gpu-greedy-tiny")
    found = []
    for row in rows:
        if row["bench"] == "greedy":
            good = not row["otherwise"]
            text = met(f"{row['equal']} of {row['prompts']} equal", good)
            found.append(
                f"{row['mode']}: {text}, {len(row['ties'])} up to a tie, {len(row['otherwise'])} otherwise"
            )
    lines = (
        [
            "Greedy tokens of the shipped checkpoint on the GPU against the CPU's: "
            + "; ".join(found)
            + "."
        ]
        if found
        else []
    )
    for row in rows:
        if row["bench"] == "load":
            good = not (row["lost"] or row["crossed"] or row["blocks_held_at_the_end"])
            text = met(
                f"{row['lost']} lost, {len(row['crossed'])} with another one's tokens, "
                f"{row['blocks_held_at_the_end']} blocks held at the end",
                good,
            )
            lines.append(
                f"Of {row['requests']} requests with {row['aborted']} random aborts: {text}."
            )
    return lines


def _peers(read: Read) -> list[str]:
    rows = [r for r in read("gpu-peers") if r["bench"] == "peer"]
    if not rows:
        return []
    cases: dict[str, dict[str, float]] = {}
    for r in rows:
        cases.setdefault(_peer_case(r), {})[r["mode"]] = r["us"]
    names = [name for name in PEERS if any(name in us for us in cases.values())]
    lines = [
        "Kernels beside FlashInfer's, and beside torch's where it has one, us; of experts our whole pass, "
        "but the others' two grouped products alone (`bench/micro/peers.py` says what each does):",
        "",
        "| | " + " | ".join(PEERS[name] for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for label, us in cases.items():
        cells = [f"{us[name]:.0f}" if name in us else "-" for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _peer_case(row: Row) -> str:
    """What kernels are compared in."""
    if row["what"] == "sample":
        return f"draw, batch {row['batch']}, top_p {row['top_p']}"
    if row["what"] == "top_k":
        return f"512 best entries of {row['prompt_tokens']} tokens at ratio 4, batch {row['batch']}"
    return f"experts of a prompt of {row['prompt_tokens']} tokens, `{row['geometry']}`"
