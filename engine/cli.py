"""`bathyal engine ...`: checkpoints on the command line.

Exit codes: 0 ok, 1 something was found (a difference, a broken checkpoint), 2 misuse.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.architectures import AnyConfig, read_config
from engine.config import ModelConfig
from engine.memory import MemoryPlan, blocks_for_gpu, container_memory, plan_memory
from engine.options import EngineConfig, rule_of
from engine.plan.replay import tail_problems
from engine.speculation import speculation_problems

#: Options of the engine that an audit takes: all but the file that every variant would write anew.
_AUDITED = [f.name for f in dataclasses.fields(EngineConfig) if f.name != "record_routing"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="bathyal engine", description="Checkpoints of the engine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="compare the model with golden tensors")
    verify.add_argument("dir", type=Path, metavar="DIR", help="folder with verify.json")
    verify.add_argument("--atol", type=float, help="bound instead of the one in verify.json")
    inspect = commands.add_parser("inspect", help="list what a checkpoint holds")
    inspect.add_argument("dir", type=Path, metavar="DIR", help="checkpoint folder")
    convert = commands.add_parser("convert", help="transformers' names to the official layout")
    convert.add_argument("source", type=Path, metavar="SRC")
    convert.add_argument("target", type=Path, metavar="DST")
    convert.add_argument("--architecture", choices=("v4", "v4.1"), default="v4")
    convert.add_argument("--config", default="config.json", help="name of SRC's config file")
    plan = commands.add_parser("plan", help="say who gets what memory and why")
    plan.add_argument("--model", type=Path, metavar="DIR", default=TINY_CHECKPOINT)
    plan.add_argument(
        "--gpu-gb", type=float, metavar="X", help="of the GPU; without it, the CPU's plan"
    )
    plan.add_argument("--host-gb", type=float, metavar="Y", help="instead of the container's limit")
    plan.add_argument("--context", type=int, metavar="N", help="tokens; the model's own by default")
    plan.add_argument("--concurrency", type=int, metavar="M", help="requests at once")
    plan.add_argument(
        "--speculation",
        choices=("off", "dspark", "mtp"),
        default="off",
        help="count draft stages and what they keep (with --gpu-gb)",
    )
    plan.add_argument(
        "--tail-graphs", action="store_true", help="count captured tails of bounded prompts"
    )
    plan.add_argument(
        "--paged", action="store_true", help="give experts slots, the same in every paged layer"
    )
    plan.add_argument(
        "--trace", type=Path, metavar="FILE", help="routing trace: slots, and who stays, by it"
    )
    plan.add_argument(
        "--out", type=Path, metavar="FILE", help="of --paged or --trace: write each layer's slots"
    )
    audit = commands.add_parser("audit", help="measure what each part of the engine gains here")
    audit.add_argument("--model", type=Path, metavar="DIR", default=TINY_CHECKPOINT)
    audit.add_argument("--lengths", default="128,512", help="prompt tokens, comma-separated")
    audit.add_argument("--concurrency", default="1,4", help="requests at once, comma-separated")
    audit.add_argument("--new-tokens", type=int, default=32, metavar="N", help="of each request")
    audit.add_argument("--repeats", type=int, default=3, metavar="N", help="after one warm-up")
    audit.add_argument("--out", type=Path, default=Path("audit"), help="folder of the report")
    audit.add_argument(
        "--limit", type=float, default=900, metavar="S", help="seconds that a variant may take"
    )
    own = audit.add_argument_group("the engine as configured", "as bathyal serve takes them")
    for name in _AUDITED:
        own.add_argument(_flag(name), metavar="VALUE", help=rule_of(name).about.replace("%", "%%"))
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:  # argparse exits by itself, with 0 for --help
        return int(done.code or 0)
    try:
        if args.command == "verify":
            return _verify(args.dir, args.atol)
        if args.command == "inspect":
            return _inspect(args.dir)
        if args.command == "plan":
            return _plan(args)
        if args.command == "audit":
            return _audit(args)
        return _convert(args.source, args.target, args.architecture, args.config)
    except OSError as error:
        told = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"bathyal engine {args.command}: {told}", file=sys.stderr)
        return 2
    except (EngineError, ValueError) as error:
        print(f"bathyal engine {args.command}: {error}", file=sys.stderr)
        return 2


def _verify(folder: Path, atol: float | None) -> int:
    from engine.verify import verify

    if atol is not None and not atol >= 0:
        print(f"bathyal engine verify: --atol: expected a number >= 0, got {atol}", file=sys.stderr)
        return 2
    differences = verify(folder, atol)
    for d in differences:
        verdict = "ok" if d.ok else "DIFFERS"
        print(f"{d.output} max_abs_diff={d.max_abs_diff:.3e} atol={d.atol:.1e} {verdict}")
    return 0 if all(d.ok for d in differences) else 1


def _audit(args: argparse.Namespace) -> int:
    from engine.audit import Load, audit
    from engine.audit_report import open_folder, write_report

    problems: list[str] = []
    for flag, count in (("--new-tokens", args.new_tokens), ("--repeats", args.repeats)):
        if count < 1:
            problems.append(f"{flag}: expected a whole number of at least 1, got {count}")
    if not args.limit > 0:
        problems.append(f"--limit: expected a number of seconds above 0, got {args.limit}")
    lengths = _numbers("--lengths", args.lengths, problems)
    concurrency = _numbers("--concurrency", args.concurrency, problems)
    given = _given(args, problems)
    try:
        options = EngineConfig(**given)
    except EngineError as error:  # numbers that do not go together
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    load = Load(lengths, concurrency, args.new_tokens, args.repeats, limit=args.limit)
    try:
        open_folder(args.out)
    except OSError as error:
        why = f"{args.out} ({error.strerror})"
        raise ValueError(f"--out: expected a folder that can be written to, got {why}") from None
    kept: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        kept.update(result)
        write_report(result, args.out)

    try:
        audit(args.model, options, load, keep=keep)
    except BaseException:  # Ctrl-C after half an hour, memory that runs out
        if kept:
            report = write_report(kept, args.out)
            print(f"bathyal engine audit: cut; {report} has what was measured", file=sys.stderr)
        raise
    print(f"wrote {args.out / 'report.md'}")
    return 0


def _given(args: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """Options of the engine that stand on the command line; notes what is none."""
    found: dict[str, Any] = {}
    for name in _AUDITED:
        text, rule = getattr(args, name), rule_of(name)
        if text is None:
            continue
        try:
            found[name] = rule.parse(text)
        except ValueError:
            problems.append(f"{_flag(name)}: expected {rule.accepted}, got {text!r}")
    return found


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _numbers(flag: str, text: str, problems: list[str]) -> tuple[int, ...]:
    """Read comma-separated positive numbers; notes what is none."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        problems.append(f"{flag}: expected positive numbers with commas between, got {text!r}")
    return found


