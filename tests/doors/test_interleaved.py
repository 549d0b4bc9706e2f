"""Interleaved reasoning in every order: one session, and nothing that a strict provider refuses.

A reply has reasoning (R), words (M), calls (F) and the provider's own searches (W) in any order, up to five. The client appends
what came, as SDKs do, and goes on; the stub refuses what the providers refuse, and says which words were over the window.

A long run: `PYTHONPATH=src:tests python tests/doors/test_interleaved.py --trials 500 --seed 1`.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from doors.stub import Answer, Judge, Part, Seen, answer_of, refusal, whole
from doors.visit import Got, Ground, Json, Trial, check, find_broken, format_broken, gateway, prose, run

WINDOW = 2500
ORDERS = ["".join(order) for length in range(1, 6) for order in itertools.product("RMFW", repeat=length)]
"""All orders; what ends with reasoning is no reply."""
ORDERS = [order for order in ORDERS if not order.endswith("R")]


class Model:
    """Says what it is told to, and calls recall now and then, where that is offered."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.parts: list[Part] = []
        self.encrypted = True
        self.recalls: list[list[Part]] = []
        self.refused: list[str] = []
        self.prompts: list[Json] = []
        self.over: list[int] = []
        self.window = 1 << 60
        self.lock = threading.Lock()

    def answer(self, seen: Seen) -> Answer:
        with self.lock:
            form, body = seen.form, seen.body
            self.prompts.append(body)
            if wrong := self.judge.wrong(form, body):
                self.refused.append(wrong)
                return refusal(form, wrong)
            if (size := size_of(body)) > self.window:
                self.over.append(size)
            offered = "recall" in [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools", ())]
            parts = self.recalls.pop() if offered and self.recalls else self.parts
            reply = whole(form, parts, encrypted=self.encrypted)
            self.judge.gave(form, reply)
            return answer_of(form, reply, bool(body.get("stream")))


def texts(value: Any) -> Iterator[str]:
    """The words in a prompt: what counts in any tokenizer, without keys, ids and seals."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in (
                "text",
                "content",
                "thinking",
                "arguments",
                "output",
                "input",
                "summary",
                "reasoning_content",
                "query",
                "messages",
            ):
                yield from texts(inner)


def size_of(body: Json) -> int:
    """Tokens of the words of a prompt, four characters each: less than any honest count of it."""
    return sum(len(text) for text in texts(body.get("input") or body.get("messages"))) // 4


def reply_of(form: str, got: Got, streamed: bool) -> Json:
    """A reply as an SDK would have it, put together from its events where it is streamed."""
    if not streamed:
        return dict(got.json)
    events = [json.loads(line[6:]) for line in got.body.decode().splitlines() if line.startswith("data: {")]
    if form == "responses":
        done = [event["response"] for event in events if event["type"] == "response.completed"]
        check(len(done) == 1, "a stream has one end", got.body[-400:])
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        check(
            items == done[0]["output"], "the items of a stream are those of its end", {"items": items, "end": done[0]["output"]}
        )
        return dict(done[0])
    if form == "messages":
        blocks: list[Json] = []
        for event in events:
            if event["type"] == "content_block_start":
                check(event["index"] == len(blocks), "blocks have their places", got.body[-400:])
                blocks.append(dict(event["content_block"], partial=""))
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                for key in ("text", "thinking", "signature"):
                    if key in delta:
                        blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
                blocks[-1]["partial"] += delta.get("partial_json", "")
        for block in blocks:
            if written := block.pop("partial"):
                block["input"] = json.loads(written)
        return {"content": blocks}
    message: Json = {"role": "assistant", "content": None}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message}]}


def words_of(form: str, reply: Json) -> list[str]:
    """What a reply says, without its reasoning: by this a session is recognised."""
    if form == "chat":
        message = reply["choices"][0]["message"]
        return list(texts([{**message, "reasoning_content": ""}, [call["function"] for call in message.get("tool_calls") or ()]]))
    said = reply["output"] if form == "responses" else reply["content"]
    return list(texts([part for part in said if part["type"] not in ("reasoning", "thinking", "redacted_thinking")]))


def without_ids(items: list[Json]) -> list[Json]:
    """As Codex sends them back: no ids, no status."""
    return [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]


class Client:
    """A client of one dialect: its history, and how it goes on."""

    def __init__(self, rng: random.Random, form: str, **traits: Any) -> None:
        self.rng, self.form, self.traits = rng, form, traits
        self.history: list[Json] = []

    def say(self, text: str) -> None:
        said: Any = text
        if self.form == "messages" and self.traits.get("documents"):
            data = {"type": "text", "media_type": "text/plain", "data": prose(self.rng, 20)}
            said = [{"type": "document", "source": data, "title": "notes"}, {"type": "text", "text": text}]
        if self.form == "responses" and self.traits.get("parts"):
            said = [{"type": "input_text", "text": text}]
        self.history.append({"role": "user", "content": said})

    def body(self, streamed: bool) -> Json:
        body: Json = {"model": "m"} | ({"stream": True} if streamed else {})
        look = {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        }
        history = copy.deepcopy(self.history)
        if self.form == "responses":
            include = ["reasoning.encrypted_content"]
            return body | {"input": history, "store": False, "include": include, "tools": [{"type": "function"} | look]}
        if self.form == "chat":
            return body | {"messages": history, "tools": [{"type": "function", "function": look}]}
        look["input_schema"] = look.pop("parameters")
        if self.traits.get("marks"):
            self.mark(history)
        return body | {
            "messages": history,
            "max_tokens": 1000,
            "tools": [look],
            "thinking": {"type": "enabled", "budget_tokens": 500},
        }

    def mark(self, history: list[Json]) -> None:
        """Cache marks on the last two of the user's messages, which so become lists of blocks."""
        for message in [message for message in history if message["role"] == "user"][-2:]:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            place = 0 if self.traits.get("documents") and len(message["content"]) > 1 else -1
            message["content"][place]["cache_control"] = {"type": "ephemeral"}

    def take(self, reply: Json) -> bool:
        """Append a reply and the results of its calls; tells whether there were calls."""
        rng = self.rng
        if self.form == "responses":
            output = reply["output"]
            self.history += without_ids(output) if self.traits.get("bare") else output
            calls = [item["call_id"] for item in output if item["type"] == "function_call"]
            self.history += [{"type": "function_call_output", "call_id": call, "output": prose(rng, 30)} for call in calls]
        elif self.form == "messages":
            self.history.append({"role": "assistant", "content": reply["content"]})
            calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
            if calls:
                results = [{"type": "tool_result", "tool_use_id": call, "content": prose(rng, 30)} for call in calls]
                self.history.append({"role": "user", "content": results})
        else:
            message = reply["choices"][0]["message"]
            if not self.traits.get("thoughts"):
                message.pop("reasoning_content", None)
            self.history.append({key: value for key, value in message.items() if value is not None or key == "content"})
            calls = [call["id"] for call in message.get("tool_calls") or ()]
            self.history += [{"role": "tool", "tool_call_id": call, "content": prose(rng, 30)} for call in calls]
        return bool(calls)


def parts_of(rng: random.Random, order: str, form: str, count: int) -> list[Part]:
    parts: list[Part] = []
    for letter in order:
        if letter == "F":
            parts.append(("F", "look", {"at": prose(rng, 2)}))
        elif letter == "R" and form != "chat" and rng.random() < 0.25:
            parts.append(("X", prose(rng, count)))
        elif letter != "W" or form != "chat":
            parts.append((letter, f"{prose(rng, count if letter != 'W' else 3)} {rng.random()}."))
    return parts or [("M", "Yes.")]


def trial(rng: random.Random, *, ground: Ground, model: Model, form: str, small: bool, again: bool) -> None:
    traits = {name: rng.random() < 0.5 for name in ("bare", "documents", "marks", "parts", "thoughts")}
    model.encrypted = traits["bare"] or rng.random() < 0.7
    streamed = rng.random() < 0.5
    client = Client(rng, form, **traits)
    model.refused, model.over, model.recalls = [], [], []
    names: list[str] = []
    orders: list[str] = []
    client.say(f"{rng.random()} " + prose(rng, 20))
    shown: Json = {"form": form, "streamed": streamed, "small": small, "orders": orders, "encrypted": model.encrypted}
    shown |= {name: value for name, value in traits.items() if value}
    for turn in range(14 if small else 5):
        order = rng.choice(ORDERS)
        if small and rng.random() < 0.3:
            call = ("F", "recall", {"address": "p1"})
            model.recalls = [[*parts_of(rng, rng.choice(("", "R", "M", "RM", "MR", "RF", "FR", "RMR", "WR")), form, 10), call]]
        model.parts = parts_of(rng, order, form, 150 if small else 8)
        orders.append("".join(part[0] for part in model.parts) + ("+recall" if model.recalls else ""))
        body = client.body(streamed)
        sends = 2 if again and rng.random() < 0.4 else 1
        recalls = model.recalls
        said: list[list[str]] = []
        for _ in range(sends):
            before = len(model.prompts)
            model.recalls = [*recalls]
            got = ground.ask(form, body)
            shown["status"], shown["names"] = got.status, names
            check(not model.refused, "a strict provider refuses nothing", shown | {"refused": model.refused})
            check(got.status == 200, "a turn is answered", shown | {"said": got.body[:300]})
            said.append(words_of(form, reply_of(form, got, streamed)))
            if said[-1] != said[0]:
                # Only one of the two prompts had room for a recall, and the words before it: that is another way on.
                check(streamed or got.session not in names, "other words are another session", shown)
                names.clear()
                break
            names.append(got.session)
            if not small:
                sent = model.prompts[before]
                check(len(model.prompts) == before + 1, "one prompt a turn while all fits", shown)
                check(sent == body, "what the upstream got is what the client sent", shown | {"sent": sent, "asked": body})
        orders[-1] += f" x{sends}" if sends > 1 else ""
        check(len(set(names)) <= 1, "one session", shown)
        model.recalls = []
        if not client.take(reply_of(form, got, streamed)) or rng.random() < 0.1:
            client.say(f"Turn {turn}: " + prose(rng, 250 if small else 8))
    check(not model.over, "no prompt is over the window", shown | {"over": model.over})
    check(not small or size_of(client.body(False)) > WINDOW, "the history is larger than the window", shown)


@contextmanager
def interleaved(form: str, small: bool, again: bool) -> Iterator[Trial]:
    model = Model()
    model.window = WINDOW if small else 1 << 60
    with gateway(model.answer, form=form, window=WINDOW if small else 1_000_000) as ground:
        yield partial(trial, ground=ground, model=model, form=form, small=small, again=again)


FUZZERS: dict[str, Callable[[], Any]] = {
    f"{form}-{'small' if small else 'large'}{'-again' if again else ''}": partial(interleaved, form, small, again)
    for form in ("responses", "messages", "chat")
    for small in (False, True)
    for again in (False, True)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_interleaved_reasoning_stays_one_session(name: str) -> None:
    with FUZZERS[name]() as trial:
        broken = find_broken(trial, trials=6 if "small" in name else 16)
    assert not broken, format_broken(broken)


if __name__ == "__main__":
    run(FUZZERS, __doc__ or "")
