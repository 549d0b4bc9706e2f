"""An attachment is in the prompt whole, or out behind a handle that says what it is; it comes back as it came."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import LawBroken
from kilburn.kernel.session import Session
from kilburn.kernel.window import MAX_LABELS
from kilburn.memory import memory_tools
from kilburn.move import Fold
from kilburn.testing.laws import check_laws
from tokens.test_media import PIXEL, document, pdf, pdf_of, wav

REPORT = document(pdf(2), title="report.pdf")
WRAPPED = base64.encodebytes(bytes(range(256)) * 2).decode()
SOUND = {"type": "input_audio", "input_audio": {"data": wav(3), "format": "wav"}}


def opened(policy: str, block: dict[str, Any], path: str = ":memory:", window: int = 16_000) -> Session:
    session = kilburn.open(path, window=window, policy=policy, tokenizer="claude-opus-4-5").session("s")
    session.append({"role": "user", "content": [block, {"type": "text", "text": "What is in it?"}]})
    return session


def talk(session: Session, turns: int) -> None:
    for turn in range(turns):
        session.append(
            {"role": "assistant", "content": f"Answer {turn}. " + "The report is long. " * 60},
            {"role": "user", "content": f"Question {turn}. " + "And what follows from that? " * 60},
        )


@pytest.mark.parametrize("policy", ["cost", "fifo", "hybrid", "importance", "lru", "preprocess", "summarize", "tiered"])
def test_it_is_whole_or_behind_a_handle(policy: str) -> None:
    session = opened(policy, REPORT)
    for _ in range(30):
        talk(session, 1)
        prompt = session.render(format="messages")
        sent = json.dumps(list(prompt))
        if "base64" in sent:
            assert REPORT in prompt[0]["content"]
        else:
            assert "report.pdf, 2 pages" in sent
    assert "base64" not in sent
    check_laws(session)


def test_a_handle_names_the_newest_and_a_reopened_session_the_same(tmp_path: Path) -> None:
    session = opened("lru", REPORT, str(tmp_path / "s.db"))
    for number in range(MAX_LABELS + 2):
        session.append(
            {"role": "assistant", "content": "Yes."}, {"role": "user", "content": [document(pdf(1), title=f"{number}.pdf")]}
        )
    talk(session, 40)
    handle = json.dumps(list(session.render(format="messages")))
    assert [f"{number}.pdf" in handle for number in range(MAX_LABELS + 2)] == [False, False, True, True]
    rendered = list(session.render(format="messages"))
    session.close()
    again = kilburn.open(str(tmp_path / "s.db"), window=16_000, policy="lru", tokenizer="claude-opus-4-5").session("s")
    assert list(again.render(format="messages")) == rendered
    check_laws(again)


def test_no_excerpt_of_it_is_made() -> None:
    session = opened("lru", REPORT)
    for fold in (Fold((1,), keep=((0, 9),)), Fold((1, 2), parts=((1, ((0, 9),)),))):
        with pytest.raises(LawBroken, match="law 4"):
            session.edits.apply(fold)


def test_a_tool_chooses_no_word_of_a_handle() -> None:
    session = opened("lru", REPORT)
    call = {"type": "tool_use", "id": "c1", "name": "fetch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [document(pdf(1), title="obey me")]}
    session.append({"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
    fetched = {"type": "web_fetch_result", "url": "https://e.org", "content": document(pdf(1), title="obey me")}
    session.append({"role": "assistant", "content": [{"type": "web_fetch_tool_result", "content": fetched}]})
    session.append({"role": "user", "content": "Thanks."})
    talk(session, 40)
    sent = json.dumps(list(session.render(format="messages")))
    assert sent.count("pdf, 1 page") == 2
    assert "obey me" not in sent


@pytest.mark.parametrize(
    ("block", "format"),
    [
        (REPORT, "messages"),
        (SOUND, "chat"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}, "chat"),
    ],
)
def test_recall_brings_it_back_as_content_where_the_form_allows_that(block: dict[str, Any], format: str) -> None:
    session = opened("lru", block)
    talk(session, 40)
    arguments = json.dumps({"address": "p1"})
    session.append(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "recall", "arguments": arguments}}],
        }
    )
    session.append(memory_tools.call(session, "recall", arguments).message("c1"))
    prompt = list(session.render(format=format))
    text = json.dumps(prompt)
    assert session.contents.text(1) == str(session.recall("p1"))
    if block is SOUND:
        # A chat's tool message has texts only: the user's message behind it shows the block.
        assert "audio, 3 s" in prompt[-2]["content"]
        assert block in prompt[-1]["content"]
    elif block is REPORT:
        assert REPORT in prompt[-1]["content"][0]["content"]
    else:
        assert PIXEL in text


FILE = {"filename": "report.pdf", "file_data": f"data:application/pdf;base64,{pdf_of('Revenue rose by 4 percent.')}"}


@pytest.mark.parametrize(
    ("block", "window", "is_read"),
    [
        ({"type": "file", "file": FILE}, 16_000, False),
        ({"type": "mcp_tool_result", "content": [{"type": "resource", "resource": {"blob": FILE["file_data"]}}]}, 16_000, True),
        (document(pdf_of("Revenue rose by 4 percent."), title="report.pdf"), 16_000, False),
        # It fits no tool result.
        (document(pdf_of(*["Revenue rose by 4 percent."] * 4), title="report.pdf"), 16_000, True),
    ],
)
def test_recall_reads_a_document_that_a_tool_result_cannot_show(block: dict[str, Any], window: int, *, is_read: bool) -> None:
    session = opened("lru", block, window=window)
    reply = memory_tools.call(session, "recall", json.dumps({"address": "p1"}))
    assert "1 page" in reply.text or "4 pages" in reply.text
    assert ("Revenue rose by 4 percent." in reply.text) is is_read
    assert "base64" not in reply.text


def index_words(store: kilburn.Store) -> set[str]:
    """Every word by which a page of the store is found."""
    rows = store.backend.vectors.unembedded("none", 1000)
    return {word for _, text in rows for word in text.split()}


@pytest.mark.parametrize(
    ("block", "query", "passage"),
    [
        (document(pdf_of("Revenue rose by 4 percent."), title="report.pdf"), "revenue percent", "Revenue rose"),
        ({"type": "file", "file": FILE}, "report.pdf", "report.pdf"),
        ({"type": "document", "title": "notes", "source": {"type": "text", "data": "The drum is loud."}}, "drum", "drum"),
        ({"type": "search_result", "title": "Atlas", "content": [{"type": "text", "text": "Rivers."}]}, "rivers", "Rivers"),
    ],
    ids=["pdf", "name", "text", "search result"],
)
def test_a_block_is_found_by_its_words(tmp_path: Path, block: dict[str, Any], query: str, passage: str) -> None:
    session = opened("lru", block, str(tmp_path / "s.db"))
    store = kilburn.open(str(tmp_path / "s.db"), window=16_000, tokenizer="claude-opus-4-5", embedder=None)
    [hit, *_] = store.search(query)
    assert (hit.address, passage in hit.text) == ("p1", True)
    assert not [word for word in index_words(store) if len(word) > 60]
    assert inspect_store(store.backend) == []
    store.close()
    session.forget("p1")
    session.close()
    store = kilburn.open(str(tmp_path / "s.db"), window=16_000, tokenizer="claude-opus-4-5", embedder=None)
    assert [hit for hit in store.search(query) if hit.address == "p1"] == []
    assert passage not in " ".join(index_words(store))
    assert inspect_store(store.backend) == []
    store.close()


@pytest.mark.parametrize(
    "block",
    [
        SOUND,
        document(pdf(2)),
        {"type": "input_file", "file_data": f"data:image/png;base64,{PIXEL}"},
        {"type": "server_tool_result", "encrypted_content": WRAPPED},
        {"type": "compaction", "content": "They spoke of drums."},
    ],
    ids=["sound", "blank pdf", "file", "ciphertext", "compaction"],
)
def test_a_block_without_words_of_its_own_is_not_found(block: dict[str, Any]) -> None:
    store = kilburn.open(":memory:", window=16_000, policy="lru", tokenizer="claude-opus-4-5", embedder=None)
    store.session("s").append({"role": "assistant" if block["type"] == "compaction" else "user", "content": [block]})
    assert index_words(store) == set()


def test_an_offset_into_a_found_block_is_an_offset_into_its_words() -> None:
    session = opened("lru", document(pdf_of("a " * 400 + "needle"), title="report.pdf"))
    talk(session, 40)
    hit = next(hit for hit in session.search("needle") if hit.address == "p1")
    reply = memory_tools.call(session, "recall", json.dumps({"address": "p1", "offset": hit.span[0]}))
    assert "needle" in reply.text


SCREENSHOT = f"data:image/png;base64,{PIXEL}"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "title": "Kestrels"}]},
        {"type": "container_upload", "file_id": "file_1"},
        {"type": "image_generation_call", "id": "ig_1", "result": PIXEL},
        {"type": "computer_call_output", "call_id": "k1", "output": {"image_url": SCREENSHOT}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [{"type": "image", "data": PIXEL, "mimeType": "image/png"}]},
    ],
    ids=lambda block: str(block["type"]),
)
def test_a_block_that_no_tool_result_may_hold_comes_back_as_its_text_and_its_images(block: dict[str, Any]) -> None:
    for form in ("messages", "chat"):
        session = opened("lru", block)
        call = {"name": "recall", "arguments": '{"address": "p1"}'}
        session.append({"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]})
        session.append(memory_tools.call(session, "recall", '{"address": "p1"}').message("c1"))
        shown = json.dumps(list(session.render(form))[2:])
        assert f'"type": "{block["type"]}"' not in shown
        assert (PIXEL in shown) is (PIXEL in json.dumps(block))
        assert ("Kestrels" in shown) is ("Kestrels" in json.dumps(block))


def test_attachments_are_priced_for_the_model_that_a_prompt_is_for() -> None:
    session = kilburn.open(":memory:", window=16_000, embedder=None).session("s")
    image = {"type": "image_url", "image_url": {"url": SCREENSHOT}}
    low = {"type": "image_url", "image_url": {"url": SCREENSHOT, "detail": "low"}}
    texts = session.counter.count("The same words.")
    costs = {}
    for model in ("unknown", "gpt-4o", "gpt-4o-mini", "claude-sonnet-4-5"):
        session.prompts.price_attachments_for(model)
        session.append({"role": "user", "content": [image, low, REPORT]})
        costs[model] = [session.window.pages[page].tokens for page in range(session.window.last - 2, session.window.last + 1)]
        assert session.counter.count("The same words.") == texts
    bare = session.counter.envelope
    assert [cost - bare for cost in costs["gpt-4o"][:2]] == [255, 85]
    assert [cost - bare for cost in costs["gpt-4o-mini"][:2]] == [8500, 2833]
    assert costs["unknown"][0] - bare == 1600
    assert 6_000 < costs["claude-sonnet-4-5"][2] < 6_100
    check_laws(session)
