"""The demo's agent where no model drives: it decides the next call from what it was just shown.

It is a `Model` like any other, so the agent loop, the tools and the window are the real ones. It keeps
a to-do list of its own, filled from the listings it sees, and no text: what it read is in the
process or nowhere. It refuses to know the file system.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kilburn.demo.workshop import ENTRIES, READ
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Reply, Request

__all__ = ["TASK", "Explorer"]

TASK = (
    "Work through this Python library: list every folder, read every file from its first line to its last, "
    "note where things are defined, and look up the built-in modules. You will be asked about exact details afterwards."
)
OUTLINE = "^(class|def|async def) "
BUILT_IN = ("-c", "import sys; print(*sys.builtin_module_names)")
ERRANDS = (BUILT_IN, ("-V",), ("-m", "this"), ("-c", "import sys; print(sys.float_info, sys.int_info, sys.hash_info, sep='\\n')"))
LOOKED_UP = 12

_HEAD = re.compile(r"^(?:(?:root )?folder .+: entries|matches) (?P<first>\d+)-(?P<last>\d+) of (?P<total>\d+)")
_FILE = re.compile(r"^(\S+\.py) (\d+) lines$")

Call = tuple[str, dict[str, Any]]


class Explorer:
    """Reads a whole tree, folder by folder.

    Args:
        lines: how many lines it reads at a time.
        errands: whether it runs commands too.
        noted: told all that it says as it says it: texts, and the arguments of calls.
    """

    name = "explorer"
    form = "chat"
    context: int | None = None
    tokenizer: Any = "auto"

    def __init__(self, *, lines: int = READ, errands: bool = True, noted: Callable[[str], None] = lambda text: None) -> None:
        self.files = 0
        self._noted = noted
        self._lines = lines
        self._todo: deque[Call] = deque([("list", {"path": ".", "start": 1, "count": ENTRIES})])
        if errands:
            self._todo.extend(("run", {"arguments": list(arguments)}) for arguments in ERRANDS)
        self._found: dict[str, list[Call]] = {}
        self._asked: Call | None = None
        self._calls = 0

    @property
    def left(self) -> int:
        """Calls that it has on its list now; listings to come will add more."""
        return len(self._todo)

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The next call, or the end of the work."""
        note = self._learn(request)
        parts = [Part(kind=Kind.TEXT, text=note)] if note else []
        finish = "calls" if self._todo else "stop"
        if self._todo:
            self._asked = self._todo.popleft()
            self._calls += 1
            name, arguments = self._asked
            text = msgspec.json.encode(arguments).decode()
            parts.append(Part(kind=Kind.CALL, call=f"e{self._calls}", name=name, text=text))
        else:
            parts = [Part(kind=Kind.TEXT, text=f"Done: {self.files} files read. Ask me.")]
        for part in parts:
            self._noted(part.text)
            if part.kind is Kind.TEXT:
                yield Delta(part.text)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=tuple(parts)), finish=finish)

    def _learn(self, request: Request) -> str:
        """Put on the list what the last output calls for; returns a note where a folder is known."""
        last = request.messages[-1]
        asked, self._asked = self._asked, None
        if asked is None or last.get("role") != "tool":
            return ""
        name, arguments = asked
        shown = str(last.get("content") or "").split("\n")
        if name == "list":
            return self._listed(arguments, shown)
        if name == "search":
            self._searched(arguments, shown)
        elif name == "run" and tuple(arguments["arguments"]) == BUILT_IN:
            names = [module for line in shown for module in line.split() if module.isalpha()]
            names = [module for module in names if module not in ("python", "import", "print", "sys", "status")]
            self._todo.extend(("run", {"arguments": ["-m", "pydoc", module]}) for module in names[:LOOKED_UP])
        return ""

    def _listed(self, arguments: dict[str, Any], shown: list[str]) -> str:
        head = _HEAD.match(shown[0])
        if head is None:
            # Shown in parts only: the listing was too long for this window.
            if arguments["count"] > 1:
                self._todo.appendleft(("list", {**arguments, "count": arguments["count"] // 2}))
            return ""
        folder = arguments["path"]
        within = "" if folder == "." else f"{folder}/"
        found = self._found.setdefault(folder, [])
        for line in shown[1:]:
            file = _FILE.match(line)
            if file:
                self.files += 1
                total = max(1, int(file[2]))
                found += [
                    ("read", {"path": within + file[1], "start": start, "lines": self._lines})
                    for start in range(1, total + 1, self._lines)
                ]
            elif line.endswith("/"):
                found.append(("list", {"path": within + line[:-1], "start": 1, "count": ENTRIES}))
        if int(head["last"]) < int(head["total"]):
            self._todo.appendleft(("list", {**arguments, "start": int(head["last"]) + 1}))
            return ""
        steps: list[Call] = [("search", {"pattern": OUTLINE, "path": folder, "start": 1}), *self._found.pop(folder)]
        self._todo.extendleft(reversed(steps))
        return f"{folder}: {len(steps)} steps noted."

    def _searched(self, arguments: dict[str, Any], shown: list[str]) -> None:
        head = next((match for match in map(_HEAD.match, shown) if match), None)
        if head is not None and int(head["last"]) < int(head["total"]):
            self._todo.appendleft(("search", {**arguments, "start": int(head["last"]) + 1}))
