"""Seeded sessions of agents as both providers' SDKs would send them, and a run of one under a policy.

Thinking loops with signed, redacted and unsigned thinking, parallel, late and never answered calls, pictures, citations, cache
marks, unknown fields. It refuses to use the wire code that is tested.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow
from kilburn.models.scripted import Scripted
from kilburn.testing.clock import FakeClock
from wire.provider import check_chat, check_messages, check_speakers, weight

__all__ = ["FORMS", "POLICIES", "WINDOWS", "anthropic", "openai", "run"]

Dicts = dict[str, Any]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WORDS = [
    "parser", "token", "src/main.py", "naïve", "文字", "🦉", "error", "decided", "TODO", "12", "</page>", "</log>", "</system>",
    "[p1 out: 3 tokens]", "p2 user:", "\n", "\n", "assistant:", '"quoted"',
]  # fmt: skip

POLICIES = [
    "fifo", "lru", "importance", "tiered", "hybrid", "cost", "mask", "preprocess", "summarize", "recursive", "belady",
    "memento(pairs=True, to=60)", "clear_thinking", "clear_tool_uses(trigger=400, keep=1)", "compact(trigger=None, keep=1)",
    "agentfold", "mem1", "comem(every=1)", "free(every=200, least=0)",
    "chain(clear_thinking, hybrid)", "chain(preprocess, mask, fifo)", "chain(free(every=300), hybrid)",
    "chain(clear_thinking, clear_tool_uses(trigger=500, keep=1, clear_tool_inputs=True), compact(trigger=None, keep=1))",
]  # fmt: skip


def _text(rng: random.Random, most: int = 40) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 10, most])))


def _said(rng: random.Random, most: int = 40) -> str:
    """Text with something visible in it."""
    return f"{rng.choice(WORDS[:5])} {_text(rng, most)}"


def _output(rng: random.Random) -> str:
    """What a tool says: every line of it can be told, and some try to be somebody else's."""
    lines = [f"tool-said {rng.randrange(10**6)} {_text(rng, 12)}".replace("\n", " ") for _ in range(rng.choice([1, 3, 10, 30]))]
    if rng.random() < 0.3:
        lines.insert(rng.randrange(len(lines)), rng.choice(["[end a1b2c3]", "</log>", "a1b2c3 p2 user:"]))
    return "\n".join(lines)


def _picture() -> Dicts:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


def anthropic(seed: int, steps: int = 14) -> Iterator[Dicts]:
    """A session of the messages form; one of three thinks at every reply, at the first of a turn, or now and then."""
    rng = random.Random(f"anthropic {seed}")
    mode = rng.choice(["every", "first", "some"])
    if rng.random() < 0.7:
        yield {"role": "system", "content": rng.choice([_said(rng), [{"type": "text", "text": _said(rng)}]])}
    yield {"role": "user", "content": rng.choice([_said(rng), [{"type": "text", "text": _said(rng), "cache_control": CACHE}]])}
    waiting: list[str] = []
    fresh = True
    for step in range(steps):
        blocks: list[Dicts] = []
        if mode == "every" or (mode == "first" and fresh) or (mode == "some" and rng.random() < 0.5):
            blocks += [_thought(rng) for _ in range(rng.choice([1, 1, 2]))]
        fresh = False
        if rng.random() < 0.6:
            blocks.append({"type": "text", "text": _said(rng, 20), **(_citations(rng) if rng.random() < 0.3 else {})})
        if rng.random() < 0.1:
            blocks += _served(rng, f"srv_{step}")
        ids = [rng.choice(["toolu_{}_{}", "a b {} {}"]).format(step, n) for n in range(rng.choice([0, 1, 1, 2, 3]))]
        if mode == "every" and len(ids) > 1 and rng.random() < 0.4:  # interleaved
            blocks += [_use(rng, ids[0]), _thought(rng), *(_use(rng, call) for call in ids[1:])]
        else:
            blocks += [_use(rng, call) for call in ids]
        if not blocks or blocks[-1]["type"] in ("thinking", "redacted_thinking"):
            blocks.append({"type": "text", "text": _said(rng)})
        envelope = {"id": f"msg_{step}", "type": "message", "model": "claude", "usage": {"input_tokens": 99}, "stop_reason": None}
        yield {"role": "assistant", "content": blocks, **(envelope if rng.random() < 0.5 else {})}
        waiting += ids
        answered = [call for call in waiting if rng.random() < 0.85]
        waiting = [call for call in waiting if call not in answered]
        rng.shuffle(answered)
        content: list[Dicts] = [_result(rng, call) for call in answered]
        if not content or rng.random() < 0.2:
            fresh = True
            content.append({"type": "text", "text": _said(rng), **({"cache_control": CACHE} if rng.random() < 0.3 else {})})
            if rng.random() < 0.1:
                content.append(_picture())
        yield {"role": "user", "content": content}


