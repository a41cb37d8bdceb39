"""The headers by which a request says how its prompt is to be processed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import PREFILL_MODES, PrefillMode
from gateway.call import header
from parsers import ClientError

MODE = "x-bathyal-prefill"
PARITY = "x-bathyal-trainer-parity"
_FLAGS = {"": False, "false": False, "true": True}


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a prompt is to be processed.

    Args:
        mode: None takes the server's setting.
        parity: whether logits must be those of a trainer's forward pass up to rounding.
    """

    mode: PrefillMode | None = None
    parity: bool = False


DEFAULT_PREFILL = Prefill()


def read_prefill(headers: Sequence[tuple[bytes, bytes]]) -> Prefill:
    """Read both headers of an ASGI scope.

    Raises:
        ClientError: one of them has a value that it cannot have, or they rule each other out.
    """
    mode = header(headers, MODE.encode()).strip().lower()
    parity = header(headers, PARITY.encode()).strip().lower()
    if mode and mode not in PREFILL_MODES:
        raise ClientError(f"{MODE}: expected one of {', '.join(PREFILL_MODES)}, got {mode!r}")
    if parity not in _FLAGS:
        raise ClientError(f"{PARITY}: expected true or false, got {parity!r}")
    if mode == "bounded" and _FLAGS[parity]:
        raise ClientError(
            f"{MODE}: expected off or exact beside {PARITY}: true, got 'bounded', whose results"
            " are not those of a trainer"
        )
    return Prefill(mode or None, _FLAGS[parity])
