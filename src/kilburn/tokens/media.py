"""What content that is not text costs in a prompt, and what its handle says.

A block of a provider is JSON. Its readable strings are text; a base64 string, a `data:` URL, a ciphertext and a reference to a
file are media. `RULES` has one pricing rule for each type of media, from the providers' documentation. The type is read from
the first bytes, because clients often name it wrongly. Nothing is fetched, and no pixel or sample is decoded.

A rule is an estimate where a provider publishes a range. A session's counter corrects the window by the usage that the provider
reports (`kilburn.tokens.calibrated`).
"""

from __future__ import annotations

import binascii
import hashlib
import io
import itertools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from kilburn.budget import Counter
from kilburn.page import digest_of
from kilburn.remembered import ENTRY, texts
from kilburn.tokens.images import MAX_HEADER_BYTES, image_size, image_tokens, pixel_size
from kilburn.tokens.pdf import pdf_text
from kilburn.wire.plain import unpack

Result = TypeVar("Result")
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
RAW_SOUND = dict.fromkeys(("pcm16", "pcm", "audio/pcm"), 48_000) | dict.fromkeys(
    ("g711_ulaw", "g711_alaw", "audio/pcmu", "audio/pcma"), 8_000
)
"""Bytes of one second of samples without a header, by OpenAI's names of formats: 16 bits at 24 kHz, or 8 bits at 8 kHz, mono.
Gemini's MIME types name the rate (`audio/L16;rate=16000`)."""
_RAW = "raw sound "
_RAW_SOUND = re.compile(rf"{_RAW}(\d+)")
_FORMAT_KEYS = ("format", "media_type", "mime_type", "mimeType")
_RATE = re.compile(r"rate=(\d{4,6})\b")
MAX_IMAGES = 4
"""Images of one block that `recall` shows."""
_IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"))
MAX_PDFS = 4
"""PDFs of one block whose text is read."""
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
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}|(?:[A-Za-z0-9+/]{60,76}\r?\n)+[A-Za-z0-9+/]{0,76}={0,2}\s*")
"""One line, or lines of the usual lengths."""
_LONG_RUN = re.compile(r"[A-Za-z0-9+/_-]{256,}={0,2}")
"""Base64 within a text, such as that of a tool that answers with JSON in a string. Providers count it as text."""
_FILE_KEYS = frozenset({"file_url", "image_url", "video_url", "audio_url", "file_uri", "source_url"})
"""Keys of references that a provider follows. Another URL or id, such as that of a citation or a search result, is text."""
_TEXT_KEYS = frozenset({"text", "thinking"})
"""Keys whose values are text, whatever they look like."""
_HOLDERS = frozenset({"file", "input_file", "input_image", "image", "document", "container_upload"})
"""Types of blocks, and of sources, that refer to a file by its id."""
_NAME_KEYS = ("filename", "file_name", "title", "name")
_IGNORED = frozenset(
    {"type", "media_type", "mime_type", "mimeType", "detail", "cache_control", "format", "status"}
    | {"id", "call_id", "tool_use_id", "container_id"}
)
"""Keys whose values are instructions to the provider, or ids that say nothing."""
_DOCUMENT_TYPES = frozenset({"document", "file", "input_file", "container_upload", "search_result"})


class Media(msgspec.Struct, frozen=True):
    """Media in a block, as far as no model's rule of pricing is needed.

    Args:
        type: `pdf`, `image`, `audio`, `video`, `file`, `encrypted` or `data`.
        amount: pages of a PDF, seconds of sound or video, bytes of what is encrypted or of no known type.
        size: width and height of an image in pixels, if they can be read.
    """

    type: str
    amount: float = 0.0
    size: tuple[int, int] | None = None

    @property
    def extent(self) -> str:
        """Its size in words ("3 pages", "12 s", "640 x 480"), or ""."""
        if self.type == "pdf":
            return f"{int(self.amount):,} {'page' if self.amount == 1 else 'pages'}"
        if self.type in ("audio", "video"):
            return f"{math.ceil(self.amount):,} s"
        return f"{self.size[0]} x {self.size[1]}" if self.size else ""


class _Block(msgspec.Struct, frozen=True):
    """A provider's block as it is priced, named and searched.

    Args:
        text: its JSON without media.
        words: its readable strings, without media and without instructions to the provider.
        name: the name that it gives itself, or "".
    """

    type: str
    text: str
    words: str
    name: str
    media: tuple[Media, ...]


