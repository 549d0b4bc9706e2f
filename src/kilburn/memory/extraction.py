"""Extracts facts from an exchange with a model, and checks each against the messages.

The model sees the running summary, the earlier messages, and the new ones with their dates. Its reply is held to a JSON
schema. A fact counts only if the messages support its names, its numbers and its statement: anything else is an invention of
the model, or from our own prompt. In a language that is unknown here this cannot be judged: such a fact counts as the
assistant's words. A fact cites every message that its words come from, so forgetting one of them forgets the fact. A reply that
is not such JSON is asked for once more, and then it is a failure, never "no facts".
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

from kilburn.claims import SPEAKER, is_speaker, plain_name
from kilburn.effect import Answer, Ask, Effect, Note, Outcome
from kilburn.memory import english
from kilburn.memory.clauses import clauses, unasked
from kilburn.memory.prompts import prompt
from kilburn.memory.view import MemoryView, Utterance
from kilburn.memory.words import KIN, NEGATED, RECURRING, content_words, is_sign, match_words, proper_names, stated_end
from kilburn.message import Role, Trust
from kilburn.model import object_schema
from kilburn.move import Add
from kilburn.page import Claim
from kilburn.search.confidence import is_english
from kilburn.search.dates import grounded
from kilburn.wire.quotation import with_headings

MAX_FACTS = 20
"""Facts of one exchange at most."""

MAX_FACT_CHARS = 400
"""Characters of a fact at most."""

MAX_SHOWN_CHARS = 6_000
"""Characters of a message that the model sees, half of them from its end."""

MIN_SUPPORT = 0.6
"""The share of the words of a fact, or of its object, that the messages must have."""

SYSTEM = prompt("list_facts")

_ONE_AT_A_TIME = english.pattern("extraction.one_at_a_time")
"""Relations with one object at a time; all others may have several objects."""

CORRECTS = english.pattern("extraction.corrects", re.IGNORECASE)
"""Words of a correction."""
_PAST = english.pattern("extraction.past")
_NOT_PAST = re.compile(r"\b(?:is|are|am|be|has|have|will|plans?|wants?|needs?|next)\b")
"""With these two patterns, "on Friday" is resolved to the last Friday or the next."""
_CLAUSE = re.compile(r"[.!?;,\n]+\s|\s(?:but|and)\s")
_ENDED = re.compile(r"\b(?:any ?more|any longer|no longer|stopped|quit|gave up|got rid of|sold|used to)\b")
"""Words that say that something has ended."""
_FIRST_PERSON = [
    (re.compile(r"\bI(?:'m| am)\b"), f"{SPEAKER} is"),
    (re.compile(r"\bI(?:'ve| have)\b"), f"{SPEAKER} has"),
    (re.compile(r"\b(?:I|[Mm]e|[Mm]yself)\b"), SPEAKER),
    (re.compile(r"\b[Mm]y\b"), f"{SPEAKER}'s"),
]
_SPOKEN_TO = re.compile(r"\b(?:you|your|yours|yourself)\b", re.IGNORECASE)
"""A sentence in the second person, such as a greeting that the model copied, is no fact."""
Form = TypeVar("Form")


class Extracted(msgspec.Struct, frozen=True):
    """An extracted fact: the `Add` that stores it, and the message that states it."""

    add: Add
    utterance: Utterance


class _Fact(msgspec.Struct):
    text: str
    message: int = 1
    subject: str = ""
    relation: str = ""
    object: str = ""
    correction: bool = False


class _Facts(msgspec.Struct):
    facts: list[_Fact]


class Failed(msgspec.Struct, frozen=True):
    """The failure of a question, with a reason that quotes neither question nor answer."""

    outcome: Outcome
    why: str


def ask_for(ask: Ask, form: type[Form], tries: int = 2) -> Generator[Ask, Answer, Form | Failed]:
    """Ask a question and return the decoded reply, or the failure. A reply that has another form, is empty or was cut at its cap
    is asked for again."""
    failed = Failed(Outcome.FAILED, "it was not asked")
    for _ in range(max(1, tries)):
        answer = yield ask
        if answer.ok:
            try:
                return msgspec.json.decode(_strip_fence(answer.text), type=form)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                failed = Failed(Outcome.REJECTED, "no JSON of the form that was asked for")
            continue
        plain = {Outcome.EMPTY: "an empty reply", Outcome.TRUNCATED: f"a reply cut at its cap of {ask.max_tokens:,} tokens"}
        failed = Failed(answer.outcome, plain.get(answer.outcome) or answer.detail or str(answer.outcome))
        if answer.outcome not in plain:
            break
    return failed


def _strip_fence(text: str) -> str:
    """Return the JSON object of a reply, without the fence that a model may put around it."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def extract_facts(
    view: MemoryView, *, tokens: int, timeout: float, known_facts: Sequence[str] = ()
) -> Generator[Effect, Answer, list[Extracted] | Failed]:
    """Return the facts of the view's new messages, or the failure of the model.

    Args:
        known_facts: facts that need not be listed again.
    """
    reply = yield from ask_for(_question(view, tokens, timeout, known_facts), _Facts)
    if isinstance(reply, Failed):
        return reply
    facts: dict[str, Extracted] = {}
    for fact in reply.facts[:MAX_FACTS]:
        checked = _check(fact, view)
        if checked is not None:
            facts.setdefault(plain_name(checked.add.text), checked)
    if dropped := len(reply.facts) - len(facts):
        yield Note(why="facts that nobody said, or that were said twice", figures={"unmatched": dropped})
    return list(facts.values())


