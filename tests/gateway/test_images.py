"""Images: which addresses are asked, what is taken, and that a model that sees gets them."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, strategies as st

from engine.api import EngineError, GenerateRequest, ModelInfo, SamplingParams
from gateway import images
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.scripted import ScriptedBackend
from gateway.images import MOST_REDIRECTS, ImageLimits, Images, is_public
from gateway.imagesize import ImageSize, image_size
from parsers import BootError, ClientError
from tests.gateway.support import (
    FunctionBackend,
    call,
    chat_body,
    make_info,
    run,
    running,
    text_line,
)

CHAT = "/v1/chat/completions"
LIMITS = ImageLimits(count=3, size=2000, pixels=10_000, seconds=5)
PUBLIC = "93.184.215.14"


def png(width: int, height: int, padding: int = 0) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\0" * padding


def jpeg(width: int, height: int, frame: int = 0xC0) -> bytes:
    table = b"\xff\xe0" + struct.pack(">H", 16) + b"\0" * 14
    head = bytes([0xFF, frame]) + struct.pack(">HBHH", 17, 8, height, width)
    return b"\xff\xd8" + table + b"\xff" + head + b"\0" * 12


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0" * 3


def webp(kind: bytes, head: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + kind + b"\0\0\0\0" + head


def vp8(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height))


def vp8l(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | height - 1 << 14) + b"\0" * 5)


def vp8x(width: int, height: int) -> bytes:
    sizes = b"".join(struct.pack("<I", side - 1)[:3] for side in (width, height))
    return webp(b"VP8X", b"\0" * 4 + sizes)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (png, "image/png"),
        (jpeg, "image/jpeg"),
        (lambda w, h: jpeg(w, h, 0xC2), "image/jpeg"),
        (gif, "image/gif"),
        (vp8, "image/webp"),
        (vp8l, "image/webp"),
        (vp8x, "image/webp"),
    ],
)
@given(st.integers(1, 16383), st.integers(1, 16383))
def test_a_formats_head_tells_its_size(
    make: Callable[[int, int], bytes], kind: str, width: int, height: int
) -> None:
    """Both sides, the right way round; and a cut head tells nothing or the same."""
    data = make(width, height)
    assert image_size(data) == ImageSize(kind, width, height)
    for end in range(len(data)):
        assert image_size(data[:end]) in (None, ImageSize(kind, width, height))


@given(
    st.binary(max_size=60), st.sampled_from([b"", b"\xff\xd8\xff", b"GIF89a", b"RIFF....WEBPVP8X"])
)
def test_any_bytes_have_a_size_or_none(rest: bytes, head: bytes) -> None:
    """Nothing raises and nothing loops."""
    found = image_size(head + rest)
    assert found is None or (found.width > 0 and found.height > 0)


@pytest.mark.parametrize("data", [png(0, 5), b"<svg/>", b"BM" + b"\0" * 60, b"", jpeg(3, 3)[:4]])
def test_what_has_no_pixels_or_is_no_image_has_no_size(data: bytes) -> None:
    """Another format, an empty image, a cut one."""
    assert image_size(data) is None


NOT_PUBLIC = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::"),
    *(
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2001:0:7f00:1::",
        "",
        "localhost",
        "1.2.3",
        "0x7f.1",
    ),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_asked(address: str) -> None:
    """Private, loopback, link-local and all others that are nobody's on the internet, in any dress."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "2606:2800:21f:cb07::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are(address: str) -> None:
    """Of the internet, IPv4 in IPv6 dress too."""
    assert is_public(address)


