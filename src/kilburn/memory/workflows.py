"""Workflows: procedures of successful tasks, as notes `workflows/...` that an agent is shown for similar tasks.

After Agent Workflow Memory (Wang et al. 2024). A judge says whether an episode succeeded. Only a success becomes a workflow: its
steps, with the values of the task as variables. Equal steps are stored once. If an episode was shown a workflow and began like
it, its success counts for the workflow; its failure counts against the workflow if the workflow's own steps failed, or nothing
else was done. The ledger of the notes records wins and losses, and a workflow that loses too often is retired.

    flows = Workflows(store, "ana")
    flows.learn(store.session("monday"), judge=lambda episode: tests_pass())
    session.append({"role": "user", "content": task}, flows.message(task))
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from kilburn.arguments import checked
from kilburn.collections.collection import undisturbed
from kilburn.effect import Answer, Ask
from kilburn.errors import Forgotten, SecretFound, SpecError
from kilburn.kernel.drive import run
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory import secrets
from kilburn.memory.episodes import (
    Call,
    Episode,
    Experience,
    Key,
    episodes,
    progress_data,
    quote_parts,
    recall_message,
    slug,
    versions,
)
from kilburn.memory.extraction import Failed, ask_for
from kilburn.memory.learning import make_answerer
from kilburn.memory.notes import NoteVersion
from kilburn.memory.prompts import prompt
from kilburn.memory.words import content_words, coverage
from kilburn.message import Kind, Message, Trust
from kilburn.model import object_schema
from kilburn.move import Add, Retire
from kilburn.page import Page, Place

__all__ = ["Workflows"]

FOLDER = "workflows"
"""The folder of these notes, and the name of the policy that writes them."""

MAX_STEPS = 50
"""Steps of a workflow at most."""

MAX_WORKFLOW_CHARS = 20_000
"""Characters of a workflow at most: a step that writes a whole file is no example for other tasks."""

MAX_COMMAND_CHARS = 2_000
"""Characters of a command that may only look around; a longer one does more."""

MIN_OVERLAP = 0.6
"""The share of the words of a workflow's goal that a task must have."""

MAX_LOSS_LEAD = 2
"""A workflow with this many more losses than wins is retired."""

INTRO = "How tasks like this were done before. Put the task's own values in place of {variables}."

Judge = Callable[[Episode], bool | None]
"""Returns whether an episode succeeded; None if it cannot tell."""

_STEP = re.compile(r"\d+\. (\S+) (.+)")
_VARIABLE = re.compile(r"\{((?:file|number|email|url|name|text|secret|value)\d+)\}")
_QUOTED = re.compile(r"\"([^\"\n]+)\"|(?<!\w)'([^'\n]+)'(?!\w)|`([^`\n]+)`|[“„]([^”“\n]+)[”“]|«([^»\n]+)»")
_TOKEN = re.compile(r"[^\s,;()\[\]{}<>|&$=\"'`]+")
_TELLING = re.compile(r"[\d/@_~\\]|\w\.\w|\w-\w|\w:\w")
_NAMES = (
    ("email", re.compile(r"[^@\s]+@[^@\s]+\.\w+")),
    ("url", re.compile(r"\w+://.+")),
    ("number", re.compile(r"[+-]?\d+(?:[.,]\d+)*%?")),
    ("file", re.compile(r".*[/~\\].*|.*\w\.[A-Za-z]\w{0,9}")),
    ("text", re.compile(r".*\s.*")),
    ("name", re.compile(r"[^\W\d_]+")),
)
_LOOKING = re.compile(
    r"\s*(?:(?:ls|cat|head|tail|less|more|pwd|cd|find(?!.*-(?:delete|exec))|grep|rg|which|man|help|type|stat|wc|file|tree|echo)\b"
    r"[^>&;|]*|[^>&;|]*\s(?:--help|-h))\s*\Z",
    re.DOTALL,
)
"""A shell command that changes nothing."""

_READING = re.compile(r"(?:read|list|ls|search|find|get|show|view|look|grep|cat|help|recall|describe)(?:_|\b|[A-Z])")
"""The name of a tool that changes nothing."""

JUDGE = prompt("judge")
INDUCE = prompt("induce")


