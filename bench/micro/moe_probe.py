"""How fast packed FP4 can be read and unpacked, by access pattern: what bounds the experts.

    python -m bench.micro.moe_probe

A warp reads 16 rows of 2 KB, 128 bytes a thread at a time. Patterns: "quads" (8 rows x 64 bytes
an instruction, as tensor core operands lie), "runs" (a quad's threads take 64 bytes each),
"rows" (512 bytes of one row an instruction). Scales: a word for every 128 columns, or none.
Unpacking: none, to bfloat16 pairs without or with the multiplication by the scale, and with the
tensor cores' product.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.micro.timing import replayed_us
from engine.kernels.stream import load16, mma, multiply_pairs
from engine.kernels.triton_compat import tl, triton

ROWS, COLUMNS = 1 << 19, 4096


@triton.jit
def _pairs(q):
    s: tl.constexpr = -0x7FFF8000
    return (
        ((q << 12) & s) | ((q << 6) & 0x01C001C0),
        ((q << 8) & s) | ((q << 2) & 0x01C001C0),
        ((q << 4) & s) | ((q >> 2) & 0x01C001C0),
        (q & s) | ((q >> 6) & 0x01C001C0),
    )


@triton.jit
def _read(data, scale, out, PATTERN: tl.constexpr, SCALES: tl.constexpr, MATH: tl.constexpr):
    K: tl.constexpr = 4096
    thread = tl.arange(0, 128)
    lane = thread % 32
    base = (tl.program_id(0) * 4 + thread // 32) * 16
    zero = tl.zeros((128,), tl.float32)
    c = (zero, zero, zero, zero)
    total = tl.zeros((128,), tl.int32)
    for step in range(8):
        loaded = ()
        for i in tl.static_range(8):
            if PATTERN == 0:
                row = base + lane // 4 + i // 4 * 8
                group = step * 16 + i % 4 * 4 + lane % 4
            elif PATTERN == 1:
                row = base + lane // 4 + i // 4 * 8
                group = step * 16 + lane % 4 * 4 + i % 4
            else:
                row = base + step * 2 + i // 4
                group = i % 4 * 32 + lane
            w = load16(data + row * (K // 8) + group * 4, group < 128)
            s = row + group + 118
            if SCALES:
                s = tl.load(scale + row * (K // 128) + (group >> 2)) >> ((group & 3) << 3)
            loaded = loaded + ((w[0], w[1], w[2], w[3], s),)  # noqa: RUF005
        for i in tl.static_range(8):
            w = loaded[i]
            if MATH == 0:
                total ^= w[0] ^ w[1] ^ w[2] ^ w[3] ^ w[4]
            else:
                f = ((w[4] & 0xFF) + 110) * 0x00800080
                for j in tl.static_range(4):
                    p = _pairs(w[j])
                    if MATH == 1:
                        total ^= p[0] ^ p[1] ^ p[2] ^ p[3] ^ f
                    else:
                        p0 = multiply_pairs(p[0], f)
                        p1 = multiply_pairs(p[1], f)
                        p2 = multiply_pairs(p[2], f)
                        p3 = multiply_pairs(p[3], f)
                        if MATH == 2:
                            total ^= p0 ^ p1 ^ p2 ^ p3
                        else:
                            c = mma(p0, p1, p2, p3, lane, lane + 1, c)
    value = total + (c[0] + c[1] + c[2] + c[3]).to(tl.int32, bitcast=True)
    tl.store(out + tl.program_id(0) * 128 + thread, value)


def main() -> None:
    """Run."""
    data = torch.empty(ROWS, COLUMNS // 8, dtype=torch.int32, device="cuda").random_()
    scale = torch.empty(ROWS, COLUMNS // 128, dtype=torch.int32, device="cuda").fill_(0x78777675)
    out = torch.empty(ROWS // 64 * 128, dtype=torch.int32, device="cuda")
    patterns, maths = ("quads", "runs", "rows"), ("read", "unpack", "scaled", "product")
    combos = [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0, 0, 2),
        (0, 0, 3),
        (0, 1, 3),
    ]
    for pattern, scales, math in combos:
        call = partial(
            _read[(ROWS // 64,)], data, scale, out, pattern, scales, math, num_warps=4, maxnreg=128
        )
        us = replayed_us([call], repeats=3)
        rate = (data.nbytes + scales * scale.nbytes) / us / 1e6
        print(f"{patterns[pattern]:6s} {'scales' if scales else '      '} {maths[math]:8s}"
              f" {us:7.1f} us {rate:5.2f} TB/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