def _question(view: MemoryView, tokens: int, timeout: float, known_facts: Sequence[str]) -> Ask:
    parts = [("summary of what was said before", view.summary)] if view.summary else []
    parts += [("known facts", "\n".join(known_facts))] if known_facts else []
    words = {"type": "string", "maxLength": MAX_FACT_CHARS}
    fields: dict[str, Any] = {
        "message": {"type": "integer", "enum": list(range(1, len(view.new) + 1))},
        "text": words,
        "subject": words,
        "relation": words,
        "object": words,
        "correction": {"type": "boolean"},
    }
    return Ask(
        prompt=with_headings([*parts, *conversation(view)]),
        system=SYSTEM,
        max_tokens=tokens,
        schema=list_schema("facts", fields, MAX_FACTS),
        purpose=f"facts of {view.new[0].address}-{view.new[-1].address}",
        timeout=timeout,
    )


def conversation(view: MemoryView) -> list[tuple[str, str]]:
    """Return the messages of a view as a model sees them, each with its heading; the new ones have numbers from 1."""
    parts = [(f"earlier, {utterance.role}", _shorten(utterance.text)) for utterance in view.earlier]
    return parts + [
        (f"message {at}, {utterance.role}, said on {_spoken_day(utterance)}", _shorten(utterance.text))
        for at, utterance in enumerate(view.new, 1)
    ]


def list_schema(name: str, fields: dict[str, Any], max_items: int) -> dict[str, Any]:
    """Return the schema of an object with one list under a name, of objects that have all these fields."""
    return object_schema({name: {"type": "array", "items": object_schema(fields), "maxItems": max_items}})


