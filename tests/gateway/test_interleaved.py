"""Replies of OpenAI's responses whose items come in every order, by clients that send them back as they came."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kilburn.message import Kind, Message, Part, Role
from kilburn.testing.upstream import Refusal, Sent, Upstream, calling

Item = dict[str, Any]

FILLER = "The river carries sand, and the sand carries gold. "
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}
ORDERS = ("MRF", "RMRF", "RFRF", "RWM", "RWMRF", "RF", "MF", "FF", "RFF", "RFMF", "MMF", "RMRM", "RRF", "WRF", "M", "FRM")
"""M: words, R: reasoning, F: a call, W: a search of the provider's own."""


RECALLS = ("", "R", "RM", "M", "RMR", "RWM", "RWR")
"""What comes before a recall."""


class Model:
    """Says items in the orders that it is given, and recalls first where it may and is to."""

    def __init__(self, orders: list[str], *, seed: int = 0, recalls: Any = (), bare: bool = False) -> None:
        self.orders, self.random, self.recalls, self.bare = list(orders), random.Random(seed), recalls, bare
        self.number = self.recalled = 0
        self.once = False
        """Whether it recalls once in a reply at most."""

    def say(self, sent: Sent) -> Message:
        """One reply."""
        offered = any(tool.get("name") == "recall" for tool in sent.body.get("tools") or ())
        behind = any(item.get("name") == "recall" for item in sent.body["input"][-2:])
        if self.recalls and offered and not (behind and self.once) and self.random.random() < 0.5:
            self.recalled += 1
            parts = self.parts(self.random.choice(self.recalls))
            parts.append(Part(kind=Kind.CALL, text='{"address": "p2"}', name="recall", call=""))
            return Message(role=Role.ASSISTANT, parts=tuple(parts))
        return Message(role=Role.ASSISTANT, parts=tuple(self.parts(self.orders.pop(0) if self.orders else "M")))

    def parts(self, order: str) -> list[Part]:
        return [self.part(letter) for letter in order]

    def part(self, letter: str) -> Part:
        self.number += 1
        number = self.number
        if letter == "M":
            if number % 2:
                return Part(kind=Kind.TEXT, text=f"Words {number}. {FILLER * 3}")
            said = [{"type": "output_text", "text": f"Words {number}. {FILLER}", "annotations": [], "logprobs": []}]
            item = {"type": "message", "role": "assistant", "status": "completed", "phase": "commentary", "content": said}
            return Part(kind=Kind.OPAQUE, text=json.dumps(item))
        if letter == "R":
            return Part(kind=Kind.REASONING, text="" if self.bare else f"Thought {number}. {FILLER}")
        if letter == "F":
            return Part(kind=Kind.CALL, text=json.dumps({"path": f"file {number}"}), name="read", call="")
        search = {"type": "search", "query": f"rivers {number}", "queries": [f"rivers {number}"]}
        return Part(kind=Kind.OPAQUE, text=json.dumps({"type": "web_search_call", "status": "completed", "action": search}))


