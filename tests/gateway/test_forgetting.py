"""What a person forgets is gone from every session that has it, and the clients that still send it do not bring it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from gateway.talk import TALK, said, user
from kilburn.gateway.conversations import said_after
from kilburn.kernel.store import Store
from kilburn.search.embedders.hashing import Hashing
from kilburn.testing.upstream import Upstream, calling

SECRET = "The canary sleeps at the wharf."


def with_secret() -> list[dict[str, Any]]:
    talk = [dict(message) for message in TALK]
    talk[4]["content"] += SECRET
    return talk


def scripted(sent: Any) -> str:
    """The reply that the talk has."""
    asked = sent.body["messages"][-1]["content"]
    return next((TALK[at + 1]["content"] for at in range(0, len(TALK), 2) if asked.startswith(TALK[at]["content"])), "OK.")


def held(setup: Any, talk: list[dict[str, Any]]) -> str:
    for end in range(1, len(talk), 2):
        _, headers = setup.chat(talk[:end])
    return str(headers["x-kilburn-session"])


def in_files(setup: Any, words: str) -> bool:
    return words.encode() in b"".join(file.read_bytes() for file in setup.db.parent.iterdir() if file.is_file())


def linked(gateway: Callable[..., Any], *calls: Any) -> tuple[Any, str, list[dict[str, Any]]]:
    """A session, and another one that a client made of it, in which the model looked for what was left out."""
    talk = with_secret()
    setup = gateway(upstream=Upstream(otherwise=scripted))
    name = held(setup, talk)
    setup.upstream.enqueue(*(calling((tool, {key: value.format(name)})) for tool, key, value in calls), "It sleeps.")
    compacted = [*talk[:2], user("(the rest was left out)"), said("OK."), *talk[-4:], user("Where was it?")]
    setup.chat(compacted)
    return setup, name, [*compacted, said("It sleeps."), user("Thank you.")]


RECALL, SEARCH = ("recall", "address", "{} p5"), ("search_memory", "query", "wharf")


@pytest.mark.parametrize("calls", [(RECALL,), (SEARCH,), (RECALL, SEARCH)])
def test_a_page_that_was_recalled_from_an_earlier_session(gateway: Any, calls: Any) -> None:
    setup, name, more = linked(gateway, *calls)
    assert SECRET in setup.upstream.sent[-1].raw.decode()
    with setup.store() as store:
        receipt = store.forget(session=name, address="p5")
    assert len(receipt.pages) == 2, "the copies are named too"
    assert not in_files(setup, "canary")
    _, headers = setup.chat(more)
    assert headers["x-kilburn-session"] == f"{name}~2"
    assert "canary" not in setup.upstream.sent[-1].raw.decode()
    assert not setup.upstream.refused


@pytest.mark.parametrize("calls", [(RECALL,), (SEARCH,), (RECALL, SEARCH)])
def test_a_turn_goes_on_without_what_is_being_forgotten(gateway: Any, calls: Any) -> None:
    """Somebody has begun to forget what the model asks for, and it is still there."""
    setup, name, more = linked(gateway)
    setup.upstream.enqueue(*(calling((tool, {key: value.format(name)})) for tool, key, value in calls), "I cannot say.")
    with setup.store() as store, store.backend.leaving([(store.session(name).number, 5)]):
        reply, _ = setup.chat(more)
    assert reply.choices[0].message.content == "I cannot say."
    sent = setup.upstream.sent[-1].raw.decode()
    assert sent.count("what was read here has just been forgotten") == len(calls)
    assert "canary" not in sent
    with setup.store() as store:
        assert len(store.forget(session=name, address="p5").pages) == 1


def test_an_earlier_session_that_is_forgotten_whole(gateway: Any) -> None:
    setup, name, more = linked(gateway, RECALL)
    with setup.store() as store:
        store.forget(session=name)
    assert not in_files(setup, "canary")
    setup.upstream.enqueue(calling(("recall", {"address": f"{name} p5"})), calling(("search_memory", {"query": "wharf"})))
    _, headers = setup.chat(more)
    assert headers["x-kilburn-session"] == f"{name}~2"
    assert "canary" not in setup.upstream.sent[-1].raw.decode()
    with setup.store() as store:
        assert [info.name for info in store.sessions()] == [f"{name}~2"], "nobody made the forgotten session again"


def test_a_copy_in_a_fork_goes_with_the_page(gateway: Any) -> None:
    setup, name, more = linked(gateway, RECALL, SEARCH)
    _, headers = setup.chat([*more[:-1], user("Really?")])
    _, headers = setup.chat([*more[:-1], user("No.")])
    assert headers["x-kilburn-session"] == f"{name}~3"
    with setup.store() as store:
        assert len(store.forget(session=name, address="p5").pages) == 3
    assert not in_files(setup, "canary")


def test_a_fork_with_what_is_being_forgotten_is_asked_for_again(gateway: Any) -> None:
    """Somebody has begun to forget what was recalled in the session that it goes on from: a moment later it has none of it."""
    setup, name, more = linked(gateway, RECALL)
    setup.chat([*more[:-1], user("Really?")])
    fork = [*more[:-1], user("No.")]
    with setup.store() as store, store.backend.leaving([(store.session(name).number, 5)]):
        refused = httpx2.post(f"{setup.url}/v1/chat/completions", json={"model": "m", "messages": fork}, timeout=600)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    with setup.store() as store:
        store.forget(session=name, address="p5")
    _, headers = setup.chat(fork)
    assert headers["x-kilburn-session"] == f"{name}~3"
    assert not in_files(setup, "canary")


@pytest.mark.parametrize("restart", [False, True])
def test_a_client_that_still_sends_what_was_forgotten_goes_on(gateway: Any, restart: bool) -> None:
    talk = with_secret()
    setup = gateway(upstream=Upstream(otherwise=scripted))
    name = held(setup, talk)
    with setup.store() as store:
        store.forget(session=name, address="p5")
    if restart:
        setup = gateway(upstream=Upstream(otherwise=scripted))
    for words in ("Go on.", "And on."):
        talk.append(user(words))
        _, headers = setup.chat(talk)
        assert headers["x-kilburn-session"] == name
        assert "canary" not in setup.upstream.sent[-1].raw.decode()
        talk.append(said("OK."))
    assert not in_files(setup, "canary")
    with setup.store() as store:
        assert len(store.session(name).contents.messages()) == len(talk) - 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_session_that_is_forgotten_while_its_reply_is_on_the_way(gateway: Any, streamed: bool) -> None:
    def forget(_: Any) -> str:
        with setup.store() as store:
            store.forget(session=name)
        return "The canary replies."

    setup = gateway(upstream=Upstream(otherwise="OK."))
    name = held(setup, [user("Hello."), said("OK.")])
    setup.upstream.enqueue(forget)
    body = {"model": "m", "messages": [user("Hello."), said("OK."), user(SECRET)], "stream": streamed}
    answer = httpx2.post(f"{setup.url}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == (200 if streamed else 503)
    assert '"error"' in answer.text
    assert not in_files(setup, "canary")
    with setup.store() as store:
        assert not store.sessions()
    setup.chat([user("Hello."), said("OK."), user("Again.")])
    with setup.store() as store:
        assert [len(store.session(info.name).contents.messages()) for info in store.sessions()] == [4]


class Between(Hashing):
    """An embedder that is asked for what is remembered between the admission of a question and its sending; it does something."""

    def __init__(self) -> None:
        super().__init__(64)
        self.then: list[Callable[[], object]] = []

    def embed(self, texts: Sequence[str]) -> Any:
        if self.then and any("locker" in text for text in texts):
            self.then.pop()()
        return super().embed(texts)


@pytest.mark.parametrize("turns", [0, 6])
def test_a_session_that_is_forgotten_before_its_question_is_sent_begins_anew(gateway: Any, turns: int) -> None:
    between = Between()
    setup = gateway(upstream=Upstream(otherwise="OK."), memory=300, window=1200, embedder=between)
    with setup.store() as store:
        store.memory("").remember("My locker is number 12 in Porto")
    talk: list[dict[str, Any]] = []
    for turn in range(turns):
        talk.append(user(f"Question {turn}: " + "words that fill a window " * 40))
        setup.chat(talk)
        talk.append(said("OK."))
    gone: list[int] = []

    def forget() -> None:
        with setup.store() as store:
            for info in store.sessions():
                gone.append(info.number)
                store.forget(session=info.name)

    between.then = [forget]
    _, headers = setup.chat([*talk, user("What is the number of my locker?")])
    assert len(gone) == 1
    assert "locker" in setup.upstream.sent[-1].raw.decode()
    with setup.store() as store:
        (info,) = store.sessions()
        assert info.name == headers["x-kilburn-session"]
        assert info.number not in gone
        assert store.session(info.name).contents.messages()[-1]["content"] == "OK."


def test_a_session_of_which_all_is_forgotten_sends_nothing_and_goes_on(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="OK."))
    talk = [user("Hello. " + SECRET), said("OK."), user("More.")]
    name = setup.chat(talk[:1])[1]["x-kilburn-session"]
    setup.chat(talk)
    asked = len(setup.upstream.sent)
    with setup.store() as store:
        store.forget(session=name, address="p1-p4")
    body = {"model": "m", "messages": [*talk, said("OK.")]}
    answer = httpx2.post(f"{setup.url}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 400, (answer.headers, setup.upstream.sent[-1].raw)
    assert "nothing to send" in answer.text
    assert len(setup.upstream.sent) == asked
    assert setup.chat([*talk, said("OK."), user("And now?")])[1]["x-kilburn-session"] == name
    assert [message["content"] for message in setup.upstream.sent[-1].body["messages"]] == ["And now?"]
    assert not setup.upstream.refused


# What a provider made of the prompt


def summed(form: str, words: str) -> dict[str, Any]:
    """A reply with a provider's compaction of the prompt: in plain, or encrypted."""
    block = {"type": "compaction", "content": words} if form == "messages" else {"type": "compaction", "id": "cmp_1"}
    return {"role": "assistant", "content": [{**block, "encrypted_content": words}, {"type": "text", "text": "Here I am."}]}


