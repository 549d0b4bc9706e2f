"""What branches save: a migration of many files in a Git repository, with and without them.

A repository is made with modules that call an old client, each with a timeout of its own and a test. A scripted agent
moves them to the new client: it edits real files and runs real tests, and at the end writes a report with all the
timeouts that it found on the way. It knows only what its prompt shows. Where the steps of each file stand in a branch,
the main window has one line for it; without branches, the early files have left the window when the report is due.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kilburn
from figures import Row, emit, parser
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.loop import UNLIMITED, Agent, RunResult
from kilburn.kernel.branches import Inherit
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Request
from kilburn.models.scripted import Scripted

TASK = "Move every module in svc/ to the new client. Then write a report with each module's old timeout."
CLIENT = "def fetch(url, timeout):\n    return url, timeout\n\n\ndef get(address, *, seconds):\n    return address, seconds\n"
FILLER = "    # Part {number} of the notes on module {name}: {words}.\n"
WORDS = ("river", "sand", "gold", "water", "stone", "bridge", "mill", "wheel", "ferry", "bank", "reed", "heron", "otter", "weir")


class Repository:
    """A Git repository to be migrated.

    Args:
        folder: where it is made.
        files: modules in it.
        lines: lines of comment in each.
    """

    def __init__(self, folder: Path, files: int, lines: int, seed: int = 0) -> None:
        self.folder = folder
        dice = random.Random(seed)
        self.timeouts = {f"svc/mod_{number:02}.py": dice.randrange(100, 1000) for number in range(files)}
        (folder / "svc").mkdir(parents=True)
        (folder / "client.py").write_text(CLIENT)
        for path, timeout in self.timeouts.items():
            name = Path(path).stem
            notes = "".join(
                FILLER.format(number=number, name=name, words=" ".join(dice.choices(WORDS, k=9))) for number in range(lines)
            )
            text = f'import client\n\n\ndef load():\n{notes}    return client.fetch("https://{name}", timeout={timeout})\n'
            (folder / path).write_text(text)
            test = (
                f"import sys, unittest\nsys.path[:0] = ['svc', '.']\nimport client, {name}\n\n\nclass Moved(unittest.TestCase):\n"
                f"    def test_it(self):\n        client.fetch = None\n"
                f"        self.assertEqual({name}.load(), ('https://{name}', {timeout}))\n"
            )
            (folder / f"test_{name}.py").write_text(test)
        self.git("init", "-q")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@a", "commit", "-qm", "before")

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def remaining(self) -> str:
        """The next module that still uses the old client."""
        found = [path for path in self.timeouts if "client.fetch" in (self.folder / path).read_text()]
        return f"next: {found[0]} ({len(found)} left)" if found else "none is left"

    def read(self, path: str) -> str:
        """Read a file."""
        return (self.folder / path).read_text()

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file, which must have it once."""
        text = (self.folder / path).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {path}")
        (self.folder / path).write_text(text.replace(old, new))
        return f"edited {path}"

    def test(self, path: str) -> str:
        """Run the test of a module."""
        command = [sys.executable, "-S", "-m", "unittest", "-q", f"test_{Path(path).stem}"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60)
        return f"passed: {path}" if not done.returncode else f"FAILED: {path}\n{done.stderr[-2000:]}"

    def report(self, lines: list[str]) -> str:
        """Write the report."""
        (self.folder / "MIGRATION.txt").write_text("\n".join(lines) + "\n")
        return f"written: {len(lines)} lines"

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What an agent may do here."""
        return [self.remaining, self.read, self.edit, self.test, self.report]

    def right(self) -> int:
        """Lines of the report that are right."""
        report = self.folder / "MIGRATION.txt"
        lines = set(report.read_text().splitlines()) if report.exists() else set()
        return len(lines & {f"{path} {timeout}" for path, timeout in self.timeouts.items()})

    def moved(self) -> int:
        """Modules that changed in Git and pass their tests."""
        changed = self.git("diff", "--name-only").split()
        return sum(self.test(path).startswith("passed") for path in self.timeouts if path in changed)


class Mover:
    """The scripted agent: what it does next follows from the prompt alone."""

    def __init__(self, branches: bool) -> None:
        self.branches = branches
        self._calls, self._lock = 0, threading.Lock()

    def __call__(self, request: Request) -> Message | str:
        texts = [(message["role"], _text(message)) for message in request.messages]
        task = next(text for role, text in reversed(texts) if role == "user")
        last = texts[-1][1]
        if task.startswith("Move svc/"):
            return self._inside(task.split()[1], last, texts)
        if found := re.match(r"next: (\S+)", last):
            if self.branches:
                prompt = f"Move {found[1]} to the new client, and return its old timeout."
                return self._call("branch", description="move one file", prompt=prompt)
            return self._call("read", path=found[1])
        if last == "none is left":
            known = dict(re.findall(r"moved (svc/\S+\.py): timeout (\d+)", "\n".join(text for _, text in texts)))
            return self._call("report", lines=[f"{path} {timeout}" for path, timeout in sorted(known.items())])
        if last.startswith("written"):
            return "It is done."
        return self._step(last, texts) if not self.branches and last != TASK else self._call("remaining")

    def _inside(self, path: str, last: str, texts: list[tuple[str, str]]) -> Message:
        if last.startswith("passed"):
            return self._call("return", message=_moved(path, texts))
        return self._step(last, texts) if "client" in last or last.startswith("edited") else self._call("read", path=path)

    def _step(self, last: str, texts: list[tuple[str, str]]) -> Message:
        """The next step with the file of the last result."""
        if found := re.search(r'client\.fetch\("(https://(\S+))", timeout=(\d+)\)', last):
            new = f'client.get("{found[1]}", seconds={found[3]})'
            return self._call("edit", path=f"svc/{found[2]}.py", old=found[0], new=new)
        if found := re.match(r"edited (\S+)", last):
            return self._call("test", path=found[1])
        if found := re.match(r"passed: (\S+)", last):
            return self._call("remaining", say=_moved(found[1], texts))
        return self._call("remaining")

    def _call(self, name: str, say: str = "", **arguments: Any) -> Message:
        with self._lock:
            self._calls += 1
        part = Part(kind=Kind.CALL, text=json.dumps(arguments), call=f"call{self._calls}", name=name)
        said = (Part(kind=Kind.TEXT, text=say),) if say else ()
        return Message(role=Role.ASSISTANT, parts=(*said, part))


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return "\n".join([str(content), *calls])


def _moved(path: str, texts: list[tuple[str, str]]) -> str:
    """What is said of a file that is moved: its timeout is in the arguments of the edit."""
    wanted = re.compile(rf"https://{Path(path).stem}\W+seconds=(\d+)")
    found = [match[1] for _, text in texts if (match := wanted.search(text))]
    return f"moved {path}: timeout {found[-1] if found else 'unknown'}"


def agent_for(repository: Repository, session: Session, inherit: str, script: Callable[[Request], Any]) -> Agent:
    """The scripted agent at work in a repository; its branches inherit the history or the task, or it has none ("")."""
    files = len(repository.timeouts)
    model, limits = Scripted([script] * (20 * files + 20)), UNLIMITED
    if inherit:
        agents = [SubAgent(inherit=Inherit(inherit))]
        return Branching(model, repository.tools, session, agents=agents, max_branches=2 * files, limits=limits, memory=False)
    return Agent(model, repository.tools, session, limits=limits, memory=False)


def measure(files: int, lines: int, window: int, inherit: str, policy: str) -> Row:
    """Migrate once; what it took."""
    with tempfile.TemporaryDirectory() as folder, kilburn.open(f"{folder}/a.db", window=window, policy=policy) as store:
        repository = Repository(Path(folder) / "work", files, lines)
        session = store.session("main")
        result: RunResult = agent_for(repository, session, inherit, Mover(bool(inherit))).run(TASK)
        every = [session, *(store.session(info.name) for info, _ in session.branches.children())]
        stats = [each.stats() for each in every]
        return {
            "agent": f"{f'branches with the {inherit}' if inherit else 'no branches'}, window {window:,}",
            "moved": repository.moved(),
            "reported": repository.right(),
            "steps": result.calls,
            "main peak": stats[0].peak,
            "tokens shipped": sum(one.tokens_shipped for one in stats),
            "prefilled again": sum(one.tokens_reprefilled for one in stats),
        }


def main() -> None:
    """Measure with and without branches, and without them in a window that holds everything."""
    arguments = parser(str(__doc__))
    arguments.add_argument("--files", type=int, default=40, help="modules to be moved")
    arguments.add_argument("--lines", type=int, default=40, help="lines of comment in each")
    arguments.add_argument("--window", type=int, default=4000, help="tokens of the window")
    arguments.add_argument("--policy", default="hybrid", help="what decides at the window")
    given = arguments.parse_args()
    rows = [
        measure(given.files, given.lines, window, inherit, given.policy)
        for inherit, window in (("history", given.window), ("task", given.window), ("", given.window), ("", 1_000_000))
    ]
    for row in rows:
        row["x"] = round(float(row["tokens shipped"]) / float(rows[0]["tokens shipped"]), 2)
    emit("migration", rows, given.json, f"{given.files} files; x: tokens shipped, compared with branches")


if __name__ == "__main__":
    main()