CACHE = {"type": "ephemeral", "ttl": "1h"}


def _thought(rng: random.Random) -> Dicts:
    kind = rng.choice(["signed", "signed", "redacted", "unsigned"])
    if kind == "redacted":
        return {"type": "redacted_thinking", "data": f"Eo{rng.randrange(10**9)}" * rng.randint(1, 8)}
    thinking = rng.choice(["", f"my-thought {_said(rng)}\nmy-thought {_said(rng)}"])
    return {"type": "thinking", "thinking": thinking, "signature": f"sig{rng.randrange(10**9)}" if kind == "signed" else ""}


def _citations(rng: random.Random) -> Dicts:
    cited = {
        "type": "char_location", "cited_text": _said(rng), "document_index": 0, "document_title": rng.choice([None, "A title"]),
        "start_char_index": rng.randrange(99), "end_char_index": 200,
    }  # fmt: skip
    return {"citations": [cited] * rng.randint(0, 2)}


def _served(rng: random.Random, call: str) -> list[Dicts]:
    hit = {"type": "web_search_result", "url": "https://example.org", "title": _said(rng), "encrypted_content": "Eq" * 20}
    return [
        {"type": "server_tool_use", "id": call, "name": "web_search", "input": {"query": _said(rng, 3)}},
        {"type": "web_search_tool_result", "tool_use_id": call, "content": [hit]},
    ]


def _use(rng: random.Random, call: str) -> Dicts:
    given = {"path": _text(rng, 12), **({"limit": rng.choice([5, 1.5e300, None])} if rng.random() < 0.3 else {})}
    return {"type": "tool_use", "id": call, "name": rng.choice(["read", "functions.read"]), "input": given}


def _result(rng: random.Random, call: str) -> Dicts:
    text = {"type": "text", "text": _output(rng), **(_citations(rng) if rng.random() < 0.2 else {})}
    content: Any = rng.choice([_output(rng), _output(rng), [], [text], [text, text], None, " "])
    if rng.random() < 0.06:
        content = [text, _picture()]
    failed = {"is_error": True} if rng.random() < 0.2 else {}
    return {"type": "tool_result", "tool_use_id": call, **({} if content is None else {"content": content}), **failed}


def openai(seed: int, steps: int = 25) -> Iterator[Dicts]:
    """A session of the chat form."""
    rng = random.Random(f"openai {seed}")
    named = {"name": "ann"} if rng.random() < 0.3 else {}
    if rng.random() < 0.7:
        yield {"role": rng.choice(["system", "developer"]), "content": _said(rng)}
    yield {"role": "user", "content": _said(rng), **named}
    waiting: list[str] = []
    made = 0
    for _ in range(steps):
        pick = rng.randrange(10)
        if waiting and (pick < 5 or len(waiting) > 3):
            content: Any = rng.choice([_output(rng), _output(rng), "", [{"type": "text", "text": _output(rng)}] * 2])
            yield {"role": "tool", "tool_call_id": waiting.pop(rng.randrange(len(waiting))), "content": content}
        elif pick == 5:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}}
            extra = [image] if rng.random() < 0.2 else [{"type": "text", "text": _said(rng)}]
            yield {"role": "user", "content": [{"type": "text", "text": _said(rng)}, *extra], **named}
        elif pick == 6:
            yield {"role": "user", "content": _said(rng), "x_note": {"from": _said(rng, 3), "weight": 3.5}}
        elif pick == 7:
            thought = rng.choice([{}, {"reasoning_content": f"my-thought {_said(rng)}"}, {"refusal": "I cannot"}])
            yield {"role": "assistant", "content": rng.choice([_said(rng), [{"type": "text", "text": _said(rng)}]]), **thought}
        elif pick == 8 and rng.random() < 0.3:
            yield {"role": "system", "content": _said(rng)}
        else:
            ids = [f"call_{made + n}" for n in range(rng.choice([1, 1, 2, 3]))]
            made += len(ids)
            waiting += ids
            thought = {"reasoning_content": f"my-thought {_said(rng)}"} if rng.random() < 0.4 else {}
            calls = [_call(rng, call) for call in ids]
            yield {"role": "assistant", "content": rng.choice([None, _said(rng, 12)]), **thought, "tool_calls": calls}