def _convert(source: Path, target: Path, architecture: str, config_name: str) -> int:
    from engine.convert import convert

    convert(
        source,
        target,
        architecture="v4.1" if architecture == "v4.1" else "v4",
        config_name=config_name,
    )
    print(f"wrote {target}")
    return 0


def _inspect(folder: Path) -> int:
    from engine.inspection import inspect

    lines, problems = inspect(folder)
    for line in (*lines, *(f"problem   {problem}" for problem in problems)):
        print(line)
    return 1 if problems else 0


def _plan(args: argparse.Namespace) -> int:
    config = read_config(args.model)
    most = config.max_position_embeddings
    problems = [
        f"{flag}: expected a number of gigabytes above 0, got {value}"
        for flag, value in (("--gpu-gb", args.gpu_gb), ("--host-gb", args.host_gb))
        if value is not None and not 0 < value < 1e6
    ]
    for flag, count, least in (
        ("--context", args.context, 2),
        ("--concurrency", args.concurrency, 1),
    ):
        if count is not None and count < least:
            problems.append(f"{flag}: expected a whole number of at least {least}, got {count}")
    if args.context is not None and args.context > most:
        problems.append(f"--context: the model's context is {most} tokens, got {args.context}")
    paged = args.paged or args.trace is not None
    problems += _paging_problems(args) if paged else _beside_residents(args, config)
    if problems:
        raise ValueError("; ".join(problems))
    if paged:
        return _plan_slots(args, config)
    options = EngineConfig(
        max_model_len=args.context, tail_graphs=args.tail_graphs, speculation=args.speculation
    )
    if args.concurrency is not None:
        rows = options.resolve_max_batched_tokens(on_gpu=args.gpu_gb is not None)
        rows = max(rows, args.concurrency + 1)
        options = dataclasses.replace(
            options, max_num_seqs=args.concurrency, max_batched_tokens=rows
        )
    host = container_memory() if args.host_gb is None else int(args.host_gb * 1e9)
    on_gpu = args.gpu_gb is not None
    budget = int(args.gpu_gb * 1e9) if on_gpu else host
    if on_gpu:  # as the engine does where nobody says how many
        assert budget is not None
        blocks, _ = blocks_for_gpu(config, options, budget, itemsize=2)
        options = dataclasses.replace(options, num_blocks=blocks)
    plan = plan_memory(config, options, itemsize=2 if on_gpu else 4, budget=budget, packed=on_gpu)
    source = "--host-gb" if args.host_gb is not None else "the container's limit"
    limit = "no limit known, give --host-gb" if host is None else f"{host:,} bytes, {source}"
    print(f"device    {f'GPU, {budget:,} bytes, --gpu-gb' if on_gpu else f'CPU, {limit}'}")
    print(f"host      {limit}")
    return _print_plan(plan)


