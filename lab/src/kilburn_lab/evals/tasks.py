"""Small tasks in real source files, for an agent that knows only what its window shows.

A task is a plan: looks, and edits that each need one fact, a line of an earlier output or of the user. The files are
copies of modules of this Python's standard library, or of C headers, in a folder of their own; edits are written, and a
check is a program that runs there. Four kinds of task:

- *rename*: one search lists the places of a name; each place is read and edited in turn.
- *values*: the user says some figures in the middle of the session; files are read; some of the figures are needed.
- *calls*: one search lists definitions; their exact signatures are needed one after another.
- *failures*: one run of the check lists wrong constants; each is read and repaired in turn.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kilburn.demo.library import Library, read_lines
from kilburn.errors import SpecError

KINDS = ("rename", "values", "calls", "failures")

PACKAGES = (
    "asyncio", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging", "unittest", "urllib", "xml",
)  # fmt: skip
"""Of the standard library, beside its modules."""

ATTEMPTS = 1000
"""Choices of files of which one should do for a task."""

FILES = 8
"""Source files of a task."""

LINES = 50
"""Lines that are read at once."""

SECONDS = 60.0
"""That a check may take."""


class Language(msgspec.Struct, frozen=True):
    """How a language writes what the tasks are about.

    Args:
        suffix: of its files.
        define: a search for the definition of a function, whose name stands for {}.
        signature: a line that defines a function of several arguments, as a regular expression.
        constant: a line that gives a name a whole number: what stands before the number, and the number.
    """

    suffix: str
    define: str
    signature: str
    constant: str


class Command(msgspec.Struct, frozen=True):
    """What the agent does: `read PATH LINE`, `search PATTERN`, `write PATH LINE TEXT` or `check`."""

    verb: str
    path: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.verb, self.path, self.line or "", self.text) if part)


class Look(msgspec.Struct, frozen=True):
    """Do something whatever the window shows."""

    thought: str
    command: Command


class Say(msgspec.Struct, frozen=True):
    """The user says something."""

    text: str


class Edit(msgspec.Struct, frozen=True):
    """Edit a file with a fact that the window has to show.

    Args:
        thought: names what is looked for, and not the fact.
        form: says to a model what to write and where, as the script knows it, without the fact.
        fact: the whole line that has it, as a regular expression.
        again: brings the fact once more; None if only memory can.
        near: read around the place first; it is where the fact says.
        make: the edit, from the match.
    """

    thought: str
    form: str
    fact: re.Pattern[str]
    again: Command | None
    make: Callable[[re.Match[str]], Command]
    near: bool = False


class Task(msgspec.Struct, frozen=True):
    """One task: its files by path, what is asked, the plan, and the program that checks the result."""

    id: str
    kind: str
    files: dict[str, str]
    ask: str
    plan: tuple[Look | Say | Edit, ...]
    check: str


class Workshop:
    """A folder with a task's files, in which commands are carried out."""

    def __init__(self, root: Path, task: Task) -> None:
        self.root = root
        for path, text in {**task.files, "check.py": task.check}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        self._library = Library(root)

    def do(self, command: Command) -> str:
        """The output of a command."""
        read_lines.cache_clear()
        if command.verb == "read":
            return self._library.read(command.path, max(1, command.line - LINES // 2), LINES)
        if command.verb == "search":
            found = [
                f"{path.relative_to(self.root).as_posix()} {number}: {line}"
                for path in sorted(self.root.rglob("*.*"))
                if path.is_file() and path.name != "check.py"
                for number, line in enumerate(read_lines(path), start=1)
                if re.search(command.text, line)
            ]
            return "\n".join(found) or "nothing found"
        if command.verb == "check":
            return self.check()[1]
        path = self.root / command.path
        lines = read_lines(path) if path.exists() else ()
        kept = [*lines, *[""] * (command.line - len(lines))]
        kept[command.line - 1] = command.text
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
        return f"{command.path} is written"

    def check(self) -> tuple[bool, str]:
        """Whether the task is done, and what its check says."""
        # Isolated, so that no module of the folder hides one of the library.
        command = [sys.executable, "-I", "check.py"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=SECONDS, check=False)
        return done.returncode == 0, done.stdout + done.stderr


PYTHON = Language(".py", r"def {}\b", r"^\s*def \w+\(.*,.*\):$", r"^([A-Z][A-Z0-9_]{3,} = )([1-9]\d{0,8})$")
C = Language(
    ".h",
    r"\b{} *\(",
    r"^(?!typedef )\w[\w *]*[ *]\w+ *\([^()]*,[^()]*\)[\w ]*;$",
    r"^(#\s*define\s+[A-Z][A-Z0-9_]{3,}\s+)([1-9]\d{0,8})$",
)


class Sources(msgspec.Struct, frozen=True):
    """The files that tasks are made from: texts by path, in one language."""

    language: Language
    texts: dict[str, str]


def tasks(count: int, seed: int, folder: Path | None = None) -> Iterator[Task]:
    """So many tasks, the kinds in turn; the same seed and the same files give the same tasks.

    Args:
        folder: with C headers in it or below; None for this Python's library.

    Raises:
        SpecError: too few sources, or none of which a task of each kind can be made.
    """
    known = sources(folder)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(f"{seed}/{number}")
        attempts = (_MAKERS[kind](f"{kind}-{seed}-{number}", known, chance) for _ in range(ATTEMPTS))
        made = next((task for task in attempts if task is not None), None)
        if made is None:
            raise SpecError(f"{folder}: no task of kind {kind} can be made of it", advice="name a folder with more sources")
        yield made


def sources(folder: Path | None = None) -> Sources:
    """The C headers in a folder or below, or the files of this Python's library, that are long enough to read in parts.

    Raises:
        SpecError: too few.
    """
    if folder is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [*root.glob("*.py"), *(path for package in PACKAGES for path in (root / package).rglob("*.py"))]
        files = [path for path in files if "test" not in path.parts]
    else:
        root, files = folder, list(folder.rglob(f"*{C.suffix}"))
    texts = {path.relative_to(root).as_posix(): _text_of(path) for path in sorted(files)}
    texts = {path: text for path, text in texts.items() if text.count("\n") > 2 * LINES}
    if len(texts) < FILES:
        raise SpecError(f"{root} has too few sources", advice=f"{FILES} files of over {2 * LINES} lines are needed")
    return Sources(PYTHON if folder is None else C, texts)


def _text_of(path: Path) -> str:
    """The text of a file; "" if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _chosen(texts: dict[str, str], chance: random.Random) -> dict[str, str]:
    return {path: texts[path] for path in sorted(chance.sample(sorted(texts), FILES))}


def _reads(files: dict[str, str], count: int, chance: random.Random) -> list[Look]:
    """Parts of the files, read because the work leads there."""
    looks = []
    for path in chance.choices(sorted(files), k=count):
        looks.append(Look(f"I go on with {path}.", Command("read", path, chance.randrange(1, files[path].count("\n")))))
    return looks


def _rename(name: str, sources: Sources, chance: random.Random) -> Task | None:
    files = _chosen(sources.texts, chance)
    places: dict[str, list[tuple[str, int]]] = {}
    for path, text in files.items():
        for number, said in enumerate(text.split("\n"), start=1):
            for word in dict.fromkeys(re.findall(r"\b[a-z]+_[a-z_]+\b", said)):
                places.setdefault(word, []).append((path, number))
    fitting = sorted(word for word, found in places.items() if 5 <= len(found) <= 9 and len({path for path, _ in found}) > 1)
    if not fitting:
        return None
    old = chance.choice(fitting)
    new = f"{old}_{chance.randrange(100, 1000)}"
    search = Command("search", text=rf"\b{old}\b")
    plan: list[Look | Say | Edit] = [Look(f"Where is {old}?", search)]
    for path, line in places[old]:
        plan.append(
            Edit(
                thought=f"The next place of {old}.",
                form=f"Write line {line} of {path} anew, with {new} in place of {old}.",
                fact=re.compile(rf"^{re.escape(path)} {line}: (.*)$", re.M),
                again=search,
                make=partial(_renamed, path, line, old, new),
                near=True,
            )
        )
    check = f"left = {{path: text.count({old!r}) - text.count({new!r}) for path, text in TEXTS.items()}}\n"
    check += "bad = [f'{path} still has it' for path, count in left.items() if count]\n"
    check += f"bad += [] if sum(text.count({new!r}) for text in TEXTS.values()) >= {len(places[old])} else ['too few']\n"
    # A name that is part of another one stays.
    left = {path: len(re.findall(rf"{old}", text)) - len(re.findall(rf"\b{old}\b", text)) for path, text in files.items()}
    if any(left.values()):
        return None
    return _task(name, "rename", files, f"Rename {old} to {new} in all files, one place at a time.", plan, check)


def _values(name: str, sources: Sources, chance: random.Random) -> Task:
    files = _chosen(sources.texts, chance)
    agreed = f"agreed{sources.language.suffix}"
    names = [f"{word}_{chance.choice(('LIMIT', 'RETRIES', 'PORT', 'SECONDS'))}" for word in chance.sample(_WORDS, 7)]
    figures = {one: chance.randrange(100, 10_000) for one in names}
    said = "\n".join(["These were agreed today, remember them:", *(f"{one} = {value}" for one, value in figures.items())])
    wanted = chance.sample(names, 4)
    plan: list[Look | Say | Edit] = [*_reads(files, 3, chance), Say(said), *_reads(files, 6, chance)]
    for line, one in enumerate(wanted, start=1):
        plan.append(
            Edit(
                thought=f"Now {one}, as it was agreed.",
                form=f"Write {one} = its figure as line {line} of {agreed}.",
                fact=re.compile(rf"^{one} = (\d+)$", re.M),
                again=None,
                make=partial(_with_figure, agreed, line, f"{one} = "),
            )
        )
        plan += _reads(files, 2, chance)
    check = f"bad = [one for one in {[f'{one} = {figures[one]}' for one in wanted]!r} if one not in TEXTS.get({agreed!r}, '')]\n"
    return _task(name, "values", files, f"Read the sources, then write {agreed} with figures that were agreed.", plan, check)


def _calls(name: str, sources: Sources, chance: random.Random) -> Task | None:
    files = _chosen(sources.texts, chance)
    language, stubs = sources.language, f"stubs{sources.language.suffix}"
    found = [(path, line, text) for path, text in files.items() for line, text in _definitions(text, language.signature)]
    names = [_name_of(text) for _, _, text in found]
    known = [place for place, one in zip(found, names, strict=True) if names.count(one) == 1]
    if len(known) < 12:
        return None
    wanted = chance.sample(known, 5)
    plan: list[Look | Say | Edit] = [Look("Which functions take several arguments?", Command("search", text=language.signature))]
    written = []
    for number, (path, line, text) in enumerate(wanted, start=1):
        one = _name_of(text)
        plan += _reads(files, 2, chance)
        plan.append(
            Edit(
                thought=f"Which signature has {one} of {path}?",
                form=f"Write its whole signature and then ' ...' as line {number} of {stubs}.",
                fact=re.compile(rf"^{re.escape(path)} {line}: (.*\b{one} *\(.*)$", re.M),
                again=Command("search", text=language.define.format(one)),
                make=partial(_stub, stubs, number),
            )
        )
        written.append(f"{text.strip()} ...")
    check = f"bad = [one for one in {written!r} if one not in TEXTS.get({stubs!r}, '').split('\\n')]\n"
    asked = ", ".join(_name_of(text) for _, _, text in wanted)
    return _task(name, "calls", files, f"Write {stubs} with the signatures of {asked}.", plan, check)


def _failures(name: str, sources: Sources, chance: random.Random) -> Task | None:
    constant = sources.language.constant
    fitting = {path: text for path, text in sources.texts.items() if _constants(text, constant)}
    if len(fitting) < FILES:
        return None
    files = _chosen(fitting, chance)
    found = [(path, *one) for path, text in files.items() for one in _constants(text, constant)]
    if len(found) < 5:
        return None
    wanted = chance.sample(found, 5)
    rules = []
    for path, line, head, value in wanted:
        wrong = value + chance.randrange(3, 90)
        lines = files[path].split("\n")
        lines[line - 1] = f"{head}{wrong}"
        files[path] = "\n".join(lines)
        rules.append((path, line, head, re.findall(r"\w+", head)[-1], wrong, value))
    plan: list[Look | Say | Edit] = [Look("What fails?", Command("check"))]
    for path, line, head, one, wrong, _ in rules:
        plan.append(
            Edit(
                thought=f"The failure of {one}.",
                form=f"Write line {line} of {path} anew, with what {one} must be.",
                fact=re.compile(rf"^FAIL {re.escape(path)}:{line}: {one} is {wrong} and must be (\d+)$", re.M),
                again=Command("check"),
                make=partial(_with_figure, path, line, head),
                near=True,
            )
        )
        plan += _reads(files, 1, chance)
    check = "bad = []\n"
    check += f"for path, line, head, one, wrong, value in {rules!r}:\n"
    check += "    if TEXTS[path].split('\\n')[line - 1] != f'{head}{value}':\n"
    check += "        bad.append(f'FAIL {path}:{line}: {one} is {wrong} and must be {value}')\n"
    return _task(name, "failures", files, "Some constants were changed by mistake. Repair them, one at a time.", plan, check)


def _renamed(path: str, line: int, old: str, new: str, found: re.Match[str]) -> Command:
    return Command("write", path, line, re.sub(rf"\b{old}\b", new, found[1]))


def _with_figure(path: str, line: int, head: str, found: re.Match[str]) -> Command:
    return Command("write", path, line, f"{head}{found[1]}")


def _stub(path: str, line: int, found: re.Match[str]) -> Command:
    return Command("write", path, line, f"{found[1].strip()} ...")


def _task(name: str, kind: str, files: dict[str, str], ask: str, plan: Sequence[Look | Say | Edit], check: str) -> Task:
    begin = "from pathlib import Path\n\n"
    begin += "PATHS = [path for path in Path().rglob('*.*') if path.is_file() and path.name != 'check.py']\n"
    begin += "TEXTS = {path.as_posix(): path.read_text('utf-8') for path in PATHS}\n"
    end = "print('\\n'.join(bad) or 'all is well')\nraise SystemExit(bool(bad))\n"
    return Task(name, kind, files, ask, tuple(plan), begin + check + end)


_MAKERS: dict[str, Callable[[str, Sources, random.Random], Task | None]] = {
    "rename": _rename,
    "values": _values,
    "calls": _calls,
    "failures": _failures,
}

_WORDS = ["UPLOAD", "LOGIN", "MIRROR", "PRINTER", "BACKUP", "CACHE", "REPORT", "QUEUE", "GATEWAY", "SENSOR", "ARCHIVE", "RELAY"]


def _definitions(text: str, signature: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if re.search(signature, line)]


def _name_of(definition: str) -> str:
    """What stands before the first bracket."""
    found = re.search(r"(\w+) *\(", definition)
    return found[1] if found else ""


def _constants(text: str, constant: str) -> list[tuple[int, str, int]]:
    """Lines that give a name a whole number: their number, what stands before the number in them, and it."""
    found = ((number, re.match(constant, line)) for number, line in enumerate(text.split("\n"), start=1))
    return [(number, one[1], int(one[2])) for number, one in found if one is not None]