class Agent:
    """Sends back what it got. `how`: "kept" at the provider, with ids; "sealed": nothing is kept there, and reasoning is
    encrypted; "bare": as Codex does it, without ids too; "chain": by the id of the last response alone."""

    def __init__(self, setup: Any, how: str, *, streamed: bool) -> None:
        self.setup, self.how, self.streamed = setup, how, streamed
        self.items: list[Item] = []
        self.last: str | None = None
        self.sessions: set[str] = set()

    def run(self, words: str) -> None:
        """Ask, and answer calls, until there are none."""
        new: list[Item] = [{"role": "user", "content": words}]
        while new:
            self.items += new
            reply = self.ask(new)
            output = [item.model_dump(exclude_unset=True) for item in reply.output]
            self.items += [self.again(item) for item in output]
            called = [item["call_id"] for item in output if item["type"] == "function_call"]
            new = [{"type": "function_call_output", "call_id": call, "output": f"{call}: {FILLER * 4}"} for call in called]
            self.last = reply.id

    def ask(self, new: list[Item]) -> Any:
        # As it is: the client's library would look at each item again for names to be written otherwise, and there are none.
        more: Item = {"model": "m", "tools": [READ], "extra_body": {"input": self.items}}
        if self.how in ("sealed", "bare"):
            more |= {"store": False, "include": ["reasoning.encrypted_content"]}
        elif self.how == "chain" and self.last is not None:
            more |= {"extra_body": {"input": new}, "previous_response_id": self.last}
        raw = self.setup.openai.responses.with_raw_response.create(**more, stream=self.streamed)
        self.sessions.add(raw.headers.get("x-kilburn-session", "none"))
        if not self.streamed:
            return raw.parse()
        events = list(raw.parse())
        assert events[-1].type == "response.completed"
        return events[-1].response

    def again(self, item: Item) -> Item:
        if self.how != "bare":
            return item
        left = {key: value for key, value in item.items() if key not in ("id", "status")}
        return {**left, "content": None} if item["type"] == "reasoning" else left


def plain(items: list[Item]) -> list[Item]:
    """Items without what an item may be sent without, and without the gateway's own calls and the reasoning that led to them."""
    out: list[Item] = []
    ours = set()
    for item in items:
        if item.get("name") == "recall" or item.get("call_id") in ours:
            while "output" not in item and out and out[-1]["type"] == "reasoning":
                out.pop()
            ours.add(item["call_id"])
            continue
        item = {key: value for key, value in item.items() if key not in ("id", "status") or item.get("type") == "reasoning"}
        if item.get("type", "message") == "message" and isinstance(item["content"], list):
            item["type"] = "message"
        out.append({"type": "message", **item})
    return out


def orders(seed: int, count: int = 60) -> list[str]:
    """Orders at random: reasoning comes before something, and a few replies end a turn."""
    rng = random.Random(seed)
    if not seed:
        return [*ORDERS] * 4
    made = []
    for _ in range(count):
        letters = "".join(rng.choice("RMFW") for _ in range(rng.randint(1, 5)))
        made.append(letters.rstrip("R") + rng.choice("MF") if letters.endswith("R") else letters)
    return made


@pytest.mark.parametrize(("seed", "how"), [(0, "kept"), (1, "sealed"), (2, "bare"), (3, "kept")])
def test_a_conversation_is_one_session_whatever_the_order_of_its_items(gateway: Any, seed: int, how: str) -> None:
    model = Model(orders(seed), bare=seed > 1)
    setup = gateway(upstream=Upstream(otherwise=model.say))
    agent = Agent(setup, how, streamed=bool(seed % 2))
    for turn in range(6):
        agent.run(f"Question {turn}.")
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong
    assert setup.upstream.sent[-1].body["input"] == agent.items[: len(setup.upstream.sent[-1].body["input"])]
    assert len(agent.sessions) == 1, agent.sessions


@pytest.mark.slow
@pytest.mark.parametrize("recalls", [False, True])
@pytest.mark.parametrize("how", ["kept", "sealed", "bare", "chain"])
@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_that_overflows_is_one_session_too(gateway: Any, seed: int, how: str, recalls: bool) -> None:
    model = Model(orders(seed, 200), seed=seed, recalls=RECALLS if recalls else (), bare=seed > 1)
    setup = gateway(upstream=Upstream(otherwise=model.say), window=3000)
    agent = Agent(setup, how, streamed=bool(seed % 2))
    for turn in range(14):
        agent.run(f"Question {turn}. {FILLER * 5}")
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong
    assert len(agent.sessions) == 1, agent.sessions
    assert model.recalled or not recalls
    assert max(sent.tokens for sent in setup.upstream.sent) <= 3000


