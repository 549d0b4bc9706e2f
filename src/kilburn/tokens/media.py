"""What content that is not text costs in a prompt, and what its handle says.

A block of a provider is JSON. Its readable strings are text; a base64 string, a `data:` URL, a ciphertext and a reference to a
file are media. `RULES` has one pricing rule for each type of media, from the providers' documentation. The type is read from
the first bytes, because clients often name it wrongly. Nothing is fetched, and no pixel or sample is decoded.

A rule is an estimate where a provider publishes a range. A session's counter corrects the window by the usage that the provider
reports (`kilburn.tokens.calibrated`).
"""

from __future__ import annotations

import binascii
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kilburn.budget import Counter
from kilburn.tokens.images import cost_of_image, image_size
from kilburn.tokens.pdf import pdf_text

log = logging.getLogger("kilburn")

FILE_TOKENS = 2_000
"""Tokens of a file that the prompt refers to by an id or a URL, unless the counter has `file_tokens`: a page, or an image."""
PDF_TOKENS = {"claude": 3_000, "claude-large": 6_000}
"""Tokens of one PDF page, by family. Anthropic: 1,500 to 3,000 for the text, and the page's image. Others: `PDF_PAGE`."""
PDF_PAGE = 2_000
AUDIO_TOKENS = {"openai": 10, "openai-small": 10, "gpt-4o-mini": 10}
"""Tokens of one second of sound, by family. OpenAI: one for 100 ms. Others, as Gemini: `AUDIO_SECOND`."""
AUDIO_SECOND = 32
VIDEO_SECOND = 295
"""Tokens of one second of video. Gemini: 263 for one frame a second, and 32 for its sound."""
CIPHER_BYTES = 4
"""Bytes of ciphertext that count as one token: what a provider encrypts is its own text, which it reads back as text."""

MIN_CIPHER_CHARS = 64
"""A shorter string without blanks may be an id or a word; it counts as text."""
AUDIO_BYTES, VIDEO_BYTES = 8_000, 125_000
"""Bytes of one second whose length cannot be read: 64 kbit/s, and 1 Mbit/s."""
PDF_BYTES = 50_000
"""Bytes of one page of a PDF whose pages cannot be counted."""
MIN_PDF_PAGE_BYTES = 16
"""A PDF that claims more pages than its size allows is counted by its size."""

MIN_SECOND_BYTES = 250
"""Sound or video that claims more seconds than its size allows is counted by its size, such as a stream written into a pipe."""
MAX_PDF_DECODED = 2_000_000
"""Bytes that a stream of a PDF may have when it is decoded to count the pages: its table of 250,000 objects."""

BROKEN = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What a library may raise besides its own errors, for a file that is damaged or hostile."""
_FILE = "file id"
CIPHER_SAMPLE = 1_024
"""Characters of a string in which a ciphertext has capital and small letters and digits."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_FILE_KEYS = frozenset({"file_url", "image_url", "video_url", "audio_url", "file_uri", "source_url"})
"""Keys of references that a provider follows. Another URL or id, such as that of a citation or a search result, is text."""
_TEXT_KEYS = frozenset({"text", "thinking"})
"""Keys whose values are text, whatever they look like."""
_HOLDERS = frozenset({"file", "input_file", "input_image", "image", "document", "container_upload"})
"""Types of blocks, and of sources, that refer to a file by its id."""
_NAME_KEYS = ("filename", "file_name", "title", "name")
_IGNORED = frozenset({"type", "media_type", "mime_type", "detail", "cache_control", "format", "status"})
"""Keys whose values are instructions to the provider."""
_DOCUMENT_TYPES = frozenset({"document", "file", "input_file", "container_upload"})


class Media(msgspec.Struct, frozen=True):
    """Media in a block.

    Args:
        type: `pdf`, `image`, `audio`, `video`, `file`, `encrypted` or `data`.
        tokens: what it costs in a prompt, in tokens.
        extent: its size in words ("3 pages", "12 s", "640 x 480"), or "".
    """

    type: str
    tokens: int
    extent: str = ""


def strings_tokens(counter: Counter, strings: Iterable[tuple[str, str]]) -> int:
    """Return what strings cost in a prompt, in tokens: text by its words, media by their rules.

    Args:
        strings: each with the key under which it stands in a provider's JSON.
    """
    words: list[str] = []
    tokens = 0
    for key, text in strings:
        media = read_media(counter, key, text)
        if media is None:
            words.append(text)
        else:
            tokens += media.tokens
    return counter.count(" ".join(words)) + tokens


