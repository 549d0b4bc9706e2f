"""Recorded agent runs: a head (system, task) and steps of thought, action and output.

Read from files, one run at a time; or made up from a seed, so that a measurement runs on a machine without any file: in a code
base that does not exist, or in a folder of sources of any language that `kilburn_lab.evals.grammars` reads. Runs can be braided
into longer sessions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.form import parse
from kilburn.wire.recording import read_runs
from kilburn.wire.trajectory import HeadMessage, Step, Trajectory
from kilburn_lab.evals.grammars import definitions, shelves
from kilburn_lab.evals.measure import coined


def read(path: str | Path) -> Iterator[Trajectory]:
    """The runs of a file or a folder, of any form that `kilburn.wire.recording.read_runs` reads, each with an id of its own.

    Raises:
        InvalidMessage: no such file, it cannot be read, or a line is no run; the message names the line.
    """
    for run in read_runs(path):
        told = run.trajectory
        yield trajectory_of(run.name, run.messages) if told is None else msgspec.structs.replace(told, id=run.name)


def trajectory_of(id: str, messages: Iterable[dict[str, Any]]) -> Trajectory:
    """Return a run of messages as a head and steps.

    The head is what stands before the first reply. Each call is a step, with its result as the observation; the first
    call of a reply has its text as the thought. A reply without a call is an action of its own, and what the user says
    next came back.

    Raises:
        InvalidMessage: no message, or a result whose call is not before it; it names the message.
    """
    head: list[HeadMessage] = []
    steps: list[Step] = []
    calls: dict[str | None, int] = {}
    answered = True
    for number, source in enumerate(messages, start=1):
        where = f"{id}: message {number}"
        for message in _parsed(source, where):
            text = _joined(part for part in message.parts if part.kind in (Kind.TEXT, Kind.REASONING))
            if message.role is Role.ASSISTANT:
                reply_calls = [part for part in message.parts if part.kind is Kind.CALL]
                for at, part in enumerate(reply_calls):
                    calls[part.call] = len(steps)
                    steps.append(Step("" if at else text, _action(part), ""))
                if not reply_calls:
                    steps.append(Step("", text, ""))
                answered = bool(reply_calls)
            elif message.role is Role.TOOL:
                for part in message.parts:
                    if part.kind is Kind.RESULT:
                        _answer(steps, calls, part, where)
            elif not steps:
                head.append(HeadMessage(message.role, text))
            elif answered:
                steps.append(Step("", "", text, user=True))
            else:
                steps[-1] = msgspec.structs.replace(steps[-1], observation=text)
                answered = True
    return Trajectory(id, tuple(head), tuple(steps))


def _parsed(source: dict[str, Any], where: str) -> list[Message]:
    try:
        return parse(source)
    except InvalidMessage as error:
        raise InvalidMessage(f"{where}: {error.what}", advice=error.advice) from None


def _joined(parts: Iterable[Part]) -> str:
    return "\n".join(part.text for part in parts)


def _answer(steps: list[Step], calls: dict[str | None, int], part: Part, where: str) -> None:
    at = calls.get(part.call)
    if at is None:
        raise InvalidMessage(f"{where}: a result whose call {part.call!r} is not before it", advice="record the call too")
    observation = steps[at].observation
    steps[at] = msgspec.structs.replace(steps[at], observation=f"{observation}\n{part.text}" if observation else part.text)


def _action(call: Part) -> str:
    """Return a call as one would type it: a shell's command alone, else the tool's name and its arguments."""
    try:
        arguments = msgspec.json.decode(call.text)
    except (msgspec.DecodeError, RecursionError):  # as the model wrote it
        arguments = call.text
    values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
    words = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values]
    if isinstance(arguments, dict) and list(arguments) == ["command"]:
        return words[0]
    return " ".join([call.name or "call", *words])


STRETCHES = 3
"""Pieces that a run of a braided session is cut into."""


def braided(runs: Iterable[Trajectory], tokens: int, seed: int) -> Iterator[Trajectory]:
    """Sessions of about `tokens` tokens of four characters, in each of which an agent works at several tasks in turn.

    Each run is cut into three stretches at random steps. First all first stretches are told, then all second ones, then
    all third ones, so that between two stretches of a task lies most of a third of the session. Runs told one after the
    other would need a window of one run, however long the session is. The last session may be shorter.
    """
    chance = random.Random(seed)
    group: list[Trajectory] = []
    length = 0
    for run in runs:
        group.append(run)
        length += sum(len(step.thought) + len(step.action) + len(step.observation) for step in run.steps) // 4
        if length >= tokens:
            yield _braid(group, chance)
            group, length = [], 0
    if group:
        yield _braid(group, chance)


def _braid(runs: Sequence[Trajectory], chance: random.Random) -> Trajectory:
    stretches: list[list[Step]] = [[] for _ in range(STRETCHES)]
    for number, run in enumerate(runs, start=1):
        steps = [msgspec.structs.replace(step, task=run.id) for step in run.steps]
        cuts = [0, *sorted(chance.choices(range(len(steps) + 1), k=STRETCHES - 1)), len(steps)]
        said = [f"Task {number}.\n{run.asked}"] + [f"Go on with task {number}."] * (STRETCHES - 1)
        for at, (start, stop) in enumerate(pairwise(cuts)):
            if at == 0 or start < stop:
                stretches[at] += [Step("", "", said[at], run.id, user=True), *steps[start:stop]]
    head = tuple(turn for turn in runs[0].head if turn.role == "system")
    return Trajectory("+".join(run.id for run in runs), head, tuple(step for stretch in stretches for step in stretch))


_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ki", "lo", "mu", "na", "pe", "ra", "so", "ti", "vu", "wa", "xe", "yo", "zu")
_VERBS = ["load", "parse", "merge", "render", "check", "fetch", "store", "split", "bind", "trace"]
_TYPES = ["int", "str", "bytes", "float", "bool"]


def shell_call(id: str, thought: str, command: str) -> dict[str, Any]:
    """A step's thought and action as a message that calls a shell, in the chat form."""
    function = {"name": "shell", "arguments": json.dumps({"command": command}, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": thought or None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def synthetic(runs: int, seed: int, *, copying: bool = False) -> Iterator[Trajectory]:
    """`runs` made-up runs: an agent reads, searches, edits and tests a code base that does not exist.

    Later actions name functions and files that only older outputs mentioned, as real ones do. With `copying` they copy
    lines of them too. The same seed gives the same runs.
    """
    for number in range(runs):
        yield _Made(random.Random(f"{seed}/{number}"), copying).run(f"made-{seed}-{number}")


class _Made:
    """One made-up code base and the agent that walks through it."""

    def __init__(self, chance: random.Random, copying: bool) -> None:
        self.chance = chance
        self.copying = copying
        self.used: set[str] = set()
        self.package = self._word()
        self.files = {f"src/{self.package}/{self._word()}.py": self._functions() for _ in range(chance.randint(6, 12))}
        self.steps: list[Step] = []
        self.seen: list[str] = []
        self.lines: dict[str, str] = {}

    def _word(self) -> str:
        return coined(self.chance, _SYLLABLES, 3, self.used)

    def _functions(self) -> list[str]:
        return [f"{self.chance.choice(_VERBS)}_{self._word()}" for _ in range(self.chance.randint(5, 14))]

    def run(self, name: str) -> Trajectory:
        task = f"The result of the {self.package} package is wrong for empty input. Find out why and repair it."
        self._add("Let me see which files there are.", "ls -R src", "\n".join(sorted(self.files)))
        for _ in range(self.chance.randint(8, 20)):
            self.chance.choice((self._view, self._view, self._search, self._edit, self._edit, self._test))()
        self._add("That should do.", "submit", "done")
        head = (HeadMessage("system", "You are a programmer with a shell. One command at a time."), HeadMessage("user", task))
        return Trajectory(name, head, tuple(self.steps))

    def _add(self, thought: str, action: str, observation: str) -> None:
        self.steps.append(Step(thought, action, observation))

    def _body(self, function: str) -> list[str]:
        kind = self.chance.choice(_TYPES)
        lines = [f"def {function}(value: {kind}) -> {kind}:", f'    """{function.split("_")[0].title()} one value."""']
        lines += [f"    step = value + {self.chance.randint(2, 999)}" for _ in range(self.chance.randint(1, 6))]
        self.lines[function] = lines[-1]
        return [*lines, "    return step", ""]

    def _view(self) -> None:
        file = self.chance.choice(sorted(self.files))
        lines = [line for function in self.files[file] for line in self._body(function)]
        self.seen += self.files[file]
        shown = "\n".join(f"{number}:{line}" for number, line in enumerate(lines, 1))
        self._add("The next file may hold the fault.", f"open {file}", f"[File: {file} ({len(lines)} lines total)]\n{shown}")

    def _search(self) -> None:
        word = self.chance.choice(_VERBS)
        found = [f"{file}: def {name}" for file, names in self.files.items() for name in names if name.startswith(word)]
        self.seen += [line.rsplit(" ", 1)[1] for line in found]
        self._add(f"Which functions {word} something?", f'search_dir "{word}"', "\n".join(found) or "No matches found")

    def _edit(self) -> None:
        if not self.seen:
            return self._view()
        target = self.chance.choice(self.seen)
        hint = target.split("_")[0]
        copied = f"{self.lines[target]}\n" if self.copying and target in self.lines else ""
        self._add(
            f"The {hint} function has to check for empty input first.",
            f"edit 3:3\n    {target}(value or 0)\n{copied}end_of_edit",
            "File updated.",
        )
        return None

    def _test(self) -> None:
        lines = [f"test_{self._word()} PASSED" for _ in range(self.chance.randint(10, 60))]
        self._add("Let me run the tests.", "python -m pytest", "\n".join(lines))


READ = 40
"""Lines of a source that are read at once."""

REPLACED = 12
"""Lines that an edit replaces at most."""


def sourced(folder: Path, runs: int, seed: int) -> Iterator[Trajectory]:
    """`runs` runs of a scripted agent in real sources, the languages of a folder in turn; each run is named after its own.

    The agent reads parts of a few files. Later it edits what it has read, and as most agents' tools want it, the edit quotes the
    lines that it replaces, of an output that is not the last one.

    Raises:
        SpecError: no sources.
    """
    shelf = shelves(folder)
    for number in range(runs):
        language = list(shelf)[number % len(shelf)]
        yield _sourced(f"{language}-{seed}-{number}", shelf[language], random.Random(f"sources/{seed}/{number}"))


def _sourced(name: str, files: dict[str, str], chance: random.Random) -> Trajectory:
    texts = {path: files[path].split("\n") for path in sorted(chance.sample(sorted(files), min(5, len(files))))}
    defined = {path: list(definitions(path, files[path])) for path in texts}
    task = f"Go through {', '.join(texts)} and simplify what can be simpler."
    head = (HeadMessage("system", "You are a programmer with tools to read and edit files."), HeadMessage("user", task))
    steps: list[Step] = []
    seen: list[tuple[str, int]] = []
    for _ in range(chance.randint(12, 30)):
        if len(seen) > 2 and chance.random() < 0.4:
            path, start = chance.choice(seen[:-1])
            steps.append(_replaced(path, texts[path], start, defined[path], chance))
            continue
        path = chance.choice(list(texts))
        start = chance.randrange(1, max(2, len(texts[path]) - READ // 2))
        shown = texts[path][start - 1 : start - 1 + READ]
        lines = "\n".join(f"{at}\t{line}" for at, line in enumerate(shown, start))
        seen.append((path, start))
        steps.append(
            Step(f"I read on in {path}.", f"read {path} {start}", f"{path} lines {start}-{start - 1 + len(shown)}\n{lines}")
        )
    return Trajectory(name, head, tuple(steps))


def _replaced(path: str, lines: list[str], start: int, defined: Sequence[tuple[int, str]], chance: random.Random) -> Step:
    """An edit of some lines that were read, which it quotes, with one of them left out."""
    stop = min(start - 1 + READ, len(lines))
    at = chance.randrange(start - 1, stop)
    quoted = lines[at : min(stop, at + chance.randint(1, REPLACED))]
    gone = chance.randrange(len(quoted))
    above = [name for number, name in defined if start <= number <= at + 1]
    thought = f"{above[-1] if above else 'This part'} can be simpler."
    old, new = "\n".join(quoted), "\n".join(quoted[:gone] + quoted[gone + 1 :])
    return Step(thought, f"replace in {path}\n<<<<\n{old}\n====\n{new}\n>>>>", f"{path} is written")
