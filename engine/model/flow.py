"""What a pass of the fast form carries from layer to layer, and what it leaves behind.

A pass sees `Rows`. Late layers may need fewer of them than early ones (engine.plan.replay), so both
the pass and the flow can be narrowed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from engine.kernels.mhc import HcIn
from engine.kernels.rows import Narrowing, Rows

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool


class Held:
    """Stores of a pass that wait until it is known how many rows of each sequence count.

    Entries and index keys are written at once: those of rows that turn out not to count lie beyond
    what anybody may see, until they are written again.
    """

    def __init__(self) -> None:
        self._stores: list[Callable[..., None]] = []

    def add(self, store: Callable[..., None]) -> None:
        """Put a store off; it takes `lengths`."""
        self._stores.append(store)

    def commit(self, lengths: Tensor) -> None:
        """Store the first rows of each sequence: int32 [G] of them, 0 allowed."""
        for store in self._stores:
            store(lengths=lengths)
        self._stores.clear()


@dataclass(slots=True)
class Pass:
    """What one pass works out once and shares between layers.

    Args:
        rows: of the pass.
        pool: memory of the requests.
        held: where stores of rolling state are put off to, None to store at once.
        taps: layer -> mean of the streams at its entry [T, d], of the layers that are tapped.
        written: layer whose entries were written before rows were left out.
        choices: index source -> places int32 [T, K] of the entries that its readers attend.
        candidates: groups that the candidate source leaves to later choosers.
    """

    rows: Rows
    pool: KVPool
    held: Held | None = None
    taps: dict[int, Tensor] = field(default_factory=dict)
    written: int | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None

    def store(self, store: Callable[..., None]) -> None:
        """Do a store of rolling state now, or when the pass's rows are known to count."""
        if self.held is None:
            store()
        else:
            self.held.add(store)

    def narrow(self, to: Narrowing) -> None:
        """Go on with fewer rows; what was chosen for those that are left stays chosen."""
        self.rows = to.rows
        self.choices = {at: to.take(choice) for at, choice in self.choices.items()}
        self.taps = {at: to.take(tap) for at, tap in self.taps.items()}
        if self.candidates is not None:
            self.candidates = to.take(self.candidates)


@dataclass(slots=True)
class Flow:
    """What passes from layer to layer.

    Args:
        streams: R [T, S, d], of the site that is open.
        parts: summands [T, P, d] of the last sublayer's output, not yet mixed in.
        site: the open site.
    """

    streams: Tensor
    parts: Tensor
    site: HcIn

    def select(self, rows: Tensor) -> Flow:
        """Keep some rows, int64 [N]."""
        return self._take(lambda tensor: tensor.index_select(0, rows))

    def narrow(self, to: Narrowing) -> Flow:
        """Go on with fewer rows."""
        return self._take(to.take)

    def head(self, count: int) -> Flow:
        """The first rows, views."""
        return self._take(lambda tensor: tensor[:count])

    def _take(self, take: Callable[[Tensor], Tensor]) -> Flow:
        old = self.site
        x = take(old.x)
        xq = x if old.xq is old.x else take(old.xq)
        site = HcIn(x, xq, take(old.pre), take(old.post), take(old.comb))
        return Flow(take(self.streams), take(self.parts), site)


#: Runs the layers from a narrowing on, given the flow of all rows; None where it does not.
TailRun = Callable[[Flow, Narrowing], Flow | None]
#: Runs the first layers of a pass, as many as it is told, pausing after each; it gives what flows out
#: of the last one, and leaves in the pass what they have chosen and tapped. None where it does not.
FrontRun = Callable[[Pass, int], Iterator[Flow | None] | None]
