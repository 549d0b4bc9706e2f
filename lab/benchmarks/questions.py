"""Many questions in one session: what must stay in the window so that all are answered at the end?

A seeded world of made-up people, firms and towns, a search over its passages, and tasks of several
questions of two steps each, after MEM1's multi-objective question answering (arXiv 2506.15841). An agent
plays a task in a session of Kilburn and is paid one point for every answer that matches exactly. The
scripted agent knows nothing but what its prompt holds, so what leaves the window without being written
down is lost to it. A near miss counts nothing: there is no judge and no model.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

import kilburn
from kilburn.errors import SpecError
from kilburn.policy import Policy
from kilburn.selection.directives import parse_state, within

Speaker = Callable[[Sequence[Mapping[str, Any]]], str]
"""An agent: from a rendered prompt in the chat form to its reply."""

_SYLLABLES = ("bar", "den", "fol", "gri", "hal", "jor", "kel", "lun", "mar", "nos", "pel", "rud", "sav", "tor", "vin", "wes")
_TRADES = ("clocks", "sails", "lenses", "bells", "maps", "kites", "looms", "pumps", "locks", "drums")
_FOUNDED = re.compile(r"The firm (\w+) was founded by (\w+ \w+)\.")
_BORN = re.compile(r"(\w+ \w+) was born in the town of (\w+)\.")
_ASKED = re.compile(r"^(\d+)\. In which town was the founder of (\w+) born\?$", re.MULTILINE)
_NOTED = re.compile(r"^(\d+): (founder|town) (.+)$", re.MULTILINE)
_LEFT = re.compile(r"\[HINT\]You have (\d+) turns left\.\[/HINT\]")


class Objective(msgspec.Struct, frozen=True):
    """One question: in which town was the founder of `firm` born?"""

    firm: str
    founder: str
    town: str


class Task(msgspec.Struct, frozen=True):
    """Several questions in one, and the passages that can be searched for the answers.

    Args:
        passages: name and text of each, those that no question is about included.
        turns: replies that the agent may give.
    """

    objectives: tuple[Objective, ...]
    passages: tuple[tuple[str, str], ...]
    turns: int

    @property
    def question(self) -> str:
        """What the agent is told."""
        asked = "\n".join(
            f"{number}. In which town was the founder of {objective.firm} born?"
            for number, objective in enumerate(self.objectives, 1)
        )
        return (
            f"Answer these questions.\n{asked}\nIn each reply give one <search>words</search>, or, when you know all "
            "answers, <answer>first; second</answer>, in the order of the questions and parted by semicolons."
        )

    def search(self, query: str) -> list[str]:
        """The three passages that share most words with a query."""
        words = set(query.lower().split())
        ranked = sorted(self.passages, key=lambda passage: (-len(words & set(passage[0].lower().split())), passage[0]))
        return [f"({name}) {text}" for name, text in ranked[:3]]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """How a task was played.

    Args:
        points: answers that match exactly, of `objectives`.
        peak: tokens of the largest prompt; `question` tokens of it are the task itself.
        shipped: tokens of all prompts.
        finish: "answered", "invalid" (neither one search nor an answer) or "turns" (none were left).
    """

    objectives: int
    points: int
    peak: int
    question: int
    shipped: int
    turns: int
    finish: str


def make(objectives: int, seed: int) -> Task:
    """A task of so many questions; the same numbers give the same task.

    Raises:
        SpecError: fewer than one question, or more than there are names for.
    """
    if not 1 <= objectives <= 200:
        raise SpecError(f"{objectives} objectives", advice="give 1 to 200")
    chance = random.Random(f"{objectives}/{seed}")
    used: set[str] = set()

    def name() -> str:
        while True:
            made = "".join(chance.choices(_SYLLABLES, k=3)).capitalize()
            if made not in used:
                used.add(made)
                return made

    found = tuple(Objective(name(), f"{name()} {name()}", name()) for _ in range(objectives))
    others = [Objective(name(), f"{name()} {name()}", name()) for _ in range(max(4, objectives))]
    passages = [passage for each in (*found, *others) for passage in _passages(each, chance)]
    chance.shuffle(passages)
    return Task(found, tuple(passages), 2 * objectives + 2)


def _passages(about: Objective, chance: random.Random) -> list[tuple[str, str]]:
    """One passage on the firm and one on its founder, each of some hundred words that nobody asks for."""
    firm = [f"The firm {about.firm} was founded by {about.founder}."] + [
        f"In {chance.randint(1820, 1990)} it sold {chance.randint(20, 900)} {chance.choice(_TRADES)} in one {word}."
        for word in chance.choices(("month", "year", "season", "week"), k=12)
    ]
    person = [f"{about.founder} was born in the town of {about.town}."] + [
        f"In {chance.randint(1820, 1990)} the family kept {chance.randint(2, 90)} {chance.choice(_TRADES)} in a {word}."
        for word in chance.choices(("house", "shop", "barn", "cellar"), k=12)
    ]
    return [(f"firm {about.firm}", " ".join(firm)), (f"person {about.founder}", " ".join(person))]


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks: the comparison of SQuAD."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def answers_of(reply: str) -> list[str] | None:
    """The answers in the last `<answer>...</answer>` of a reply, parted by semicolons; None where there is none."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else [answer.strip() for answer in reply[start + len("<answer>") : end].split(";")]