def shaped(form: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("form", ["messages", "responses"])
def test_a_providers_compaction_goes_with_what_it_was_made_from(gateway: Any, form: str) -> None:
    setup = gateway(upstream=Upstream(otherwise="OK."), form=form if form == "messages" else "chat")
    history = [shaped(form, "My phone number is 1. " + SECRET), said("OK."), shaped(form, "And?")]
    path = {"messages": "v1/messages", "responses": "v1/responses"}[form]

    def ask(history: list[dict[str, Any]]) -> httpx2.Response:
        more = {"max_tokens": 100, "messages": history} if form == "messages" else {"input": history}
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "compact-2026-01-12"}
        return httpx2.post(f"{setup.url}/{path}", json={"model": "m", **more}, headers=headers, timeout=600)

    name = ask(history[:1]).headers["x-kilburn-session"]
    setup.upstream.enqueue(summed(form, "A canary was spoken of."))
    reply = ask(history).json()
    items = reply["content"] if form == "messages" else reply["output"]
    assert "canary" in str(items)
    more = [{"role": "assistant", "content": items}] if form == "messages" else items
    history = [*history, *more, shaped(form, "Go on.")]
    assert ask(history).headers["x-kilburn-session"] == name
    assert "A canary" in setup.upstream.sent[-1].raw.decode()
    history += [said("OK."), shaped(form, "And on.")]
    with setup.store() as store:
        gone = store.forget(session=name, address="p1").pages[name]
        assert len(gone) == 2, "the page, and the compaction alone: what was said beside it stays"
        assert "Here I am." in str(store.session(name).contents.messages())
    assert not in_files(setup, "canary")
    answer = ask(history)
    assert answer.headers["x-kilburn-session"] == name
    assert "canary" not in setup.upstream.sent[-1].raw.decode()
    assert not in_files(setup, "canary")


