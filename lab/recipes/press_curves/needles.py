"""Contexts made of pages of real text, with facts planted in them and a question about one of the facts.

Some pages are older outputs that a later one superseded, and say what was true then; of one page an
excerpt stands further on; the first page is the system prompt. That is what a store knows, and all
that `Case.facts` tells. The question is drawn when the context is there, from all of its facts, so that
nothing a press is told says where the answer stands.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kilburn.errors import SpecError
from kilburn.message import Kind
from kilburn.page import address_of
from kilburn.selection.extract import Piece as Source
from kilburn.selection.extract import extract
from kilburn.selection.lines import OMISSION
from kilburn.selection.selection import focus_words, max_passage_chars, page_candidates, select
from kilburn.wire.trajectory import Trajectory
from kilburn_kv.observation import CachedPage

KINDS = ("updated", "plain")
"""Of questions: an older page says another value, or the value stands nowhere else."""

SHORTEST, LONGEST = 60, 140
"""Tokens of a page, before facts are planted."""

EXCERPT = 40
"""Tokens of the excerpt of a page."""

PLANTED = 460
"""Tokens, about, that come on top of the pages of a context: older versions of two, an excerpt, facts, the last page."""

ENOUGH = 4000
"""Passages that are looked at for one context."""

_SYSTEM = "You look after the offices of a company. Answer from the pages below; of two versions of a page the later one holds."
_ATTRIBUTES = ("access code", "badge number", "parcel number", "room number")
_PLACES = ("Lisbon", "Oslo", "Dublin", "Warsaw", "Geneva", "Tallinn", "Porto", "Leeds", "Nairobi", "Osaka", "Quito", "Perth")
_MODULES = (
    "argparse calendar cmd codecs configparser contextlib csv difflib doctest fractions ftplib gettext gzip heapq imaplib "
    "inspect ipaddress locale mailbox optparse pdb pickle platform plistlib pprint profile random sched shelve shutil "
    "smtplib socket statistics subprocess tarfile textwrap threading timeit trace traceback turtle urllib/request uuid "
    "warnings weakref zipapp"
)


class Words(Protocol):
    """A tokenizer, as `kilburn_kv.weights.Weights` has it."""

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        ...

    def text(self, tokens: list[int]) -> str:
        """The text of tokens."""
        ...


class Passage(NamedTuple):
    """One message of real text: who speaks, as the policies name it, and what."""

    role: str
    text: str


@dataclass(frozen=True)
class Frame:
    """What stands around the pages: the system prompt with what opens the user's message, and what ends it."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Leaf:
    """A page of a context: its text and tokens, and what a store knows of it (see `kilburn_kv.observation.CachedPage`)."""

    role: str
    text: str
    tokens: tuple[int, ...]
    pinned: bool = False
    folded: bool = False
    stale: bool = False


@dataclass(frozen=True)
class Case:
    """A context, and what is asked of it.

    Args:
        leaves: its pages; the first has number 1.
        question: tokens behind the context, up to where the answer begins. asked: its words.
        answer: tokens of the right answer.
        rest: the tokens with which the last page goes on where nothing is asked.
        kind: of `KINDS`.
        home: number of the page with the answer: for scoring, not for a press.
    """

    leaves: tuple[Leaf, ...]
    question: tuple[int, ...]
    asked: str
    answer: tuple[int, ...]
    rest: tuple[int, ...]
    kind: str
    home: int

    @property
    def prompt(self) -> list[int]:
        """The tokens of all pages."""
        return [token for leaf in self.leaves for token in leaf.tokens]

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Page, start and stop of each."""
        found, at = [], 0
        for page, leaf in enumerate(self.leaves, 1):
            found.append((page, at, at := at + len(leaf.tokens)))
        return found

    @property
    def facts(self) -> Mapping[int, CachedPage]:
        """What the store knows, by page."""
        return {
            page: CachedPage(page, 0, 0, pinned=leaf.pinned, folded=leaf.folded, stale=leaf.stale)
            for page, leaf in enumerate(self.leaves, 1)
        }


class _Fact(NamedTuple):
    """What is planted, what an older version says, and the index of the page that it is on."""

    what: str
    value: str
    before: str
    home: int

    def line(self, value: str) -> str:
        return f"The {self.what} is {value}."


def library() -> list[list[Passage]]:
    """Real text that every machine has: the docstrings of Python's own library, a document for each module.

    They differ a little from one Python to the next.

    Raises:
        SpecError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for name in _MODULES.split():
        file = root / f"{name}.py"
        if not file.is_file():
            continue
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [(getattr(node, "name", name), ast.get_docstring(node)) for node in nodes if isinstance(node, kinds)]
        documents.append([Passage("tool", f"help({name})\n{text}") for name, text in found if text and len(text) > 120])
    documents = [document for document in documents if len(document) > 1]
    if not documents:
        raise SpecError("this Python came without the sources of its library", advice="give a file of runs with --data")
    return documents


