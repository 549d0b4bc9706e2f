"""Sessions, and questions on them that have one exact answer.

A session is a recorded run, or reads and searches in real files of this Python's library or of a folder, made from a seed.
Something is planted in it at random places: what a user says, notes that a tool shows, what the agent settles, and the output
of tests, made up or cut from real logs. A question asks for a fact that the session showed once or says the same way
everywhere. Its answer is cut from the session by a program, by the parser of its language where it is code
(`kilburn_lab.evals.grammars`). Others of its kind stand in the same session.
"""

from __future__ import annotations

import gzip
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, cycle, islice
from pathlib import Path

import msgspec

from kilburn.demo.library import Library
from kilburn.errors import SpecError
from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.grammars import LONGEST_LINE, definitions, grammar_of, shelves
from kilburn_lab.evals.plants import garden
from kilburn_lab.evals.sample import HALVES, half_of
from kilburn_lab.evals.tasks import LINES
from kilburn_lab.evals.tasks import sources as library_sources
from kilburn_lab.evals.trajectories import read

FAMILIES = {
    "default": "source",
    "base": "source",
    "argument": "source",
    "line": "source",
    "failed": "log",
    "test": "log",
    "message": "log",
    "said": "planted",
    "noted": "planted",
    "settled": "planted",
}
"""Kinds of question, and where their answers are from."""

TOKENS = 6000
"""Of a session, before something is planted in it."""

FOUND = 12
"""Lines that a search shows."""

LOG = 1200
"""Characters that are cut from a log."""

LONGEST = 60
"""Characters of an answer."""


class RunQuestion(msgspec.Struct, frozen=True):
    """One question.

    Args:
        kind: of `FAMILIES`.
        text: what is asked. It does not contain the answer.
        answer: the exact answer.
        fact: a regular expression for the text that has to be known; its group is the answer.
        age: tokens of four characters from there to the end of the session.
        language: of the source that states the fact, a name of `kilburn_lab.evals.grammars`; "" if it is none.
    """

    kind: str
    text: str
    answer: str
    fact: str
    age: int
    language: str = ""


class Interview(msgspec.Struct, frozen=True):
    """A session, and what is asked when it has come to its end."""

    id: str
    steps: tuple[Step, ...]
    questions: tuple[RunQuestion, ...]


def interviews(
    sessions: int,
    asked: int,
    *,
    seed: int = 0,
    data: str | Path | None = None,
    sources: Path | None = None,
    logs: str | Path | None = None,
    tokens: int = TOKENS,
    half: str = "",
) -> list[Interview]:
    """So many sessions with so many questions each, or fewer if the data have no more.

    Args:
        data: recorded runs, see `kilburn_lab.evals.trajectories.read`; None for sessions made from the seed.
        sources: the folder whose files these read, the languages in turn; None for this Python's library.
        logs: a folder of logs of tests, plain or gzip; None for made-up ones.
        tokens: of a session, of four characters each; what is planted comes on top. Shorter runs are left out.
        half: one of `kilburn_lab.evals.sample.HALVES`, by what the user asked in a run; "" for all sessions.

    Raises:
        SpecError: a number below 1, no such half, no sessions, no logs, both runs and sources, or no sources.
        InvalidMessage: a file that cannot be read, or a line that is no run.
    """
    if min(sessions, asked, tokens) < 1 or half not in ("", *HALVES):
        raise SpecError(f"sessions={sessions}, questions={asked}, tokens={tokens}, half={half!r}", advice="see --help")
    if data is not None and sources is not None:
        raise SpecError("recorded runs and sources", advice="give one of them: sessions are made from sources")
    known = _logs(logs) if logs is not None else []
    made = (
        _interview(run.id, list(run.steps), asked, random.Random(f"{seed}/{run.id}"), known)
        for run in (_made(seed, tokens, sources) if data is None else _recorded(data, seed, tokens))
        if half in ("", half_of(run))
    )
    listed = list(islice((one for one in made if one.questions), sessions))
    if not listed:
        raise SpecError(f"{data or sources}: no sessions of {tokens} tokens", advice="give longer runs, or fewer tokens")
    return listed


def _recorded(data: str | Path, seed: int, tokens: int) -> Iterator[Trajectory]:
    """The beginnings of the runs that are long enough, in an order of the seed's."""
    runs = list(read(data))
    random.Random(seed).shuffle(runs)
    for run in runs:
        steps = _until(run.steps, tokens)
        if sum(_length(step) for step in steps) > tokens * 3 // 4:
            yield msgspec.structs.replace(run, steps=steps)


