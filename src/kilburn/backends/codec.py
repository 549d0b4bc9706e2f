"""The stored form of a text: plain, one zstd frame if that is smaller, or pieces of other texts.

Stored bytes are not trusted: the recorded size bounds their length, and every read checks the SHA-256.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, MutableMapping, Sequence

import msgspec

from kilburn.errors import StoreCorrupt, StoreError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


PLAIN = 0
ZSTD = 1
SPLICED = 2
"""An excerpt: a zstd frame of its pieces, which are literal words and spans of other texts."""

COLD = 3
"""The text is an object in the tenant's cold place; the row contains the object's name."""

Piece = str | tuple[int, int, int]
"""Literal words, or the row of another text and a half-open range of its characters."""

MAX_PIECES_BYTES = 64 << 20
"""Bound on the unpacked pieces of one text: a damaged row must not fill the memory."""

MIN_PACKED_BYTES = 200
"""In shorter texts the header of a frame takes more than the compression saves."""

MAX_SHARED_FRAME = 65_536
"""Texts up to this many bytes share one compressor, because making one takes longer than such a frame. Larger ones do
not: a compressor that has compressed fifty megabytes keeps their memory."""

_compressor = zstd.ZstdCompressor(level=3)

_pieces = msgspec.msgpack.Decoder(tuple[Piece, ...])


def check_storable(*texts: str | None) -> None:
    """Check that texts, names and values can be stored.

    Raises:
        StoreError: one has a lone surrogate.
    """
    try:
        "".join(filter(None, texts)).encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"a text has a lone surrogate at character {error.start}", advice="replace it before storing") from error


def encode_text(text: str, digest: str) -> bytes:
    """Return the text in UTF-8, after checking its digest.

    Raises:
        StoreError: it has another digest, or a lone surrogate.
    """
    check_storable(text)
    data = text.encode()
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise StoreError(f"a text with digest {actual} was given under the digest {digest}", advice="use page.digest_of")
    return data


def digest_bytes(digest: str) -> bytes:
    """Return the 32 bytes of a digest.

    Raises:
        StoreError: it is not a SHA-256 in hex.
    """
    try:
        key = bytes.fromhex(digest)
    except (ValueError, TypeError):
        key = b""
    if len(key) != 32:
        raise StoreError(f"{digest[:80]!r} is no digest", advice="use page.digest_of")
    return key


def pack(data: bytes) -> tuple[int, bytes]:
    """Return codec and bytes to store."""
    if len(data) >= MIN_PACKED_BYTES:
        frame = (
            _compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
            if len(data) <= MAX_SHARED_FRAME
            else zstd.compress(data, 3)
        )
        if len(frame) < len(data):
            return ZSTD, frame
    return PLAIN, data


def pack_pieces(pieces: Sequence[Piece]) -> tuple[int, bytes]:
    """Return codec and bytes to store of a text in pieces."""
    return SPLICED, _compressor.compress(msgspec.msgpack.encode(pieces), zstd.ZstdCompressor.FLUSH_FRAME)


def split_pieces(data: object, digest: bytes) -> tuple[Piece, ...]:
    """Return the pieces of a stored text.

    Raises:
        StoreCorrupt: they cannot be decoded.
    """
    if not isinstance(data, bytes):
        raise _corrupt(digest, "its row contradicts itself")
    try:
        return _pieces.decode(zstd.ZstdDecompressor().decompress(data, max_length=MAX_PIECES_BYTES))
    except (zstd.ZstdError, msgspec.MsgspecError, UnicodeError) as error:
        raise _corrupt(digest, "its pieces cannot be read") from error


def spliced(pieces: Sequence[Piece], text_of: Callable[[int], str]) -> str:
    """Return the text that pieces compose.

    Args:
        text_of: returns the text of a row.
    """
    return "".join([piece if isinstance(piece, str) else text_of(piece[0])[piece[1] : piece[2]] for piece in pieces])


def unpack(codec: int, packed: bytes, size: int, digest: bytes, text_of: Callable[[int], str] | None = None) -> str:
    """Return the verified text of a stored content.

    Args:
        text_of: returns the text of another row, for a text in pieces.

    Raises:
        StoreCorrupt: it does not match this digest.
    """
    data = inflate(codec, packed, size, digest, text_of)
    if hashlib.sha256(data).digest() != digest:
        raise _corrupt(digest, "its SHA-256 differs")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corrupt(digest, "it is not UTF-8") from error


def parted(object_body: bytes) -> tuple[int, bytes]:
    """Return codec and bytes of an object of a cold place; for an empty object, an unreadable form."""
    return (object_body[0], object_body[1:]) if object_body else (COLD, b"")


def digest_of_stored(codec: int, data: bytes, size: int, text_of: Callable[[int], str] | None = None) -> bytes:
    """Return the actual digest of a stored text, which may differ from its recorded digest.

    Raises:
        StoreCorrupt: it cannot be decoded.
    """
    return hashlib.sha256(inflate(codec, data, size, b"", text_of)).digest()


def inflate(codec: int, packed: bytes, size: int, digest: bytes, text_of: Callable[[int], str] | None = None) -> bytes:
    """Return the decompressed bytes of a stored text, with its length checked but not its digest.

    Raises:
        StoreCorrupt: it cannot be decoded, or has another length.
    """
    if not isinstance(packed, bytes) or not isinstance(size, int) or not 0 <= size < 1 << 60:
        raise _corrupt(digest, "its row contradicts itself")
    data = packed
    if codec == ZSTD:
        unpacker = zstd.ZstdDecompressor()
        try:
            # One byte more than recorded detects an excessive length without inflating a bomb.
            data = unpacker.decompress(packed, max_length=size + 1)
        except zstd.ZstdError as error:
            raise _corrupt(digest, "its compressed form is broken") from error
    elif codec == SPLICED and text_of is not None:
        data = spliced(split_pieces(packed, digest), text_of).encode("utf-8", "replace")
    elif codec != PLAIN:
        raise _corrupt(digest, f"its codec {codec} is unknown")
    if len(data) != size:
        raise _corrupt(digest, f"its length is not the recorded {size} bytes")
    return data


def sound_passages(
    limit: int,
    waiting: Callable[[int], Sequence[tuple[int, int, int, int]]],
    text_of: Callable[[int, int], str],
    damaged: MutableMapping[int, StoreCorrupt],
) -> list[tuple[int, str]]:
    """Return the first `limit` passages with intact texts: (entry, text).

    Args:
        waiting: returns at most that many first passages: entry, page, start, stop.
        text_of: returns the text of a page of a segment, or raises StoreCorrupt.
        damaged: receives the errors of the passages that were passed over, by entry.
    """
    texts: dict[tuple[int, int], str | StoreCorrupt] = {}
    count = limit
    while True:
        passages, wrong = list[tuple[int, str]](), dict[int, StoreCorrupt]()
        spans = waiting(count)
        for entry, page, start, stop in spans:
            key = entry >> 32, page
            if key not in texts:
                try:
                    texts[key] = text_of(*key)
                except StoreCorrupt as error:
                    texts[key] = error
            text = texts[key]
            if isinstance(text, StoreCorrupt):
                wrong[entry] = text
            else:
                passages.append((entry, text[start:stop]))
        if len(spans) < count or len(passages) >= limit:
            damaged.update(wrong)
            return passages[:limit]
        count = limit + 2 * len(wrong)


def _corrupt(digest: object, why: str) -> StoreCorrupt:
    name = digest.hex() if isinstance(digest, bytes) else repr(digest)
    return StoreCorrupt(f"content {name}: {why}", advice="run `kilburn fsck`; restore the file from a copy if it says so")
