"""What a program asks beside its conversation, by the same wrapped client: it goes past the session, byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kilburn
from effort import rounds
from kilburn.testing import check_laws
from kilburn.testing.upstream import Sent, Upstream, calling, serving

openai = pytest.importorskip("openai", reason="the extra openai is not installed")
anthropic = pytest.importorskip("anthropic", reason="the extra anthropic is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from kilburn.adapters.clients import wrap  # noqa: E402
from kilburn.adapters.history import Recollections  # noqa: E402
from kilburn.errors import SpecError  # noqa: E402

MAIN = "You help with the pumps of a waterworks, and answer in one sentence."
OTHER = "Give a title of three words."


@pytest.fixture
def store() -> Iterator[kilburn.Store]:
    with kilburn.open(":memory:", window=2500, policy="lru", embedder=None, tokenizer="chars/4") as store:
        yield store
    while OPEN:
        OPEN.pop().close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


OPEN: list[Any] = []
"""Clients that are closed after the test."""


class Door:
    """A client, plain and wrapped, and one way to ask it: with a system prompt, a history, streamed or not."""

    key = "messages"

    def __init__(self, url: str, session: kilburn.Session) -> None:
        self.plain = self.made(url)
        self.client = wrap(self.plain, session)
        OPEN.append(self.plain)

    def made(self, url: str) -> Any:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, system: str, history: list[Any], *, plain: bool = False, stream: bool = False) -> str:
        given = [{"role": "system", "content": system}] * bool(system) + history
        door = (self.plain if plain else self.client).chat.completions
        if stream:
            pieces = door.create(model="m", messages=given, stream=True)
            return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        return door.create(model="m", messages=given).choices[0].message.content or ""


class Responses(Door):
    key = "input"

    def ask(self, system: str, history: list[Any], *, plain: bool = False, stream: bool = False) -> str:
        door = (self.plain if plain else self.client).responses
        given: dict[str, Any] = {"model": "m", "input": history} | ({"instructions": system} if system else {})
        if stream:
            with door.stream(**given) as events:
                return events.get_final_response().output_text
        return door.create(**given).output_text


class Messages(Door):
    def made(self, url: str) -> Any:
        return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def ask(self, system: str, history: list[Any], *, plain: bool = False, stream: bool = False) -> str:
        door = (self.plain if plain else self.client).messages
        given: dict[str, Any] = {"model": "claude-opus-4-8", "max_tokens": 99, "messages": history}
        given |= {"system": system} if system else {}
        if stream:
            with door.stream(**given) as events:
                return events.get_final_message().content[0].text
        return door.create(**given).content[0].text


every = pytest.mark.parametrize("kind", [Door, Responses, Messages], ids=["chat", "responses", "messages"])


def grown(door: Any, turns: int, system: str = MAIN, said: str = "pump") -> list[Any]:
    """A conversation of so many turns."""
    history: list[Any] = []
    for number in range(turns):
        history.append(user(f"How is {said} {number}?"))
        history.append(reply(door.ask(system, history)))
    return history


def state(session: kilburn.Session) -> tuple[Any, ...]:
    return session.contents.messages(), session.contents.pages(), list(session.ledger.events()), session.contents.shown()


def texts(session: kilburn.Session) -> list[str]:
    """What is in force of the session, in order."""
    return [session.contents.text(page.id) for page, place in session.contents.pages() if place.at not in ("retired", "dropped")]


def passes(door: Any, upstream: Upstream, session: kilburn.Session, system: str, history: list[Any], stream: bool) -> None:
    """A history goes past the session: as the plain client sends it, and nothing changes."""
    before = state(session)
    door.ask(system, history, plain=True, stream=stream)
    door.ask(system, history, stream=stream)
    bare, sent = upstream.sent[-2:]
    assert sent.raw == bare.raw
    assert {key: value for key, value in sent.headers.items() if "retry" not in key} == {
        key: value for key, value in bare.headers.items() if "retry" not in key
    }
    assert state(session) == before


@every
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_asked_beside_the_conversation_goes_as_it_is(kind: Any, stream: bool, store: kilburn.Store) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")
    with serving(upstream) as url:
        door = kind(url, session)
        history = grown(door, 3)
        beside = [
            ("", [user("Give a title to: How is pump 0?")]),
            (OTHER, [user("How is pump 0?")]),
            (OTHER, [user(history[-2]["content"])]),
            (OTHER, [*history[-2:], user("Was this good?")]),
            ("", [user(history[-2]["content"])]),
            (MAIN, [user("Is this a question on pumps: how is pump 2?")]),
            (MAIN, [*history[:2], user("A title, please.")]),
            (OTHER, [user("One"), reply("Reply 1."), user("Two")]),
            ("", [user(f"Rate this answer: {history[-1]['content']}")]),
        ]
        for system, given in beside:
            passes(door, upstream, session, system, given, stream)
        history += [user("And pump 9?")]
        history += [reply(door.ask(MAIN, history, stream=stream))]
        assert "search_memory" in upstream.sent[-1].raw.decode()
        passes(door, upstream, session, "", [user("Give a title to: And pump 9?")], stream)
        assert texts(session) == [message["content"] for message in history]
    assert not upstream.refused
    check_laws(session)


@every
def test_a_first_call_that_is_none_of_the_conversation(kind: Any, store: kilburn.Store) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")
    with serving(upstream) as url:
        door = kind(url, session)
        door.ask(OTHER, [user("How is pump 0?")])
        history = grown(door, 5)
        assert texts(session) == [message["content"] for message in history]
        passes(door, upstream, session, OTHER, [user("How is pump 0?")], False)
        passes(door, upstream, session, OTHER, [user("Is this rude: How is pump 4?")], False)


@every
def test_a_title_while_the_first_reply_is_on_its_way(kind: Any, store: kilburn.Store) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply to {sent.raw[-60:].hex()}."), store.session("s")
    with serving(upstream) as url, ThreadPoolExecutor(8) as pool:
        door = kind(url, session)
        history: list[Any] = []
        for number in range(6):
            history.append(user(f"How is pump {number}?"))
            asked = [pool.submit(door.ask, OTHER, [history[0]]), pool.submit(door.ask, "", [user(f"Rude? How is {number}?")])]
            main = pool.submit(door.ask, MAIN, list(history))
            asked += [pool.submit(door.ask, OTHER, [user(f"Judge {one}"), reply("Yes"), user("Sure?")]) for one in range(3)]
            history.append(reply(main.result()))
            assert all(each.result() for each in asked)
        assert texts(session)[-10:] == [message["content"] for message in history[-10:]]
    assert not upstream.refused
    check_laws(session)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_async_clients_too(stream: bool, store: kilburn.Store) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")

    async def ask(client: Any, system: str, given: list[Any]) -> str:
        messages = [{"role": "system", "content": system}, *given]
        if not stream:
            return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content or ""
        pieces = await client.chat.completions.create(model="m", messages=messages, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])

    with serving(upstream) as url:
        plain = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        client, history = wrap(plain, session), []
        for number in range(4):
            history.append(user(f"How is pump {number}?"))
            history.append(reply(await ask(client, MAIN, history)))
            before = state(session)
            titles = [user(f"Title of {number}")]
            said = await asyncio.gather(*(ask(client, OTHER, titles) for _ in range(3)), ask(plain, OTHER, titles))
            assert len(said) == 4
            assert len({sent.raw for sent in upstream.sent[-4:]}) == 1
            assert state(session) == before
        await client.close()
        await plain.close()


@every
def test_the_conversation_stays_the_sessions(kind: Any, store: kilburn.Store) -> None:
    """Its history may be tried again, edited at its end, cut, summed up, or follow another system prompt."""
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")

    def own(system: str, history: list[Any]) -> None:
        door.ask(system, history)
        assert "search_memory" in upstream.sent[-1].raw.decode(), "it went through the session"

    with serving(upstream) as url:
        door = kind(url, session)
        history = grown(door, 3)
        own(MAIN, history[:-1])  # once more
        own(MAIN, [*history[:-2], user("How is pump 2 now?")])  # edited
        history[-2:] = [user("How is pump 2 now?"), reply("It runs.")]  # the client's own words
        own(MAIN.replace("pumps", "pumps and valves"), [*history, user("And 3?")])
        own("You are somebody else now, who speaks of trees and of nothing besides.", [*history, user("And 3?")])
        history += [user("And 3?"), reply(f"Reply {len(upstream.sent)}.")]
        own(MAIN, [*history[-4:], user("Cut.")])
        history += [user("Cut."), reply(f"Reply {len(upstream.sent)}.")]
        own(MAIN, [user("Earlier they spoke of pumps."), reply("Noted."), *history[-2:], user("And 4?")])
        own(MAIN, [user("Earlier they spoke of pumps."), reply("Noted."), *history[-2:], user("And 4?")])
    assert not upstream.refused
    check_laws(session)


@every
def test_a_history_that_is_taken_up_again_far_back(kind: Any, store: kilburn.Store) -> None:
    """Once it goes on, it is the conversation."""
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")
    with serving(upstream) as url:
        door = kind(url, session)
        history = [*grown(door, 4)[:2], user("Rather of valves.")]
        before = state(session)
        history.append(reply(door.ask(MAIN, history)))
        assert state(session) == before
        history.append(user("Go on."))
        history.append(reply(door.ask(MAIN, history)))
        assert texts(session) == [message["content"] for message in history]


@every
def test_one_that_would_not_fit_needs_the_window(kind: Any, store: kilburn.Store) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}.", window=2500), store.session("s")
    with serving(upstream) as url:
        door, history = kind(url, session), []
        for number in range(12):
            history.append(user(f"Pump {number}: " + "pressure normal, " * 60))
            history.append(reply(door.ask(MAIN, history)))
        door.ask(MAIN, [*history[:-6], user("Go back to there.")])
    assert not upstream.refused
    assert max(sent.tokens for sent in upstream.sent) <= 2500
    check_laws(session)


def test_two_conversations_by_one_client_are_told_of_once(store: kilburn.Store, caplog: pytest.LogCaptureFixture) -> None:
    upstream, session = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}."), store.session("s")
    with serving(upstream) as url, caplog.at_level(logging.WARNING, "kilburn"):
        door = Door(url, session)
        history = grown(door, 2)
        before = state(session)
        grown(door, 5, OTHER, "valve")
        assert state(session) == before
        said = [record.message for record in caplog.records if "goes past it" in record.message]
        assert len(said) == 1
        assert said[0].endswith("wrap a client for it, with a session of its own")
        grown(door, 2, "", "tap")
        assert len([record for record in caplog.records if "goes past it" in record.message]) == 2
        again = door.client.with_options(timeout=9)
        again.chat.completions.create(model="m", messages=[user("Give a title.")])
        assert state(session) == before
        assert history


def test_what_is_forgotten_or_restarted_is_still_known(tmp_path: Any, store: kilburn.Store) -> None:
    upstream = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}.")
    history: list[Any] = []
    with serving(upstream) as url:
        for run in range(3):
            with kilburn.open(str(tmp_path / "a.db"), window=2500, tokenizer="chars/4", embedder=None) as kept:
                session = kept.session("s")
                door = Door(url, session)
                if run:
                    passes(door, upstream, session, OTHER, [user("Give a title.")], False)
                for number in range(3):
                    history.append(user(f"How is pump {run}.{number}?"))
                    history.append(reply(door.ask(MAIN, history)))
                    assert "search_memory" in upstream.sent[-1].raw.decode()
                session.forget(f"p{6 * run + 1}")
                check_laws(session)


def test_a_call_that_the_provider_refuses_leaves_the_session(store: kilburn.Store) -> None:
    session, upstream = store.session("s"), Upstream(otherwise="Yes.", window=400)
    with serving(upstream) as url:
        door = Door(url, session)
        grown(door, 2)
        before = state(session)
        with pytest.raises(openai.BadRequestError):
            door.ask(OTHER, [user("words " * 3000)])
        with pytest.raises(kilburn.KilburnError):
            door.client.chat.completions.create(model="m", messages=[{"role": "nobody", "content": 1}])
        with door.client.chat.completions.create(model="m", messages=[user("A title")], stream=True) as stream:
            next(stream)
        assert state(session) == before


def test_tool_loops_beside_the_conversation(store: kilburn.Store) -> None:
    """A sub-agent with tools of its own, and calls with the ids of the session's."""
    session = store.session("s")

    def answer(sent: Sent) -> Any:
        said = sent.body["messages"]
        return calling(("look", {"at": "a"}, f"call_{len(said)}")) if said[-1]["role"] == "user" else "Done."

    upstream = Upstream(otherwise=answer)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with serving(upstream) as url:
        door = Door(url, session)

        def run(history: list[Any], system: str) -> list[Any]:
            given = [{"role": "system", "content": system}]
            for _ in range(2):
                made = door.client.chat.completions.create(model="m", messages=given + history, tools=tools).choices[0].message
                history.append(made.model_dump(exclude_none=True))
                history += [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in made.tool_calls or ()]
            return history

        history = run([user("Look at a.")], MAIN)
        history = run([*history, user("Look at b.")], MAIN)
        before = state(session)
        run([user("Look at c, sub-agent.")], OTHER)
        run([user("Look at d, sub-agent.")], MAIN)
        assert state(session) == before
        run([*history, user("Look at e.")], MAIN)
        assert len(session.contents.messages()) == 12
    assert not upstream.refused
    check_laws(session)


