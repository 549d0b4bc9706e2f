"""Seeded conversations in every form a user may append, odd ones included, ways to weigh a prompt, and to disturb a session.

It refuses to use the wire code that is tested: the shapes come from the providers' references.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

from kilburn.errors import KilburnError
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Load

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WORDS = [
    "parser",
    "token",
    "window",
    "naïve",
    "文字",
    "🦉",
    "error",
    "fix",
    "a\x00b",
    "TODO",
    "12",
    "</system>",
    "[p1 out: 3 tokens]",
]

Dicts = dict[str, Any]


def text(rng: random.Random) -> str:
    size = rng.choice([0, 1, 3, 10, 40, 40, 200, 2000])
    return rng.choice([" ", "\n", ""]).join(rng.choices(WORDS, k=size))


def call_of(call: str, name: str = "read", **arguments: Any) -> Dicts:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def user(content: Any) -> Dicts:
    return {"role": "user", "content": content}


def assistant(content: Any, *calls: Dicts) -> Dicts:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def tool(call: str, content: Any) -> Dicts:
    return {"role": "tool", "tool_call_id": call, "content": content}


def chat(seed: int, steps: int = 25) -> Iterator[Dicts]:
    """OpenAI's form: parallel calls, late and empty results, images, refusals, several systems."""
    rng = random.Random(seed)
    yield {"role": "system", "content": f"You repair programs, seed {seed}."}
    yield user(f"Fix issue {seed} in src/parser.py")
    made = 0
    waiting: list[str] = []
    for _ in range(steps):
        pick = rng.randrange(9)
        if waiting and (pick < 4 or len(waiting) > 3):
            yield tool(waiting.pop(rng.randrange(len(waiting))), text(rng))
        elif pick == 4:
            yield {"role": rng.choice(["system", "developer"]), "content": f"rule {rng.randrange(99)}: {text(rng)[:200]}"}
        elif pick == 5:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            yield user([{"type": "text", "text": text(rng)}, image])
        elif pick == 6:
            yield {"role": "assistant", "content": None, "refusal": "I cannot"}
        elif pick == 7 and not waiting:
            yield user(text(rng))
        else:
            calls = [call_of(f"c{made + n}", path=text(rng)[:300]) for n in range(rng.randint(1, 3))]
            made += len(calls)
            waiting += [call["id"] for call in calls]
            yield assistant(rng.choice([None, "", text(rng)]), *calls)
    for call in waiting:
        yield tool(call, text(rng))


def messages(seed: int, steps: int = 25) -> Iterator[Dicts]:
    """Anthropic's form: thinking, images in results, errors, unknown and server-side blocks, empty results."""
    rng = random.Random(seed)
    yield user([{"type": "text", "text": f"Fix issue {seed}", "cache_control": {"type": "ephemeral"}}])
    for step in range(steps):
        blocks: list[Dicts] = []
        if rng.random() < 0.5:
            blocks.append({"type": "thinking", "thinking": text(rng) or "hm", "signature": "s" * rng.choice([8, 400])})
        if rng.random() < 0.2:
            blocks.append({"type": "redacted_thinking", "data": "ZZZ" * rng.randint(1, 300)})
        blocks.append({"type": "text", "text": text(rng) or "I look."})
        ids = [f"toolu_{step}_{n}" for n in range(rng.randint(0, 3))]
        blocks += [{"type": "tool_use", "id": call, "name": "read", "input": {"path": text(rng)[:300]}} for call in ids]
        yield {"role": "assistant", "content": blocks, "stop_reason": "tool_use" if ids else "end_turn"}
        results: list[Dicts] = []
        for call in ids:
            content: Any = rng.choice([text(rng), [], [{"type": "text", "text": text(rng) or "x"}], None])
            if rng.random() < 0.3:
                picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
                content = [{"type": "text", "text": text(rng) or "see"}, picture]
            result: Dicts = {"type": "tool_result", "tool_use_id": call}
            if content is not None:
                result["content"] = content
            results.append(result)
        rng.shuffle(results)
        if rng.random() < 0.2:
            results.append({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text(rng)}})
        if results:
            yield user([*results, {"type": "text", "text": text(rng) or "go on"}])
        else:
            yield user([{"type": "text", "text": text(rng) or "go on", "cache_control": None}])


def own(seed: int, steps: int = 25) -> Iterator[Message]:
    """Kilburn's own messages, with parts that no wire form would put together so."""
    rng = random.Random(seed)
    yield Message(role=Role.SYSTEM, parts=(Part(kind=Kind.TEXT, text="You repair programs."),))
    yield Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="Fix it"), Part(kind=Kind.TEXT, text="")))
    for step in range(steps):
        parts = [Part(kind=Kind.REASONING, text=text(rng)), Part(kind=Kind.TEXT, text=text(rng))][rng.randrange(2) :]
        ids = [f"k{step}-{n}" for n in range(rng.randint(0, 2))]
        parts += [Part(kind=Kind.CALL, text=rng.choice(['{"a":1}', "not json", ""]), call=call, name="read") for call in ids]
        yield Message(role=Role.ASSISTANT, parts=tuple(parts))
        for call in ids:
            attached = (Part(kind=Kind.IMAGE, text=f"data:image/png;base64,{PIXEL}", call=call),) if rng.random() < 0.3 else ()
            yield Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text=text(rng), call=call), *attached))
        if not ids:
            yield Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=text(rng)),))


FORMS = {"chat": chat, "messages": messages, "own": own}


def leaves(value: Any, key: str = "") -> Iterator[str]:
    """All strings of a prompt that a model reads: not the roles, types and media types; pictures left out."""
    if isinstance(value, str):
        if (
            key not in ("role", "type", "media_type", "id", "tool_call_id", "tool_use_id")
            and "base64," not in value
            and value != PIXEL
        ):
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)


def weight(value: Any) -> int:
    """Tokens of four characters of all that is read, each string rounded down: a floor of any honest count."""
    return sum(len(string) // 4 for string in leaves(value))


def meddle(session: Session, rng: random.Random) -> None:
    """Load or pin a page at random, or unpin all but the first."""
    page = rng.randint(1, session.window.last)
    with contextlib.suppress(KilburnError):  # too much is pinned, or a call is open
        match rng.randint(0, 3):
            case 0:
                session.edits.apply(Load((page,)))
            case 1:
                session.pin(f"p{page}")
            case 2:
                for pin in sorted(session.window.pins - {1}):
                    session.unpin(f"p{pin}")
