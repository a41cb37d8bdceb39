"""Who may ask, and how much at once: API keys, their rate and their concurrency.

A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`; where both are sent, Bearer counts
(as with the hosted Messages endpoint, protocol.md 4.5). Keys are kept as SHA-256 digests, so that a
dump of the process shows none, and every one of them is compared, each in constant time.

Without any key in the settings everybody is the same caller, and the limits hold for all together.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import RetryLaterError
from gateway.settings import Settings, SettingsError
from parsers import ClientError

_FIELDS = ("name", "key", "concurrency", "requests_per_minute")
#: A burst may use the requests of so many seconds at once.
BURST_SECONDS = 10.0


@dataclass(slots=True)
class Caller:
    """One key's owner and what it uses at the moment.

    Args:
        name: shown in logs in place of the key.
        salt: of what is kept of its prompts; differs from key to key and gives no key away.
        concurrency: most requests open at once, None for no limit.
        requests_per_minute: None for no limit.
    """

    name: str
    concurrency: int | None = None
    requests_per_minute: int | None = None
    salt: str = ""
    open: int = 0
    _tokens: float = math.inf  # requests that may come at once now; filled up on the first look
    _looked: float = 0.0

    def enter(self, now: float) -> None:
        """Count a request in; `leave` has to follow.

        Args:
            now: a monotonic time in seconds.

        Raises:
            ClientError: 429; too many are open or came too fast. Nothing is counted then.
        """
        if self.concurrency is not None and self.open >= self.concurrency:
            raise RetryLaterError(
                f"{self.open} requests of this key are open, its limit is {self.concurrency};"
                " wait for one to end",
                status=429,
                code="concurrency_limit_exceeded",
                seconds=1,
            )
        if self.requests_per_minute is not None:
            rate = self.requests_per_minute / 60
            burst = max(1.0, rate * BURST_SECONDS)
            self._tokens = min(burst, self._tokens + (now - self._looked) * rate)
            self._looked = now
            if self._tokens < 1:
                raise RetryLaterError(
                    f"this key may send {self.requests_per_minute} requests a minute",
                    status=429,
                    code="rate_limit_exceeded",
                    seconds=math.ceil((1 - self._tokens) / rate),
                )
            self._tokens -= 1
        self.open += 1

    def leave(self) -> None:
        """Count a request out."""
        self.open -= 1


class Keys:
    """All callers by their keys.

    Args:
        callers: key to caller; without any, everybody is let in as `anonymous`.
        anonymous: who is counted where there are no keys.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        callers: Mapping[str, Caller],
        anonymous: Caller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._callers = [(_digest(key), caller) for key, caller in callers.items()]
        for key, caller in callers.items():
            caller.salt = hashlib.sha256(b"prefix cache\0" + _digest(key)).hexdigest()
        self._anonymous = anonymous
        self._clock = clock

    @classmethod
    def load(cls, settings: Settings) -> Keys:
        """Collect the keys of the settings and of their file.

        Raises:
            SettingsError: the file is wrong; names the entry, never the key.
        """
        limits = (settings.key_concurrency, settings.key_requests_per_minute)
        callers: dict[str, Caller] = {}
        if settings.api_key is not None:
            callers[settings.api_key] = Caller("default", *limits)
        if settings.api_keys is not None:
            for key, caller in _read(settings.api_keys, limits):
                if key in callers:
                    raise SettingsError(
                        f"{settings.api_keys}: {caller.name}: this key is {callers[key].name}'s"
                    )
                callers[key] = caller
        return cls(callers, Caller("anonymous", *limits))

    def enter(self, authorization: str, api_key: str) -> Caller:
        """Let a request in and count it; `Caller.leave` has to follow.

        Args:
            authorization: the header of that name, empty where none was sent.
            api_key: likewise `x-api-key`.

        Raises:
            ClientError: 401, no key or an unknown one; 429, too many requests.
        """
        caller = self._find(authorization, api_key)
        caller.enter(self._clock())
        return caller

    def _find(self, authorization: str, api_key: str) -> Caller:
        if not self._callers:
            return self._anonymous
        scheme, _, token = authorization.partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else api_key
        if not given:
            raise _unauthorized("no API key was sent; send it as 'Authorization: Bearer KEY'")
        digest, found = _digest(given), None
        for known, caller in self._callers:  # all of them: the time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise _unauthorized("the API key is not known here")
        return found


def _read(path: Path, limits: tuple[int | None, int | None]) -> list[tuple[str, Caller]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None
    rows = content.get("keys")
    if not isinstance(rows, list) or not rows or content.keys() != {"keys"}:
        raise SettingsError(f"{path}: expected [[keys]] tables, each with a name and a key")
    names: set[str] = set()
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_entry(row, names, limits))
        except ValueError as error:
            raise SettingsError(f"{path}, key {number}: {error}") from None
    return found


def _entry(row: Any, names: set[str], limits: tuple[int | None, int | None]) -> tuple[str, Caller]:
    if not isinstance(row, dict):
        raise ValueError("expected a table")
    if unknown := sorted(row.keys() - set(_FIELDS)):
        raise ValueError(f"{unknown[0]}: no such field; there are {', '.join(_FIELDS)}")
    name, key = row.get("name"), row.get("key")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise ValueError("name: expected 1 to 64 letters, digits, dots or dashes")
    if name in names:
        raise ValueError(f"name: {name!r} is used twice")
    names.add(name)
    if not isinstance(key, str) or not re.fullmatch(r"[!-~]{8,256}", key):
        raise ValueError("key: expected 8 to 256 visible ASCII characters")
    for field, default in zip(_FIELDS[2:], limits, strict=True):
        value = row.setdefault(field, default)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{field}: expected a whole number above 0, got {value!r}")
    return key, Caller(name, row["concurrency"], row["requests_per_minute"])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> ClientError:
    return ClientError(message, status=401, code="invalid_api_key", param=None)
