"""Turns of an agent at work, seeded, in both wire forms: talk, thinking, calls, results, texts of all sizes, odd characters.

Each message holds a mark that no other holds, so that one can be found again. Which calls wait for a result the caller says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from torture.oracle import Turn

__all__ = ["Talk"]

WORDS = (
    "parser",
    "window",
    "naïve",
    "文字",
    "🦉",
    "a\x00b",
    "src/m1.py",
    "TODO",
    "4096",
    "</system>",
    "[p1 out: 3 tokens]",
    "\r\n",
    "Error:",
    "\x1b[31m",
)


class Talk:
    """A source of turns.

    Args:
        form: "chat" or "messages".
        name: begins every mark and call id, so that several sources do not mix.
        size: characters that a long text has.
    """

    def __init__(self, rng: random.Random, form: str, name: str, size: int) -> None:
        self.rng, self.form, self.name, self.size, self.made = rng, form, name, size, 0

    def text(self) -> str:
        """A text with a mark of its own."""
        self.made += 1
        mark, rng = f"<{self.name}.{self.made}>", self.rng
        length = rng.choice([0, 1, 1, 4, 4, 8, 12]) * self.size // 12
        words: list[str] = []
        while sum(map(len, words)) + len(words) < length:
            words.append(rng.choice(WORDS))
        words.insert(rng.randrange(len(words) + 1), mark)
        return " ".join(words)

    def first(self) -> Turn:
        """The system prompt, where the form has one, and the task."""
        rules, task = f"You repair programs. <{self.name}>", f"Fix the parser. {self.text()[:200]}"
        if self.form == "chat":
            made: list[dict[str, Any]] = [{"role": "system", "content": rules}, {"role": "user", "content": task}]
            return Turn(messages=made, texts=[rules, task])
        return self.plain("user", task)

    def plain(self, role: str, text: str = "") -> Turn:
        """One message of one page."""
        said = text or self.text()
        content: Any = said if self.form == "chat" else [{"type": "text", "text": said}]
        return Turn(messages=[{"role": role, "content": content}], texts=[said])

    def next(self, waiting: Sequence[str]) -> Turn:
        """The next turn of a conversation in which these calls wait for their results."""
        rng = self.rng
        if waiting and (self.form == "messages" or rng.random() < 0.7):
            return self.results(waiting if self.form == "messages" else [rng.choice(list(waiting))])
        pick = rng.random()
        if pick < 0.3:
            return self.plain("user")
        if pick < 0.5:
            return self.plain("assistant")
        return self.calls(rng.randint(1, 2))

    def calls(self, count: int) -> Turn:
        """An assistant's message that calls tools."""
        said, inputs = self.text(), [{"path": self.text()} for _ in range(count)]
        ids = tuple(f"{self.name}-{self.made}-{at}" for at in range(count))
        if self.form == "chat":
            wanted = [json.dumps(given, ensure_ascii=False) for given in inputs]
            calls = [
                {"id": call, "type": "function", "function": {"name": "read", "arguments": given}}
                for call, given in zip(ids, wanted, strict=True)
            ]
            return Turn(messages=[{"role": "assistant", "content": said, "tool_calls": calls}], texts=[said, *wanted], opens=ids)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": said}]
        texts: list[Any] = [said]
        if self.rng.random() < 0.4:
            thought = self.text()
            blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": "s" * self.rng.choice([8, 300])})
            texts.insert(0, thought)
        blocks += [
            {"type": "tool_use", "id": call, "name": "read", "input": given} for call, given in zip(ids, inputs, strict=True)
        ]
        return Turn(messages=[{"role": "assistant", "content": blocks}], texts=[*texts, *inputs], opens=ids)

    def results(self, calls: Sequence[str]) -> Turn:
        """The results of these calls."""
        said = [self.text() for _ in calls]
        if self.form == "chat":
            made: list[dict[str, Any]] = [
                {"role": "tool", "tool_call_id": call, "content": text} for call, text in zip(calls, said, strict=True)
            ]
            return Turn(messages=made, texts=said, closes=tuple(calls))
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in zip(calls, said, strict=True)]
        return Turn(messages=[{"role": "user", "content": blocks}], texts=said, closes=tuple(calls))