class Lookalike:
    """What only has the name of a client."""

    _client = None


OpenAI = type("OpenAI", (Lookalike,), {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (openai.OpenAI, "the class OpenAI, not a client .*OpenAI"),
        (anthropic.AsyncAnthropic, "the class AsyncAnthropic, not a client"),
        (OpenAI(), "a client of type OpenAI, from test_foreign|from tests"),
        (openai, "a client of type module"),
        (None, "a client of type NoneType"),
        ("gpt-5", "a client of type str, from builtins"),
        (anthropic.AnthropicBedrock(aws_region="x"), "a client of type AnthropicBedrock, from anthropic"),
    ],
)
def test_what_cannot_be_wrapped_is_named(given: Any, said: str, store: kilburn.Store) -> None:
    with pytest.raises(SpecError, match=said):
        wrap(given, store.session("s"))


def test_the_other_arguments_are_looked_at(store: kilburn.Store) -> None:
    OPEN.extend([openai.OpenAI(api_key="none"), anthropic.Anthropic(api_key="none")])
    for client in OPEN:
        for wrong in (store, "s", store.memory("ana"), None, kilburn.Session):
            with pytest.raises(SpecError, match=r"a session of type .*store\.session"):
                wrap(client, wrong)
        with pytest.raises(SpecError, match=r"recollections of type Store .*give Recollections\(store\)"):
            wrap(client, store.session("s"), recollections=store)  # type: ignore[arg-type]
        made = wrap(client, store.session("s"), recollections=Recollections(store))
        for again in (made, made.with_options(timeout=3)):
            with pytest.raises(SpecError, match="wrapped already"):
                wrap(again, store.session("t"))
        assert wrap(client, store.session("t")) is not made


def test_any_order_of_calls_leaves_a_valid_session(store: kilburn.Store) -> None:
    """Histories that share beginnings, ends and words, in many orders: in every one under `run.py test --all`."""
    upstream = Upstream(otherwise=lambda sent: f"Reply {len(upstream.sent)}.")
    base = [user("A"), reply("a"), user("B"), reply("b"), user("C")]
    others = [base[:1], base[:3], base, base[2:], [user("T")], [user("A"), reply("x"), user("B")], [user("S"), *base[3:]]]
    with serving(upstream) as url:
        orders = [*itertools.permutations(others, 3)]
        for number, order in enumerate(random.Random(0).sample(orders, rounds(40, len(orders)))):
            session = store.session(f"s{number}")
            door = Door(url, session)
            for at, given in enumerate(order):
                door.ask((MAIN, OTHER, "")[at], given)
                assert json.loads(upstream.sent[-1].raw)["messages"][-1]["content"].endswith(given[-1]["content"])
            check_laws(session)
    assert not upstream.refused