def passages_of(run: Trajectory) -> list[Passage]:
    """A recorded run as passages: what the agent said and did, and what came back."""
    found = []
    for step in run.steps:
        found.append(Passage("assistant", f"{step.thought.strip()}\n{step.action.strip()}"))
        found.append(Passage("tool", step.observation.strip()))
    return [passage for passage in found if passage.text]


def frame_of(tokenizer: Any) -> Frame:
    """The system prompt and the user's message as the tokenizer's chat template writes them; plain lines where it has none."""
    if getattr(tokenizer, "chat_template", None):
        mark = "@@kilburn@@"
        talk = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": mark}]
        opening, _, closing = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True).partition(mark)
        return Frame(opening, closing)
    return Frame(f"{_SYSTEM}\n\n", "\n\n")


def case_of(
    documents: Sequence[Sequence[Passage]], words: Words, frame: Frame, number: int, *, tokens: int, rest: int, seed: int = 0
) -> Case:
    """Case `number` of a seed: the same arguments give the same case.

    Args:
        tokens: of the context, about.
        rest: held-out tokens that the last page goes on with.

    Raises:
        SpecError: the documents have no text that is long enough.
    """
    chance = random.Random(f"needles/{seed}/{number}")
    leaves, held = _leaves(documents, words, chance, max(6 * SHORTEST, tokens - PLANTED), rest)
    facts = _facts(chance, [leaf.role for leaf in leaves])
    older: dict[int, Leaf] = {}
    for order, fact in enumerate(facts):
        leaf, row = leaves[fact.home], chance.random()
        if KINDS[order // 2] == "updated":
            older[fact.home] = replace(_planted(leaf, fact.line(fact.before), row, words), stale=True)
        leaves[fact.home] = _planted(leaf, fact.line(fact.value), row, words)
    woven = _woven(leaves, older, chance, words)
    opening = Leaf("system", frame.opening, tuple(words.tokens(frame.opening)), pinned=True)
    chosen = number % len(facts)
    fact = facts[chosen]
    return Case(
        leaves=(opening, *(leaf for _, leaf in woven)),
        question=tuple(words.tokens(f"\n\nWhat is the {fact.what}?{frame.closing}The {fact.what} is")),
        asked=f"What is the {fact.what}?",
        answer=tuple(words.tokens(f" {fact.value}")),
        rest=tuple(held),
        kind=KINDS[chosen // 2],
        home=2 + [at for at, _ in woven].index(fact.home),
    )


def _leaves(
    documents: Sequence[Sequence[Passage]], words: Words, chance: random.Random, tokens: int, rest: int
) -> tuple[list[Leaf], list[int]]:
    """Pages of one document after the other, from somewhere in it, and how the last one goes on."""
    leaves: list[Leaf] = []
    total = looked = 0
    while documents and looked < ENOUGH:
        document = chance.choice(documents)
        looked += 1
        for passage in document[chance.randrange(len(document)) :]:
            looked += 1
            length = chance.randint(SHORTEST, LONGEST)
            last = total >= tokens
            # Most tokens are shorter than eight characters; only so much of a long output is read.
            found = words.tokens(f"{passage.text[: 8 * (LONGEST + rest)]}\n")
            if len(found) < (SHORTEST + rest if last else SHORTEST // 2):
                continue
            length = min(length, len(found) - (rest if last else 0))
            total += length
            leaves.append(Leaf(passage.role, words.text(found[:length]), tuple(found[:length])))
            if last:
                return leaves, found[length : length + rest]
    raise SpecError("the data has too little text for a context", advice="give a file with longer runs, or fewer tokens")


def _facts(chance: random.Random, roles: Sequence[str]) -> list[_Fact]:
    """Four facts on pages of their own, none on the last; the first two on outputs that will have an older version before."""
    attribute = chance.choice(_ATTRIBUTES)
    inner = range(2, len(roles) - 1)
    outputs = [home for home in inner if roles[home] == "tool"]
    homes = chance.sample(outputs if len(outputs) > 1 else inner, 2)
    homes += chance.sample([home for home in range(len(roles) - 1) if home not in homes], 2)
    values = [str(value) for value in chance.sample(range(1000, 10_000), 2 * len(homes))]
    places = chance.sample(_PLACES, len(homes))
    return [
        _Fact(f"{attribute} of the {place} office", values[2 * at], values[2 * at + 1], home)
        for at, (place, home) in enumerate(zip(places, homes, strict=True))
    ]


def _planted(leaf: Leaf, line: str, share: float, words: Words) -> Leaf:
    """The page with a line more, behind a share of its lines."""
    lines = leaf.text.rstrip("\n").split("\n")
    at = round(share * len(lines))
    text = "\n".join([*lines[:at], line, *lines[at:], ""])
    return replace(leaf, text=text, tokens=tuple(words.tokens(text)))


def _woven(leaves: Sequence[Leaf], older: Mapping[int, Leaf], chance: random.Random, words: Words) -> list[tuple[int, Leaf]]:
    """All pages in order, each with the index it had, or -1: older versions somewhere before the later one, and an excerpt
    of one page somewhere behind it. The last page stays the last."""
    folded = chance.choice([at for at in range(len(leaves) - 1) if at not in older])
    placed = [(float(at), at, replace(leaf, folded=at == folded)) for at, leaf in enumerate(leaves)]
    placed += [(chance.randrange(home - 1) + 0.5, -1, leaf) for home, leaf in older.items()]
    source = leaves[folded]
    count = _counter(words)
    told = extract([_source(folded, source)], EXCERPT, count).text or source.text.partition("\n")[0]
    excerpt = Leaf(Kind.EXCERPT, f"{told}\n", tuple(words.tokens(f"{told}\n")))
    placed.append((chance.randrange(folded, len(leaves) - 1) + 0.7, -1, excerpt))
    return [(at, leaf) for _, at, leaf in sorted(placed, key=lambda one: one[0])]


def summary(case: Case, tokens: int, words: Words, query: str = "") -> str:
    """What the extract of `summarize` keeps of a case's pages within so many tokens; "" where nothing fits.

    It is told what presses are told: of what was superseded nothing is kept.
    """
    sources = [_source(page, leaf) for page, leaf in enumerate(case.leaves, 1) if not leaf.pinned and not leaf.stale]
    return extract(sources, tokens, _counter(words), query=query).text


def excerpts(case: Case, tokens: int, words: Words, query: str = "") -> str:
    """What `hybrid` would keep: the passages that are likest to the query, or the newest. Else as `summary`."""
    passages = [
        passage
        for page, leaf in enumerate(case.leaves, 1)
        if not leaf.pinned and not leaf.stale
        for passage in page_candidates(leaf.text, page, page, leaf.role, max_passage_chars(tokens))
    ]
    parts = select(passages, [], focus_words([(query, 1.0)]), tokens, _counter(words))
    told = [
        f"{address_of(page)}:\n" + f"\n{OMISSION}".join(case.leaves[page - 1].text[start:stop] for start, stop in spans)
        for page, spans in parts
    ]
    return "\n".join([*told, ""]) if told else ""


def _source(page: int, leaf: Leaf) -> Source:
    kind = Kind.TEXT if leaf.role == "assistant" else Kind.EXCERPT if leaf.role == Kind.EXCERPT else Kind.RESULT
    return Source(page, leaf.role, kind, leaf.text)


def _counter(words: Words) -> Callable[[str], int]:
    return lambda text: len(words.tokens(text))
