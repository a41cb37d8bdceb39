"""Images of a request: fetched past a filter of addresses, and bounded in bytes, pixels and time.

Used only where the served model sees. Every image of a body is taken, whether it comes along or has
to be fetched, checked, and put back as data, so that nothing behind this module opens a connection.

A host is resolved here and the connection goes to the very address that was checked, so that a name
which answers differently the second time gains nothing; a redirect is a new address and is checked
like the first. Proxies of the environment are not used: they would resolve the name anew.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import orjson

from gateway.call import whole_number
from gateway.imagesize import image_size
from gateway.threads import THREAD_FROM_BYTES, in_thread, in_thread_if
from parsers import ClientError, Protocol
from parsers.body import check_nesting

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]
MOST_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_CODE = "invalid_image"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one request's images may amount to; see `gateway.settings.Settings` for each."""

    count: int
    size: int
    pixels: int
    seconds: float


def is_public(address: str) -> bool:
    """Whether an address is one that any host of the internet may be asked at.

    Not private, loopback, link-local (where clouds keep their metadata), multicast, reserved or
    unspecified; an IPv4 address in any IPv6 dress (mapped, 6to4, Teredo, NAT64) counts as itself.
    """
    try:
        found: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if found.ipv4_mapped is not None:
            return True
    return found.is_global and not found.is_multicast


