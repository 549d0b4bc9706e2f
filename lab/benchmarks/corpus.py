"""Real text for the benchmarks: the sources of the running Python's standard library, in turns.

Nothing is downloaded and nothing is random: the same interpreter gives the same sessions.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import kilburn
from kilburn.policy import Policy

SIZE = 400
"""Characters of a page: 100 tokens at four characters each."""

Turn = tuple[dict[str, Any], dict[str, Any]]
"""An assistant message with one tool call, and its result: two pages."""


def texts(size: int = SIZE) -> Iterator[str]:
    """Stretches of source text, for ever; a later round starts elsewhere, so that no two are alike."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    shift = 0
    while True:
        for path in paths:
            whole = path.read_text(encoding="utf-8", errors="replace")
            for start in range(shift, len(whole) - size, size):
                yield f"{path.name}:{start}\n{whole[start : start + size]}"[:size]
        shift += 37


def turns(size: int = SIZE, start: int = 0) -> Iterator[Turn]:
    """Turns of an agent that reads: a call with some 400 characters of reasoning in its arguments, then the text."""
    pieces = texts(size)
    for number, (thought, found) in enumerate(zip(pieces, pieces, strict=False), start):
        call = {"id": f"call{number}", "type": "function", "function": {"name": "read", "arguments": _arguments(thought)}}
        yield (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call{number}", "content": found},
        )


def _arguments(text: str) -> str:
    plain = "".join(character if character.isalnum() or character in " ._/" else " " for character in text)
    return f'{{"path": "{plain[:-14]}"}}'


def open_store(path: str, window: int, policy: str | Policy, tokenizer: str = "auto") -> kilburn.Store:
    """A store as a user opens it."""
    return kilburn.open(path, window=window, policy=policy, tokenizer=tokenizer)


def fill(session: kilburn.Session, source: Iterator[Turn], pages: int, batch: int = 50) -> None:
    """Bring a session up to so many pages, `batch` turns a commit, from a system prompt and a task on."""
    held = len(session.contents.pages())
    if not held:
        session.append(
            {"role": "system", "content": "You read source code."},
            {"role": "user", "content": "Read the library and explain it."},
        )
        held = 2
    while held < pages:
        some = list(islice(source, min(batch, (pages - held + 1) // 2)))
        session.append(*(message for turn in some for message in turn))
        held += 2 * len(some)
