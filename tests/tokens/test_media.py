"""Real files in providers' blocks: their type is read from their bytes, and each is priced by its rule, never as text."""

from __future__ import annotations

import base64
import io
import os
import struct
import wave
import zlib
from typing import Any

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

import kilburn
from kilburn.budget import Counter
from kilburn.errors import SpecError
from kilburn.tokens import media
from kilburn.tokens.choice import counter_for
from kilburn.tokens.media import FILE_TOKENS
from kilburn.tokens.pdf import MAX_CHARS, MAX_PAGES, pdf_text
from kilburn.wire.plain import pack

CLAUDE, GPT = counter_for("claude-opus-4-5"), counter_for("gpt-4o")
FONT = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def block_tokens(counter: Counter, block: dict[str, Any]) -> int:
    return media.block_tokens(counter, pack(block))


def describe(block: dict[str, Any], *, named: bool = True) -> str:
    return media.describe(pack(block), use_name=named)


def readable_text(block: dict[str, Any]) -> str:
    return media.readable_text(pack(block))


def document_text(block: dict[str, Any]) -> str:
    return media.document_text(pack(block))


def pdf(pages: int) -> str:
    writer = pypdf.PdfWriter()
    for _ in range(pages):
        writer.add_blank_page(600, 800)
    file = io.BytesIO()
    writer.write(file)
    return base64.b64encode(file.getvalue()).decode()


def pdf_of(*texts: str, repeat: int = 1) -> str:
    """A PDF with a page for each text, which its operators show so many times."""
    writer = pypdf.PdfWriter()
    font = DictionaryObject({NameObject(key): NameObject(name) for key, name in FONT.items()})
    for text in texts:
        page = writer.add_blank_page(600, 800)
        stream = DecodedStreamObject()
        stream.set_data(b"BT /F1 12 Tf 50 700 Td " + f"({text}) Tj 0 -14 Td ".encode() * repeat + b"ET")
        page[NameObject("/Contents")] = writer._add_object(stream)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})})
    file = io.BytesIO()
    writer.write(file)
    return base64.b64encode(file.getvalue()).decode()


def wav(seconds: int) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\1" * 8000 * seconds)
    return base64.b64encode(file.getvalue()).decode()


def document(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}, **more}


PDF_URL = f"data:application/pdf;base64,{pdf(2)}"


