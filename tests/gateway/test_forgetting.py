"""What a person forgets is gone from every session that has it, and the clients that still send it do not bring it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from gateway.talk import TALK, said, user
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
        assert [info.name for info in store.processes()] == [f"{name}~2"], "nobody made the forgotten session again"


def test_a_copy_in_a_fork_goes_with_the_page(gateway: Any) -> None:
    setup, name, more = linked(gateway, RECALL, SEARCH)
    _, headers = setup.chat([*more[:-1], user("Really?")])
    _, headers = setup.chat([*more[:-1], user("No.")])
    assert headers["x-kilburn-session"] == f"{name}~3"
    with setup.store() as store:
        assert len(store.forget(session=name, address="p5").pages) == 3
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
        assert len(store.process(name).messages()) == len(talk) - 1


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
        assert not store.processes()
    setup.chat([user("Hello."), said("OK."), user("Again.")])
    with setup.store() as store:
        assert [len(store.process(info.name).messages()) for info in store.processes()] == [4]