@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_client_keeps_its_provider_takes_without_the_gateway(gateway: Any, streamed: bool) -> None:
    """A client is not shown the reasoning of a hidden call: it would send it back without the call."""
    model = Model(orders(1), seed=1, recalls=("R", "RM", "", "M"))
    setup = gateway(upstream=Upstream(otherwise=model.say), window=60_000)
    agent = Agent(setup, "kept", streamed=streamed)
    agent.run("Where does it end? " + FILLER * 6000)
    for turn in range(3):
        agent.run(f"Question {turn}.")
    assert model.recalled
    assert "reasoning" in {item.get("type") for item in agent.items}
    past = setup.openai.with_options(default_headers={"x-kilburn": "off"})
    past.responses.create(model="m", tools=[READ], input=agent.items)
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong


@pytest.mark.parametrize(("seed", "how"), [(1, "kept"), (2, "sealed")])
def test_items_that_the_gateway_writes_again_are_those_that_the_client_sent(gateway: Any, seed: int, how: str) -> None:
    model = Model(orders(seed), seed=seed, recalls=("", "R", "RM", "M"))
    model.once = True  # words that are said before a recall are kept behind the last one
    setup = gateway(upstream=Upstream(otherwise=model.say), window=60_000, policy="fifo")
    agent = Agent(setup, how, streamed=False)
    agent.run("Where does it end? " + FILLER * 6000)
    for turn in range(6):
        agent.run(f"Question {turn}.")
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong
    assert model.recalled
    sent = plain(setup.upstream.sent[-1].body["input"])
    first = next(at for at, item in enumerate(sent) if item.get("content") == "Question 0.")
    asked = plain(agent.items)
    start = next(at for at, item in enumerate(asked) if item.get("content") == "Question 0.")
    assert sent[first:] == asked[start:][: len(sent) - first]
    assert len(agent.sessions) == 1, agent.sessions


def following(setup: Any, words: str, before: str | None, **more: Any) -> tuple[Any, str]:
    """A reply to words that go on from another reply, and its session."""
    raw = setup.openai.responses.with_raw_response.create(
        model="m", input=words, **({} if before is None else {"previous_response_id": before}), **more
    )
    return raw.parse(), raw.headers.get("x-kilburn-session", "none")