def block_tokens(counter: Counter, block: dict[str, Any]) -> int:
    """Return what a provider's block costs in a prompt, in tokens, without its message's envelope: its JSON without media, and
    its media."""
    media = [item for key, text in _strings(block) if (item := read_media(counter, key, text)) is not None]
    text = msgspec.json.encode(_without_media(block)).decode() if media else msgspec.json.encode(block).decode()
    return counter.count(text) + sum(item.tokens for item in media)


def _without_media(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_media(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_media(inner, key) for inner in value]
    return "" if isinstance(value, str) and _payload(key, value) is not None else value


def describe(counter: Counter, block: dict[str, Any], *, named: bool = True) -> str:
    """Return one line on what a block is, such as `report.pdf, 3 pages`: its name or type, and the extent of its media.

    Args:
        named: whether to use the name that it gives itself.
    """
    media = [item for key, text in _strings(block) if (item := read_media(counter, key, text)) is not None]
    names = [text for key, text in _strings(block) if key in _NAME_KEYS and text.strip()] if named else []
    kind = str(block.get("type") or "block")
    main = next((item for item in media if item.type not in ("encrypted", "data")), media[0] if media else None)
    if names and (main is not None or kind in _DOCUMENT_TYPES):
        title = " ".join(names[0].split())
    else:
        title = main.type if main is not None and main.type not in ("encrypted", "data", "file") else kind.replace("_", " ")
    # Square brackets mark handles.
    title = title.replace("[", "(").replace("]", ")")
    return f"{title}, {main.extent}" if main is not None and main.extent else title


def readable_text(block: dict[str, Any]) -> str:
    """Return the text in a block, without its media: what a model or a search can read of it in a text."""
    return "\n".join(text for key, text in _strings(block) if key not in _IGNORED and _payload(key, text) is None)


def document_text(block: dict[str, Any]) -> str:
    """Return the text of the PDFs in a block. Each is read by a process of its own, so this is for what a model asks to read."""
    payloads = [payload for key, text in _strings(block) if isinstance(payload := _payload(key, text), bytes)]
    return "".join(pdf_text(payload) for payload in payloads if _is_pdf(payload))


def describe_image(url: str) -> str:
    """Return one line on what an image is, such as `image, 640 x 480`."""
    size = image_size(url)
    return f"image, {size[0]} x {size[1]}" if size else "image"


def read_media(counter: Counter, key: str, text: str) -> Media | None:
    """Return what a string in a block is, or None if it is text.

    Args:
        key: the key under which it stands in the block.
    """
    payload = _payload(key, text)
    if payload is None:
        return None
    if isinstance(payload, str):
        return _file(counter, "", b"")
    family = str(getattr(counter, "family", ""))
    for matches, rule in RULES:
        if matches(payload):
            return rule(counter, family, payload)
    return Media("encrypted" if "encrypted" in key or "signature" in key else "data", math.ceil(len(payload) / CIPHER_BYTES))


def _payload(key: str, text: str) -> bytes | str | None:
    """Return the bytes that a string stands for, the reference itself if it refers to a file, or None if it is text."""
    if key in _TEXT_KEYS:
        return None
    if text[:5].lower() == "data:":
        head, comma, encoded = text.partition(",")
        return _decode(encoded) if comma and head.lower().rstrip().endswith(";base64") else None
    if key in _FILE_KEYS:
        return text if text[:4].lower() in ("http", "gs:/", "s3:/", "file") else None
    if key == _FILE:
        return text
    if len(text) < MIN_CIPHER_CHARS or not _BASE64.fullmatch(text):
        return None
    # A path, an identifier and a run of letters are in the same alphabet.
    is_mixed = all(any(map(is_in_class, text[:CIPHER_SAMPLE])) for is_in_class in (str.isupper, str.islower, str.isdigit))
    data = _decode(text)
    return data if is_mixed or (data is not None and any(matches(data) for matches, _ in RULES)) else None


def _decode(encoded: str) -> bytes | None:
    # Ciphertexts also come in the URL-safe alphabet, and without padding.
    plain = "".join(encoded.split()).rstrip("=").replace("-", "+").replace("_", "/")
    plain = plain[:-1] if len(plain) % 4 == 1 else plain
    try:
        return binascii.a2b_base64(plain + "=" * (-len(plain) % 4))
    except (binascii.Error, ValueError):
        return None


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a JSON value with the key under which it, or the list that it is in, stands. A URL inside an object
    has that object's key too (`source_url`), and the id of a file that a provider reads has `_FILE`."""
    stack = [(key, value)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            holds = key == "file" or str(value.get("type")) in _HOLDERS
            for name, inner in reversed(value.items()):
                if name == "url":
                    stack.append((key if key.endswith("_url") else f"{key}_url", inner))
                else:
                    stack.append((_FILE if name == "file_id" and holds else name, inner))
        elif isinstance(value, list):
            stack.extend((key, item) for item in reversed(value))
        elif isinstance(value, str):
            yield key, value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, str(value)


def _is_office(data: bytes) -> bool:
    return data.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0"))


def _is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:1024]


def _is_image(data: bytes) -> bool:
    if data.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM")) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return True
    return data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"mif1", b"avif")


