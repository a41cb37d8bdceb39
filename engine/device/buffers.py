"""Static input of decode steps: one set of buffers on the device, of which a bucket reads the head.

A row belongs to a request as long as it decodes. Three kinds of buffers:

* the *step's own*: ids, positions, output index. The step advances them itself, so the host writes
  them only while no step is under way;
* the *host's*: slots, block tables, sampling parameters. The host keeps a mirror and uploads what
  changed; while nothing changes a step needs no copy at all;
* *results*: a ring of two rows, copied to pinned memory on a stream of its own.

Rows that belong to nobody pad: slot 0, position 0, a table of zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.rows import Rows

#: Uploads under way at once: one is written while the steps that read the others still wait.
STAGES = 4
#: Rows of the block tables that are worth uploading one by one.
FEW_ROWS = 4

#: Name -> numpy type and what a padding row holds.
OWN = {"ids": (np.int64, 0), "positions": (np.int32, 0), "index": (np.int32, 0)}
HOSTS = {
    "slots": (np.int32, 0),
    "seeds": (np.int64, 0),
    "temperature": (np.float64, 0.0),
    "top_p": (np.float64, 1.0),
    "forced": (np.int32, -1),
}
#: One row of many values each.
WIDE = {"tables": (np.int32, 0), "mask": (np.int32, -1)}


class DecodeBuffers:
    """Buffers for decode steps of up to `num_rows` rows.

    Attributes:
        ids: int64 [N].
        positions: int32 [N].
        index: int32 [N], output index of the token that is drawn next.
        slots: int32 [N].
        tables: int32 [N, NB].
        seeds: int64 [N].
        temperature: float64 [N].
        top_p: float64 [N].
        forced: int32 [N], -1 for none.
        mask: int32 [N, ceil(V / 32)], bits of the tokens that may be drawn.
        results: int64 [2, N].
        half: int64 [1], the row of `results` that the next step writes.
        host: mirrors of all but results and half, numpy arrays by name.

    Args:
        num_rows: N, of the largest bucket.
        max_model_len: positions a request may have.
        block_size: of the pool.
        vocab_size: V.
        device: where they live.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    slots: Tensor
    tables: Tensor
    seeds: Tensor
    temperature: Tensor
    top_p: Tensor
    forced: Tensor
    mask: Tensor

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self._block_size = block_size
        self._on_gpu = device.type == "cuda"
        widths = {"tables": -(-max_model_len // block_size), "mask": -(-vocab_size // 32)}
        self.host: dict[str, NDArray[Any]] = {}
        self._mirror: dict[str, Tensor] = {}
        self._device: dict[str, Tensor] = {}
        for name, (dtype, value) in (OWN | HOSTS | WIDE).items():
            shape = (num_rows, widths[name]) if name in widths else (num_rows,)
            self.host[name] = np.full(shape, value, dtype)
            self._mirror[name] = torch.from_numpy(self.host[name])
            self._device[name] = self._mirror[name].to(device, copy=True)
            setattr(self, name, self._device[name])
        self.results = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        self.half = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._stages = [_Stage(self._mirror) for _ in range(STAGES)] if self._on_gpu else []
        self._next_stage = 0

    def rows(self, count: int) -> Rows:
        """The first `count` rows as a decode pass."""
        return Rows(
            ids=self.ids[:count],
            positions=self.positions[:count],
            seq=self._rows[:count],
            slots=self.slots[:count],
            starts=self.positions[:count],
            first=self._rows[:count],
            lengths=self._ones[:count],
            tables=self.tables[:count],
            block_size=self._block_size,
            max_length=1,
            max_end=self.max_model_len,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes, by name."""
        names = (*OWN, *HOSTS, *WIDE, "results", "half")
        return {name: getattr(self, name) for name in names}

    def clear(self, row: int) -> None:
        """Make a row pad in the mirror."""
        for name, (_, value) in (OWN | HOSTS | WIDE).items():
            self.host[name][row] = value

    def stop(self, row: int) -> None:
        """Make a row of the step's own buffers pad on the device, after the steps launched so far."""
        for tensor in (self.ids, self.positions):
            tensor[row : row + 1].zero_()

    def upload(self, names: Iterable[str], count: int) -> None:
        """Copy the first `count` rows of the mirrors to the device, in order with its work."""
        with _Upload(self) as put:
            for name in names:
                put(name, slice(0, count))

    def upload_rows(self, name: str, rows: Collection[int], count: int) -> None:
        """Copy single rows of a wide mirror; all of the first `count` where there are many."""
        with _Upload(self) as put:
            for part in rows if len(rows) <= FEW_ROWS else (slice(0, count),):
                put(name, part)

    def restart(self) -> None:
        """Bring everything into the state it was made in."""
        for row in range(self.num_rows):
            self.clear(row)
        self.upload((*OWN, *HOSTS, *WIDE), self.num_rows)
        self.half.zero_()

    def put(self, stage: _Stage | None, name: str, part: int | slice) -> None:
        """Copy a part of one mirror, by way of a stage on a GPU."""
        source = self._mirror[name][part]
        target = self._device[name][part]
        if stage is None:
            target.copy_(source)
            return
        staged = stage.tensors[name][part]
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)

    def take_stage(self) -> _Stage | None:
        """Give the stage used longest ago, when the device has read it; None on a CPU."""
        if not self._stages:
            return None
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % STAGES
        if stage.used:
            stage.read.synchronize()
        stage.used = True
        return stage


class _Stage:
    """Pinned copies of all mirrors, which the device reads in its own time."""

    def __init__(self, mirrors: dict[str, Tensor]) -> None:
        self.tensors = {name: torch.empty_like(m, pin_memory=True) for name, m in mirrors.items()}
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.used = False


class _Upload:
    """One batch of copies from a stage."""

    def __init__(self, buffers: DecodeBuffers) -> None:
        self._buffers = buffers
        self._stage: _Stage | None = None

    def __enter__(self) -> _Upload:
        self._stage = self._buffers.take_stage()
        return self

    def __call__(self, name: str, part: int | slice) -> None:
        self._buffers.put(self._stage, name, part)

    def __exit__(self, *_: object) -> None:
        if self._stage is not None:
            self._stage.read.record()


class Readback:
    """Copies results to the host on a stream of its own, one step late.

    Args:
        buffers: whose results.
        device: where they live.
    """

    def __init__(self, buffers: DecodeBuffers, device: torch.device) -> None:
        self._results = buffers.results
        self._on_gpu = device.type == "cuda"
        shape = tuple(buffers.results.shape)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._on_gpu)
        self._values = self._host.numpy()
        if self._on_gpu:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._ran = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def start(self, half: int, count: int) -> None:
        """Begin to copy what the step launched last wrote."""
        if not self._on_gpu:
            self._host[half, :count].copy_(self._results[half, :count])
            return
        self._ran[half].record()
        self._stream.wait_event(self._ran[half])
        with torch.cuda.stream(self._stream):
            self._host[half, :count].copy_(self._results[half, :count], non_blocking=True)
            self._copied[half].record()

    def finish(self, half: int, count: int) -> list[int]:
        """Wait for the copy and give the tokens."""
        if self._on_gpu:
            self._copied[half].synchronize()
        found: list[int] = self._values[half, :count].tolist()
        return found
