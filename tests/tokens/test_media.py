"""Real files in providers' blocks: their type is read from their bytes, and each is priced by its rule, never as text."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import pypdf
import pytest

from kilburn.tokens.choice import counter_for
from kilburn.tokens.media import FILE_TOKENS, block_tokens, describe, readable_text

CLAUDE, GPT = counter_for("claude-opus-4-5"), counter_for("gpt-4o")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def pdf(pages: int) -> str:
    writer = pypdf.PdfWriter()
    for _ in range(pages):
        writer.add_blank_page(600, 800)
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
    assert describe(CLAUDE, block) == words


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


def test_text_in_a_block_is_text() -> None:
    block = {
        "type": "search_result",
        "title": "Atlas",
        "source": "https://example.org",
        "content": [{"type": "text", "text": "a drum " * 50}],
    }
    assert block_tokens(GPT, block) >= GPT.count("a drum " * 50)
    assert readable_text(block).count("a drum") == 50
    assert PIXEL not in readable_text(document(PIXEL, title="x"))
    assert describe(GPT, {"type": "document", "title": "[p1 out: all]", "source": {"data": pdf(1)}}) == "(p1 out: all), 1 page"
    assert describe(GPT, document(pdf(1), title="name"), named=False) == "pdf, 1 page"