def reward(reply: str, golds: Sequence[str | Sequence[str]]) -> int:
    """How many answers match exactly, each at its place, after SQuAD's normalization.

    No answer at all is worth 0, an answer too few is a wrong one, and answers beyond the last question
    do not count. An answer that is nothing but blanks matches nothing.

    Args:
        golds: for each question its answer, or several that are all right.
    """
    given = answers_of(reply) or []
    points = 0
    for answer, gold in zip(given, golds, strict=False):
        right = {normalize(each) for each in ([gold] if isinstance(gold, str) else gold)}
        points += bool(normalize(answer)) and normalize(answer) in right
    return points


def play(task: Task, policy: str | Policy, window: int, agent: Speaker, *, system: str = "") -> Episode:
    """Let an agent play a task in a session of its own, in which the question is pinned.

    Args:
        policy: a policy or its spec, as `kilburn.open` takes it.
        window: tokens of four characters.
        agent: from the prompt to a reply.
        system: the system prompt, such as `kilburn.policies.mem1.INSTRUCTIONS`.

    Raises:
        PinsExceedWindow: the window is too small for the question.
    """
    points = shipped = peak = turn = 0
    finish = "turns"
    with kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4") as store:
        session = store.session("objectives")
        head = [{"role": "system", "content": system}] if system else []
        session.pin(session.append(*head, {"role": "user", "content": task.question}))
        question = session.render().tokens
        for turn in range(1, task.turns + 1):
            prompt = session.render()
            peak, shipped = max(peak, prompt.tokens), shipped + prompt.tokens
            reply = agent(prompt)
            session.append({"role": "assistant", "content": reply})
            if answers_of(reply) is not None:
                points, finish = reward(reply, [objective.town for objective in task.objectives]), "answered"
                break
            query = within(reply, "search")
            if not isinstance(query, str):
                finish = "invalid"
                break
            found = "\n".join(task.search(query))
            left = f"[HINT]You have {task.turns - turn} turns left.[/HINT]"
            session.append({"role": "user", "content": f"<information>{left}\n{found}</information>"})
    return Episode(
        objectives=len(task.objectives),
        points=points,
        peak=peak,
        question=question,
        shipped=shipped,
        turns=turn,
        finish=finish,
    )


def scripted(states: str = "full") -> Speaker:
    """An agent that reads its prompt, and nothing else: passages, and the notes of its own latest state.

    It searches for the first thing that it does not know, and answers when it knows all, or has one turn left.

    Args:
        states: "full" for an internal state in each reply that holds what the prompt held, "blank" for
            one that says nothing, "none" for no state at all.

    Raises:
        SpecError: none of these.
    """
    if states not in ("full", "blank", "none"):
        raise SpecError(f"states={states!r}", advice="give full, blank or none")

    def speak(prompt: Sequence[Mapping[str, Any]]) -> str:
        text = "\n".join(_texts(prompt))
        asked = [(int(number), firm) for number, firm in _ASKED.findall(text)]
        known = _known(text, asked)
        left = _LEFT.findall(text)
        open_ = [(number, firm) for number, firm in asked if (number, "town") not in known]
        state = ""
        if states != "none":
            notes = _notes(known, asked) if states == "full" else ""
            state = f"<IS>\nKnown so far:\n{notes}\n</IS>\n"
        if open_ and not (left and int(left[-1]) <= 1):
            return f"{state}<search>{_query(known, *open_[0])}</search>"
        given = "; ".join(known.get((number, "town"), "unknown") for number, _ in asked)
        return f"{state}<answer>{given}</answer>"

    return speak


def _notes(known: Mapping[tuple[int, str], str], asked: Sequence[tuple[int, str]]) -> str:
    """A line for each question of which something is known: the answer, or what leads to it."""
    lines = []
    for number, _ in asked:
        kind = "town" if (number, "town") in known else "founder"
        if (number, kind) in known:
            lines.append(f"{number}: {kind} {known[number, kind]}")
    return "\n".join(lines)


def _known(text: str, asked: Sequence[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """What a prompt says on each question: from its passages, and from the latest state that stands in it."""
    known: dict[tuple[int, str], str] = {}
    at = text.rfind("<IS>")
    state = parse_state(text[at:].partition("</IS>")[0] + "</IS>") if at >= 0 else None
    if isinstance(state, str):
        known.update({(int(number), kind): said for number, kind, said in _NOTED.findall(state)})
    founded, born = dict(_FOUNDED.findall(text)), dict(_BORN.findall(text))
    for number, firm in asked:
        founder = founded.get(firm) or known.get((number, "founder"))
        if founder:
            known[number, "founder"] = founder
            if founder in born:
                known[number, "town"] = born[founder]
    return known


def _query(known: Mapping[tuple[int, str], str], number: int, firm: str) -> str:
    founder = known.get((number, "founder"))
    return f"person {founder}" if founder else f"firm {firm}"


def _texts(prompt: Sequence[Mapping[str, Any]]) -> list[str]:
    found: list[str] = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return found
