"""The demo's agent: a program in place of a model, which chooses the next call by the last result.

It implements `Model`, so the agent loop, the tools and the window are the real ones. It keeps the names of folders and files, but
no text of them.
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
LINES_PER_READ = 120
"""Lines of one read."""

_HEAD = re.compile(r"^.* \d+-(\d+) of (\d+)\n", re.MULTILINE)

Call = tuple[str, dict[str, Any]]


class Explorer:
    """Lists a tree, reads its files, and searches it for definitions. `files` has the line counts of the known files.

    Args:
        enough: called before each file; if it returns True, no further file is read.
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
        """Yield the next call, or the end of the work."""
        result = str(request.messages[-1].get("content") or "") if self._calls else None
        try:
            name, arguments = self._work.send(result)
        except StopIteration:
            part, finish = Part(kind=Kind.TEXT, text="Done. Ask me."), Finish.STOP
        else:
            self._calls += 1
            text = msgspec.json.encode(arguments).decode()
            part, finish = Part(kind=Kind.CALL, call=f"e{self._calls}", name=name, text=text), Finish.CALLS
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(part,)), finish=finish)

    def _explore(self) -> Generator[Call, str | None, None]:
        """Yield the calls one by one, and receive the result of each."""
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
                for start in range(1, lines + 1, LINES_PER_READ):
                    yield "read", {"path": path, "start": start, "count": LINES_PER_READ}
        for folder in folders:
            yield from self._every("search", {"pattern": OUTLINE, "path": folder})

    def _every(self, name: str, arguments: dict[str, Any]) -> Generator[Call, str | None, list[str]]:
        """Call a tool until all entries are shown, with fewer entries per call if the window showed only a part of them."""
        entries: list[str] = []
        total, count = 1, 40
        while len(entries) < total and count:
            output = (yield name, arguments | {"start": len(entries) + 1, "count": count}) or ""
            head = _HEAD.match(f"{output}\n")
            page = output.split("\n")[1:]
            if head and len(entries) + len(page) == int(head[1]):
                entries, total = entries + page, int(head[2])
            else:
                count //= 2
        return entries