class Web:
    """Hosts by name, pages by URL, and what was asked."""

    def __init__(
        self,
        pages: Mapping[str, httpx.Response | bytes],
        hosts: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.pages = pages
        self.hosts = {"a.example": [PUBLIC], "b.example": ["8.8.8.8"], **(hosts or {})}
        self.asked: list[tuple[str, str, str]] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        if host not in self.hosts:
            raise OSError("no such host")
        return self.hosts[host]

    def answer(self, request: httpx.Request) -> httpx.Response:
        host, sni = request.headers["host"], str(request.extensions["sni_hostname"])
        self.asked.append((request.url.host, host, sni))
        page = self.pages[f"{request.url.scheme}://{host}{request.url.raw_path.decode()}"]
        return (
            httpx.Response(200, stream=httpx.ByteStream(page)) if isinstance(page, bytes) else page
        )

    def images(self, limits: ImageLimits = LIMITS) -> Images:
        transport = httpx.MockTransport(self.answer)
        return Images(limits, resolver=self.resolve, transport=transport)


def chat(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return orjson.dumps({"messages": [{"role": "user", "content": parts}]})


def taken(web: Web, *urls: str, limits: ImageLimits = LIMITS) -> list[str]:
    body = orjson.loads(run(web.images(limits).inline("chat", chat(*urls))))
    return [part["image_url"]["url"] for part in body["messages"][0]["content"]]


def refused(web: Web, *urls: str, limits: ImageLimits = LIMITS) -> ClientError:
    with pytest.raises(ClientError) as caught:
        taken(web, *urls, limits=limits)
    assert caught.value.status == 400
    return caught.value


def moved(to: str, status: int = 302) -> httpx.Response:
    return httpx.Response(status, headers={"location": to})


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    """The name goes along for the host and for TLS, but is not resolved again."""
    web = Web({"https://a.example/x.png?q=1": png(3, 5), "http://b.example:81/y": gif(2, 2)})

    assert taken(web, "https://a.example/x.png?q=1#part", "http://b.example:81/y") == [
        data_url(png(3, 5)),
        data_url(gif(2, 2), "image/gif"),
    ]
    assert web.asked == [
        (PUBLIC, "a.example", "a.example"),
        ("8.8.8.8", "b.example:81", "b.example"),
    ]


@pytest.mark.parametrize("address", NOT_PUBLIC[:-5])
def test_a_name_of_a_private_address_is_not_asked(address: str) -> None:
    """Not even where a public address stands beside it; the error does not say what was found."""
    for addresses in ([address], [PUBLIC, address]):
        web = Web({}, {"in.example": addresses})
        error = refused(web, "http://in.example/x")
        assert (error.code, web.asked) == ("image_address_refused", [])
        assert address not in error.message


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:10.0.0.1]"])
def test_a_written_address_is_checked_too(host: str) -> None:
    """The system's resolver gives it back as it is."""
    web = Web({})
    web.resolve = images.resolve  # type: ignore[method-assign]
    assert refused(web, f"http://{host}:8000/x").code == "image_address_refused"
    assert web.asked == []


@pytest.mark.parametrize("to", ["http://in.example/x", "//in.example/x", "http://10.0.0.1/"])
def test_a_redirect_is_checked_like_the_first(to: str) -> None:
    """A public page that points inside."""
    web = Web(
        {"http://a.example/x": moved(to)}, {"in.example": ["10.0.0.1"], "10.0.0.1": ["10.0.0.1"]}
    )
    assert refused(web, "http://a.example/x").code == "image_address_refused"
    assert len(web.asked) == 1


def test_without_the_filter_the_inside_would_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a filter that lets everything through."""
    monkeypatch.setattr(images, "is_public", lambda address: True)
    web = Web(
        {"http://a.example/x": moved("http://in.example/x"), "http://in.example/x": png(1, 1)},
        {"in.example": ["10.0.0.1"]},
    )
    assert taken(web, "http://a.example/x") == [data_url(png(1, 1))]
    assert ("10.0.0.1", "in.example", "in.example") in web.asked


def test_redirects_are_followed_and_counted() -> None:
    """Relative ones, to another host, and so many at most."""
    web = Web(
        {
            "http://a.example/x": moved("/y", 301),
            "http://a.example/y": moved("http://b.example/z", 307),
            "http://b.example/z": png(1, 1),
            "http://a.example/loop": moved("/loop"),
        }
    )
    assert taken(web, "http://a.example/x") == [data_url(png(1, 1))]
    assert "redirects" in refused(web, "http://a.example/loop").message
    assert len(web.asked) == 3 + MOST_REDIRECTS + 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://a.example/x", "http, https or data"),
        ("file:///etc/passwd", "http, https or data"),
        ("/x", "http, https or data"),
        ("http://a\x01.example/x", "a URL"),
        ("http://nowhere.example/x", "has an address"),
        ("http://a.example/404", "404"),
        ("http://a.example/svg", "PNG, JPEG, GIF or WebP"),
        ("http://a.example/packed", "content encoding"),
        ("http://a.example/to-file", "http, https or data"),
        ("http://a.example/broken", "to be fetched"),
        ("data:image/png;base64,!!", "base64"),
        ("data:image/png", "comma"),
        (data_url(b"<svg/>"), "PNG, JPEG, GIF or WebP"),
    ],
)
def test_what_is_no_image_is_refused(url: str, words: str) -> None:
    """With the field, and without the URL, which may hold a secret."""
    web = Web(
        {
            "http://a.example/404": httpx.Response(404),
            "http://a.example/svg": b"<svg/>",
            "http://a.example/to-file": moved("file:///etc/passwd"),
            "http://a.example/packed": httpx.Response(
                200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"x")
            ),
        }
    )

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/broken":
            raise httpx.ConnectError(f"cannot connect to {request.url}")
        return Web.answer(web, request)

    web.answer = answer  # type: ignore[method-assign]
    error = refused(web, url.replace("http://a.", "http://user:secret@a."))
    assert words in error.message
    assert error.param == "messages[0].content[0].image_url.url"
    assert "secret" not in error.message
    assert "passwd" not in error.message


def test_bytes_are_counted_declared_or_not() -> None:
    """While they are read, so that an endless image ends."""

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                sent.append(1)
                yield b"x" * 500

    sent: list[int] = []
    web = Web(
        {
            "http://a.example/just": png(1, 1, LIMITS.size - 24),
            "http://a.example/over": png(1, 1, LIMITS.size - 23),
            "http://a.example/endless": httpx.Response(200, stream=Endless()),
        }
    )
    assert taken(web, "http://a.example/just")
    for name in ("over", "endless"):
        assert refused(web, f"http://a.example/{name}").code == "image_too_large"
    assert len(sent) == 5
    assert refused(Web({}), data_url(png(1, 1, 2000))).code == "image_too_large"


@pytest.mark.parametrize(("width", "fits"), [(100, True), (101, False)])
def test_pixels_are_counted_without_decoding(width: int, fits: bool) -> None:
    """A small file can hold a wall of them."""
    if fits:
        assert taken(Web({}), data_url(png(width, 100)))
    else:
        error = refused(Web({}), data_url(png(width, 100)))
        assert (error.code, "101 x 100" in error.message) == ("image_too_large", True)


def test_the_number_of_images_is_bounded_before_any_is_fetched() -> None:
    """The field is that of the first one too many."""
    web = Web({"http://a.example/x": png(1, 1)})
    assert len(taken(web, *["http://a.example/x"] * 3)) == 3
    error = refused(web, *["http://a.example/x"] * 4)
    assert (error.code, error.param) == ("too_many_images", "messages[0].content[3].image_url.url")
    assert len(web.asked) == 3


def test_time_is_bounded_for_all_together() -> None:
    """A host that answers slowly holds no request for ever."""
    web = Web({})

    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return [PUBLIC]

    web.resolve = never  # type: ignore[method-assign]
    error = refused(web, "http://a.example/x", limits=ImageLimits(3, 2000, 10_000, 0.05))
    assert (error.code, error.param) == ("image_timeout", "messages[0].content[0].image_url.url")


URL = "http://a.example/x"
INLINE = data_url(png(1, 1))
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1, 1)).decode()}


@pytest.mark.parametrize(
    ("protocol", "before", "after"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URL}]}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": INLINE}]}
                ]
            },
        ),
        (
            "responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
                    {
                        "type": "function_call_output",
                        "output": [{"type": "input_image", "image_url": URL}],
                    },
                ]
            },
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": INLINE}]},
                    {
                        "type": "function_call_output",
                        "output": [{"type": "input_image", "image_url": INLINE}],
                    },
                ]
            },
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": URL}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "content": [{"type": "image", "source": SOURCE}],
                            }
                        ],
                    },
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": SOURCE}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "content": [{"type": "image", "source": SOURCE}],
                            }
                        ],
                    },
                ]
            },
        ),
    ],
)
def test_every_place_of_a_protocol_is_found(protocol: Any, before: Any, after: Any) -> None:
    """Results of tools included; the media type is what the bytes say."""
    web = Web({URL: png(1, 1)})
    assert orjson.loads(run(web.images().inline(protocol, orjson.dumps(before)))) == after


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [{"content": [{"type": "image_url"}]}]}',
        b"{}",
    ],
)
def test_a_body_without_images_is_left_as_it_is(body: bytes) -> None:
    """What is wrong with it the parsers tell."""
    assert run(Web({}).images().inline("chat", body)) == body


def seen(info: ModelInfo, body: Any, path: str = CHAT, **settings: Any) -> tuple[int, Any, Any]:
    async def main() -> tuple[int, Any, Any]:
        backend = FunctionBackend(info, ScriptedBackend([text_line("ok")], info).generate)
        played = ScriptedBackend([text_line("ok")], info)
        await played.start()
        backend._generate = played.generate
        async with running(backend, **settings) as app:
            status, reply = await call(app, path, body)
        return status, reply, backend.requests

    return run(main())


@pytest.fixture
def sees(info: ModelInfo) -> ModelInfo:
    return make_info(Path(info.tokenizer_path), has_vision=True)


def shown(**fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(png(3, 3))}}
    return chat_body(messages=[{"role": "user", "content": [part]}], **fields)


def test_a_model_that_sees_is_shown_the_image(sees: ModelInfo) -> None:
    """The prompt holds its placeholder, and the backend gets its bytes."""
    status, reply, (request,) = seen(sees, shown())

    assert (status, reply["choices"][0]["message"]["content"]) == (200, "ok")
    assert request.images == (data_url(png(3, 3)),)
    placeholder = 9  # the last of the special tokens of the test's tokenizer
    assert request.prompt_ids.count(placeholder) == 1


def test_limits_are_settings(sees: ModelInfo) -> None:
    """And hold in every protocol that takes images, counting included."""
    status, reply, _ = seen(sees, shown(), max_image_pixels=8)
    assert (status, reply["error"]["code"]) == (400, "image_too_large")
    block = {"type": "image", "source": SOURCE}
    body = {"model": "test-model", "messages": [{"role": "user", "content": [block, block]}]}
    path = "/v1/messages/count_tokens"
    assert seen(sees, body, path)[0] == 200
    status, reply, _ = seen(sees, body, path, max_images=1)
    assert status == 400
    assert "at most 1 images" in reply["error"]["message"]


def test_a_private_address_is_refused_by_the_server(sees: ModelInfo) -> None:
    """With the system's own resolver and no fake between."""
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    body = chat_body(messages=[{"role": "user", "content": [part]}])
    status, reply, requests = seen(sees, body)
    assert (status, reply["error"]["code"], requests) == (400, "image_address_refused", [])


def test_a_model_that_does_not_see_refuses_images_unfetched(info: ModelInfo) -> None:
    """Nothing is looked at on its behalf."""
    for body in (
        shown(),
        chat_body(messages=orjson.loads(chat("http://127.0.0.1:1/x"))["messages"]),
    ):
        status, reply, requests = seen(info, body)
        assert (status, reply["error"]["code"], requests) == (400, "image_not_supported", [])


def test_backends_without_vision_take_none(info: ModelInfo) -> None:
    """The embedded engine has none, and a script says what it stands for."""

    async def main() -> None:
        embedded, played = EmbeddedBackend(), ScriptedBackend([text_line("a")], info)
        embedded._thread = object()  # type: ignore[assignment]
        await played.start()
        for backend in (embedded, played):
            request = GenerateRequest("a", (5,), SamplingParams(1), images=("data:",))
            with pytest.raises(EngineError, match="images: expected none"):
                async for _ in backend.generate(request):  # type: ignore[attr-defined]
                    pass

    run(main())


def test_a_tokenizer_without_a_place_for_images_cannot_serve_a_model_that_sees(
    info: ModelInfo, tmp_path: Path
) -> None:
    """At the start, with the token's name."""
    spec = orjson.loads(Path(info.tokenizer_path).read_bytes())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<｜image｜>"]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(orjson.dumps(spec))
    blind = make_info(path, has_vision=True)
    with pytest.raises(BootError, match="<｜image｜>"):
        seen(blind, chat_body())