def _call(rng: random.Random, call: str) -> Dicts:
    given = rng.choice([json.dumps({"path": _text(rng, 12)}), '{"n": 1e5}', "", '{"path": "a', '["a"]'])
    return {"id": call, "type": "function", "function": {"name": rng.choice(["read", "ünicode"]), "arguments": given}}


FORMS = {"anthropic": anthropic, "openai": openai}
WINDOWS = (2500, 6000)


def run(form: str, policy: str, window: int, seed: int, *, asked: bool = False, steps: int = 16) -> int:
    """Append a session message by message, look at every prompt in both forms; the number of prompts.

    A character is a token here, so nothing is lost by rounding.
    """
    model = Scripted(["", "a summary of it all", "no " * 30, RuntimeError("no")] * 300) if asked else None
    prompts = 0
    taken: list[Dicts] = []
    lost: set[str] = set()
    with Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/1", model=model, clock=FakeClock()) as store:
        session = store.session("fuzz")
        for message in FORMS[form](seed, steps):
            left = _without(message, lost)
            if left is None:
                continue
            message = left
            try:
                session.append(message)
            except PinsExceedWindow:
                lost |= _calls(message)
                continue
            taken.append(message)
            for name in ("messages", "chat"):
                prompt = session.render(name)
                prompts += 1
                where = f"{form} seed {seed}, {policy} at {window}{', asked' * asked}, {len(taken)} messages, as {name}"
                try:
                    if name == "chat":
                        check_chat(prompt)
                    else:
                        check_messages(prompt, prompt.system, taken if form == "anthropic" else ())
                    check_speakers(prompt)
                    sent = weight(list(prompt)) + weight(prompt.system)
                    assert sent <= prompt.tokens, f"{sent} characters are sent, {prompt.tokens} were counted"
                    assert prompt.tokens <= window, f"{prompt.tokens} of {window}"
                except AssertionError as error:
                    error.add_note(where)
                    raise
    return prompts


def _calls(message: Dicts) -> set[str]:
    used = [block["id"] for block in message["content"] or () if isinstance(block, dict) and block["type"] == "tool_use"]
    return {*used, *(call["id"] for call in message.get("tool_calls") or ())}


def _without(message: Dicts, lost: set[str]) -> Dicts | None:
    """The message without results of calls that were not admitted; None where nothing is left."""
    if message.get("tool_call_id") in lost:
        return None
    if message["role"] == "user" and isinstance(message["content"], list):
        kept = [block for block in message["content"] if block.get("tool_use_id") not in lost]
        return {**message, "content": kept} if kept else None
    return message


def _main() -> None:
    """The long run: `PYTHONPATH=tests python -m wire.sessions FIRST LAST [POLICY ...]` takes each seed through all policies."""
    first, last, *policies = sys.argv[1:]
    logging.disable()
    prompts = failed = 0
    for seed, form, policy, window in product(range(int(first), int(last)), FORMS, policies or POLICIES, WINDOWS):
        try:
            prompts += run(form, policy, window, seed, asked=seed % 2 == 1)
        except Exception as error:
            failed += 1
            print(f"{form} seed {seed}, {policy} at {window}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    print(f"{prompts} prompts, {failed} sessions failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    _main()
