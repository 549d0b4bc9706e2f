"""Conversations with questions about them, for `kilburn_lab.evals.recall`.

Read from JSON lines, plain or gzip: `name`, `docs` [{id, text, speaker, session, time}] and `queries` [{id, text, gold,
category}]; or made up from a seed. What may be known before a ranking is written (`Corpus`) and what may not (`answers`)
are read apart.
"""

from __future__ import annotations

import datetime as dt
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kilburn.wire.recording import read_as
from kilburn_lab.evals.measure import coined


class CorpusTurn(msgspec.Struct, frozen=True):
    """A message: who said it, in which session, and when, as the file writes it."""

    id: str
    text: str
    speaker: str = "user"
    session: str = "1"
    time: str | None = None


class CorpusQuery(msgspec.Struct, frozen=True):
    """A question. It has no field for its answer, so none is read."""

    id: str
    text: str


class Corpus(msgspec.Struct, frozen=True):
    """One conversation, over any number of sessions, with its questions."""

    name: str
    docs: list[CorpusTurn]
    queries: list[CorpusQuery]


class _Answered(msgspec.Struct, frozen=True):
    id: str
    gold: list[str]
    category: str | int | float | None = ""


class _Answers(msgspec.Struct, frozen=True):
    name: str
    queries: list[_Answered]


Answers = Mapping[tuple[str, str], tuple[frozenset[str], str]]
"""By corpus and question: the ids of the messages that answer it, and the question's category."""


FORM = "each line is {name, docs: [{id, text}], queries: [{id, text, gold}]}; see kilburn lab recall --help"


def corpora(path: Path) -> Iterator[Corpus]:
    """The conversations of a file, without the answers.

    Raises:
        InvalidMessage: it cannot be read, or a line is no conversation; the message names the line.
    """
    for _, corpus in read_as(path, Corpus, FORM):
        yield corpus


def answers_of(path: Path) -> Answers:
    """The answers of a file. Only for scoring a ranking that is written.

    Raises:
        InvalidMessage: it cannot be read, or a line is no conversation; the message names the line.
    """
    return {
        (corpus.name, query.id): (frozenset(query.gold), str(query.category))
        for _, corpus in read_as(path, _Answers, FORM)
        for query in corpus.queries
    }


_FORMS = ("%I:%M %p on %d %B, %Y", "%B-%d-%Y", "%Y-%m-%d", "%d %B %Y", "%d %B, %Y", "%B %d, %Y")


def seconds(time: str | None) -> float | None:
    """A time as a file writes it, in seconds since the epoch; None if it is none, or is not understood."""
    if not time:
        return None
    for form in _FORMS:
        try:
            return dt.datetime.strptime(time.strip(), form).replace(tzinfo=dt.UTC).timestamp()
        except ValueError:
            continue
    try:
        read = dt.datetime.fromisoformat(time.strip())
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=dt.UTC)).timestamp()


_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b")
_SYLLABLES = "ba be bi da de di ga go ka ke ko la le lo ma mi mo na ne no ra ri ro sa so ta ti to va vo za zo"


def renamed(corpus: Corpus, seed: int) -> Corpus:
    """The same conversation with other names: each word that is written with a capital in the middle of a sentence, and
    nowhere without, is another word, the same one everywhere."""
    texts = [*(said.text for said in corpus.docs), *(asked.text for asked in corpus.queries)]
    whole = "\n".join(texts)
    names = {name for said in corpus.docs for name in said.speaker.split() if name not in ("user", "assistant")}
    names |= set(_NAME.findall(whole))
    names -= {word.capitalize() for word in re.findall(r"\b[a-z]{3,}\b", whole)}
    chance = random.Random(f"{seed} {corpus.name}")
    syllables = _SYLLABLES.split()
    made = {name: coined(chance, syllables, 4).capitalize() for name in sorted(names)}
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(made, key=len, reverse=True)))})\b") if made else None

    def again(text: str) -> str:
        return text if pattern is None else pattern.sub(lambda match: made[match.group()], text)

    return Corpus(
        corpus.name,
        [msgspec.structs.replace(said, text=again(said.text), speaker=again(said.speaker)) for said in corpus.docs],
        [msgspec.structs.replace(asked, text=again(asked.text)) for asked in corpus.queries],
    )


_PEOPLE = ["Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"]
_THINGS = (
    ("adopted", "a {}", "pet", "beagle parrot tortoise kitten ferret rabbit"),
    ("moved to", "{}", "new home", "Lisbon Oslo Quebec Nairobi Kyoto Lima"),
    ("started learning", "{}", "hobby", "pottery fencing origami juggling sailing chess"),
    ("bought", "a {}", "purchase", "telescope kayak typewriter piano scooter tent"),
    ("cooked", "{}", "dinner", "paella ramen gnocchi pierogi moussaka goulash"),
    ("is allergic to", "{}", "allergy", "peanuts shellfish pollen latex penicillin wool"),
)
_CHAT = (
    "How was your week?", "Quite busy, to be honest.", "The weather has been strange lately.", "I know what you mean.",
    "Did you sleep well?", "Not really, the neighbours were loud again.", "We should meet for coffee soon.", "I would like that.",
    "Work never ends, does it?", "Tell me about it.", "That made me laugh.", "See you next time!",
)  # fmt: skip


def synthetic(seed: int, conversations: int = 5, sessions: int = 8) -> tuple[list[Corpus], Answers]:
    """Made-up conversations of two people with facts in small talk, and a question about each fact."""
    made: list[Corpus] = []
    answers: dict[tuple[str, str], tuple[frozenset[str], str]] = {}
    for number in range(conversations):
        chance = random.Random(f"{seed} {number}")
        pair = chance.sample(_PEOPLE, 2)
        docs: list[CorpusTurn] = []
        queries: list[CorpusQuery] = []
        facts = [(person, thing) for person in pair for thing in _THINGS]
        chance.shuffle(facts)
        for session in range(sessions):
            day = dt.datetime(2023, 1, 5, tzinfo=dt.UTC) + dt.timedelta(days=14 * session)
            told = facts[session::sessions]
            lines = [(chance.choice(pair), text) for text in chance.sample(_CHAT, 8)]
            for person, (verb, form, _, words) in told:
                said = f"I {verb} {form.format(chance.choice(words.split()))}.".replace("I is", "I am")
                lines.insert(chance.randrange(len(lines)), (person, said))
            for at, (speaker, text) in enumerate(lines):
                docs.append(CorpusTurn(f"{session}:{at}", text, speaker, f"session-{session}", day.isoformat()))
            for person, (verb, form, about, _) in told:
                said = form.format("").strip()
                asked = CorpusQuery(
                    f"q{len(queries)}", f"What do we know about {person}'s {about}: who {verb} {said}?".replace(" ?", "?")
                )
                queries.append(asked)
                start = f"I {verb}".replace("I is", "I am")
                gold = {doc.id for doc in docs if doc.speaker == person and doc.text.startswith(start)}
                answers[f"made-up-{number}", asked.id] = (frozenset(gold), about)
        made.append(Corpus(f"made-up-{number}", docs, queries))
    return made, answers
