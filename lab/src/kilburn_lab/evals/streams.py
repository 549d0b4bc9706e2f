"""Made-up streams of statements that change: what several users say in several sessions, and what is then true.

Each user tells where they live, whom they work for and the like, changes it, corrects it, takes it back, contradicts
themselves, says it again, and tells late what was true before. Between these stand sentences that must change nothing.
The truth is kept as intervals, from the plain meaning of each statement; no code of the memory is used for it. Values
are words that stand nowhere else, so that a text that has one can be recognised. The same seed gives the same stream.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from kilburn_lab.evals.measure import SYLLABLES, check_known, coined

FAMILIES = ("plain", "casual")
"""Two sets of sentences with the same meaning. `plain` was looked at while the extractor was made; `casual` was not."""

START = 1_672_650_000.0
"""The first day of a stream, early in 2023."""

DAY = 86_400.0
USERS = ("ana", "bruno", "chidi")
SESSIONS = 4
CHANGES = 12
"""Statements of a user in one stream, those that must change nothing aside."""

LATE = 90.0
"""Days before the first statement on a topic that one which is told late speaks of."""


class Matter(msgspec.Struct, frozen=True):
    """What may be asked: subject and relation of the claims, whether several objects hold at once, the question's words
    for each family, and its sentences by kind; `{v}` is the value, `{old}` the one before, `{s}` the subject's name."""

    subject: str
    relation: str
    many: bool
    question: str
    plain: Mapping[str, str]
    casual: Mapping[str, str]


MATTERS = (
    Matter(
        "user",
        "lives in",
        False,
        "Which town does the user live in?",
        {
            "state": "I live in {v}.",
            "update": "I moved to {v} this week.",
            "correct": "That was wrong. I live in {v}, not in {old}.",
            "retract": "I don't live in {old} any more.",
            "late": "Before that, until {until}, I lived in {v}.",
        },
        {
            "state": "Oh, and home for me is {v}, in case it matters.",
            "update": "Big news: we packed everything up, and {v} is home now.",
            "correct": "Oops, I misspoke before; it's {v} that I call home, {old} was a slip of the tongue.",
            "retract": "So {old} isn't home any longer, I gave up the flat.",
            "late": "Up to {until} home was {v}, by the way.",
        },
    ),
    Matter(
        "user",
        "works for",
        False,
        "Which company does the user work for?",
        {
            "state": "I work for {v}.",
            "update": "I have a new job: I work for {v} now.",
            "correct": "Correction: I work for {v}, not for {old}.",
            "retract": "I no longer work for {old}.",
            "late": "I worked for {v} until {until}.",
        },
        {
            "state": "My pay comes from {v}, if you need to know.",
            "update": "I handed in my notice and started at {v} on Monday.",
            "correct": "Sorry, brain freeze: my employer is {v}. I don't know why I wrote {old}.",
            "retract": "{old} let me go, sadly.",
            "late": "I was on the payroll of {v} up to {until}.",
        },
    ),
    Matter(
        "user",
        "has the dentist",
        False,
        "What is the name of the user's dentist?",
        {
            "state": "My dentist is {v}.",
            "update": "I changed dentists. My dentist is now {v}.",
            "correct": "I made a mistake. My dentist is {v}, not {old}.",
            "retract": "{old} is not my dentist any more.",
            "late": "My dentist was {v} until {until}.",
        },
        {
            "state": "For my teeth I see {v}.",
            "update": "From here on {v} looks after my teeth.",
            "correct": "Wait, not {old}: the one who looks after my teeth is {v}.",
            "retract": "I don't go to {old} for my teeth now.",
            "late": "{v} looked after my teeth up to {until}.",
        },
    ),
    Matter(
        "user",
        "drives",
        False,
        "What car does the user drive?",
        {
            "state": "I drive a {v}.",
            "update": "I sold the old car and drive a {v} now.",
            "correct": "Actually, I drive a {v}, not a {old}.",
            "retract": "I don't drive the {old} any more.",
            "late": "I drove a {v} until {until}.",
        },
        {
            "state": "There's a {v} in my garage and I take it everywhere.",
            "update": "I traded the car in; a {v} stands in the garage these days.",
            "correct": "I keep mixing them up. The car is a {v} and never was a {old}.",
            "retract": "The {old} went to the scrapyard.",
            "late": "I had a {v} on the road up to {until}.",
        },
    ),
    Matter(
        "{s}",
        "lives in",
        False,
        "Which town does {s} live in?",
        {
            "state": "My sister {s} lives in {v}.",
            "update": "{s} moved. She lives in {v} now.",
            "correct": "I was wrong about {s}: she lives in {v}, not in {old}.",
            "retract": "{s} doesn't live in {old} any more.",
            "late": "{s} lived in {v} until {until}.",
        },
        {
            "state": "{s}, my sister, has a place in {v}.",
            "update": "{s} has just settled in {v}.",
            "correct": "About {s}, scratch that: her place is in {v} and not in {old}.",
            "retract": "{s} has left {old} for good.",
            "late": "{s} had a place in {v} up to {until}.",
        },
    ),
    Matter(
        "user",
        "is allergic to",
        True,
        "What is the user allergic to?",
        {"state": "I am allergic to {v}.", "retract": "I am not allergic to {old} any more."},
        {
            "state": "{v} brings me out in a rash.",
            "retract": "Good news from the doctor: {old} is fine for me after all these years.",
        },
    ),
    Matter(
        "user",
        "plays",
        True,
        "Which games does the user play?",
        {"state": "I play {v}.", "retract": "I don't play {old} any more."},
        {"state": "On weekends I'm usually at it with friends, a round of {v}.", "retract": "I've given up {old}."},
    ),
)

