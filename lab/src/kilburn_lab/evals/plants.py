"""What is planted at the start of a stream of work, and the work after it.

Facts are exact values (a path, a port, a hash, a decision), rules are constraints that hold for the
whole job. The work after them repeats their words with other values, so that a search has to choose.
The same seed gives the same stream.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.measure import SYLLABLES, check_known, coined
from kilburn_lab.evals.trajectories import shell_call, synthetic

ARMS = ("system", "pinned", "plain")
"""Where the rules are: in the system prompt, in a user message that is pinned, or in one that is not."""

FACTS = 12
RULES = 5
"""Plants in one stream."""

Dicts = dict[str, Any]

_ATTRIBUTES = (
    ("{part} listens on port {value}.", "{part} port", "On which port does {part} take connections?"),
    ("The data of {part} lies in {value} on every host.", "{part} data path", "Under which path does {part} keep its data?"),
    ("The last good build of {part} is {value}.", "last good build of {part}", "Which build of {part} was the last that worked?"),
    ("decided: {part} keeps its index {value}, because the old one was too slow.", "{part} index decided", ""),
)
_ELSEWHERE = (
    "On host-{host} {part} listens on port {value}.",
    "A copy of the data of {part} on host-{host} lies in {value}.",
    "Build {value} of {part} failed on host-{host}.",
    "On host-{host} somebody tried {part} with its index {value}.",
)
_RULES = (
    ("Never delete files under /srv/{word}.", "may files be deleted under /srv"),
    ("Always give lengths in metric units.", "units for lengths"),
    ("Ask {name} before you touch the table {word}.", "whom to ask before touching a table"),
    ("Never push to the branch release-{number}.", "push to the release branch"),
    ("Open at most {number} connections to the database.", "how many connections to the database"),
    ("Do not restart {word} between {hour}:00 and {later}:00.", "when not to restart"),
    ("Write every date as YYYY-MM-DD.", "how to write a date"),
    ("Never write a password into a log.", "password in a log"),
    ("Leave the signature of every public function of {word} as it is.", "signature of a public function"),
    ("Use no library but the standard one.", "which library to use"),
)
_NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Alan", "Kathleen")
_TALK = 0.35
"""Share of the later steps that mention a part again, with another value."""


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must not get lost.

    Args:
        kind: "fact" or "rule".
        text: the sentence as it was said.
        value: what must be there verbatim: a fact's value, a rule's whole sentence.
        query: what one would search for.
        question: what one would ask, in other words than the sentence's, if the value is the whole answer; else "".
    """

    kind: str
    text: str
    value: str
    query: str
    question: str = ""


class Garden(msgspec.Struct, frozen=True):
    """The start of a stream: its messages, which of them holds each plant, and which is to be pinned."""

    messages: list[Dicts]
    plants: list[tuple[Plant, int]]
    pin: int | None
    parts: list[str]


def _word(chance: random.Random) -> str:
    return coined(chance, SYLLABLES, 4)


def _value(chance: random.Random, attribute: int) -> str:
    if attribute == 0:
        return str(chance.randint(20_000, 65_000))
    if attribute == 1:
        return f"/var/lib/{_word(chance)}/{_word(chance)}.db"
    if attribute == 2:
        return f"{chance.getrandbits(48):012x}"
    return f"as a {_word(chance)} tree in {_word(chance)}.idx"


def _plants(chance: random.Random, parts: Sequence[str]) -> tuple[list[Plant], list[Plant]]:
    pairs = [(part, attribute) for part in parts for attribute in range(len(_ATTRIBUTES))]
    facts = []
    for part, attribute in chance.sample(pairs, FACTS):
        sentence, query, question = (text.format(part=part, value="{value}") for text in _ATTRIBUTES[attribute])
        value = _value(chance, attribute)
        text = sentence.format(value=value)
        facts.append(Plant(kind="fact", text=text, value=value, query=query, question=question))
    rules = []
    for sentence, query in chance.sample(_RULES, RULES):
        hour = chance.randint(1, 11)
        text = sentence.format(
            word=_word(chance),
            name=chance.choice(_NAMES),
            number=chance.randint(2, 99),
            hour=hour,
            later=hour + chance.randint(2, 9),
        )
        rules.append(Plant(kind="rule", text=text, value=text, query=query))
    return facts, rules


def garden(seed: int, arm: str) -> Garden:
    """The start of the stream of a seed; streams that differ only in `arm` hold the same plants.

    Raises:
        SpecError: no such arm.
    """
    check_known("arm", [arm], ARMS)
    chance = random.Random(f"plants/{seed}")
    parts = [_word(chance) for _ in range(6)]
    facts, rules = _plants(chance, parts)
    told, listed, settled = facts[:4], facts[4:8], facts[8:]
    standing = "Rules that hold for the whole job:\n" + "\n".join(f"- {rule.text}" for rule in rules)
    system = "You look after a cluster with a shell, one command at a time."
    messages: list[Dicts] = [{"role": "system", "content": f"{system}\n{standing}" if arm == "system" else system}]
    # The kernel pins the system prompt and the first user message, so no plants except the arm's own are there.
    messages.append({"role": "user", "content": "Find out why the nightly job fails, and repair it."})
    messages.append({"role": "assistant", "content": "What should I know before I begin?"})
    homes = [(rule, 0 if arm == "system" else len(messages)) for rule in rules]
    if arm != "system":
        messages.append({"role": "user", "content": standing})
    homes += [(fact, len(messages)) for fact in told]
    messages.append({"role": "user", "content": " ".join(fact.text for fact in told)})
    messages.append(shell_call("plant-0", "I look at the notes first.", "cat NOTES"))
    homes += [(fact, len(messages)) for fact in listed]
    messages.append({"role": "tool", "tool_call_id": "plant-0", "content": "\n".join(fact.text for fact in listed)})
    homes += [(fact, len(messages)) for fact in settled]
    messages.append({"role": "assistant", "content": "\n".join(fact.text for fact in settled)})
    # The user's latest message stays in the window, so it has no plant, only what the plants are about.
    messages.append({"role": "user", "content": f"Good. Go on with {', '.join(parts)}."})
    return Garden(messages, homes, 3 if arm == "pinned" else None, parts)


def work(seed: int, parts: Sequence[str], runs: Sequence[Trajectory] = ()) -> Iterator[list[Dicts]]:
    """Step after step of work without an end: a call and its result each.

    Args:
        seed: of made-up work; of recorded runs, with which one to begin.
        parts: their words are repeated, with other values.
        runs: recorded runs to repeat; none for made-up work.
    """
    chance = random.Random(f"work/{seed}")
    for number, step in enumerate(_steps(seed, runs)):
        thought = step.thought
        if chance.random() < _TALK:
            attribute = chance.randrange(len(_ELSEWHERE))
            again = _ELSEWHERE[attribute].format(
                host=chance.randint(1, 99), part=chance.choice(parts), value=_value(chance, attribute)
            )
            thought = f"{thought}\n{again}"
        call = f"work-{number}"
        yield [shell_call(call, thought, step.action), {"role": "tool", "tool_call_id": call, "content": step.observation}]


def _steps(seed: int, runs: Sequence[Trajectory]) -> Iterator[Step]:
    for number in count():
        chosen = [runs[(seed + number) % len(runs)]] if runs else synthetic(1, seed * 1000 + number)
        for run in chosen:
            yield from run.steps
