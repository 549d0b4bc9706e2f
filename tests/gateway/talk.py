"""A conversation of many words, for tests in which these matter."""

from __future__ import annotations

from typing import Any

Talk = list[dict[str, Any]]

TOPICS = ("parser", "lexer", "printer", "linker", "loader", "cache", "index", "ledger", "window", "prompt")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def work(project: str = "atlas", turns: int = 10) -> Talk:
    """A conversation, to its last reply."""
    talk = []
    for number in range(turns):
        topic = TOPICS[number % len(TOPICS)]
        talk += [user(f"Please look at the {topic} of {project}. " + f"Its tests {number} fail since Monday. " * 4)]
        talk += [said(f"The {topic} of {project} drops line {number}. " + f"I moved the check {number} before the loop. " * 6)]
    return talk


TALK = work()