_NOISE = {
    "plain": (
        "My neighbour Tom lives in {v}.",
        "If I lived in {v}, I would sail every day.",
        "Have you ever been to {v}?",
        'Please translate: "I work for {v}."',
        "Tom asked whether my dentist is {v}.",
        "In the film the hero drives a {v}.",
        "Can you plan the week for me?",
        "Thanks, that helps.",
    ),
    "casual": (
        "My boss keeps talking about his house in {v}.",
        "Imagine I had a job at {v}, wouldn't that be something!",
        "What's the weather like in {v}?",
        'The novel begins with "home was {v}", lovely line.',
        "A colleague's dentist is called {v}, funny name.",
        "Someone parked a {v} in front of the house again.",
        "lol ok 😀",
        "Merci, à demain!",
    ),
}
_SISTERS = ("Rosa", "Ines", "Marta")


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a user.

    Args:
        kind: "state", "update", "correct", "retract", "contest" (two values in one message), "settle" (one of the two again,
            so that it counts from then on), "repeat", "late", or "noise".
        text: as it was said.
        values: what it says is the case; of a retraction, what is not any more.
        since, until: the time of which it speaks, in seconds since the epoch; None for the time at which it was said.
        subject, relation, many: of its claims; "" for noise.
    """

    user: str
    session: int
    time: float
    kind: str
    text: str
    subject: str = ""
    relation: str = ""
    many: bool = False
    values: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None


class StreamInquiry(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked at the end of a stream.

    Args:
        at: the time that is asked about; None for now.
        expected: the values that are then the case; two for an open contradiction, none if it was taken back.
        others: all other values that were ever said on this topic.
        open: whether the expected values contradict each other.
    """

    user: str
    subject: str
    relation: str
    text: str
    at: float | None
    expected: tuple[str, ...]
    others: tuple[str, ...]
    open: bool = False


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in the order of their time, and questions about them. `told` are all the values that each user said."""

    seed: int
    family: str
    changes: list[Telling]
    questions: list[StreamInquiry]
    told: dict[str, list[str]]


class _Held(msgspec.Struct):
    """A value with the interval in which it is the case; `to` is None while it is."""

    value: str
    since: float
    to: float | None = None

    def holds(self, at: float) -> bool:
        return self.since <= at and (self.to is None or at < self.to)


class _Spoken:
    """What one user has said on one topic."""

    def __init__(self, user: str, topic: Matter, sister: str) -> None:
        self.user, self.topic, self.sister = user, topic, sister
        self.held: list[_Held] = []
        self.said: list[str] = []
        self.first = 0.0

    @property
    def open(self) -> list[_Held]:
        """What is the case now."""
        return [one for one in self.held if one.to is None]

    def choose(self, chance: random.Random) -> str:
        """A kind of statement that means something here."""
        if not self.held:
            return "contest" if not self.topic.many and chance.random() < 0.15 else "state"
        if not self.open:
            return "state"
        if self.topic.many:
            return chance.choice(("state", "state", "retract", "repeat"))
        if len(self.open) > 1:
            return chance.choice(("update", "settle"))
        kinds = ["update", "update", "correct", "retract", "repeat"]
        if not any(one.since < self.first for one in self.held) and self.held[0].to is None:
            kinds.append("late")
        return chance.choice(kinds)

    def say(self, kind: str, time: float, values: Sequence[str]) -> tuple[tuple[str, ...], float | None, float | None]:
        """Keep the truth; returns what the message says, from when, and until when."""
        now = self.open
        old = now[0].value if now else ""
        if not self.held:
            self.first = time
        if kind in ("state", "contest"):
            told = tuple(values[:2]) if kind == "contest" else (values[0],)
            self.held += [_Held(value, time) for value in told]
        elif kind == "update":
            told = (values[0],)
            for one in now:
                one.to = time
            self.held.append(_Held(values[0], time))
        elif kind == "correct":
            told = (values[0],)
            self.held = [one for one in self.held if one not in now]
            self.held.append(_Held(values[0], now[0].since))
        elif kind == "late":
            told = (values[0],)
            began, ended = self.first - LATE * DAY, self.first
            self.held.append(_Held(values[0], began, ended))
            self.said += told
            return told, began, ended
        else:
            told = (old,)
            for one in now[:1] if kind == "retract" else now[1:] if kind == "settle" else ():
                one.to = time
        self.said += [value for value in told if value not in self.said]
        return told, None, None

    def questions(self, end: float) -> list[StreamInquiry]:
        """Now, and in the middle of each interval between two changes."""
        edges = sorted({edge for one in self.held for edge in (one.since, one.to) if edge is not None})
        times: list[float | None] = [None]
        times += [(low + high) / 2 for low, high in zip(edges, [*edges[1:], end], strict=True)]
        asked = []
        for at in times:
            true = tuple(one.value for one in self.held if one.holds(end if at is None else at))
            asked.append(
                StreamInquiry(
                    user=self.user,
                    subject=self.topic.subject.format(s=self.sister),
                    relation=self.topic.relation,
                    text=self.topic.question.format(s=self.sister),
                    at=at,
                    expected=true,
                    others=tuple(value for value in self.said if value not in true),
                    open=len(true) > 1 and not self.topic.many,
                )
            )
        return asked


def stream(seed: int, family: str = "plain") -> Stream:
    """The stream of a seed; both families tell the same story in other sentences.

    Raises:
        SpecError: no such family.
    """
    check_known("family", [family], FAMILIES)
    chance = random.Random(f"change/{seed}")
    used: set[str] = set()

    def value() -> str:
        return coined(chance, (*SYLLABLES, "lan", "mer", "dor", "vel"), 4, used).capitalize()

    changes: list[Telling] = []
    asked: list[StreamInquiry] = []
    told: dict[str, list[str]] = {}
    for user, sister in zip(USERS, _SISTERS, strict=True):
        spoken = [_Spoken(user, topic, sister) for topic in chance.sample(MATTERS, 5)]
        time = START + chance.random() * 7 * DAY
        for number in range(CHANGES):
            session = number * SESSIONS // CHANGES
            time += (1 + chance.random() * 20) * DAY
            if chance.random() < 0.4:
                text = chance.randrange(len(_NOISE["plain"]))
                changes.append(
                    Telling(user=user, session=session, time=time, kind="noise", text=_NOISE[family][text].format(v=value()))
                )
                time += 600.0
            # The first statements open the topics, and later ones go back to them.
            one = spoken[number] if number < len(spoken) else chance.choice(spoken)
            kind = one.choose(chance)
            old = one.open[0].value if one.open else ""
            until = one.first
            said, since, ended = one.say(kind, time, (value(), value()))
            changes.append(
                Telling(
                    user=user,
                    session=session,
                    time=time,
                    kind=kind,
                    text=_sentences(one.topic, family, kind, said, old, sister, _month(until)),
                    subject=one.topic.subject.format(s=sister),
                    relation=one.topic.relation,
                    many=one.topic.many,
                    values=said,
                    since=since,
                    until=ended,
                )
            )
        end = time + DAY
        asked += [question for one in spoken for question in one.questions(end)]
        told[user] = [text for one in spoken for text in one.said]
    changes.sort(key=lambda change: change.time)
    return Stream(seed=seed, family=family, changes=changes, questions=asked, told=told)


_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def _month(time: float) -> str:
    """The month of a time, with the year, in English whatever the locale."""
    date = datetime.fromtimestamp(time, UTC)
    return f"{_MONTHS[date.month - 1]} {date.year}"


def _sentences(topic: Matter, family: str, kind: str, said: Sequence[str], old: str, sister: str, until: str) -> str:
    sentences = topic.plain if family == "plain" else topic.casual
    template = sentences["state" if kind in ("repeat", "contest", "settle") else kind]
    return " ".join(template.format(v=value, old=old, s=sister, until=until) for value in said)