class Workflow(msgspec.Struct, frozen=True):
    """A goal, and the steps that reach it, with `{variables}` in both.

    Args:
        steps: tools and their arguments as JSON.
    """

    goal: str
    steps: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """As the note says it: the goal, an empty line, and a line for each step."""
        lines = (f"{at}. {tool} {arguments}" for at, (tool, arguments) in enumerate(self.steps, 1))
        return "\n".join((self.goal, "", *lines))

    @property
    def signature(self) -> tuple[str, ...]:
        """What two workflows that do the same have in common: their steps, whatever the variables are called."""
        numbers: dict[str, int] = {}

        def numbered(match: re.Match[str]) -> str:
            return f"{{{numbers.setdefault(match[1], len(numbers))}}}"

        return tuple(_VARIABLE.sub(numbered, f"{tool} {arguments}") for tool, arguments in self.steps)

    @classmethod
    def parse(cls, text: str) -> Workflow:
        """Parse the text of a note, also of one that a person wrote: its first line is the goal, and numbered lines are steps."""
        first, *rest = text.strip().splitlines() or [""]
        return cls(first.lstrip("# "), tuple((match[1], match[2]) for line in rest if (match := _STEP.fullmatch(line.strip()))))


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow in force, with its wins and losses."""

    note: NoteVersion
    workflow: Workflow
    won: int = 0
    lost: int = 0


class Induced(msgspec.Struct, kw_only=True):
    """The result of one call.

    Args:
        learned: names of new workflows. known: number of successes whose steps were known.
        won, lost, unjudged: numbers of episodes. retired: names of workflows that lost too often.
        fallback: how often the rule replaced an unusable answer of the model.
        failed: why learning stopped before an episode, or ""; the next call tries again.
    """

    learned: list[str] = []
    known: int = 0
    won: int = 0
    lost: int = 0
    unjudged: int = 0
    retired: list[str] = []
    fallback: int = 0
    failed: str = ""


class _Verdict(msgspec.Struct):
    success: bool


class _Plan(msgspec.Struct):
    goal: str
    steps: list[int]
    values: list[str]


@checked
class Workflows:
    """The workflows among the notes of one owner. Safe to use from several threads.

    Args:
        owner: a user of the tenant, or an agent; "" for all users.
    """

    def __init__(self, store: Store, owner: str = "") -> None:
        self.store, self.notes = store, store.notes(owner)
        self._past = Experience(self.notes.collection, FOLDER)

    def list(self) -> Sequence[Record]:
        """Return those in force, by name."""
        tally, notes = self._tally(), self.notes.list(FOLDER)
        texts = self.notes.collection.backend.contents.texts(note.digest for note in notes)
        records = []
        for note in notes:
            won, lost = tally.get(note.page, (0, 0))
            if note.digest in texts:  # it was not forgotten meanwhile
                records.append(Record(note=note, workflow=Workflow.parse(texts[note.digest]), won=won, lost=lost))
        return records

    def find(self, goal: str, limit: int = 4) -> Sequence[Record]:
        """Return the workflows whose goal is all or part of this one: the larger the part the earlier; of equals, the one that
        wins more often."""
        scored = []
        for record in self.list():
            words = _goal_words(record.workflow.goal)
            share = coverage(words, goal)
            if share >= MIN_OVERLAP:
                rate = (record.won + 1) / (record.won + record.lost + 2)
                scored.append(((share, len(content_words(words)), rate), record))
        scored.sort(key=lambda pair: pair[0], reverse=True)
        return [record for _, record in scored[: max(0, limit)]]

    def message(self, goal: str, limit: int = 4) -> Message | None:
        """Return the workflows that `find` returns as a message to append behind the task, each with its trust and wins; None if
        there are none. The message cites the notes, so the outcome of the episode counts for them, and is forgotten with them."""
        notes = [(_heading(record), record.note) for record in self.find(goal, limit)]
        return recall_message(FOLDER, INTRO, self.notes.collection, notes)

    def learn(
        self,
        session: Session,
        judge: Judge | None = None,
        *,
        model: Any = None,
        induce: Literal["rule", "model"] = "rule",
        anew: bool = False,
    ) -> Induced:
        """Learn from the episodes of a session that are new: count what was shown, and make a workflow of each success.

        Args:
            judge: returns whether an episode succeeded; without one, the model is asked.
            model: a model or its spec; None for that of the store.
            induce: what chooses the steps and the values. The rule replaces an unusable answer of the model.
            anew: read all episodes again, as after something was forgotten. Nothing counts twice.

        Raises:
            SpecError: a model is needed and there is none, or the judge returned none of True, False and None. StoreError.
            Whatever the judge raises; earlier episodes are learned, and the next call continues from there.
        """
        answer = make_answerer(self.store, model, required=True) if judge is None or induce == "model" else None
        report = Induced()
        upto = 0 if anew else self._past.upto(session.number)
        for episode in episodes(session, upto):
            if episode.last <= upto or not episode.calls:
                continue
            verdict = judge(episode) if judge is not None else None
            if judge is None:
                assert answer is not None
                reply = run(ask_for(_question(JUDGE, "success", episode, {"success": {"type": "boolean"}}), _Verdict), answer)
                if isinstance(reply, Failed):
                    report.failed = reply.why
                    break
                verdict = reply.success
            if verdict is not None and not isinstance(verdict, bool):
                raise SpecError(f"the judge said {verdict!r}"[:80], advice="it is to say True, False or None")
            workflow = None
            if verdict:
                workflow = self._by_model(episode, answer, report) if answer is not None and induce == "model" else None
                workflow = workflow or by_rule(episode)
            try:
                undisturbed(partial(self._write, episode, verdict, workflow, report, anew=anew), lambda: self.notes.head)
            except Forgotten:
                continue  # the episode was forgotten meanwhile
        return report

    def _by_model(self, episode: Episode, answer: Callable[[Ask], Answer], report: Induced) -> Workflow | None:
        """Return the workflow that a model chose, if it can be carried out. The model names steps and values, and writes none
        itself."""
        text, number = {"type": "string"}, {"type": "integer"}
        fields = {"goal": text, "steps": {"type": "array", "items": number}, "values": {"type": "array", "items": text}}
        plan = run(ask_for(_question(INDUCE, "workflow", episode, fields), _Plan), answer)
        if not isinstance(plan, Failed) and plan.goal.strip() and plan.steps == sorted({*plan.steps}):
            chosen = [episode.calls[at - 1] for at in plan.steps if 0 < at <= len(episode.calls)]
            arguments = " ".join(call.arguments for call in chosen)
            if chosen and len(chosen) == len(plan.steps) and all(value.strip() and value in arguments for value in plan.values):
                workflow = _abstracted(" ".join(plan.goal.split())[:500], chosen, plan.values)
                if workflow is not None:
                    return workflow
        report.fallback += 1
        return None

    def _write(self, episode: Episode, verdict: bool | None, workflow: Workflow | None, report: Induced, *, anew: bool) -> None:
        """Write the outcome of an episode, with how far the session was learned from, in one transaction."""
        collection = self.notes.collection
        head = collection.ledger.head
        if not anew and self._past.upto(episode.number) >= episode.last:
            return  # another writer was faster
        rows = versions(collection, FOLDER)
        in_force = [page for page, state in rows if state.at is Place.OUT]
        counted = [] if verdict is None else [page for page in in_force if self._counts(page, episode, verdict)]
        moves: list[Add | Retire] = []
        retired = []
        if verdict is False:
            tally = self._tally(without=(episode.number, episode.last))
            states = {page.id: (page, state) for page, state in rows}
            for page in counted:
                won, lost = tally.get(page.id, (0, 0))
                row, state = states[page.id]
                if lost + 1 - won >= MAX_LOSS_LEAD and not state.pinned:
                    moves.append(Retire((page.id,), why=f"lost {lost + 1} of {won + lost + 1}"))
                    retired.append(row.name or "")
        texts = collection.backend.contents.texts(page.digest for page, _ in rows) if workflow is not None else {}
        signatures = {Workflow.parse(text).signature for text in texts.values()}
        is_new = workflow is not None and workflow.signature not in signatures
        name = ""
        if workflow is not None and is_new:
            name = self._name_for(workflow)
            why = "made from a success"
            moves.append(Add(text=workflow.text, kind=Kind.TEXT, name=name, cites=episode.pages, why=why))
        outcome = {True: "won", False: "lost", None: "unjudged"}[verdict]
        note = progress_data(episode.number, episode.last, outcome=outcome, used=[page.id for page in counted])
        if anew:
            note["upto"] = max(episode.last, self._past.upto(episode.number))
            note["last"] = episode.last
        tainted = episode.taint < Trust.AGENT
        collection.apply(*moves, policy=FOLDER, cause="learn", tainted=tainted, seen=head, note=note)
        report.learned += [name] if name else []
        report.known += workflow is not None and not is_new
        report.retired += retired
        report.won += verdict is True
        report.lost += verdict is False
        report.unjudged += verdict is None

    def _counts(self, page: Page, episode: Episode, verdict: bool) -> bool:
        """Return whether the outcome of an episode counts for or against a workflow: the workflow was shown, and its first step
        was carried out. A loss counts only if one of the workflow's steps failed, or nothing else was done: in a larger task
        something else may be to blame."""
        if (self.notes.collection.number, page.id) not in episode.cited:
            return False
        steps = Workflow.parse(self.notes.collection.contents.text(page.id)).steps
        plain = [(call.tool, _plain(call.arguments)) for call in episode.calls]
        matches = [[tool == called and _fits(form, arguments) for called, arguments in plain] for tool, form in steps]
        if not matches or not any(matches[0]):
            return False
        in_workflow = [any(flags) for flags in zip(*matches, strict=True)]
        failed = any(call.failed and is_its for call, is_its in zip(episode.calls, in_workflow, strict=True))
        alone = all(is_its or call.failed or _looks(call) for call, is_its in zip(episode.calls, in_workflow, strict=True))
        return verdict or failed or alone

    def _tally(self, without: Key | None = None) -> Mapping[int, tuple[int, int]]:
        """Return wins and losses of each page; one episode may be left out."""
        outcomes = {key: outcome for key, outcome in self._past.outcomes().items() if key != without}
        counts = {
            how: Counter(page for result, pages in outcomes.values() if result == how for page in pages)
            for how in ("won", "lost")
        }
        return {page: (counts["won"][page], counts["lost"][page]) for page in {*counts["won"], *counts["lost"]}}

    def _name_for(self, workflow: Workflow) -> str:
        used_names = {note.name for note in self.notes.list(FOLDER)}
        words = _goal_words(workflow.goal)
        name = first = slug([word for word in words.split() if content_words(word)][:6], FOLDER)
        at = 1
        while name in used_names:
            at += 1
            name = f"{first}-{at}"
        return name


def by_rule(episode: Episode) -> Workflow | None:
    """Make a workflow of an episode without a model: its calls without those that failed, only looked around, or were repeated
    later. Values of the goal that the calls use, and all secrets, become variables. Return None if no call remains."""
    effective = [call for call in episode.calls if not call.failed and not _looks(call)]
    last = {(call.tool, call.arguments): at for at, call in enumerate(effective)}
    steps = [call for at, call in enumerate(effective) if last[call.tool, call.arguments] == at]
    goal = " ".join(episode.goal.split())[:500]
    return _abstracted(goal, steps, values_in(goal)) if 0 < len(steps) <= MAX_STEPS else None


def values_in(goal: str) -> Sequence[str]:
    """Return the values of a goal that are particular to it: quoted strings; words with digits, dots, slashes or the like; names
    with a capital that do not begin a sentence."""
    values = [next(filter(None, match.groups())) for match in _QUOTED.finditer(goal)]
    previous = "."
    for match in _TOKEN.finditer(goal):
        token = match[0].rstrip(".!?:")
        if _TELLING.search(token) or (token[:1].isupper() and len(token) > 1 and previous[-1:] not in ".!?:"):
            values.append(token)
        previous = match[0]
    return [value for value in dict.fromkeys(values) if len(value) > 1 or value.isalnum()]


def _looks(call: Call) -> bool:
    """Return whether a call only looked around."""
    if _READING.match(call.tool):
        return True
    words = [value for value in _values(call.arguments) if isinstance(value, str)]
    return bool(words) and len(words[0]) <= MAX_COMMAND_CHARS and _LOOKING.match(words[0]) is not None


def _values(arguments: str) -> list[Any]:
    """Return the values of a call's arguments."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return [arguments]
    return list(decoded.values()) if isinstance(decoded, dict) else [decoded]