@pytest.mark.parametrize("window", [2000, 1_000_000])
def test_a_chain_of_ids_goes_on_after_a_restart(gateway: Any, window: int) -> None:
    provider = Upstream()
    setup = gateway(upstream=provider, window=window)
    before, names = None, set()
    for turn in range(12):
        if turn % 3 == 2:
            setup = gateway(upstream=provider, window=window)
        reply, name = following(setup, f"Question {turn}. {FILLER * 20}", before, instructions="Be brief.")
        before = reply.id
        names.add(name)
    assert len(names) == 1, names
    assert not provider.refused
    assert max(sent.tokens for sent in provider.sent) <= max(2000, sum(len(FILLER * 20) for _ in range(12)) // 3)
    last = provider.sent[-1].body
    assert ("previous_response_id" in last) == (window > 2000), "what left the window is not read from the provider's copy"
    assert last["instructions"] == "Be brief."
    with setup.store() as store:
        roles = [message["role"] for message in store.session(names.pop()).contents.messages()]
    assert roles == ["user", "assistant"] * 12


@pytest.mark.parametrize("window", [2000, 1_000_000])
def test_two_ways_on_from_one_reply(gateway: Any, window: int) -> None:
    setup = gateway(window=window)
    replies, names = [], []
    before = None
    for turn in range(8):
        reply, name = following(setup, f"Question {turn}. {FILLER * 20}", before)
        replies.append(reply)
        names.append(name)
        before = reply.id
    assert len(set(names)) == 1
    again, branch = following(setup, "Another way?", replies[2].id)
    assert branch == f"{names[0]}~2"
    _, name = following(setup, "And on?", again.id)
    assert name == branch
    assert following(setup, "Question 8.", replies[-1].id)[1] == names[0]
    assert not setup.upstream.refused
    with setup.store() as store:
        said = [message["content"] for message in store.session(branch).contents.messages() if message["role"] == "user"]
    assert [words.split(".")[0] for words in said] == ["Question 0", "Question 1", "Question 2", "Another way?", "And on?"]


def test_what_else_a_provider_keeps_goes_through_as_it_is(gateway: Any) -> None:
    setup = gateway()
    reply, name = following(setup, "Hello", None)
    first = setup.upstream.sent[-1]
    for more in ({"conversation": "conv_1"}, {"background": True, "previous_response_id": reply.id}):
        setup.openai.responses.create(model="m", input="And?", **more)
        assert setup.upstream.sent[-1].body == {"model": "m", "input": "And?", **more}
    assert first.body["input"] == "Hello"
    assert following(setup, "Go on", reply.id, extra_headers={"x-kilburn-session": "another"})[1] == "none"
    assert following(setup, "Go on", reply.id, extra_headers={"x-kilburn-session": name})[1] == name
    with setup.store() as store:
        assert [info.name for info in store.sessions()] == [name]


def test_a_chain_whose_session_was_forgotten_is_the_providers(gateway: Any) -> None:
    setup = gateway()
    reply, name = following(setup, "Hello", None)
    with setup.store() as store:
        store.forget(session=name)
    assert following(setup, "Go on", reply.id)[1] == "none"
    assert not setup.upstream.refused


def test_an_id_that_was_streamed_before_a_recall_can_be_gone_on_from(gateway: Any) -> None:
    setup = gateway(calling(("recall", {"address": "p1"}), text="Let me look."), "River 0.", "Yes.", window=2000)
    talk = [{"role": role, "content": f"{role} {n}. {FILLER * 10}"} for n in range(12) for role in ("user", "assistant")]
    asked = [*talk, {"role": "user", "content": "What was first?"}]
    events = list(setup.openai.responses.create(model="m", input=asked, stream=True))
    seen = events[0].response.id
    assert events[-1].response.id == seen
    assert following(setup, "Sure?", seen)[0].output_text == "Yes."
    assert not setup.upstream.refused
    assert "River 0." in str(setup.upstream.sent[-1].body["input"])
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_reasoning_goes_with_the_words_that_came_of_it(gateway: Any) -> None:
    """Words that a client is shown before a recall are kept behind it, and their reasoning with them."""
    before = (Part(kind=Kind.REASONING, text="Speak first."), Part(kind=Kind.TEXT, text="Let me look."))
    recall = (Part(kind=Kind.REASONING, text="It has left."), *calling(("recall", {"address": "p1"})).parts)
    setup = gateway(Message(role=Role.ASSISTANT, parts=(*before, *recall)), "River 0.", "Yes.", window=2000, policy="fifo")
    talk = [{"role": role, "content": f"{role} {n}. {FILLER * 10}"} for n in range(12) for role in ("user", "assistant")]
    talk.append({"role": "user", "content": "What was first?"})
    reply = setup.openai.responses.create(model="m", input=talk)
    items = [item.model_dump(exclude_unset=True) for item in reply.output]
    setup.openai.responses.create(model="m", input=[*talk, *items, {"role": "user", "content": "Sure?"}])
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong
    _, second, third = ([item.get("type", item.get("role")) for item in sent.body["input"]] for sent in setup.upstream.sent)
    assert second[-3:] == ["reasoning", "function_call", "function_call_output"]
    assert "reasoning" not in second[:-3]
    at = third.index("function_call")
    assert third[at - 1 : at + 5] == ["reasoning", "function_call", "function_call_output", "reasoning", "message", "message"]


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("window", [1500, 1_000_000])
def test_a_reply_with_calls_that_is_asked_for_twice(gateway: Any, window: int, chained: bool) -> None:
    setup = gateway(upstream=Upstream(otherwise=lambda sent: Message(role=Role.ASSISTANT, parts=said)), window=window)
    talk: list[Item] = [{"role": "user", "content": f"Go. {FILLER * 10}"}]
    new, before, names = talk, None, set()
    calls = [Part(kind=Kind.CALL, text=json.dumps({"path": name}), name="read", call="") for name in "ab"]
    for turn in range(12):
        said = (Part(kind=Kind.REASONING, text="Hm."), *calls) if turn % 2 else (Part(kind=Kind.TEXT, text=f"Words {turn}."),)
        more = {"previous_response_id": before} if chained and before else {}
        for _ in range(2):
            raw = setup.openai.responses.with_raw_response.create(model="m", tools=[READ], input=new if chained else talk, **more)
            names.add(raw.headers["x-kilburn-session"])
        reply = raw.parse()
        output = [item.model_dump(exclude_unset=True) for item in reply.output]
        called = [item["call_id"] for item in output if item["type"] == "function_call"]
        new = [{"type": "function_call_output", "call_id": call, "output": f"{turn} {call}"} for call in called]
        new = new or [{"role": "user", "content": f"On {turn}. {FILLER * 10}"}]
        talk, before = [*talk, *output, *new], reply.id
    assert not setup.upstream.refused, setup.upstream.refused[0].wrong
    if window > 1500:
        assert len(names) == 1, names


def test_a_client_that_leaves_and_asks_again_at_once(gateway: Any) -> None:
    """It hangs up before the stream, in the middle and at its end, and asks again before that is known."""
    setup = gateway(upstream=Upstream(otherwise="A reply of a few words.", pause=0.01), window=1_000_000)
    talk: list[Item] = []
    names = set()
    for turn in range(8):
        talk.append({"role": "user", "content": f"Question {turn}."})
        for events in (0, 1, 3, 100):
            stream = setup.openai.responses.create(model="m", input=talk, stream=True)
            names.add(stream.response.headers["x-kilburn-session"])
            for _ in zip(range(events), stream, strict=False):
                pass
            stream.response.close()
        reply = setup.openai.responses.create(model="m", input=talk)
        talk += [item.model_dump(exclude_unset=True) for item in reply.output]
    assert len(names) == 1, names
    with setup.store() as store:
        [info] = store.sessions()
        said = [message["role"] for message in store.session(info.name).contents.messages()]
    assert said == ["user", "assistant"] * 8


@pytest.mark.parametrize("form", ["chat", "messages", "responses"])
def test_a_request_that_is_sent_many_times_at_once(gateway: Any, form: str) -> None:
    setup = gateway(upstream=Upstream(otherwise="The same words.", delay=0.05), form=form)

    def ask(turn: int) -> str:
        talk = [{"role": role, "content": f"{role} {n}"} for n in range(turn) for role in ("user", "assistant")]
        talk.append({"role": "user", "content": f"user {turn}"})
        if form == "messages":
            raw = setup.anthropic.messages.with_raw_response.create(model="m", max_tokens=9, messages=talk)
        elif form == "chat":
            raw = setup.openai.chat.completions.with_raw_response.create(model="m", messages=talk)
        else:
            raw = setup.openai.responses.with_raw_response.create(model="m", input=talk)
        return str(raw.headers["x-kilburn-session"])

    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(ask, [2] * 24))
    assert len(names) == 1, names
    with setup.store() as store:
        assert [info.name for info in store.sessions()] == [*names]


def test_a_request_after_errors_of_the_upstream_is_the_same_session(gateway: Any) -> None:
    refusals = [Refusal(status=status) for status in (500, 529, 429)]
    setup = gateway(*refusals, "Done.", *refusals, "Again.")
    talk: list[Item] = [{"role": "user", "content": "Go"}]
    for words in ("Done.", "Again."):
        for _ in refusals:
            with pytest.raises(openai.APIStatusError):
                setup.openai.responses.create(model="m", input=talk)
        assert setup.openai.responses.create(model="m", input=talk).output_text == words
        talk += [{"role": "assistant", "content": words}, {"role": "user", "content": "On"}]
    with setup.store() as store:
        assert len(store.sessions()) == 1