def media_tokens(counter: Counter, media: Media) -> int:
    """Return what media cost in a prompt, in tokens, by the rule of the counter's family of models."""
    family = str(getattr(counter, "family", ""))
    if media.type == "pdf":
        return int(media.amount) * PDF_TOKENS.get(family, PDF_PAGE)
    if media.type == "image":
        return image_tokens(*(media.size or (0, 0)), family)
    if media.type == "audio":
        return math.ceil(media.amount * AUDIO_TOKENS.get(family, AUDIO_SECOND))
    if media.type == "video":
        return math.ceil(media.amount * VIDEO_SECOND)
    if media.type == "file":
        return int(getattr(counter, "file_tokens", FILE_TOKENS))
    return math.ceil(media.amount / CIPHER_BYTES)


def image_cost(counter: Counter, url: str, *, low: bool = False) -> int:
    """Tokens of the image behind `url` for a counter's family of models; `low` is that of `image_tokens`."""
    return image_tokens(*(image_size(url) or (0, 0)), str(getattr(counter, "family", "")), low=low)


def strings_tokens(counter: Counter, strings: Iterable[tuple[str, str]]) -> int:
    """Return what strings cost in a prompt, in tokens: text by its words, media by their rules.

    Args:
        strings: each with the key under which it stands in a provider's JSON.
    """
    words: list[str] = []
    tokens = 0
    for key, text in strings:
        media = read_media(key, text)
        if media is None:
            words.append(text)
        else:
            tokens += media_tokens(counter, media)
    return counter.count(" ".join(words)) + tokens


def block_tokens(counter: Counter, block: str) -> int:
    """Return what a provider's block, given as JSON, costs in a prompt, in tokens, without its message's envelope: its JSON
    without media, and its media."""
    reading = _read_block(block)
    return counter.count(reading.text) + sum(media_tokens(counter, item) for item in reading.media)


def describe(block: str, *, use_name: bool = True) -> str:
    """Return one line on what a block is, such as `report.pdf, 3 pages`: its name or type, and the extent of its media.

    Args:
        block: as JSON.
        use_name: whether to use the name that the block gives itself.
    """
    reading = _read_block(block)
    main = next((item for item in reading.media if item.type not in ("encrypted", "data")), None)
    if use_name and reading.name and (main is not None or reading.type in _DOCUMENT_TYPES):
        title = reading.name
    else:
        title = main.type if main is not None and main.type != "file" else reading.type.replace("_", " ")
    # Square brackets mark handles.
    title = title.replace("[", "(").replace("]", ")")
    return f"{title}, {main.extent}" if main is not None and main.extent else title


def readable_text(block: str) -> str:
    """Return the text in a block, given as JSON, without its media: what a model or a search can read of it in a text."""
    return _read_block(block).words


def document_text(block: str) -> str:
    """Return the text of the PDFs in a block, given as JSON: of the first `MAX_PDFS`, within the limits of `kilburn.tokens.pdf`.
    Each is read by a process of its own."""
    if not any(item.type == "pdf" for item in _read_block(block).media):
        return ""
    payloads = (_payload(key, text) for key, text in _strings(unpack(block)))
    pdfs = (payload for payload in payloads if isinstance(payload, bytes) and _is_pdf(payload))
    return "".join(_by_digest(pdf_text, payload) for payload in itertools.islice(pdfs, MAX_PDFS))


def images_in(block: str) -> list[str]:
    """Return the images in a block, given as JSON, as `data:` URLs: the first `MAX_IMAGES`."""
    images: list[str] = []
    for key, text in _strings(unpack(block)):
        payload = _payload(key, text)
        if isinstance(payload, bytes) and _is_image(payload) and len(images) < MAX_IMAGES:
            kind = next((kind for start, kind in _IMAGE_TYPES if payload.startswith(start)), "webp")
            images.append(text if text[:5] == "data:" else f"data:image/{kind};base64,{text}")
    return images


def describe_image(url: str) -> str:
    """Return one line on what an image is, such as `image, 640 x 480`."""
    size = image_size(url)
    return f"image, {size[0]} x {size[1]}" if size else "image"


