"""How packed FP4 lies in memory: the order in which experts' kernels read it.

A checkpoint has two codes a byte, the low nibble first, rows one after the other. Kernels want a
thread's loads to be whole lines and its codes to need few instructions, so the bytes of a matrix
are put in another order when it is loaded; nothing is lost, and a matrix stays as large.

*Words.* Eight codes, columns 8 i ... 8 i + 7 of a row, stay in one word of 32 bits. Its low half
has the even columns, its high half the odd ones. In the form that is turned into bfloat16 by one
multiplication (engine.kernels.stream) a code's sign is bit 15 of its half and the three other
bits are 8 ... 6: with PAIR = 0x81C081C0 the pairs of columns (0, 1), (2, 3), (4, 5) and (6, 7) are

    (w << 6) & PAIR
    (w << 2) & PAIR
    (w rotated right by 4) & PAIR
    (w & 0x81808180) | ((w >> 8) & 0x00400040)

*Stripes.* A warp multiplies eight rows at a time, four threads a row, and fetches 16 bytes of codes
a thread. So that this is 512 bytes in one run, thread after thread, eight rows make a stripe, in
which the 64 bytes (128 columns) of row 0 come first, then those of row 1 and so on, then the next
128 columns of all eight. Of scale bytes four (128 columns) of each row follow each other likewise.
Matrices with a rest of rows or columns (N not a multiple of 8, K not of 128) have no stripes.

Runs of 16 bytes, with which threads that are neighbours read places 128 bytes apart, cost an H200
6 % of a decode step's experts at 64 rows and 22 % of a prompt's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton_compat import tl, triton

#: Rows of a stripe, columns of a run of scales.
STRIPE = 8
CHUNK = 128
#: Bytes of codes and of scales of a row that lie together.
_RUN, _SCALES = CHUNK // 2, CHUNK // 32
#: What `pair_values` leaves out.
PAIR_SCALE = tl.constexpr(2.0**126)


def _moves() -> dict[int, int]:
    """Bits of a word as a checkpoint has it, by how far they move to the left: masks."""
    moves: dict[int, int] = {}
    # Of each pair, where its sign and its value's bits (lowest first) lie in the low half; bit 19
    # is in the high half, and the high half's counterpart in the low one.
    places = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
    for pair, bits in enumerate(places):
        for half in range(2):
            for bit, place in enumerate(bits):
                source = 4 * (2 * pair + half) + bit
                shift = (place + 16 * half) % 32 - source
                moves[shift] = moves.get(shift, 0) | 1 << source
    return moves


_MOVES = _moves()


def _shifted(words: Tensor, moves: dict[int, int]) -> Tensor:
    wide = words.to(torch.int64) & 0xFFFFFFFF
    result = torch.zeros_like(wide)
    for shift, mask in moves.items():
        part = wide & mask
        result |= part << shift if shift >= 0 else part >> -shift
    return torch.where(result >= 1 << 31, result - (1 << 32), result).to(torch.int32)


def has_stripes(rows: int, columns: int) -> bool:
    """Whether a matrix [rows, columns] is stored in stripes."""
    return rows % STRIPE == 0 and columns % CHUNK == 0


def _striped(t: Tensor, run: int) -> Tensor:
    """Bring runs of bytes of eight rows together: [..., N, B]."""
    *lead, n, b = t.shape
    apart = t.reshape(*lead, n // STRIPE, STRIPE, b // run, run)
    return apart.transpose(-2, -3).reshape(t.shape)


def _rows_again(t: Tensor, run: int) -> Tensor:
    """Undo `_striped`."""
    *lead, n, b = t.shape
    apart = t.reshape(*lead, n // STRIPE, b // run, STRIPE, run)
    return apart.transpose(-2, -3).reshape(t.shape)


def stored_codes(codes: Tensor) -> Tensor:
    """Put codes as a checkpoint has them, uint8 [..., N, K / 2], into the order of the kernels."""
    words = _shifted(codes.contiguous().view(torch.int32), _MOVES).view(torch.uint8)
    return _striped(words, _RUN) if has_stripes(words.shape[-2], words.shape[-1] * 2) else words


def stored_scales(scale: Tensor) -> Tensor:
    """Do so with scale bytes, uint8 [..., N, K / 32]."""
    return _striped(scale, _SCALES) if has_stripes(scale.shape[-2], scale.shape[-1] * 32) else scale


def natural_scales(scale: Tensor) -> Tensor:
    """Undo `stored_scales`."""
    return (
        _rows_again(scale, _SCALES) if has_stripes(scale.shape[-2], scale.shape[-1] * 32) else scale
    )


def natural_codes(data: Tensor) -> Tensor:
    """Undo `stored_codes`."""
    if has_stripes(data.shape[-2], data.shape[-1] * 2):
        data = _rows_again(data, _RUN)
    back = {
        -shift: mask << shift if shift >= 0 else mask >> -shift for shift, mask in _MOVES.items()
    }
    return _shifted(data.contiguous().view(torch.int32), back).view(torch.uint8)


@triton.jit
def pair_values(codes):
    """Values divided by PAIR_SCALE of bytes [M, N]: of even and of odd columns, float32 [M, N] each."""
    M: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    first, second = tl.split(tl.reshape(codes.to(tl.int32), (M, N // 2, 2)))
    low, high = tl.split(tl.reshape(first | second << 8, (M, N // 4, 2)))
    word = low | high << 16
    p0 = (word << 6) & -0x7E3F7E40
    p1 = (word << 2) & -0x7E3F7E40
    p2 = (word >> 4 & 0x0FFFFFFF | word << 28) & -0x7E3F7E40
    p3 = word & -0x7E7F7E80 | word >> 8 & 0x00400040
    pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (M, N))
    even = (pairs << 16).to(tl.float32, bitcast=True)
    odd = (pairs & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def codes_of_row(row, K, STRIPES: tl.constexpr):
    """Where a row's first byte of codes lies in its matrix of K columns."""
    return row // 8 * (4 * K) + row % 8 * 64 if STRIPES else row * (K // 2)


@triton.jit
def code_in_row(byte, STRIPES: tl.constexpr):
    """How far a byte of codes lies behind the row's first."""
    return byte // 64 * 512 + byte % 64 if STRIPES else byte


@triton.jit
def scale_place(row, group, K, STRIPES: tl.constexpr):
    """Where the scale byte of a row's columns 32 group ... lies in its matrix of K columns."""
    if STRIPES:
        place = row // 8 * (K // 4) + group // 4 * 32 + row % 8 * 4 + group % 4
    else:
        place = row * (K // 32) + group
    return place
