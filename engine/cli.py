"""`bathyal engine ...`: checkpoints on the command line.

Exit codes: 0 ok, 1 something was found (a difference, a broken checkpoint), 2 misuse.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine.api import EngineError
from engine.config_checks import CSA_RATIO


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
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:  # argparse exits by itself, with 0 for --help
        return int(done.code or 0)
    try:
        if args.command == "verify":
            return _verify(args.dir, args.atol)
        if args.command == "inspect":
            return _inspect(args.dir)
        return _convert(args.source, args.target, args.architecture, args.config)
    except (EngineError, OSError, ValueError) as error:
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
    from engine.model.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    kinds = Counter(_kind(layer.ratio, config.is_v41) for layer in config.layers)
    print(f"version   {config.version}")
    print(f"layers    {len(config.layers)}: " + ", ".join(f"{n} {k}" for k, n in kinds.items()))
    print(f"context   {config.max_position_embeddings} tokens")
    print(f"tensors   {len(checkpoint.tensors)}, {checkpoint.nbytes:,} bytes")
    sizes: Counter[str] = Counter()
    for name, stored in checkpoint.tensors.items():
        sizes[_part(name)] += stored.nbytes
    for part, size in sizes.most_common():
        print(f"  {part:<20}{size:>18,}")
    dtypes = Counter(t.dtype for t in checkpoint.tensors.values())
    print("types     " + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common()))
    unused = checkpoint.unused()
    for reason, count in Counter(unused.values()).items():
        print(f"unused    {count} tensors: {reason}")
        for name in sorted(name for name, why in unused.items() if why == reason):
            print(f"  {name}")
    problems = checkpoint.problems()
    for problem in problems:
        print(f"problem   {problem}")
    return 1 if problems else 0


#: Text in a tensor's name -> the part of the checkpoint it belongs to; the first match counts.
_PARTS = {
    "mtp.": "draft stages",
    "vision.": "vision",
    "aligner.": "vision",
    "image_": "vision",
    ".engram.": "Engram",
    ".shared_experts.": "shared experts",
    ".experts.": "routed experts",
    ".gate.": "routers",
    ".attn.": "attention",
    "hc_": "residual streams",
    "embed.": "embedding and head",
    "head.": "embedding and head",
}


def _part(name: str) -> str:
    return next((part for mark, part in _PARTS.items() if mark in name), "norms")


def _kind(ratio: int, is_v41: bool) -> str:
    if ratio == 0:
        return "window"
    if is_v41:
        return f"ratio {ratio}"
    return "CSA" if ratio == CSA_RATIO else "HCA"


if __name__ == "__main__":
    sys.exit(main())