def _plain(arguments: str) -> str:
    """Return arguments in one normal form of their JSON."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        return " ".join(arguments.split())


def _fits(form: str, arguments: str) -> bool:
    """Return whether arguments are those of a step, whatever its variables stand for; in one pass, however many these are."""
    first, *rest = _VARIABLE.split(_plain(form))[::2]
    if not rest:
        return arguments == first
    *middle, last = rest
    at, end = len(first), len(arguments) - len(last)
    if not arguments.startswith(first) or not arguments.endswith(last):
        return False
    for piece in middle:
        position = arguments.find(piece, at + 1, end)
        if position < 0:
            return False
        at = position + len(piece)
    return at < end


def _abstracted(goal: str, calls: Sequence[Call], values: Iterable[str]) -> Workflow | None:
    """Return a workflow with variables in place of values and secrets; None if a secret cannot be cut out, or no note could say
    it."""
    plain = [_plain(call.arguments) for call in calls]
    whole = "\n".join((goal, *plain))
    try:
        hidden = list(dict.fromkeys(whole[slice(*secret.span)] for secret in _secrets(whole)))
    except SecretFound:
        return None
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    texts = "\n".join(plain)
    for value in (*hidden, *values):
        if value in names or (value not in hidden and not _whole(value).search(texts)):
            continue
        kind = "secret" if value in hidden else next((name for name, form in _NAMES if form.fullmatch(value)), "value")
        while True:
            counts[kind] += 1
            if f"{{{kind}{counts[kind]}}}" not in whole:
                break
        names[value] = f"{{{kind}{counts[kind]}}}"
    # A secret may be part of a value: secrets are replaced first, then longer values.
    order = sorted(names, key=lambda value: (value not in hidden, -len(value)))

    def put(text: str) -> str:
        for value in order:
            # A function, because `sub` would read a reference to a group in a string.
            text = (re.compile(re.escape(value)) if value in hidden else _whole(value)).sub(lambda _, n=names[value]: n, text)  # type: ignore[misc]
        return text

    workflow = Workflow(put(goal), tuple((call.tool, put(arguments)) for call, arguments in zip(calls, plain, strict=True)))
    return workflow if len(workflow.text) <= MAX_WORKFLOW_CHARS and Workflow.parse(workflow.text) == workflow else None


def _secrets(text: str) -> Sequence[secrets.Secret]:
    """Find secrets by the scanner where it is installed, otherwise by the rules alone."""
    return secrets.find(text) if secrets.is_installed() else secrets.by_rule(text)


def _whole(value: str) -> re.Pattern[str]:
    """Return a value that is no part of a longer word, and no variable of a program."""
    return re.compile(rf"(?<![\w.${{]){re.escape(value)}(?![\w>]|\.\w)")


def _goal_words(goal: str) -> str:
    """Return the words of a goal without its values: what tasks of its kind have in common."""
    bare = _VARIABLE.sub(" ", goal)
    for value in values_in(bare):
        bare = bare.replace(value, " ")
    return " ".join(bare.split())


def _heading(record: Record) -> str:
    score = f", won {record.won} of {record.won + record.lost}" if record.won + record.lost else ""
    return f"{record.note.name}, trust {Trust(record.note.trust).name.lower()}{score}"


def _question(system: str, purpose: str, episode: Episode, fields: Mapping[str, Any]) -> Ask:
    parts = [("the task", episode.goal)]
    for at, call in enumerate(episode.calls[:MAX_STEPS], 1):
        parts += [(f"step {at}, {call.tool}", call.arguments), (f"its result {at}", call.result)]
    parts.append(("the answer", episode.answer))
    about = f"{purpose} of {episode.session} p{episode.first}-p{episode.last}"
    return Ask(prompt=quote_parts(parts), system=system, schema=object_schema(fields), purpose=about)