async def resolve(host: str, port: int) -> list[str]:
    """Ask the system for a host's addresses."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


class Images:
    """Takes the images of requests.

    Args:
        limits: of one request.
        resolver: gives the addresses of a host; raises OSError where there are none.
        transport: carries requests to an address; one without any proxy by default.
    """

    def __init__(
        self,
        limits: ImageLimits,
        *,
        resolver: Resolver = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolver
        # No connection is kept: hosts of one address must not meet on one.
        self._transport = transport or httpx.AsyncHTTPTransport(
            trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def close(self) -> None:
        """Let go of what is open."""
        await self._transport.aclose()

    async def inline(self, protocol: Protocol, body: bytes) -> bytes:
        """Return a body whose images are all data, and all within the limits.

        A body that is no JSON object, and what is wrong with parts that are no images, is the
        parsers' affair.

        Raises:
            ClientError: 400, with the field: too many, too large, of no known format, not to be
                had, at an address that is not public, or not there in time; or the body is nested
                too deep.
        """
        long = len(body) >= THREAD_FROM_BYTES
        try:
            fields = await in_thread_if(long, orjson.loads, body)
        except orjson.JSONDecodeError:
            return body
        await in_thread_if(long, check_nesting, body, fields)
        places = list(_places(protocol, fields))
        if len(places) > self._limits.count:
            raise ClientError(
                f"{places[self._limits.count].at}: expected at most {self._limits.count} images,"
                f" got {len(places)}",
                code="too_many_images",
                param=places[self._limits.count].at,
            )
        if not places:
            return body
        at = places[0].at
        try:
            async with asyncio.timeout(self._limits.seconds):
                for place in places:
                    at = place.at
                    if place.data is None and not place.url.startswith("data:"):
                        fetched = await self._fetch(at, place.url)
                        await in_thread(self._put, place, fetched)
                    else:
                        await in_thread(self._put, place, None)
        except TimeoutError:
            raise ClientError(
                f"{at}: the images were not there within {self._limits.seconds:g} s",
                code="image_timeout",
                param=at,
            ) from None
        return await in_thread(orjson.dumps, fields)

    def _put(self, place: _Place, fetched: bytes | None) -> None:
        """Check an image and put it into the body; one that came along is taken from there."""
        if fetched is not None:
            data = fetched
        elif place.data is not None:
            data = _decoded(place.at, place.data)
        else:
            data = _of_data_url(place.at, place.url)
        place.put(data, self._checked(place.at, data))

    def _checked(self, at: str, data: bytes) -> str:
        """Check size and pixels; returns the media type."""
        if len(data) > self._limits.size:
            raise _too_large(at, self._limits.size)
        found = image_size(data)
        if found is None:
            raise _bad(at, "a PNG, JPEG, GIF or WebP image", "something else")
        if found.width * found.height > self._limits.pixels:
            raise ClientError(
                f"{at}: expected at most {self._limits.pixels} pixels,"
                f" got {found.width} x {found.height}",
                code="image_too_large",
                param=at,
            )
        return found.media_type

    async def _fetch(self, at: str, url: str) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            answer = await self._ask(at, url)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise _bad(at, f"at most {MOST_REDIRECTS} redirects", "more")

    async def _ask(self, at: str, url: str) -> bytes | str:
        """Ask for a URL once; returns what it holds, or where it points to."""
        target = _target(at, url)
        host, port = target.host, target.port or (443 if target.scheme == "https" else 80)
        address = await self._address(at, host, port)
        request = httpx.Request(
            "GET",
            target.copy_with(host=address, userinfo=b"", fragment=None),
            headers={"host": target.netloc.decode("ascii"), "accept": "image/*"},
            extensions={"sni_hostname": host},
        )
        try:
            response = await self._transport.handle_async_request(request)
            try:
                if response.is_redirect:
                    return str(target.join(response.headers.get("location", "")))
                if response.status_code != 200:
                    raise _bad(at, "status 200 of the image's host", str(response.status_code))
                return await self._read(at, response)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # its text may hold the URL, and that a secret
            raise _bad(at, "an image to be fetched", type(error).__name__) from None

    async def _address(self, at: str, host: str, port: int) -> str:
        try:
            addresses = await self._resolve(host, port)
        except OSError:
            addresses = []
        if not addresses:
            raise _bad(at, "a host that has an address", "none")
        for address in addresses:
            # one that is not public is reason enough: a name is not half trusted
            if not is_public(address):
                raise ClientError(
                    f"{at}: images are fetched from public addresses only",
                    code="image_address_refused",
                    param=at,
                )
        return addresses[0]

    async def _read(self, at: str, response: httpx.Response) -> bytes:
        limit = self._limits.size
        declared = whole_number(response.headers.get("content-length", ""))
        if declared is not None and declared > limit:
            raise _too_large(at, limit)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _bad(at, "an image without content encoding", "one with it")
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > limit:
                raise _too_large(at, limit)
            parts.append(part)
        return b"".join(parts)


@dataclass(slots=True)
class _Place:
    """Where an image stands in a body.

    Args:
        at: its path.
        holder: the object that names it.
        key: of its URL in there; None for an Anthropic source.
        url: what it is fetched from; empty where it comes along.
        data: base64, where it comes along in a field of its own.
    """

    at: str
    holder: dict[str, Any]
    key: str | None
    url: str = ""
    data: str | None = None

    def put(self, data: bytes, media_type: str) -> None:
        """Put the image back as data."""
        text = base64.b64encode(data).decode()
        if self.key is None:
            source = {"type": "base64", "media_type": media_type, "data": text}
            self.holder["source"] = source
        else:
            self.holder[self.key] = f"data:{media_type};base64,{text}"


def _places(protocol: Protocol, fields: Any) -> Iterator[_Place]:
    """Find every image in the order of the body."""
    if not isinstance(fields, dict):
        return
    top = "input" if protocol == "responses" else "messages"
    for name in ("system", top):
        yield from _within(fields.get(name), name)


def _within(value: Any, at: str) -> Iterator[_Place]:
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _within(item, f"{at}[{i}]")
    elif isinstance(value, dict):
        if (place := _place(value, at)) is not None:
            yield place
            return
        for key in ("content", "output"):
            yield from _within(value.get(key), f"{at}.{key}")


def _place(part: dict[str, Any], at: str) -> _Place | None:
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        holder = part.get("image_url")
        if isinstance(holder, dict) and isinstance(holder.get("url"), str):
            return _Place(f"{at}.image_url.url", holder, "url", holder["url"])
        if isinstance(holder, str):
            return _Place(f"{at}.image_url", part, "image_url", holder)
    if kind == "file":  # of Chat, where the codec takes no file but an image
        holder = part["file"] if isinstance(part.get("file"), dict) else part
        data = holder.get("file_data")
        if isinstance(data, str) and data[:5].lower() == "data:":
            return _Place(f"{at}.file_data", holder, "file_data", f"data:{data[5:]}")
    source = part.get("source")
    if kind == "image" and isinstance(source, dict):
        if source.get("type") == "url" and isinstance(source.get("url"), str):
            return _Place(f"{at}.source.url", part, None, source["url"])
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return _Place(f"{at}.source.data", part, None, data=source["data"])
    return None


def _target(at: str, url: str) -> httpx.URL:
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL:
        raise _bad(at, "a URL", "something else") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise _bad(at, "an http, https or data URL", repr(target.scheme[:20]))
    return target


def _of_data_url(at: str, url: str) -> bytes:
    head, comma, rest = url.removeprefix("data:").partition(",")
    if not comma:
        raise _bad(at, "data:<media type>;base64,<data>", "no comma")
    return _decoded(at, rest) if head.endswith(";base64") else unquote_to_bytes(rest)


def _decoded(at: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(at, "base64", "something else") from None


def _bad(at: str, expected: str, came: str) -> ClientError:
    """Build an error; the URL, which may hold a secret, is not repeated."""
    return ClientError(f"{at}: expected {expected}, got {came}", code=_CODE, param=at)


def _too_large(at: str, limit: int) -> ClientError:
    return ClientError(
        f"{at}: expected an image of at most {limit} bytes, got more",
        code="image_too_large",
        param=at,
    )
