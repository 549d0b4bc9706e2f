"""What an image costs, and how large it is.

Sizes are read from the first bytes of PNG, JPEG, GIF and WebP inside a `data:` URL. Nothing is fetched, and no pixel
is decoded.
"""

from __future__ import annotations

import binascii
import math

MAX_HEADER_BYTES = 1 << 20
"""Characters of base64 that are read: a JPEG's size may come after its colour profile."""

DEFAULT = 1600
UNREADABLE = {"openai": 1445, "openai-small": 3779, "gpt-4o-mini": 48_169, "claude": 1600, "claude-large": 4784}
"""The highest cost of an image, by family; used if its size cannot be read."""

_TILES = {"openai": (85, 170), "gpt-4o-mini": (2833, 5667)}
"""Tokens of an image, and of each of its tiles, by family."""

STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def image_tokens(width: int, height: int, family: str = "", *, low: bool = False) -> int:
    """Return the tokens of an image of `width` x `height` pixels, by the providers' published rules.

    "openai": 85 and 170 for each tile of 512 pixels after scaling into 2048 x 2048 and the short side
    to 768; "gpt-4o-mini": the same with 2833 and 5667; "openai-small" (mini and nano models): patches
    of 32 pixels, at most 1536, at the dearest factor of 2.46. "claude": width x height / 750, at most
    1600; "claude-large" (from 4.7 on): at most 4784. Any other family: 1600.

    Args:
        low: whether the request asks for `"detail": "low"`: with OpenAI's tiles, the 85 or 2833 alone.
    """
    if low and family in _TILES:
        return _TILES[family][0]
    if width < 1 or height < 1:
        return UNREADABLE.get(family, DEFAULT)
    if family in _TILES:
        start, per_tile = _TILES[family]
        return start + per_tile * _tiles(width, height)
    if family == "openai-small":
        return math.ceil(min(-(-width // 32) * -(-height // 32), 1536) * 2.46)
    if family in ("claude", "claude-large"):
        return min(-(-width * height // 750), UNREADABLE[family])
    return DEFAULT


def _tiles(width: int, height: int) -> int:
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    return max(1, math.ceil(width * scale / 512)) * max(1, math.ceil(height * scale / 512))


def image_size(data_url: str) -> tuple[int, int] | None:
    """Return width and height in pixels of the image in a base64 `data:` URL, or None if it is no such URL, no PNG, JPEG, GIF or
    WebP, or broken."""
    head, comma, payload = data_url[: MAX_HEADER_BYTES + 256].partition(",")
    if not comma or head[:5].lower() != "data:" or not head.lower().rstrip().endswith(";base64"):
        return None
    try:
        encoded = "".join(payload[:MAX_HEADER_BYTES].split()).rstrip("=")
        data = binascii.a2b_base64(encoded[: len(encoded) // 4 * 4])
    except (binascii.Error, ValueError):
        return None
    return pixel_size(data)


def pixel_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height in pixels of a PNG, JPEG, GIF or WebP, or None if it is another format or broken."""
    size = _png(data) or _gif(data) or _webp(data) or _jpeg(data)
    return size if size is not None and min(size) > 0 else None


def _png(data: bytes) -> tuple[int, int] | None:
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR":
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _gif(data: bytes) -> tuple[int, int] | None:
    if len(data) < 10 or data[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _webp(data: bytes) -> tuple[int, int] | None:
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if data[12:16] == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if data[12:16] == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if data[12:16] == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in STARTS_OF_FRAME:
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return None