def _shorten(text: str) -> str:
    """Return a message as a model sees it: of a long one, its head and tail."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS // 2]}\n…\n{text[-MAX_SHOWN_CHARS // 2 :]}"


def _spoken_day(utterance: Utterance) -> str:
    """Return the day on which something was said, with its weekday; "an unknown day" if its time is none."""
    try:
        return f"{dt.datetime.fromtimestamp(utterance.page.time, tz=dt.UTC):%A %Y-%m-%d}"
    except (ValueError, OverflowError, OSError):
        return "an unknown day"


def _check(fact: _Fact, view: MemoryView) -> Extracted | None:
    """Return the fact with its citations; None if it says nothing, or something that nobody said."""
    text = " ".join(fact.text.split())
    text = unasked(text) if text.endswith("?") and len(text) <= MAX_FACT_CHARS else text
    if plain_name(fact.subject) == Role.ASSISTANT:
        return None  # such as that it took note of something
    if not 0 < len(text) <= MAX_FACT_CHARS or len(text.split()) + len(content_words(text)) < 3 or _SPOKEN_TO.search(text):
        return None
    place = fact.message - 1
    numbered = [view.new[place]] if 0 <= place < len(view.new) else []
    ranked = sorted(view.new, key=lambda source: -len(_spoken_words(content_words(text), source.text, source)))
    source = numbered[0] if numbered and _spoken_words(content_words(text), numbered[0].text, numbered[0]) else ranked[0]
    if source.role is Role.USER:
        for pattern, theirs in _FIRST_PERSON:
            text = pattern.sub(theirs, text)
    past = _PAST.search(text) is not None and not _NOT_PAST.search(text)
    if not RECURRING.search(text):
        text = grounded(text, source.page.time, past=past)[0]
    words = content_words(text)
    if not words:
        return None
    cites, sources, unsaid = find_sources(words, source, view)
    claim = _claim(fact, text, source)
    trust = None
    if not _is_supported(text, claim, unsaid):
        # If both are in one language, their words can be compared.
        if (
            is_english(source.text)
            or not is_english(text)
            or _numbers(unsaid)
            or not _is_spelled(proper_names(text) & unsaid, source.text)
        ):
            return None
        trust = Trust.AGENT
    cited = [utterance.text for utterance in (*view.earlier, *view.new) if utterance.cite in cites]
    if trust is None and is_english(source.text):
        if source.role is Role.USER and not _is_own(text, claim, source.text):
            return None
        if not _agrees_on_negation(text, claim, [*cited, view.summary if sources else ""]):
            return None
    add = Add(
        text=text,
        claim=claim,
        cites=cites,
        sources=sources,
        since=source.page.time,
        until=stated_end(text, source.page.time),
        trust=trust,
    )
    return Extracted(add, source)


def _is_supported(text: str, claim: Claim | None, unsaid: set[str]) -> bool:
    """Return whether a fact was said, if these are the words of it that nobody said: its names and numbers were, and most of its
    words, or of those of its object."""
    words = content_words(text)
    required = proper_names(text) | (proper_names(f"- {claim.subject}") if claim is not None else set())
    if len(unsaid) == len(words) or unsaid & required or _numbers(unsaid):
        return False
    about = [words] if claim is None else [words, content_words(claim.object)]
    return any(part and len(part & unsaid) <= (1 - MIN_SUPPORT) * len(part) for part in about)


def _is_own(text: str, claim: Claim | None, message: str) -> bool:
    """Return whether a user says in their own name what a fact is about: not where it is quoted, imagined, asked or told of
    somebody else, as far as that can be seen."""
    things = content_words(claim.object) if claim is not None else proper_names(text)
    if not things or len(match_words(things, content_words(message))) < len(things):
        return True  # stated in several messages, or in other words
    every = list(clauses(message))
    # If one clause has the whole object, the others do not matter.
    whole = [clause.text for clause in every if len(match_words(things, content_words(clause.text))) == len(things)]
    of = whole or [clause.text for clause in every if match_words(things, content_words(f"{clause.text} {clause.rest}"))]
    if not of:
        questions = [sentence for sentence in re.split(r"(?<=[.!?])\s+|\n+", message) if sentence.endswith("?")]
        return any(_OURS.search(clause) and match_words(things, content_words(clause)) for clause in questions)
    if _is_of_speaker(text, claim):
        return not all(_ABOUT_OTHERS.match(clause) for clause in of)
    if claim is None:
        return True
    # A statement of the speakers about themselves alone is true of nobody else.
    about = content_words(claim.subject)
    return not whole or not all(
        _SELF.match(clause) and not _THIRD_PERSON.search(clause) and not match_words(about, content_words(clause))
        for clause in whole
    )


_OURS = re.compile(r"\b(?:my|our|i am|i'm|we are|we're)\b", re.IGNORECASE)


def _is_of_speaker(text: str, claim: Claim | None) -> bool:
    """Return whether a fact is about who speaks."""
    return (
        is_speaker(claim.subject) if claim is not None else re.match(r"(?:the )?user\b(?!['’])", text, re.IGNORECASE) is not None
    )


def _without_others(text: str) -> str:
    """Return a message without its clauses about somebody else."""
    for clause in clauses(text):
        if _ABOUT_OTHERS.match(clause.text):
            text = text.replace(clause.text, " ")
    return text


_SELF = re.compile(r"(?:i|we|i'm|i've|we're|we've)\b", re.IGNORECASE)
_THIRD_PERSON = re.compile(r"\b(?:he|she|they|him|her|them|his|their|theirs|both|together|with)\b", re.IGNORECASE)
_ABOUT_OTHERS = re.compile(rf"(?:(?:my|our|the) {KIN}\b|(?:he|she|they)\b)(?!.*\b(?:i|me|my|we|us|our|mine)\b)", re.IGNORECASE)


def _is_spelled(unsaid: set[str], message: str) -> bool:
    """Return whether names may be others' spellings of what is said: Lisbon of Lisboa, or any of a text in another script."""
    words = [word for word in content_words(message) if word.isalpha()]
    if sum(not word.isascii() for word in words) * 2 > len(words):
        return True
    return all(any(word[:4] == name[:4] for word in words) for name in unsaid)


