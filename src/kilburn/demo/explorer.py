"""The demo's agent without a model: a program that decides the next call from the last result.

It is a `Model` like any other, so the agent loop, the tools and the window are the real ones. It keeps the names of
folders and files, but no text: what it read is only in the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request

TASK = (
    "Work through this Python library: list every folder, read every file from its first line to its last, "
    "and search for what is defined where. You will be asked about exact details afterwards."
)
OUTLINE = r"^(class|def|async def) |^\w+ = "
READ = 120
"""Lines of one read."""

_HEAD = re.compile(r"^.* \d+-(\d+) of (\d+)\n", re.MULTILINE)

Call = tuple[str, dict[str, Any]]


class Explorer:
    """Lists a whole tree, reads its files, and searches it for definitions; `files` has the lines of each file that it knows of.

    Args:
        enough: asked before each file; where it says so, no more are read.
    """

    name = "explorer"
    form = "chat"
    context: int | None = None
    tokenizer: Any = "auto"

    def __init__(self, enough: Callable[[], bool] = lambda: False) -> None:
        self.files: dict[str, int] = {}
        self._enough = enough
        self._work = self._explore()
        self._calls = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The next call, or the end of the work."""
        shown = str(request.messages[-1].get("content") or "") if self._calls else None
        try:
            name, arguments = self._work.send(shown)
        except StopIteration:
            part, finish = Part(kind=Kind.TEXT, text="Done. Ask me."), Finish.STOP
        else:
            self._calls += 1
            text = msgspec.json.encode(arguments).decode()
            part, finish = Part(kind=Kind.CALL, call=f"e{self._calls}", name=name, text=text), Finish.CALLS
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(part,)), finish=finish)

    def _explore(self) -> Generator[Call, str | None, None]:
        """The calls, one after the other; each gets the result of the one before."""
        folders = ["."]
        for folder in folders:
            files: dict[str, int] = {}
            for entry in (yield from self._every("list", {"path": folder})):
                path = entry if folder == "." else f"{folder}/{entry}"
                if path.endswith("/"):
                    folders.append(path[:-1])
                elif path.endswith(" lines"):
                    name, length, _ = path.rsplit(" ", 2)
                    files[name] = int(length)
            self.files |= files
            for path, lines in files.items():
                if self._enough():
                    break
                for start in range(1, lines + 1, READ):
                    yield "read", {"path": path, "start": start, "count": READ}
        for folder in folders:
            yield from self._every("search", {"pattern": OUTLINE, "path": folder})

    def _every(self, name: str, arguments: dict[str, Any]) -> Generator[Call, str | None, list[str]]:
        """Call until all entries were shown; fewer at a time if the window showed only a part of them."""
        entries: list[str] = []
        total, count = 1, 40
        while len(entries) < total and count:
            shown = (yield name, arguments | {"start": len(entries) + 1, "count": count}) or ""
            head = _HEAD.match(f"{shown}\n")
            found = shown.split("\n")[1:]
            if head and len(entries) + len(found) == int(head[1]):
                entries, total = entries + found, int(head[2])
            else:
                count //= 2
        return entries
