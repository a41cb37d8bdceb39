"""Records: how one row of cached values lies in memory, as opaque bytes.

A *form* names how one kind of value is stored (model.md 2.1, 2.4, 2.6, 2.9). A row stored in a form is
one contiguous *record*: codes, then what stays as it is, then scales, filled up to a multiple of 16
bytes. So a record is read in words of up to 16 bytes, and one row touches one place in memory.

| form | codes | as they are | scales | bytes at the models' widths |
|---|---|---|---|---|
| fp8_64_tail | e4m3 | the rotary tail, in the engine's dtype | e8m0 per 64 | 448 + 128 + 7 -> 592 of 512 values |
| fp8_32 | e4m3 | | e8m0 per 32 | 512 + 16 = 528 of 512 |
| fp4_e4m3_16 | e2m1 | | e4m3 per 16 | 256 + 32 = 288 of 512 |
| fp4_32, hadamard_fp4_32 | e2m1 | | e8m0 per 32 | 64 + 4 -> 80 of 128 |

Two e2m1 codes share a byte: byte i of a chunk of 16 holds column i of its 32 columns in the low
nibble and column 16 + i in the high one, so that both nibbles unpack to runs of columns. (A row of
16 values is one chunk of 8 bytes.) Scales of fp4_e4m3_16 are in that order too: those of all low
nibbles, then those of all high ones.

Memory full of 0xff is NaN in every form, memory full of zeros is zero. Knows nothing of tensors: no
torch here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

Form = Literal["none", "fp8_64_tail", "fp8_32", "fp4_e4m3_16", "fp4_32", "hadamard_fp4_32"]

#: Records are a multiple of so many bytes long, and begin at one.
ALIGNMENT = 16
#: Bytes of a chunk of e2m1 codes.
CHUNK = 16
#: Columns that share a scale.
GROUPS: dict[Form, int] = {
    "fp8_64_tail": 64,
    "fp8_32": 32,
    "fp4_e4m3_16": 16,
    "fp4_32": 32,
    "hadamard_fp4_32": 32,
}


@dataclass(frozen=True, slots=True)
class Record:
    """The layout of one row.

    Args:
        form: of the row; not "none", whose rows are plain numbers.
        width: values of a row, a power of two.
        tail: last values that fp8_64_tail keeps as they are; 0 for the other forms.
        itemsize: bytes of one of those, 2 for bfloat16, 4 for float32.
    """

    form: Form
    width: int
    tail: int
    itemsize: int

    @property
    def group(self) -> int:
        """Values that share a scale."""
        return min(GROUPS[self.form], self.width)

    @property
    def code_bytes(self) -> int:
        """Bytes of codes, from the record's start."""
        plain = self.width - self.tail
        return plain if self.form.startswith("fp8") else plain // 2

    @property
    def scales_at(self) -> int:
        """Where the scales begin, one byte each; the tail lies before them."""
        return self.code_bytes + self.itemsize * self.tail

    @property
    def num_scales(self) -> int:
        """Scales of a row."""
        return -(-(self.width - self.tail) // self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return -(-(self.scales_at + self.num_scales) // ALIGNMENT) * ALIGNMENT


@functools.cache  # asked at every launch
def record_of(form: Form, width: int, tail: int, itemsize: int) -> Record | None:
    """Give the layout of rows in a form, None for plain numbers.

    Args:
        form: of the rows.
        width: values of a row.
        tail: rotary dimensions, the last ones; only fp8_64_tail keeps them apart.
        itemsize: bytes of an element of the engine's dtype.

    Raises:
        ValueError: the width does not fit the form.
    """
    if form == "none":
        return None
    least = 32 if form == "fp4_e4m3_16" else 16
    if width < least or width & (width - 1):
        raise ValueError(f"width: expected a power of two from {least} on for {form}, got {width}")
    if form != "fp8_64_tail":
        return Record(form, width, 0, itemsize)
    if not 4 <= tail < width or tail & (tail - 1):
        raise ValueError(f"tail: expected a power of two from 4 up to {width // 2}, got {tail}")
    return Record(form, width, tail, itemsize)


@dataclass(frozen=True, slots=True)
class Forms:
    """How a model's cached values are stored.

    Args:
        window: of window keys.
        entries: of compressed entries.
        index: of index keys.
    """

    window: Form = "none"
    entries: Form = "none"
    index: Form = "none"


def forms_of(*, is_v41: bool, is_quantised: bool) -> Forms:
    """Give the forms of a model (model.md 2.4, 2.9).

    Args:
        is_v41: whether it is a V4.1 model.
        is_quantised: whether its caches are stored in narrow formats at all.
    """
    if not is_quantised:
        return Forms()
    if is_v41:
        return Forms("fp8_32", "fp4_e4m3_16", "fp4_32")
    return Forms("fp8_64_tail", "fp8_64_tail", "hadamard_fp4_32")