def read_media(key: str, text: str) -> Media | None:
    """Return what a string in a block is, or None if it is text.

    Args:
        key: the key under which it stands in the block.
    """
    payload = _payload(key, text)
    if payload is None:
        return None
    if isinstance(payload, str):
        return Media("file")
    match = _RAW_SOUND.fullmatch(key)
    rate = int(match[1]) if match else _bytes_per_second(text[5:64].partition(";base64")[0]) if text[:5] == "data:" else 0
    if rate and not payload.startswith(b"RIFF"):
        return Media("audio", len(payload) / rate)
    for matches, measure in RULES:
        if matches(payload):
            return measure(payload)
    return Media("encrypted" if "encrypted" in key or "signature" in key else "data", len(payload))


def _read_block(block: str) -> _Block:
    """Return a block's reading. A request reads each block several times, so readings are kept by the digest of the block."""
    key = (_read_block, digest_of(block))
    reading: _Block | None = texts.get(key)
    if reading is None:
        value = unpack(block)
        media: list[Media] = []
        words: list[str] = []
        names: list[str] = []
        for name, text in _strings(value):
            item = read_media(name, text)
            if item is not None:
                media.append(item)
            elif name not in _IGNORED:
                words.append(_LONG_RUN.sub("(base64)", text))
            if name in _NAME_KEYS and item is None and text.strip():
                names.append(" ".join(text.split()))
        reading = _Block(
            type=str(value.get("type") or "block"),
            text=msgspec.json.encode(_without_media(value)).decode() if media else block,
            words="\n".join(words),
            name=names[0] if names else "",
            media=tuple(media),
        )
        texts.keep(key, reading, ENTRY + sys.getsizeof(reading.text) + sys.getsizeof(reading.words))
    return reading


def _by_digest(function: Callable[[bytes], Result], data: bytes) -> Result:
    """Return the result of a function that parses a file. It is kept by the file's digest: parsing takes up to a second."""
    key = (function, hashlib.sha256(data).digest())
    result: Result | None = texts.get(key)
    if result is None:
        result = function(data)
        texts.keep(key, result, ENTRY + sys.getsizeof(result))
    return result


def _without_media(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_media(inner, _key_in(value, key, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_media(inner, key) for inner in value]
    return "" if isinstance(value, str) and _payload(key, value) is not None else value


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
    if key.startswith(_RAW):
        return _decode(text)
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
    """Yield every string of a JSON value with the key under which it, or the list that it is in, stands; see `_key_in`."""
    stack = [(key, value)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack.extend((_key_in(value, key, name), inner) for name, inner in reversed(value.items()))
        elif isinstance(value, list):
            stack.extend((key, item) for item in reversed(value))
        elif isinstance(value, str):
            yield key, value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, str(value)


def _key_in(holder: dict[str, Any], key: str, name: str) -> str:
    """Return the key of an object's value as `_payload` and `read_media` take it. A URL inside an object has that object's key
    too (`source_url`), the id of a file that a provider reads is `_FILE`, and raw samples have their bytes for each second.

    Args:
        key: of the object.
        name: of the value in it.
    """
    if name == "url":
        return key if key.endswith("_url") else f"{key}_url"
    if name == "file_id" and (key == "file" or str(holder.get("type")) in _HOLDERS):
        return _FILE
    if name == "data":
        format = next((holder[label] for label in _FORMAT_KEYS if label in holder), None)
        if isinstance(format, str) and (rate := _bytes_per_second(format)):
            return f"{_RAW}{rate}"
    return name


def _bytes_per_second(format: str) -> int:
    """Return the bytes of a second of raw samples, by the name of their format or their MIME type; 0 for any other format."""
    kind, _, parameters = format.lower().partition(";")
    rate = _RATE.search(parameters)
    return 2 * int(rate[1]) if rate and kind in ("audio/l16", "audio/pcm") else RAW_SOUND.get(kind, 0)


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


def _pdf(data: bytes) -> Media:
    return Media("pdf", _by_digest(pdf_pages, data))


def _image(data: bytes) -> Media:
    return Media("image", size=pixel_size(data[:MAX_HEADER_BYTES]))


def _audio(data: bytes) -> Media:
    return Media("audio", duration(data, AUDIO_BYTES))


def _video(data: bytes) -> Media:
    return Media("video", duration(data, VIDEO_BYTES))


RULES: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], Media]], ...] = (
    (_is_pdf, _pdf),
    (_is_image, _image),
    (_is_audio, _audio),
    (_is_video, _video),
    (_is_office, lambda data: Media("file")),
)
"""Each type of media: how its bytes begin, and how it is measured. Bytes of no type are ciphertext, by their length."""


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
