"""How the bytes of a text are stored: as they are, as one zstd frame if that is smaller, or as pieces of other texts.

What is read is not trusted: its length is bounded by the recorded size, and its SHA-256 is checked on every read.
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
"""The text of an excerpt: a zstd frame of its pieces, which are words of its own and spans of other texts."""

COLD = 3
"""The text is in an object of the tenant's cold place; the row has the object's name."""

Piece = str | tuple[int, int, int]
"""Words, or the row of another text and a half-open range of its characters."""

MOST_PIECES = 64 << 20
"""Bytes of the pieces of one text, unpacked: a damaged row must not fill the memory."""

WORTHWHILE = 200
"""Bytes; in a shorter text the header of a frame takes more than the compression saves."""

MAX_SHARED_FRAME = 65_536
"""Texts up to this many bytes share one compressor, because making one takes longer than such a frame. Larger ones do
not: a compressor that has compressed fifty megabytes keeps their memory."""

_compressor = zstd.ZstdCompressor(level=3)

_pieces = msgspec.msgpack.Decoder(tuple[Piece, ...])


def encode_text(text: str, digest: str) -> bytes:
    """The text in UTF-8, after checking that it has this digest.

    Raises:
        StoreError: another digest, or a lone surrogate, which UTF-8 cannot hold.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(f"a text has a lone surrogate at character {error.start}", advice="replace it before storing") from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise StoreError(f"a text with digest {actual} was given under the digest {digest}", advice="use page.digest_of")
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
        frame = (
            _compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
            if len(data) <= MAX_SHARED_FRAME
            else zstd.compress(data, 3)
        )
        if len(frame) < len(data):
            return ZSTD, frame
    return PLAIN, data


def pack_pieces(pieces: Sequence[Piece]) -> tuple[int, bytes]:
    """Codec and bytes to store of a text that is made from pieces."""
    return SPLICED, _compressor.compress(msgspec.msgpack.encode(pieces), zstd.ZstdCompressor.FLUSH_FRAME)


def pieces_of(data: object, digest: bytes) -> tuple[Piece, ...]:
    """The pieces of a stored text.

    Raises:
        StoreCorrupt: there are none that can be read.
    """
    if not isinstance(data, bytes):
        raise _corrupt(digest, "its row makes no sense")
    try:
        return _pieces.decode(zstd.ZstdDecompressor().decompress(data, max_length=MOST_PIECES))
    except (zstd.ZstdError, msgspec.MsgspecError, UnicodeError) as error:
        raise _corrupt(digest, "its pieces cannot be read") from error


def spliced(pieces: Sequence[Piece], text_of: Callable[[int], str]) -> str:
    """The text that pieces make.

    Args:
        text_of: the text of a row.
    """
    return "".join([piece if isinstance(piece, str) else text_of(piece[0])[piece[1] : piece[2]] for piece in pieces])


def unpack(codec: int, stored: bytes, size: int, digest: bytes, text_of: Callable[[int], str] | None = None) -> str:
    """The text of a stored content, verified.

    Args:
        text_of: the text of another row, for a text that is made from pieces of others.

    Raises:
        StoreCorrupt: not what was stored under this digest.
    """
    data = inflate(codec, stored, size, digest, text_of)
    if hashlib.sha256(data).digest() != digest:
        raise _corrupt(digest, "its SHA-256 is another")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corrupt(digest, "it is not UTF-8") from error


def parted(object_body: bytes) -> tuple[int, bytes]:
    """Codec and bytes that an object of a cold place holds; of an empty one, such that nobody can read."""
    return (object_body[0], object_body[1:]) if object_body else (COLD, b"")


def digest_of_stored(codec: int, data: bytes, size: int, text_of: Callable[[int], str] | None = None) -> bytes:
    """The real digest of a stored text, which may differ from the digest that it is stored under.

    Raises:
        StoreCorrupt: it holds nothing that can be read.
    """
    return hashlib.sha256(inflate(codec, data, size, b"", text_of)).digest()


def inflate(codec: int, stored: bytes, size: int, digest: bytes, text_of: Callable[[int], str] | None = None) -> bytes:
    """What is stored under a digest, in the recorded length; its digest is not checked.

    Raises:
        StoreCorrupt: it cannot be read, or has another length.
    """
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
    elif codec == SPLICED and text_of is not None:
        data = spliced(pieces_of(stored, digest), text_of).encode("utf-8", "replace")
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
    """The first so many passages whose text is what was written: (entry, text).

    Args:
        waiting: the first passages, so many at most: entry, page, start, stop.
        text_of: the text of a page of a segment; it raises StoreCorrupt.
        damaged: gets those that were passed over, by entry.
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