def test_a_compaction_that_is_made_while_its_page_is_forgotten_is_not_kept(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="OK."))
    name = setup.chat([user("Hello. " + SECRET)])[1]["x-kilburn-session"]

    def forget(_: Any) -> dict[str, Any]:
        with setup.store() as store:
            store.forget(session=name, address="p1")
        return summed("responses", "A canary was spoken of.")

    setup.upstream.enqueue(forget)
    history = [user("Hello. " + SECRET), said("OK."), user("And?")]
    answer = httpx2.post(f"{setup.url}/v1/responses", json={"model": "m", "input": history}, timeout=600)
    assert answer.status_code == 503
    assert "changed meanwhile" in answer.text
    assert not in_files(setup, "canary")


def test_a_compaction_that_a_client_brings_goes_with_the_session_that_it_is_from(gateway: Any) -> None:
    """A client has its provider sum up beside the gateway, and goes on with its own beginning and that."""
    setup = gateway(upstream=Upstream(otherwise=scripted))
    talk = with_secret()
    name = held(setup, talk)
    block = {"type": "compaction", "id": "cmp_1", "encrypted_content": "A canary was spoken of."}
    body = {"model": "m", "input": [talk[0], block, user("Where was it?")]}
    answer = httpx2.post(f"{setup.url}/v1/responses", json=body, timeout=600)
    assert answer.headers["x-kilburn-session"] == f"{name}~2"
    with setup.store() as store:
        store.forget(session=name, address="p5")
    assert not in_files(setup, "canary")


def test_what_another_program_forgets_just_now_is_left_out(tmp_path: Path) -> None:
    def opened() -> Store:
        return kilburn.open(str(tmp_path / "a.db"), window=4000, policy="fifo", tokenizer="chars/4", embedder=None)

    with opened() as ours, opened() as theirs:
        session = ours.session("work")
        session.append(user("one"), user("two"), user("three"))
        theirs.forget(session="work", address="p2")
        assert [number for number, _ in said_after(session, 0)] == [1, 3]
