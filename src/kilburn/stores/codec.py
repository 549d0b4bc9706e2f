"""How the bytes of a text are stored: as they are, or as one zstd frame if that is smaller.

What is read is not trusted: its length is bounded by the recorded size, and its SHA-256 is checked on every read.
"""

from __future__ import annotations

import hashlib
import sys

from kilburn.errors import StoreCorrupt, StoreError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["PLAIN", "ZSTD", "digest_of_stored", "encode_text", "key_of", "pack", "unpack"]

PLAIN = 0
ZSTD = 1

WORTHWHILE = 200
"""Bytes; in a shorter text the header of a frame takes more than the compression saves."""

KEPT = 65_536
"""Texts up to this many bytes share one compressor, because making one takes longer than such a frame. Larger ones do
not: a compressor that has compressed fifty megabytes keeps their memory."""

_compressor = zstd.ZstdCompressor(level=3)


def encode_text(text: str, digest: str) -> bytes:
    """The text in UTF-8, after checking that it has this digest.

    Raises:
        StoreError: another digest, or a lone surrogate, which UTF-8 cannot hold.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(f"a text has a lone surrogate at character {error.start}", advice="replace it before storing") from error
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise StoreError(f"a text with digest {found} was given under the digest {digest}", advice="use page.digest_of")
    return data


def key_of(digest: str) -> bytes:
    """The 32 bytes of a digest.

    Raises:
        StoreError: not the hex form of a SHA-256.
    """
    try:
        key = bytes.fromhex(digest)
    except (ValueError, TypeError):
        key = b""
    if len(key) != 32:
        raise StoreError(f"{digest[:80]!r} is no digest", advice="use page.digest_of")
    return key


def pack(data: bytes) -> tuple[int, bytes]:
    """Codec and bytes to store."""
    if len(data) >= WORTHWHILE:
        frame = _compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME) if len(data) <= KEPT else zstd.compress(data, 3)
        if len(frame) < len(data):
            return ZSTD, frame
    return PLAIN, data


def unpack(codec: int, stored: bytes, size: int, digest: bytes) -> str:
    """The text of a stored content, verified.

    Raises:
        StoreCorrupt: not what was stored under this digest.
    """
    data = _inflate(codec, stored, size, digest)
    if hashlib.sha256(data).digest() != digest:
        raise _corrupt(digest, "its SHA-256 is another")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corrupt(digest, "it is not UTF-8") from error


def digest_of_stored(codec: int, stored: bytes, size: int) -> bytes:
    """The real digest of a stored text, which may differ from the digest that it is stored under.

    Raises:
        StoreCorrupt: it holds nothing that can be read.
    """
    return hashlib.sha256(_inflate(codec, stored, size, b"")).digest()


def _inflate(codec: int, stored: bytes, size: int, digest: bytes) -> bytes:
    if not isinstance(stored, bytes) or not isinstance(size, int) or not 0 <= size < 1 << 60:
        raise _corrupt(digest, "its row makes no sense")
    data = stored
    if codec == ZSTD:
        unpacker = zstd.ZstdDecompressor()
        try:
            # One byte more than recorded tells "too long" without inflating a bomb.
            data = unpacker.decompress(stored, max_length=size + 1)
        except zstd.ZstdError as error:
            raise _corrupt(digest, "its compressed form is broken") from error
    elif codec != PLAIN:
        raise _corrupt(digest, f"its codec {codec} is unknown")
    if len(data) != size:
        raise _corrupt(digest, f"its length is not the recorded {size} bytes")
    return data


def _corrupt(digest: object, why: str) -> StoreCorrupt:
    name = digest.hex() if isinstance(digest, bytes) else repr(digest)
    return StoreCorrupt(f"content {name}: {why}", advice="run `kilburn fsck`; restore the file from a copy if it says so")