@pytest.mark.parametrize(
    ("block", "tokens", "words"),
    [
        (document(pdf(3)), 9_000, "pdf, 3 pages"),
        (document(pdf(1), title="report.pdf"), 3_000, "report.pdf, 1 page"),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": PDF_URL}}, 6_000, "a.pdf, 2 pages"),
        ({"type": "input_file", "file_id": "file-9"}, FILE_TOKENS, "input file"),
        ({"type": "input_audio", "input_audio": {"data": wav(12), "format": "wav"}}, 384, "audio, 12 s"),
        ({"type": "computer_call_output", "output": {"image_url": f"data:image/png;base64,{PIXEL}"}}, 1, "image, 1 x 1"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-9"}}, FILE_TOKENS, "image"),
    ],
    ids=["pdf", "named", "chat file", "file id", "audio", "screenshot", "image by id"],
)  # fmt: skip
def test_media_cost_what_the_provider_says(block: dict[str, Any], tokens: int, words: str) -> None:
    assert tokens <= block_tokens(CLAUDE, block) <= tokens + 60
    assert describe(block) == words


def test_the_rule_is_that_of_the_family() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": wav(12), "format": "wav"}}
    assert 120 <= block_tokens(GPT, sound) <= 150
    assert 6_000 <= block_tokens(GPT, document(pdf(3))) <= 6_050


@pytest.mark.parametrize("key", ["encrypted_content", "data", "signature", "thought_signature", "something_new"])
def test_a_ciphertext_counts_by_its_bytes_in_either_alphabet(key: str) -> None:
    data = bytes(range(256)) * 16
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert len(data) // 4 <= block_tokens(GPT, {key: encode(data).decode().rstrip("=")}) <= len(data) // 4 + 10


@pytest.mark.parametrize(
    "data",
    [b"%PDF-1.7 and no more", b"%PDF-" + b"\xff" * 300_000, b"ID3" + b"\0" * 99, b"RIFF\0\0\0\0WAVEfmt ", b"\0\0\0\x18ftypmp42"],
)
def test_damaged_files_are_priced_by_their_size(data: bytes) -> None:
    padded = base64.b64encode(data.ljust(64, b"\0")).decode()
    assert 0 < block_tokens(CLAUDE, document(padded)) <= 3_000 * (1 + len(data) // 50_000) + 60


def test_a_pdf_that_claims_a_million_pages_is_priced_by_its_size() -> None:
    data = base64.b64decode(pdf(1)).replace(b"/Count 1", b"/Count 9")
    liar = data.replace(b"/Count 9", b"/Count 999999999", 1)
    assert block_tokens(CLAUDE, document(base64.b64encode(liar).decode())) <= 3_060


@pytest.mark.parametrize("handler", [b"/Filter/Adobe.PubSec/V 4", b"/Filter/Standard/V 9/R 9"])
def test_a_protected_pdf_that_cannot_be_read_is_priced_by_its_size(handler: bytes) -> None:
    head = b"%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Count 3/Kids[]>>endobj\n"
    data = (
        head + b"3 0 obj<<" + handler + b">>endobj\ntrailer<</Root 1 0 R/Size 4/Encrypt 3 0 R/ID[<00><00>]>>\nstartxref\n0\n%%EOF"
    )
    assert block_tokens(CLAUDE, document(base64.b64encode(data).decode())) <= 3_060


@pytest.mark.parametrize(("padding", "pages"), [(0, 3), (8_000_000, 1)])
def test_a_pdf_that_explodes_when_it_is_decoded_is_priced_by_its_size(padding: int, pages: int) -> None:
    objects = [b"1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n", b"2 0 obj<</Type/Pages/Count 3/Kids[]>>endobj\n"]
    first = len(b"%PDF-1.7\n")
    rows = b"".join(struct.pack(">BI", 1, at) for at in (0, first, first + len(objects[0])))
    table = zlib.compress(rows + bytes(padding))
    head = b"%PDF-1.7\n" + b"".join(objects)
    stream = b"3 0 obj<</Type/XRef/W[1 4 0]/Size 3/Root 1 0 R/Filter/FlateDecode/Length %d>>stream\n" % len(table)
    data = head + stream + table + b"\nendstream endobj\nstartxref\n%d\n%%%%EOF" % len(head)
    assert describe(document(base64.b64encode(data).decode())) == f"pdf, {pages} {'page' if pages == 1 else 'pages'}"


def test_sound_that_was_written_into_a_pipe_is_priced_by_its_size() -> None:
    data = bytearray(base64.b64decode(wav(12)))
    data[4:8] = data[40:44] = b"\xff" * 4
    block = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    assert describe(block) == "audio, 13 s"


SILENCE = base64.b64encode(bytes(480_000)).decode()


@pytest.mark.parametrize(
    ("block", "seconds"),
    [
        ({"type": "input_audio", "input_audio": {"data": SILENCE, "format": "pcm16"}}, 10),
        ({"type": "input_audio", "input_audio": {"data": SILENCE, "format": "g711_ulaw"}}, 60),
        ({"type": "audio_url", "audio_url": {"url": f"data:audio/L16;rate=16000;base64,{SILENCE}"}}, 15),
        ({"type": "input_audio", "input_audio": {"data": wav(12), "format": "pcm16"}}, 12),
    ],
    ids=["pcm16", "g711", "mime type", "named wrongly"],
)
def test_samples_without_a_header_are_counted_by_their_rate(block: dict[str, Any], seconds: int) -> None:
    assert describe(block) == f"audio, {seconds} s"
    assert 10 * seconds <= block_tokens(GPT, block) <= 10 * seconds + 60


def test_a_file_is_parsed_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kilburn")
    damaged = base64.b64encode(b"%PDF-1.7 and no more" + os.urandom(20_000)).decode()
    for mark in ({}, {"cache_control": {"type": "ephemeral"}}):
        for counter in (GPT, CLAUDE):
            block_tokens(counter, document(damaged, **mark))
            describe(document(damaged, **mark))
    assert [record.message.split(":")[0] for record in caplog.records].count(
        "a PDF of 20020 bytes is counted as 1 pages, because it cannot be read"
    ) == 1


def test_a_file_that_is_only_named_has_the_cost_that_was_set() -> None:
    block = {"type": "input_file", "file_id": "file-9"}
    for tokens in (0, 60_000):
        with kilburn.open(":memory:", window=100_000, file_tokens=tokens) as store:
            session = store.session("s")
            session.prompts.count_for("gpt-4o")
            session.append({"role": "user", "content": [block]})
            assert tokens <= session.window.pages[1].tokens <= tokens + 60
    with pytest.raises(SpecError):
        kilburn.open(":memory:", file_tokens=-1)


@pytest.mark.parametrize(
    "block",
    [
        {
            "type": "web_search_tool_result",
            "content": [{"type": "web_search_result", "url": f"https://e.org/{n}", "title": "Obey me"} for n in range(10)],
        },
        {"type": "text", "text": "It is so.", "annotations": [{"type": "url_citation", "url": "https://e.org"}] * 10},
        {"type": "text", "text": "It is so.", "annotations": [{"type": "file_citation", "file_id": "file-1"}] * 10},
        {"type": "web_search_call", "action": {"type": "search", "sources": [{"type": "url", "url": "https://e.org"}] * 10}},
        {"type": "file_search_call", "results": [{"file_id": "file-1", "filename": "a.txt", "text": "a drum"}] * 10},
    ],
    ids=["search results", "url citations", "file citations", "sources", "file search"],
)
def test_a_reference_that_no_provider_follows_is_text(block: dict[str, Any]) -> None:
    assert block_tokens(GPT, block) < 300
    assert describe(block) == block["type"].replace("_", " ")


def test_an_office_file_and_a_photo_of_a_phone_have_prices_of_their_own() -> None:
    office = {"type": "input_file", "filename": "a.docx", "file_data": base64.b64encode(b"PK\3\4" + bytes(200_000)).decode()}
    assert FILE_TOKENS <= block_tokens(GPT, office) <= FILE_TOKENS + 60
    photo = base64.b64encode(b"\0\0\0\x18ftypheic" + bytes(2_000_000)).decode()
    assert block_tokens(GPT, {"type": "image", "source": {"type": "base64", "data": photo}}) < 2_000


def test_text_in_a_block_is_text() -> None:
    assert block_tokens(GPT, {"type": "x", "text": "data: in base64, " + "a drum " * 50}) >= GPT.count("a drum " * 50)
    assert readable_text({"type": "x", "text": "0123456789abcdef" * 4}) == "0123456789abcdef" * 4
    block = {
        "type": "search_result",
        "title": "Atlas",
        "source": "https://example.org",
        "content": [{"type": "text", "text": "a drum " * 50}],
    }
    assert block_tokens(GPT, block) >= GPT.count("a drum " * 50)
    assert readable_text(block).count("a drum") == 50
    assert PIXEL not in readable_text(document(PIXEL, title="x"))
    told = {"type": "mcp_call", "output": f'[{{"type": "image", "data": "{pdf(9)}"}}]'}
    assert readable_text(told) == '[{"type": "image", "data": "(base64)"}]'
    assert block_tokens(GPT, told) >= GPT.count(pdf(9))
    assert describe({"type": "document", "title": "[p1 out: all]", "source": {"data": pdf(1)}}) == "(p1 out: all), 1 page"
    assert describe(document(pdf(1), title="name"), named=False) == "pdf, 1 page"


def test_the_text_of_a_pdf_is_read_page_by_page() -> None:
    block = document(pdf_of("Revenue rose by 4 percent.", "Costs fell."), title="report.pdf")
    assert document_text(block) == "[page 1]\nRevenue rose by 4 percent.\n[page 2]\nCosts fell.\n"
    assert document_text({"type": "text", "text": "%PDF-1.4"}) == ""


def test_of_a_long_pdf_the_beginning_is_read() -> None:
    text = pdf_text(base64.b64decode(pdf_of(*["A page."] * (MAX_PAGES + 2))))
    assert text.count("A page.") == MAX_PAGES
    assert text.endswith(f"[the rest of {MAX_PAGES + 2} pages is left out]\n")
    wide = pdf_text(base64.b64decode(pdf_of("w" * 1000, "The end.", repeat=MAX_CHARS // 500)))
    assert MAX_CHARS <= len(wide) < MAX_CHARS + 100
    assert "The end." not in wide


@pytest.mark.parametrize("data", [b"%PDF-1.7 nothing", b"%PDF-", base64.b64decode(pdf(1)), base64.b64decode(pdf_of("a"))[:300]])
def test_a_pdf_without_text_or_that_is_damaged_has_none(data: bytes) -> None:
    assert pdf_text(data) == ""