def _is_audio(data: bytes) -> bool:
    if data.startswith((b"ID3", b"OggS", b"fLaC", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xf1", b"FORM")):
        return True
    return (data[:4] == b"RIFF" and data[8:12] == b"WAVE") or data[4:12] in (b"ftypM4A ", b"ftypM4B ")


def _is_video(data: bytes) -> bool:
    return data[4:8] == b"ftyp" or data.startswith(b"\x1a\x45\xdf\xa3") or (data[:4] == b"RIFF" and data[8:11] == b"AVI")


def _file(counter: Counter, family: str, data: bytes) -> Media:
    return Media("file", int(getattr(counter, "file_tokens", FILE_TOKENS)))


def _pdf(counter: Counter, family: str, data: bytes) -> Media:
    pages = pdf_pages(data)
    return Media("pdf", pages * PDF_TOKENS.get(family, PDF_PAGE), f"{pages:,} {'page' if pages == 1 else 'pages'}")


def _image(counter: Counter, family: str, data: bytes) -> Media:
    url = "data:image/any;base64," + binascii.b2a_base64(data, newline=False).decode("ascii")
    size = image_size(url)
    return Media("image", cost_of_image(counter, url), f"{size[0]} x {size[1]}" if size else "")


def _audio(counter: Counter, family: str, data: bytes) -> Media:
    seconds = duration(data, AUDIO_BYTES)
    return Media("audio", math.ceil(seconds * AUDIO_TOKENS.get(family, AUDIO_SECOND)), f"{math.ceil(seconds):,} s")


def _video(counter: Counter, family: str, data: bytes) -> Media:
    seconds = duration(data, VIDEO_BYTES)
    return Media("video", math.ceil(seconds * VIDEO_SECOND), f"{math.ceil(seconds):,} s")


RULES: tuple[tuple[Callable[[bytes], bool], Callable[[Counter, str, bytes], Media]], ...] = (
    (_is_pdf, _pdf),
    (_is_image, _image),
    (_is_audio, _audio),
    (_is_video, _video),
    (_is_office, _file),
)
"""Each type of media: how its bytes begin, and what it costs. Bytes of no type are ciphertext, by their length."""


def pdf_pages(data: bytes) -> int:
    """Return the number of pages of a PDF, at least 1; one that cannot be read is estimated by its size."""
    import pypdf

    # The default limits allow a minute of decoding.
    limits: dict[str, Any] = dict.fromkeys(
        (
            "zlib_maximum_output_length",
            "lzw_maximum_output_length",
            "run_length_maximum_output_length",
            "stream_decoding_work_maximum_length",
        ),
        MAX_PDF_DECODED,
    )
    estimate = max(1, len(data) // PDF_BYTES)
    try:
        with pypdf.apply_configuration(**limits):
            root: Any = pypdf.PdfReader(io.BytesIO(data), strict=False).trailer["/Root"]
            pages = int(root["/Pages"]["/Count"])
    except (pypdf.errors.PyPdfError, pypdf.errors.DependencyError, *BROKEN) as error:
        log.info("a PDF of %d bytes is counted as %d pages, because it cannot be read: %s", len(data), estimate, error)
        return estimate
    return pages if 1 <= pages <= len(data) // MIN_PDF_PAGE_BYTES else estimate


def duration(data: bytes, bytes_per_second: int) -> float:
    """Return the length of sound or video in seconds; one that cannot be read is estimated by its size."""
    import tinytag

    estimate = len(data) / bytes_per_second
    try:
        tag = tinytag.TinyTag.get(file_obj=io.BytesIO(data), tags=False)
    except (tinytag.TinyTagException, *BROKEN) as error:
        log.info("media of %d bytes cannot be read and are counted by their size: %s", len(data), error)
        return estimate
    if tag.duration is not None and 0 < tag.duration <= len(data) / MIN_SECOND_BYTES:
        return tag.duration
    return len(data) / (125 * tag.bitrate) if tag.bitrate else estimate