def _paging_problems(args: argparse.Namespace) -> Iterator[str]:
    """Say what a plan of slots lacks, and what of the flags does not go with it."""
    sizes = (
        ("--gpu-gb", args.gpu_gb is not None),
        ("--host-gb", args.host_gb is not None or container_memory() is not None),
    )
    for flag, known in sizes:
        if not known:
            yield f"{flag}: expected gigabytes for a plan of slots, got none"
    if args.speculation != "off":
        yield f"--speculation: expected off beside paged experts, got {args.speculation}"
    if args.tail_graphs:
        yield "--tail-graphs: expected none beside paged experts, got it"


def _beside_residents(args: argparse.Namespace, config: AnyConfig) -> Iterator[str]:
    """Say what of the flags does not go with a plan whose experts are all on the device."""
    if args.out is not None:
        yield "--out: expected --paged or --trace beside it, got none"
    for flag, given in (
        ("--tail-graphs", args.tail_graphs),
        ("--speculation", args.speculation != "off"),
    ):
        if given and args.gpu_gb is None:
            yield f"{flag}: expected --gpu-gb beside it, got none"
    why = ["every layer of this model processes every row"]
    if isinstance(config, ModelConfig):
        why = list(tail_problems(config))
    if args.tail_graphs and why:
        yield f"--tail-graphs: expected a model whose late layers can leave rows out, got {why[0]}"
    for problem in speculation_problems(config, EngineConfig(speculation=args.speculation)):
        yield f"--{problem.what}: expected {problem.accepted}, got {problem.seen}"


def _plan_slots(args: argparse.Namespace, config: AnyConfig) -> int:
    from engine.paging_plan import Wish
    from engine.paging_report import report
    from engine.routing_trace import read_trace

    limit = container_memory()
    host = limit if args.host_gb is None else int(args.host_gb * 1e9)
    assert host is not None  # or _paging_problems has said so
    wish = Wish(
        gpu_bytes=int(args.gpu_gb * 1e9),
        host_bytes=host,
        context=args.context or config.max_position_embeddings,
        concurrency=args.concurrency or EngineConfig().max_num_seqs,
    )
    trace = None if args.trace is None else read_trace(args.trace)
    model = None if args.model == TINY_CHECKPOINT else args.model
    for line in report(config, trace, wish, args.out, model):
        print(line)
    return 0


def _print_plan(plan: MemoryPlan) -> int:
    width = max(28, *(len(item.what) for item in plan.items))
    for owner in ("weights", "slots", "blocks", "steps", "prompts", "host"):
        items = [item for item in plan.items if item.owner == owner]
        total = sum(item.nbytes for item in items)
        print(f"{owner:<{width + 2}}{total:>18,}")
        for item in items:
            print(f"  {item.what:<{width}}{item.nbytes:>18,}  {item.why}")
    print(f"{'device in all':<{width + 2}}{plan.nbytes:>18,}")
    tokens = plan.num_blocks * plan.block_size
    print(
        f"holds     {tokens:,} tokens in {plan.num_blocks:,} blocks of {plan.block_nbytes:,} bytes,"
        f" {plan.token_nbytes:,.1f} a token"
    )
    print(f"          all requests at full context at once: {plan.blocks_wanted:,} blocks")
    if plan.budget is None:
        return 0
    print(f"reserve   {plan.reserve:,} bytes for allocator and kernels (a tenth)")
    print(f"          the budget has room for {plan.blocks_possible:,} blocks")
    left = plan.budget - plan.reserve - plan.nbytes
    told = f"fits, {left:,} bytes left" if plan.fits else f"DOES NOT FIT, {-left:,} bytes short"
    print(f"verdict   {told}")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
