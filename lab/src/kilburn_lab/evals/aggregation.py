"""Made-up texts of many short items, and questions whose answers need all of them: in the manner of OOLONG.

An item is one line: a date, a user, and a remark about a shop. Its topic is nowhere written. Half of the remarks have a
word that gives the topic away, the others have to be understood; so code alone gets some of them wrong. The oracle knows
the topic of every remark: a model that answers by it makes no mistakes, and the system around it is what is measured.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn_lab.evals.measure import check_known

TOPICS = ("delivery", "payment", "quality", "praise", "account", "stock")
"""What remarks are about."""

KEYWORDS = {
    "delivery": ("parcel", "courier"),
    "payment": ("invoice", "charged"),
    "quality": ("broken", "scratched"),
    "praise": ("love", "excellent"),
    "account": ("password", "login"),
    "stock": ("sold out", "restock"),
}
"""Words that give a topic away, where they occur."""

REMARKS = {
    "delivery": (
        "the parcel with the {thing} never came",
        "the courier left the {thing} in the rain",
        "still waiting for the {thing} since last week",
        "the {thing} ended up at my neighbour's door",
    ),
    "payment": (
        "I was charged twice for the {thing}",
        "the invoice for the {thing} has the wrong sum",
        "my bank says that you took more than the {thing} costs",
        "where is the money back for the {thing}",
    ),
    "quality": (
        "the {thing} arrived broken",
        "the {thing} is scratched all over",
        "after two days the {thing} fell apart",
        "the {thing} does not do what the picture shows",
    ),
    "praise": (
        "I love the {thing}",
        "excellent work on the {thing}",
        "the {thing} made my week",
        "nobody else sells a {thing} like this",
    ),
    "account": (
        "my password stopped working when I ordered the {thing}",
        "the login page forgets the {thing} in my basket",
        "I cannot get in to see my order of the {thing}",
        "somebody changed my address before the {thing} was sent",
    ),
    "stock": (
        "the {thing} is sold out again",
        "when do you restock the {thing}",
        "is there any {thing} left in blue",
        "the page says that no {thing} can be had before spring",
    ),
}

THINGS = (
    "lamp", "kettle", "chair", "desk", "clock", "mirror", "rug", "sofa", "shelf", "pan", "knife", "bowl", "jug", "tray",
    "vase", "frame", "stool", "bench", "crib", "quilt", "pillow", "towel", "basket", "candle", "drawer", "hook", "ladder",
    "hammer", "drill", "wrench", "tent", "stove", "cooler", "torch", "rope", "saddle", "pump", "helmet",
)  # fmt: skip

USERS = 40

EVENTS = ("outage", "recall", "strike", "flood", "fire", "storm", "theft", "delay", "protest", "crash")
PLACES = (
    "Porto", "Lyon", "Graz", "Turku", "Bergen", "Gdansk", "Bilbao", "Leeds", "Ghent", "Malmo", "Brno", "Trieste", "Cork",
    "Basel", "Tartu", "Kaunas", "Pula", "Split",
)  # fmt: skip
WORDINGS = ("{event} reported in {place} on day {day}", "people in {place} speak of a {event}, day {day} of the month")

TASKS = ("count", "most", "user", "month", "range", "pairs")
"""Questions about items: how many, which topic, which user, which month, how many in some months, which pairs of users."""


class Item(msgspec.Struct, frozen=True):
    """One line. `topic` is the oracle's."""

    date: str
    user: str
    remark: str
    topic: str

    @property
    def line(self) -> str:
        """As it stands in the text."""
        return f"{self.date} | {self.user} | {self.remark}"


class AggregateQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question and its answer.

    Args:
        task: one of `TASKS`, or "reports".
        text: in words.
        code: Python that computes it from `found`, a dict of (user, month, topic) -> number of items.
        terms: two topics, and the months that it is about.
    """

    task: str
    text: str
    code: str
    answer: Any
    terms: tuple[str, str, tuple[str, ...]] = ("", "", ())

    def compute(self, found: Mapping[tuple[str, str, str], int]) -> Any:
        """The answer by the numbers of items of each user, month and topic."""
        return _ANSWERS[self.task](found, *self.terms)


KNOWN = {remark.format(thing=thing): topic for topic, remarks in REMARKS.items() for remark in remarks for thing in THINGS}


def topic_of(remark: str) -> str | None:
    """The oracle: the topic of a remark, or None of a text that is none."""
    return KNOWN.get(remark)


def items(tokens: int, seed: int) -> list[Item]:
    """Items of about so many tokens of four characters together. Topics and users are unequally common, and each user has
    topics of their own."""
    if tokens < 100:
        raise SpecError(f"tokens={tokens}", advice="give 100 or more")
    dice, made, characters = random.Random(f"items {seed}"), list[Item](), 0
    topics = dice.sample(TOPICS, len(TOPICS))
    weights = [1 + dice.random() for _ in topics]
    users = [f"user {number:02d}" for number in range(1, USERS + 1)]
    shares = [0.2 + dice.random() for _ in users]
    own = {user: [weight * (0.5 + dice.random()) for weight in weights] for user in users}
    while characters < 4 * tokens:
        user = dice.choices(users, shares)[0]
        topic = dice.choices(topics, own[user])[0]
        remark = dice.choice(REMARKS[topic]).format(thing=dice.choice(THINGS))
        date = f"2026-{dice.randint(1, 12):02d}-{dice.randint(1, 28):02d}"
        made.append(Item(date, user, remark, topic))
        characters += len(made[-1].line) + 1
    return made


def tally(told: Iterable[Item]) -> dict[tuple[str, str, str], int]:
    """How many items there are of each user, month and topic."""
    return Counter((item.user, item.date[:7], item.topic) for item in told)


def question_of(task: str, told: Sequence[Item], seed: int) -> AggregateQuestion:
    """A question of this kind about these items.

    Raises:
        SpecError: no such task.
    """
    dice = random.Random(f"question {task} {seed}")
    topic, other = dice.sample(TOPICS, 2)
    first = dice.randint(1, 6)
    months = [f"2026-{month:02d}" for month in range(first, first + 4)]
    made = {
        "count": (
            f"How many remarks are about {topic}?",
            f"sum(n for (user, month, topic), n in found.items() if topic == {topic!r})",
        ),
        "most": (
            "What are most remarks about?",
            "min({t: -sum(n for (u, m, x), n in found.items() if x == t) for t in {k[2] for k in found}}.items(), "
            "key=lambda p: (p[1], p[0]))[0]",
        ),
        "user": (
            f"Which user has the most remarks about {topic}? Of equals, the first by name.",
            f"min({{v: -sum(n for (u, m, x), n in found.items() if u == v and x == {topic!r}) for v in {{k[0] for k in found}}}}"
            ".items(), key=lambda p: (p[1], p[0]))[0]",
        ),
        "month": (
            f"In which month are the fewest remarks about {topic}? Of equals, the first.",
            f"min({{v: sum(n for (u, m, x), n in found.items() if m == v and x == {topic!r}) for v in {{k[1] for k in found}}}}"
            ".items(), key=lambda p: (p[1], p[0]))[0]",
        ),
        "range": (
            f"How many remarks about {topic} or {other} are from {months[0]} to {months[-1]}?",
            f"sum(n for (u, m, x), n in found.items() if m in {months!r} and x in ({topic!r}, {other!r}))",
        ),
        "pairs": (
            f"Which pairs of users, as [first, second] by name, have each more remarks about {topic} than about {other} in "
            f"{months[0]}?",
            f"(lambda good: [[a, b] for a in good for b in good if a < b])(sorted(u for u in {{k[0] for k in found}} if "
            f"found.get((u, {months[0]!r}, {topic!r}), 0) > found.get((u, {months[0]!r}, {other!r}), 0)))",
        ),
    }
    check_known("task", [task], TASKS)
    text, code = made[task]
    terms = (topic, other, tuple(months))
    return AggregateQuestion(task=task, text=text, code=code, answer=_ANSWERS[task](tally(told), *terms), terms=terms)


def _count(found: Mapping[tuple[str, str, str], int], topic: str, other: str, months: Sequence[str]) -> Any:
    return sum(n for (_, _, x), n in found.items() if x == topic)


def _by(found: Mapping[tuple[str, str, str], int], at: int, topic: str | None, sign: int) -> Any:
    sums = {key[at]: 0 for key in found}
    for key, n in found.items():
        if topic is None or key[2] == topic:
            sums[key[at]] += n
    return min(sums, key=lambda name: (sign * sums[name], name))


def _pairs(found: Mapping[tuple[str, str, str], int], topic: str, other: str, months: Sequence[str]) -> Any:
    month = months[0]
    users = {user for user, _, _ in found}
    good = sorted(user for user in users if found.get((user, month, topic), 0) > found.get((user, month, other), 0))
    return [[a, b] for a in good for b in good if a < b]


_ANSWERS: dict[str, Any] = {
    "count": _count,
    "most": lambda found, topic, other, months: _by(found, 2, None, -1),
    "user": lambda found, topic, other, months: _by(found, 0, topic, -1),
    "month": lambda found, topic, other, months: _by(found, 1, topic, 1),
    "range": lambda found, topic, other, months: sum(n for (_, m, x), n in found.items() if m in months and x in (topic, other)),
    "pairs": _pairs,
}


def reports(count: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """So many short reports, and which pairs of them (by number, the smaller first) are of the same event.

    Two reports of one event share no sentence: whether they are of the same one is the oracle's to say, pair by pair.
    """
    dice = random.Random(f"reports {seed}")
    every = [(event, place, day) for event in EVENTS for place in PLACES for day in range(1, 29)]
    events = dice.sample(every, max(1, count * 3 // 4))
    told = [(event, 0) for event in events] + [(event, 1) for event in dice.sample(events, count - len(events))]
    dice.shuffle(told)
    texts = [WORDINGS[wording].format(event=event[0], place=event[1], day=event[2]) for event, wording in told]
    same = [[a, b] for a in range(count) for b in range(a + 1, count) if told[a][0] == told[b][0]]
    return texts, same
