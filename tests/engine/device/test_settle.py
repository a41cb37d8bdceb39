"""What a loaded engine consists of costs the garbage collector nothing, and can be freed nevertheless."""

from __future__ import annotations

import gc
import weakref

from engine.device.build import free_memory, settle


class Owner:
    """Refers to itself, as a runner does by way of its graphs' body."""

    def __init__(self) -> None:
        self.itself = self


def test_what_has_settled_is_passed_over() -> None:
    """A full collection does not go through what was there when it settled."""
    kept = [Owner() for _ in range(1000)]
    settle()

    assert gc.get_freeze_count() > 1000
    assert not any(isinstance(thing, Owner) for thing in gc.get_objects())
    assert len(kept) == 1000
    gc.unfreeze()


def test_what_has_settled_can_be_freed() -> None:
    """An engine that is gone gives its memory back before the next one is built, and when that settles."""
    for free in (free_memory, settle):
        owner = Owner()
        gone = weakref.ref(owner)
        settle()
        del owner
        gc.collect()
        assert gone() is not None, "a collection alone does not see it"

        free()

        assert gone() is None
    gc.unfreeze()