def _made(seed: int, tokens: int, folder: Path | None) -> Iterator[Trajectory]:
    """Sessions without an end, each in a few files of one language."""
    if folder is None:
        root, shelf = Path(sysconfig.get_paths()["stdlib"]), {"": library_sources().texts}
    else:
        root, shelf = folder, shelves(folder)
    for number in count():
        language = list(shelf)[number % len(shelf)]
        name = f"made-{language}-{seed}-{number}" if language else f"made-{seed}-{number}"
        yield Trajectory(name, (), _until(_walk(root, shelf[language], random.Random(f"{seed}/{number}")), tokens))


def _walk(root: Path, files: dict[str, str], chance: random.Random) -> Iterator[Step]:
    """Reads and searches in a few files, without an end."""
    library = Library(root)
    chosen = {path: files[path].split("\n") for path in sorted(chance.sample(sorted(files), min(4, len(files))))}
    while True:
        path = chance.choice(list(chosen))
        start = chance.randrange(1, len(chosen[path]))
        shown = library.read(path, start, LINES)
        yield Step(f"I go on with {path}.", f"read {path} {start}", shown)
        if names := _names(path, chosen[path][start - 1 : start - 1 + LINES]):
            name = chance.choice(names)
            found = [
                f"{place} {at}: {line}" for place, lines in chosen.items() for at, line in enumerate(lines, 1) if name in line
            ]
            yield Step(f"Where else is {name}?", f"search {name}", "\n".join(found[:FOUND]))


def _names(path: str, lines: Sequence[str]) -> list[str]:
    """Names of six characters or more that some lines define."""
    text = "\n".join(lines)
    if path.endswith(".py"):
        return re.findall(r"(?:def|class) (\w{6,})", text)
    return [name for _, name in definitions(path, text) if len(name) >= 6]


def _until(steps: Iterable[Step], tokens: int) -> tuple[Step, ...]:
    """The first steps that are not longer together."""
    kept = []
    for step in steps:
        tokens -= _length(step)
        if tokens < 0:
            break
        kept.append(step)
    return tuple(kept)


def _length(step: Step) -> int:
    return sum(len(text) for text in (step.thought, step.action, step.observation)) // CHARACTERS


def _interview(id: str, steps: list[Step], asked: int, chance: random.Random, logs: Sequence[str]) -> Interview:
    """Plant in a session and choose questions, the families in turn; those of a family are drawn evenly."""
    candidates = _plant(steps, chance)
    outputs = [_cut(log, chance) for log in chance.sample(logs, min(2, len(logs)))] or [_made_output(chance)]
    for output in outputs:
        steps.insert(chance.randrange(len(steps) + 1), Step("I run the tests.", "run the tests", output))
    # The kernel pins the first message of the user, and the window keeps the newest one: neither may be asked for.
    steps.insert(0, Step("", "", "Get to know this repository. I shall ask you about details.", user=True))
    text = "\n".join(part for step in steps for part in (step.thought, step.action, step.observation))
    for step in steps:
        candidates += [*_of_source(step.observation), *_of_log(step.observation)]
    sayings = Counter(question for _, question in {(fact, question) for _, question, _, fact, _ in candidates})
    found: dict[str, list[RunQuestion]] = {}
    for kind, question, answer, fact, language in dict.fromkeys(candidates):
        places = list(re.finditer(fact, text, re.MULTILINE))
        if (
            0 < len(answer) <= LONGEST
            and sayings[question] == 1
            and {normal(place[1]) for place in places} == {normal(answer)}
            and normal(answer) not in normal(question)
        ):
            age = (len(text) - places[-1].end()) // CHARACTERS
            found.setdefault(kind, []).append(RunQuestion(kind, question, answer, fact, age, language))
    drawn: list[RunQuestion] = []
    # Of each kind, wrong answers have to stand in the session too.
    kinds = [kind for kind in found if len({answer for own, _, answer, _, _ in candidates if own == kind}) > 1]
    families = {family: [kind for kind in kinds if FAMILIES[kind] == family] for family in sorted(set(FAMILIES.values()))}
    order = [family for family, listed in families.items() if listed]
    chance.shuffle(order)
    for family in islice(cycle(order), 3 * asked):
        left = [question for kind in families[family] for question in found[kind] if question not in drawn]
        if left and len(drawn) < asked:
            kind = chance.choice(sorted({question.kind for question in left}))
            drawn.append(chance.choice([question for question in left if question.kind == kind]))
    return Interview(id, tuple(steps), tuple(drawn))


def normal(text: str) -> str:
    """What of an answer is compared: no quotes, ends of sentences, doubled blanks or capitals."""
    return " ".join(text.split()).strip("`'\". ").casefold()


Candidate = tuple[str, str, str, str, str]
"""Kind, question, answer, the regular expression of the fact, and the language of the source that states it, if it is one."""


