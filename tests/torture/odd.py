"""Odd values at every place where a caller says something: what is refused must be refused with a typed error.

Each entry is given a process and does one thing to it. An error of Kilburn's own and a return are both fine, if the session
is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kilburn.budget import Budget
from kilburn.kernel.session import Session
from kilburn.message import Message, Role
from kilburn.model import Tokens
from kilburn.move import Evict, Fold

__all__ = ["CARELESS", "ODD"]

ADDRESSES: tuple[Any, ...] = (
    *("", "p0", "p-1", "p1-p0", "f0", "p1-f1", "p99999999999999999999", "p1-p99999999999999999", "p\u0661", "\ud800"),
    *("p1;", None, 5, True, b"p1", ["p1"]),
)

NUMBERS: tuple[Any, ...] = (0, -1, -(2**70), 10_000_000, 2**53, 2**64, 2**70, float("nan"), float("inf"), 1.5, True, None, "5")

DEEP: Any = "x"
for _ in range(5_000):
    DEEP = [DEEP]

MESSAGES: tuple[Any, ...] = (
    *(None, 5, "user", b"user", [], {}, {"role": 5}, {"role": "user"}, {"role": "user", "content": 5}),
    {"role": "user", "content": "half \ud83d"},
    {"role": "user", "content": "x", "name": "\ud800"},
    {"role": "user", "content": "x", "time": float("nan")},
    {"role": "user", "content": DEEP},
    {"role": "user", "content": "x", "extra": DEEP},
    {"role": "user", "content": [{"type": "text", "text": 5}]},
    {"role": "user", "content": [{"type": "\ud800"}]},
    {"role": "tool", "tool_call_id": "nobody-asked", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "\ud800", "type": "function", "function": {"name": "x"}}]},
    {"role": "assistant", "content": None, "tool_calls": 5},
    {1: 2},
    Message(role=Role.USER, parts=()),
)


def _observe(prompt: Any, counted: Any) -> Callable[[Session], Any]:
    return lambda session: session.prompts.observe(Tokens(prompt=prompt, reply=prompt, cached=prompt), counted)


def _at(verb: str, *more: Any) -> Callable[[Session], Any]:
    return lambda session: getattr(session, verb)(*more)


def _apply(move: Callable[..., Any], *values: Any, **more: Any) -> Callable[[Session], Any]:
    return lambda session: session.edits.apply(move(*values, **more))


def _resize(*tokens: Any) -> Callable[[Session], Any]:
    return lambda session: session.edits.resize(Budget(*tokens))


ODD: dict[str, Callable[[Session], Any]] = {
    **{f"observe({number!r}, {counted!r})": _observe(number, counted) for number in NUMBERS for counted in (100, 0, number)},
    **{
        f"{verb}({address!r})": _at(verb, address)
        for verb in ("recall", "pin", "unpin", "rate", "forget")
        for address in ADDRESSES
    },
    **{f"rate(p1, {number!r})": _at("rate", "p1", number) for number in NUMBERS if isinstance(number, int | float)},
    **{f"append message {at}": _at("append", message) for at, message in enumerate(MESSAGES)},
    **{f"render({form!r})": _at("render", form) for form in ("", "nonsense", "\ud800", None, 5, ["chat"])},
    **{f"search({query!r})": _at("search", query) for query in ("", "\x00", '"', "NEAR(", "\ud800", "x" * 100_000)},
    **{f"search(x, {number!r})": _at("search", "x", number) for number in NUMBERS if isinstance(number, int | float)},
    **{f"resize({number!r})": _resize(number) for number in (0, -1, True, None, 1.5, float("nan"), "5")},
    "resize with a reserve below nothing": _resize(1000, 2000),
    **{f"evict {pages!r}": _apply(Evict, pages) for pages in ((), (0,), (10**30,), (True,))},
    **{f"fold {text!r}": _apply(Fold, (1,), text=text) for text in ("", "half \ud83d")},
}
"""What may come from outside: from a provider, a model, a file, a person."""

CARELESS: dict[str, Callable[[Session], Any]] = {
    "rate(p1, '5')": _at("rate", "p1", "5"),
    "search(None)": _at("search", None),
    "search(x, '5')": _at("search", "x", "5"),
    **{f"resize({number!r}) without a budget": _at("resize", number) for number in (5, None, "8000")},
    **{f"evict {pages!r}": _apply(Evict, pages) for pages in (("p1",), (1.5,), 5)},
    "fold 5": _apply(Fold, (1,), text=5),
    "apply what is no move": _at("apply", 5),
}
"""What only a program with a wrong type in it says: Python's own error is as good, and nothing may change."""
