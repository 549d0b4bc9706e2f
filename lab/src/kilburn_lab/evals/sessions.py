"""Made-up sessions of several users: topics, facts that are told and asked for later, tool outputs, and things that
only look like the facts.

What each interaction needs is known, because the generator made it need that. The same arguments give the same
sessions. The agent's words are written down beforehand, so that they are the same under every policy; none of them
repeats the value of a fact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn_lab.evals.measure import coined
from kilburn_lab.evals.trajectories import shell_call

Dicts = dict[str, Any]

TOPICS = 12
"""Topics of a user. How often each comes up falls with its rank (Zipf's law)."""
STAYS = 0.6
"""How likely an interaction is about the topic of the one before."""
TOLD = 0.2
"""Share of the interactions in which the user tells a fact that is asked for later."""
ASKED = 0.3
"""Share of the interactions in which a fact is asked for."""
EARLIER = 0.25
"""Share of the questions that are about an earlier session, as soon as the user has one."""
WORK = 0.3
"""Share of the interactions in which the agent calls a tool."""
FOLLOWS = 0.5
"""Share of the other interactions that need what was last said on their topic."""
CHANGED = 0.15
"""Share of the facts that get a new value before they are asked for."""
MARKED = 0.3
"""Share of the facts that come with "please remember"; as many things that nobody asks for come with it."""
SOON = 0.5
"""Share of the questions that come soon: after 6 interactions on average. The others come at any later time."""

_FACTS = (
    ("The door code of the {subject} is {value}.", "What is the door code of the {subject}?"),
    ("My customer number at the {subject} is {value}.", "Which customer number do I have at the {subject}?"),
    ("The contact at the {subject} is called {value}.", "Who is the contact at the {subject}?"),
    ("The {subject} costs {value} euros a year.", "How much does the {subject} cost a year?"),
    ("The files of the {subject} are in /srv/{value}.", "Where are the files of the {subject}?"),
    ("The appointment at the {subject} has the reference {value}.", "What is the reference of the appointment at the {subject}?"),
)
_SUBJECTS, _TOPICS, _WORDS = (
    names.split()
    for names in (
        "archive bakery boathouse brewery bureau cellar chapel clinic depot dairy embassy factory ferry foundry gallery "
        "garage greenhouse harbour hostel kiosk laboratory laundry library lodge market mill museum nursery observatory "
        "orchard pharmacy pier printshop quarry registry sawmill school shelter shipyard stable studio tannery tavern "
        "theatre vineyard warehouse",
        "insurance heating garden taxes printer holiday kitchen bicycle tenants newsletter wedding roof boiler accounts "
        "choir website fence piano scanner invoices allotment archive-move seminar photographs",
        "again after almost because before between careful change cheaper clear copy delivery different early enough "
        "estimate expected few first follow form half heavy known large late letter list little look maybe measure "
        "message missing morning moved next note often open order other paper part place plain quick quiet rather ready "
        "reason repair reply right room second short simple small spare started still table then third tidy together "
        "usual version wait week while whole written",
    )
)
_SYLLABLES = ("bel", "cor", "dan", "fel", "gor", "hil", "jun", "kel", "lom", "mar", "nel", "por", "run", "sol", "tam", "vor")


class FactQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question about a fact.

    Args:
        question: the user's words.
        value: what must be there, verbatim; no other message of the user has it but those that told the fact.
        earlier: whether the fact was told in an earlier session of this user.
    """

    question: str
    value: str
    earlier: bool


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says, and what the agent does about it.

    Args:
        said: the user's message; `done` the agent's messages and results that follow.
        uses: the numbers of the session's messages, from 1, that this interaction needs.
        asked: the question about a fact, if it is one.
        marked: whether the user's message says that it must be remembered.
    """

    said: Dicts
    done: tuple[Dicts, ...]
    uses: tuple[int, ...] = ()
    asked: FactQuestion | None = None
    marked: bool = False


class UserSession(msgspec.Struct, frozen=True):
    """A user's session. Each message is one page, so message number n is page n."""

    name: str
    user: str
    interactions: tuple[Interaction, ...]


def sessions(count: int, length: int, seed: int, users: int | None = None) -> list[UserSession]:
    """So many sessions of so many interactions each, in the order in which they happen.

    Args:
        users: how many users have them, in turn; None for one user for every ten sessions. All users speak of the
            same subjects, with values of their own.

    Raises:
        SpecError: a number below 1.
    """
    many = max(1, count // 10) if users is None else users
    if min(count, length, many) < 1:
        raise SpecError(f"{count} sessions of {length} interactions, {many} users", advice="give numbers of 1 or more")
    chance = random.Random(f"sessions/{seed}")
    known = [_User(f"user-{number}", chance) for number in range(many)]
    return [known[number % many].session(number, length) for number in range(count)]


class _Fact(msgspec.Struct):
    kind: int
    subject: str
    value: str
    told: int = 0
    """The message of this session that told it last, or 0."""


class _User:
    """A user with topics and facts of their own."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.chance = name, chance
        self.topics = chance.sample(_TOPICS, TOPICS)
        self.weights = [1 / rank for rank in range(1, TOPICS + 1)]
        self.facts: list[_Fact] = []
        self.values: set[str] = set()

    def session(self, number: int, length: int) -> UserSession:
        """The next session."""
        return UserSession(f"session-{number}", self.name, tuple(_Talk(self, length).interactions()))

    def value(self, kind: int) -> str:
        """A value that this user has not had yet. Numbers of filler text have four digits at most."""
        while True:
            digits = str(self.chance.randint(100_000, 999_999))
            made = coined(self.chance, _SYLLABLES, 3).capitalize()
            value = made if kind == 2 else f"{made.lower()}-{digits}" if kind == 4 else digits
            if value not in self.values:
                self.values.add(value)
                return value

    def fact(self) -> _Fact:
        """A fact that this user has not told yet, or, when there are no more, one that is told anew."""
        taken = {(fact.kind, fact.subject) for fact in self.facts}
        while True:
            kind, subject = self.chance.randrange(len(_FACTS)), self.chance.choice(_SUBJECTS)
            if (kind, subject) not in taken or len(taken) == len(_FACTS) * len(_SUBJECTS):
                return _Fact(kind, subject, self.value(kind))


class _Talk:
    """One session while it is made."""

    def __init__(self, user: _User, length: int) -> None:
        self.user, self.chance, self.length = user, user.chance, length
        self.before: Sequence[_Fact] = list(user.facts)
        for fact in self.before:
            fact.told = 0
        self.messages = 0
        self.calls = 0
        self.topic = ""
        self.last: dict[str, int] = {}
        """The message that last said something on a topic."""
        self.due: list[tuple[int, _Fact]] = []
        """When to ask for which fact of this session; it changes its value before, at times."""

    def interactions(self) -> list[Interaction]:
        """All of them."""
        return [self._interaction(at) for at in range(self.length)]

    def _interaction(self, at: int) -> Interaction:
        chance = self.chance
        if not self.topic or chance.random() >= STAYS:
            self.topic = chance.choices(self.user.topics, self.user.weights)[0]
        ready = [pair for pair in self.due if pair[0] <= at]
        drawn = chance.random()
        if ready and drawn < ASKED + TOLD:
            self.due.remove(ready[0])
            return self._ask(ready[0][1], earlier=False)
        if drawn < ASKED * EARLIER and (older := [fact for fact in self.before if not fact.told]):
            return self._ask(chance.choice(older), earlier=True)
        if drawn < ASKED + TOLD and at < self.length - 1:
            return self._tell(at)
        return self._work() if drawn < ASKED + TOLD + WORK else self._chat()

    def _made(self, said: str, done: Sequence[Dicts], **fields: Any) -> Interaction:
        self.messages += 1 + len(done)
        self.last[self.topic] = self.messages
        return Interaction(said={"role": "user", "content": said}, done=tuple(done), **fields)

    def _tell(self, at: int) -> Interaction:
        chance = self.chance
        changing = [fact for fact in self.user.facts if fact.told and chance.random() < CHANGED]
        if changing:
            fact = changing[0]
            fact.value = self.user.value(fact.kind)
        else:
            fact = self.user.fact()
            self.user.facts.append(fact)
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                wait = round(chance.expovariate(1 / 6)) if chance.random() < SOON else chance.randrange(self.length)
                self.due.append((at + 1 + wait, fact))
            self.due.sort(key=lambda pair: pair[0])
        fact.told = self.messages + 1
        sentence = _FACTS[fact.kind][0].format(subject=fact.subject, value=fact.value)
        marked = chance.random() < MARKED
        return self._made(
            f"{self._filler(1)} {'Please remember: ' if marked else ''}{sentence} {self._filler(1)}",
            [self._reply(2)],
            marked=marked,
        )

    def _ask(self, fact: _Fact, *, earlier: bool) -> Interaction:
        question = _FACTS[fact.kind][1].format(subject=fact.subject)
        return self._made(
            question,
            [{"role": "assistant", "content": "Here it is, as you told me. " + self._filler(1)}],
            uses=(fact.told,) if fact.told else (),
            asked=FactQuestion(question=question, value=fact.value, earlier=earlier),
        )

    def _work(self) -> Interaction:
        uses = self._needed()
        self.calls += 1
        call = f"call-{self.calls}"
        path = f"{self.topic}/{self.chance.choice(_WORDS)}-{self.chance.randint(1, 99)}.txt"
        lines = [
            f"{self.chance.randint(1, 12):02}:{self.chance.randint(0, 59):02} {self.chance.choice(_SUBJECTS)} "
            f"{self._words(4)} id={self.chance.getrandbits(20):05x} n={self.chance.randint(1, 9999)}"
            for _ in range(self.chance.randint(5, 25))
        ]
        result = {"role": "tool", "tool_call_id": call, "content": "\n".join(lines)}
        said = f"About the {self.topic}: {self._filler(1)}"
        return self._made(said, [shell_call(call, "", f"cat {path}"), result, self._reply(3)], uses=uses)

    def _chat(self) -> Interaction:
        uses = self._needed() if self.chance.random() < FOLLOWS else ()
        marked = self.chance.random() < MARKED * TOLD / (1 - ASKED - TOLD - WORK)
        said = f"About the {self.topic}: {'please remember: ' if marked else ''}{self._filler(self.chance.randint(1, 3))}"
        return self._made(said, [self._reply(self.chance.randint(2, 6))], uses=uses, marked=marked)

    def _needed(self) -> tuple[int, ...]:
        last = self.last.get(self.topic)
        return () if last is None else (last,)

    def _reply(self, sentences: int) -> Dicts:
        return {"role": "assistant", "content": self._filler(sentences)}

    def _filler(self, sentences: int) -> str:
        """Sentences with numbers, names and subjects that answer no question."""
        return " ".join(self._sentence() for _ in range(sentences))

    def _sentence(self) -> str:
        chance = self.chance
        drawn = chance.random()
        if drawn < 0.15:
            return f"The {chance.choice(_SUBJECTS)} {self._words(3)} on page {chance.randint(1, 999)}."
        if drawn < 0.3:
            return f"{coined(chance, _SYLLABLES, 2).capitalize()} {self._words(5)}, {chance.randint(2, 9999)} in all."
        return f"{self._words(chance.randint(6, 12)).capitalize()}."

    def _words(self, count: int) -> str:
        return " ".join(self.chance.choices(_WORDS, k=count))