def _hole(before: str, after: str = "") -> str:
    """A regular expression for a text around an answer."""
    return f"{re.escape(before)}(.+?){re.escape(after)}"


def _plant(steps: list[Step], chance: random.Random) -> list[Candidate]:
    """Let the user say four facts, a file of notes show four, and the agent settle four, at random places."""
    facts = [plant for plant, _ in garden(chance.randrange(1 << 30), "plain").plants if plant.kind == "fact"]
    said, noted, settled = facts[:4], facts[4:8], facts[8:]
    at = chance.randrange(len(steps))
    thought = f"{steps[at].thought}\nSettled: {' '.join(fact.text for fact in settled)}"
    steps[at] = msgspec.structs.replace(steps[at], thought=thought)
    notes = Step("I look at the notes.", "cat NOTES", "\n".join(fact.text for fact in noted))
    steps.insert(chance.randrange(len(steps) + 1), notes)
    told = Step("", "", f"For later: {' '.join(fact.text for fact in said)} Go on.", user=True)
    steps.insert(chance.randrange(len(steps) + 1), told)
    return [
        (kind, fact.question, fact.value, _hole(*fact.text.split(fact.value)), "")
        for kind, listed in (("said", said), ("noted", noted), ("settled", settled))
        for fact in listed
        if fact.question
    ]


def _of_source(output: str) -> Iterator[Candidate]:
    """From definitions on one line, in a part of a file that was read."""
    path = _FILE.match(output)
    name = path[1] or path[2] if path else ""
    grammar = grammar_of(name)
    if grammar is None:
        return
    for shown in _NUMBERED.finditer(output):
        number, text = shown[1], shown[2].rstrip("\r")
        for fact in grammar.facts(text) if len(text) <= LONGEST_LINE else ():
            asked = fact.asked.format(path=name)
            if fact.kind == "line":
                yield fact.kind, asked, number, rf"\b(\d+)[:\t][ \t]*{re.escape(text)}", grammar.name
            else:
                hole = _hole(text[: fact.start], text[fact.stop :])
                yield fact.kind, asked, text[fact.start : fact.stop], hole, grammar.name


def _of_log(output: str) -> Iterator[Candidate]:
    """From summaries of failed tests, and from errors."""
    for path, test, message in _FAILED.findall(output):
        yield "failed", f"With which message did the test {test} fail?", message, f"{_hole(f'FAILED {path}::{test} - ')}$", ""
        yield "test", f"Which test failed with this message: {message}", test, _hole(f"FAILED {path}::", f" - {message}"), ""
    for error, message in _RAISED.findall(output):
        yield "message", f"With which message was {error} raised?", message, rf"\b{_hole(f'{error}: ')}$", ""


def _made_output(chance: random.Random) -> str:
    """The output of a run of tests, three of which failed."""
    words = [word for number in range(6) for word in garden(chance.randrange(1 << 30) + number, "plain").parts]
    tests = [f"tests/test_{word[:4]}.py::test_{word}" for word in words]
    failed = chance.sample(tests, 3)
    lines = [f"{test} {'FAILED' if test in failed else 'PASSED'}" for test in tests] + ["short test summary info"]
    for test in failed:
        lines.append(f"FAILED {test} - AssertionError: {chance.randrange(100, 9999)} is not {chance.randrange(100, 9999)}")
    return "\n".join(lines)


def _logs(folder: str | Path) -> list[str]:
    """The logs of a folder that have something to ask for, without colours.

    Raises:
        SpecError: there are none.
    """
    found = []
    for path in sorted(Path(folder).glob("*.log*")):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")
        found.append(re.sub(r"\x1b\[[0-9;]*m", "", text))
    found = [text for text in found if _FAILED.search(text) or _RAISED.search(text)]
    if not found:
        raise SpecError(f"{folder}: no logs with errors or failed tests", advice="give a folder of *.log or *.log.gz")
    return found


def _cut(log: str, chance: random.Random) -> str:
    """A part of a log around something that can be asked for."""
    places = {place[0]: place.start() for pattern in (_FAILED, _RAISED) for place in pattern.finditer(log)}
    start = max(0, chance.choice(list(places.values())) - chance.randrange(LOG))
    return log[start : start + LOG].partition("\n")[2].rpartition("\n")[0]


_FILE = re.compile(r"\[File: (\S+) \(|(\S+\.\w+) lines ")
_NUMBERED = re.compile(r"^(\d+)[:\t][ \t]*(\S.*)$", re.MULTILINE)
_FAILED = re.compile(r"^FAILED (\S+?)::(\w+) - (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:E +)?(\w+(?:Error|Exception)): (.{4,60})$", re.MULTILINE)