def _numbers(words: set[str]) -> set[str]:
    return {word for word in words if any(map(str.isdigit, word))}


def _agrees_on_negation(text: str, claim: Claim | None, sources: Sequence[str]) -> bool:
    """Return whether what is said agrees on what is not the case: what a fact denies has a sign of it where it was said, and what
    it affirms is not only denied there."""
    if NEGATED.search(text):
        return any(map(is_sign, map(_without_others, sources) if _is_of_speaker(text, claim) else sources))
    things = content_words(claim.object) if claim is not None else set()
    clauses = [
        clause for source in sources for clause in _CLAUSE.split(source) if things and match_words(things, content_words(clause))
    ]
    return not clauses or _ENDED.search(text) is not None or not all(_ENDED.search(clause) for clause in clauses)


def find_sources(
    words: set[str], utterance: Utterance, view: MemoryView
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], set[str]]:
    """Return where the words of a fact come from: the messages, this one first; the summary, if it is needed; and the words that
    nobody said."""
    unsaid = words - _spoken_words(words, utterance.text, utterance)
    cites, sources = [utterance.cite], tuple[int, ...]()
    for source in sorted(
        (candidate for candidate in (*view.earlier, *view.new) if candidate is not utterance),
        key=lambda candidate: -candidate.page.id,
    ):
        more = _spoken_words(unsaid, source.text, source)
        if more:
            cites.append(source.cite)
            unsaid -= more
    if unsaid and view.summary and (more := match_words(unsaid, content_words(view.summary))):
        sources = (view.summary_page,)
        unsaid -= more
    return tuple(cites), sources, unsaid


def _claim(fact: _Fact, text: str, source: Utterance) -> Claim | None:
    """Return the parts of a fact, if its text says them in this order; else None."""
    subject, relation, thing = (" ".join(part.split())[:200] for part in (fact.subject, fact.relation, fact.object))
    words = relation.split()
    if not (subject and relation and thing) or len(words) > 5 or any(word[0].isupper() for word in words):
        return None
    subject = SPEAKER if is_speaker(subject) else subject
    pattern = re.escape(plain_name(relation)) + r"(?: \w+){0,2} " + re.escape(plain_name(thing))
    if not re.search(rf"(?<!\w){pattern}(?!\w)", plain_name(text)):
        return None
    correction = fact.correction and CORRECTS.search(source.text) is not None
    many = has_many(relation)
    return Claim(subject=subject, relation=relation, object=thing, confidence=0.7, correction=correction, many=many)


def has_many(relation: str) -> bool:
    """Return whether a relation may have several objects at a time: all do but those known to have one."""
    return _ONE_AT_A_TIME.fullmatch(plain_name(relation)) is None


def _spoken_words(words: set[str], text: str, utterance: Utterance) -> set[str]:
    """Return those words that a message says, a relative date in all its forms, and the speaker's own name."""
    dated = content_words(grounded(text, utterance.page.time)[0]) | content_words(
        grounded(text, utterance.page.time, past=True)[0]
    )
    return match_words(words, content_words(text) | dated | content_words(_spoken_day(utterance)))
