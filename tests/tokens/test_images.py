"""Sizes are read from real headers, and what cannot be read costs the most it may."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.tokens.calibrated import Calibrated
from kilburn.tokens.choice import counter_for
from kilburn.tokens.images import image_size, image_tokens
from kilburn.tokens.media import image_cost

SIDE = st.integers(1, 16_383)
FAMILIES = ["", "openai", "openai-small", "gpt-4o-mini", "claude", "claude-large", "other"]


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 30_002) + bytes(30_000)
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + exif + b"\xff\xff\xdb" + struct.pack(">H", 4) + b"\0\0" + frame + b"\xff\xd9"


def webp_lossy(width: int, height: int) -> bytes:
    body = b"VP8 " + struct.pack("<I", 10) + b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def webp_lossless(width: int, height: int) -> bytes:
    body = b"VP8L" + struct.pack("<I", 10) + b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(5)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def webp_extended(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides


@given(SIDE, SIDE, st.sampled_from([png, gif, jpeg, webp_lossy, webp_lossless, webp_extended]))
def test_sizes_are_read(width: int, height: int, make: object) -> None:
    assert callable(make)
    assert image_size(url(make(width, height))) == (width, height)


@given(st.binary(max_size=80), st.sampled_from([png, gif, jpeg, webp_lossy, webp_lossless, webp_extended]), st.integers(0, 60))
def test_broken_images_have_no_size_or_a_real_one(noise: bytes, make: object, keep: int) -> None:
    assert callable(make)
    size = image_size(url(make(7, 9)[:keep] + noise))
    assert size is None or min(size) > 0


@given(st.text(max_size=200))
def test_any_text_is_no_image(text: str) -> None:
    assert image_size(text) is None
    assert image_size("data:image/png;base64," + text) is None or len(text) >= 10


@pytest.mark.parametrize(
    "text", ["", "https://example.org/a.png", "data:image/svg+xml,<svg/>", "data:image/png;base64,", "data:;base64,A", "data:"]
)
def test_what_cannot_be_read_costs_the_default(text: str) -> None:
    assert image_size(text) is None
    assert image_cost(counter_for("auto"), text) == 1600
    assert image_cost(counter_for("chars/4"), text) == 1600


@pytest.mark.parametrize(
    ("model", "width", "height", "tokens"),
    [
        ("gpt-4o", 512, 512, 255),
        ("gpt-4o", 1024, 1024, 765),
        ("gpt-4o", 2048, 4096, 1105),
        ("gpt-4o-mini", 512, 512, 8500),
        ("gpt-5-nano", 1024, 1024, 2520),
        ("claude-3-5-sonnet", 200, 200, 54),
        ("claude-3-5-sonnet", 1092, 1092, 1590),
        ("claude-3-5-sonnet", 8000, 8000, 1600),
        ("claude-opus-4-8", 8000, 8000, 4784),
        ("auto", 30, 30, 1600),
    ],
)
def test_images_cost_what_providers_publish(model: str, width: int, height: int, tokens: int) -> None:
    counter = counter_for(model)
    assert image_cost(counter, url(png(width, height))) == tokens
    assert image_cost(Calibrated(counter), url(png(width, height))) == tokens


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(FAMILIES))
def test_no_image_costs_more_than_one_that_cannot_be_read(width: int, height: int, family: str) -> None:
    assert 0 < image_tokens(width, height, family) <= image_tokens(0, 0, family)
