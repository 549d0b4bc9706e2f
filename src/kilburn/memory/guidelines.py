"""Guidelines learned from feedback, as notes `guidelines/...`, and the feedback itself, as notes `examples/...`.

After MemAlign (Databricks). Feedback on an answer becomes two kinds of memory. A guideline is a general rule, cites all the
feedback that it was made from, and is part of every prompt. An example is a request with the feedback on its answer; the examples
nearest to a request are part of its prompt. Newer feedback on the same topic replaces the older guideline.

Forgetting feedback (`unalign`) removes its example and every guideline that was made from it. Guidelines that other feedback
supports are then made anew from that alone.

    guidelines = Guidelines(store, "ana")
    guidelines.learn(store.session("monday"))
    session.append({"role": "user", "content": request}, *guidelines.messages(request))
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kilburn.arguments import checked
from kilburn.backend import State
from kilburn.collections.collection import undisturbed
from kilburn.effect import Answer, Ask
from kilburn.errors import Forgotten, SecretFound
from kilburn.event import Act
from kilburn.forgetting.erasure import Erasure
from kilburn.kernel.drive import run
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory import english
from kilburn.memory.episodes import (
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
from kilburn.memory.secrets import Secrets, screen
from kilburn.memory.words import content_words
from kilburn.message import Kind, Message, Trust
from kilburn.model import object_schema
from kilburn.move import Add, Retire
from kilburn.page import Page, Place
from kilburn.selection.orders import is_order

__all__ = ["Guidelines"]

log = logging.getLogger("kilburn")

FOLDER, EXAMPLES = "guidelines", "examples"
"""The folders of these notes; the first is also the name of the policy that writes them."""

MAX_BATCH = 50
"""Feedback messages in one question to a model."""

MAX_GUIDELINE_CHARS = 500
"""Characters of a guideline at most."""

MAX_EXAMPLE_CHARS = 2_000
"""Characters of a request, or of feedback, in an example at most."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_OPENING = english.pattern("guidelines.opening", re.IGNORECASE)
_GENERAL = english.pattern("guidelines.general", re.IGNORECASE)
"""The beginning of an instruction."""
_CORRECTS = english.pattern("guidelines.corrects", re.IGNORECASE)
"""The beginning of a message that corrects the previous answer."""
_REASONED = english.pattern("guidelines.reasoned", re.IGNORECASE)
_FRAMING = frozenset(english.text("guidelines.framing").split("|"))
"""Words in which two guidelines on the same topic may differ."""

SYSTEM = prompt("guidelines")


class Distilled(msgspec.Struct, kw_only=True):
    """The result of one call.

    Args:
        learned: names of new and changed guidelines. supported: names of guidelines with more supporting feedback.
        examples: names of new examples. feedback: number of messages that are feedback.
        failed: why the model failed, or ""; the next call tries again. left_out: number of guidelines of a model that named no
            feedback or were too long.
        refused: addresses of feedback that holds a secret.
    """

    learned: list[str] = []
    supported: list[str] = []
    examples: list[str] = []
    feedback: int = 0
    failed: str = ""
    left_out: int = 0
    refused: list[str] = []


class _ListedGuideline(msgspec.Struct):
    text: str
    sources: list[int]


class _Listed(msgspec.Struct):
    guidelines: list[_ListedGuideline]


class _Guideline(msgspec.Struct):
    """The text of a guideline, the feedback that supports it, and the time of the newest feedback."""

    text: str
    cites: dict[Key, None]
    time: float


@checked
class Guidelines:
    """The guidelines and examples among the notes of one owner. Safe to use from several threads.

    Args:
        owner: a user of the tenant, or an agent; "" for all users.
    """

    def __init__(self, store: Store, owner: str = "") -> None:
        self.store, self.notes = store, store.notes(owner)
        self._past = Experience(self.notes.collection, FOLDER)

    def list(self) -> Sequence[NoteVersion]:
        """Return the guidelines in force, by name."""
        return self.notes.list(FOLDER)

    def examples(self, request: str = "", limit: int = 5) -> Sequence[NoteVersion]:
        """Return the examples that are nearest to a request, nearest first; all of them without one."""
        notes = {note.page: note for note in self.notes.list(EXAMPLES)}
        if not request.strip():
            return list(notes.values())
        collection = self.notes.collection
        hits = collection.backend.words.search(request, segments=[collection.number], limit=max(1, 8 * limit))
        nearest = dict.fromkeys(hit.page for hit in hits if hit.page in notes)
        return [notes[page] for page in nearest][: max(0, limit)]

    def messages(self, request: str, examples: int = 5, limit: int = 100) -> Sequence[Message]:
        """Return the guidelines, and the examples nearest to a request, as messages to append behind it. They cite the notes.

        Args:
            limit: maximum number of guidelines; those with the newest feedback are taken.
        """
        collection = self.notes.collection
        newest = sorted(self.list(), key=lambda note: note.time, reverse=True)[: max(0, limit)]
        rules = [(_heading(note), note) for note in sorted(newest, key=lambda note: note.name)]
        near = [(_heading(note), note) for note in self.examples(request, examples)]
        parts = (
            recall_message(FOLDER, "What the user's feedback says about how to work.", collection, rules),
            recall_message(EXAMPLES, "What the user said to earlier answers.", collection, near),
        )
        return [message for message in parts if message is not None]

    def learn(self, session: Session, *, model: Any = None, anew: bool = False, secrets: Secrets = None) -> Distilled:
        """Learn from the feedback in a session that is new, in one transaction. The same feedback again changes nothing.

        Args:
            model: a model, or its spec, that writes the guidelines; None for the rule, which takes general sentences
                ("Always ...", "Never ..."), and corrections that are general or have a reason ("No, it should be X, because
                ...").
            anew: read all feedback again, as after something was forgotten.
            secrets: what to do with feedback that holds a secret: see `kilburn.memory.secrets.screen`. Refused feedback is left
                out.

        Raises:
            SpecError, StoreError.
        """
        answer = None if model is None else make_answerer(self.store, model, required=True)
        return undisturbed(lambda: self._learn(session, answer, anew, secrets), lambda: self.notes.head)

    def unalign(
        self,
        session: Session,
        address: str,
        why: str = "",
        *,
        model: Any = None,
        dry: bool = False,
        secrets: Secrets = None,
    ) -> Erasure:
        """Forget feedback: its page, its example, and all versions of every guideline made from it. Guidelines that other
        feedback supports are made anew from that. Return the receipt.

        If the program ends in between, or the model fails (which is logged), the next `learn` of each session makes the missing
        guidelines.

        Args:
            model, secrets: see `learn`. dry: only return the receipt; nothing is forgotten.

        Raises:
            UnknownAddress, Forgotten. SpecError, MissingExtra, StoreError.
        """
        collection = self.notes.collection
        touched = {session.number}
        for number, pages in session.contents.forgettable(address).items():
            keys = [key for key in collection.backend.citing(number, pages) if key[0] == collection.number]
            touched |= {of for page, _ in collection.backend.read(keys).values() for of, _ in page.cites}
        names = {info.number: info.name for info in self.store.sessions()}
        sessions = [self.store.session(names[number]) for number in sorted(touched) if number in names]
        if not dry:
            for affected in sessions:
                collection.apply(policy=FOLDER, cause="forget", note=progress_data(affected.number, 0))
        receipt = self.store.forget(session=session.name, address=address, why=why, dry=dry)
        if not dry:
            for affected in sessions:
                if failed := self.learn(affected, model=model, secrets=secrets).failed:
                    log.warning("guidelines from %s are still to be made anew, learn from it again: %s", affected.name, failed)
        return receipt

    def _learn(self, session: Session, answer: Callable[[Ask], Answer] | None, anew: bool, secrets: Secrets) -> Distilled:
        collection = self.notes.collection
        head, report = collection.ledger.head, Distilled()
        upto = 0 if anew else self._past.upto(session.number)
        new, last = [], upto
        for episode in episodes(session, upto):
            if episode.next <= upto:
                continue
            last = max(last, episode.next)
            if not is_feedback(episode.feedback) and (answer is None or is_feedback(episode.goal)):
                continue
            clean = _screen(episode, secrets, asks=answer is not None)
            if clean is None:
                report.refused.append(f"p{episode.next}")
            else:
                new.append(clean)
        rows = versions(collection, FOLDER)
        if answer is None:
            guidelines = by_rule(new)
        else:
            heard = {cite for page, state in rows if state.at is Place.OUT for cite in page.cites}
            fresh = [episode for episode in new if heard.isdisjoint(episode.spoken)]
            guidelines = self._by_model(fresh, answer, report)
            if report.failed:
                return report
        heeded = {key for guideline in guidelines.values() for key in guideline.cites}
        new = [episode for episode in new if is_feedback(episode.feedback) or not heeded.isdisjoint(episode.spoken)]
        report.feedback = len(new)
        tainted = answer is not None and min((episode.taint for episode in new), default=Trust.USER) < Trust.AGENT
        moves = [*self._moves(guidelines, rows, report, tainted=tainted), *self._kept(new, report)]
        if moves or last > upto:
            note = progress_data(session.number, max(last, self._past.upto(session.number)))
            try:
                collection.apply(*moves, policy=FOLDER, cause="learn", tainted=tainted, seen=head, note=note)
            except Forgotten:
                return self._learn(session, answer, anew, secrets)
        return report

    def _moves(
        self, guidelines: dict[str, _Guideline], rows: Sequence[tuple[Page, State]], report: Distilled, *, tainted: bool
    ) -> Sequence[Add | Retire]:
        """Return the changes that bring the notes in line with the guidelines. Newer notes stay, and notes that are trusted more
        than the feedback."""
        collection = self.notes.collection
        in_force = {page.name: page for page, state in rows if state.at is Place.OUT}
        texts = collection.backend.contents.texts(page.digest for page, _ in rows)
        by_text = {texts.get(page.digest, "").casefold(): page for page in in_force.values()}
        by_person = {page for event in collection.ledger.events(act=Act.RETIRE) if event.policy == "user" for page in event.pages}
        refused = {
            collection.contents.text(page.id).casefold()
            for page, state in rows
            if state.at is Place.RETIRED and page.id in by_person
        }
        adds: list[Add] = []
        retired: list[Retire] = []
        for name, guideline in guidelines.items():
            existing = by_text.get(guideline.text.casefold()) or in_force.get(name)
            same = existing is not None and guideline.text.casefold() in by_text
            if same:
                assert existing is not None
                cites = {**dict.fromkeys(existing.cites), **guideline.cites}
                if len(cites) == len(existing.cites):
                    continue
            else:
                cites = guideline.cites
                if guideline.text.casefold() in refused or (
                    existing is not None and not self._yields(existing, guideline, tainted=tainted)
                ):
                    continue
            if existing is not None:
                retired.append(Retire((existing.id,), refers=len(adds)))
            add = Add(
                text=guideline.text,
                kind=Kind.TEXT,
                name=(existing.name if existing is not None else None) or name,
                cites=tuple(cites),
            )
            adds.append(add)
            (report.supported if same else report.learned).append(add.name)
        return [*adds, *retired]

    def _yields(self, existing: Page, newer: _Guideline, *, tainted: bool) -> bool:
        """Return whether a guideline makes room for another one about the same."""
        backend = self.notes.collection.backend
        # A guideline that a person wrote cites nothing: its own time counts.
        newest = max((source.time for source, _ in backend.read(existing.cites).values()), default=existing.time)
        authority = (
            Trust.TOOL if tainted else min((source.trust for source, _ in backend.read(newer.cites).values()), default=Trust.TOOL)
        )
        return newest <= newer.time and existing.trust <= authority

    def _kept(self, new: Sequence[Episode], report: Distilled) -> Sequence[Add]:
        """Return the examples that are not there yet."""
        names = {page.name for page, _ in versions(self.notes.collection, EXAMPLES)}
        adds = []
        for episode in new:
            name = f"{EXAMPLES}/s{episode.number}-p{episode.next}"
            if name not in names:
                text = f"Request: {episode.goal[:MAX_EXAMPLE_CHARS]}\nFeedback: {episode.feedback[:MAX_EXAMPLE_CHARS]}"
                cites = episode.pages[:1] + episode.spoken
                adds.append(Add(text=text, kind=Kind.TEXT, name=name, cites=cites))
        report.examples += [add.name for add in adds]
        return adds

    def _by_model(self, new: Sequence[Episode], answer: Callable[[Ask], Answer], report: Distilled) -> dict[str, _Guideline]:
        """Ask a model for the guidelines of feedback, in batches."""
        guidelines: dict[str, _Guideline] = {}
        known_texts = [note.text for note in self.list()]
        for first in range(0, len(new), MAX_BATCH):
            batch = new[first : first + MAX_BATCH]
            listed = run(
                ask_for(_question(batch, [*known_texts, *(guideline.text for guideline in guidelines.values())]), _Listed), answer
            )
            if isinstance(listed, Failed):
                report.failed = listed.why
                return {}
            for item in listed.guidelines:
                text = " ".join(item.text.split())
                sources = [batch[at - 1] for at in dict.fromkeys(item.sources) if 0 < at <= len(batch)]
                if not sources or not content_words(text) or len(text) > MAX_GUIDELINE_CHARS:
                    report.left_out += 1
                    continue
                # The model has seen the request and the answer too.
                cites = dict.fromkeys(key for episode in sources for key in (*episode.pages, *episode.spoken))
                guidelines[_note_name(text)] = _Guideline(text, cites, max(episode.time for episode in sources))
        return guidelines


def is_feedback(message: str) -> bool:
    """Return whether what a user says after an answer corrects it, or tells in general how to work; by its words alone."""
    return bool(guidelines_in(message)) or (_CORRECTS.match(message) is not None and not message.rstrip().endswith("?"))


def guidelines_in(message: str) -> Sequence[str]:
    """Return the general rules of a message: sentences that say how to work, and the reason of a correction."""
    corrects = _CORRECTS.match(message) is not None
    guidelines = []
    for sentence in _sentences(message):
        bare = sentence[match.end() :] if (match := _OPENING.match(sentence)) else sentence
        if sentence.endswith("?"):
            continue
        if is_order(sentence) or (corrects and _GENERAL.match(bare)):
            guidelines.append(f"{bare[:1].upper()}{bare[1:].rstrip('.!;, ')}.")
        elif corrects and (reasoned := _REASONED.fullmatch(bare)):
            # "It should be urgent, because the customer is gold."
            guidelines.append(f"If {reasoned['why']}: {reasoned['what']}.")
    return [text for text in guidelines if len(text) <= MAX_GUIDELINE_CHARS]


def by_rule(new: Iterable[Episode]) -> dict[str, _Guideline]:
    """Return guidelines by the names of their notes, without a model. The later of two about the same topic counts."""
    guidelines: dict[str, _Guideline] = {}
    for episode in new:
        for text in guidelines_in(episode.feedback):
            name = _note_name(text)
            guideline = guidelines.get(name)
            if guideline is None or guideline.text.casefold() != text.casefold():
                guideline = guidelines[name] = _Guideline(text, {}, 0.0)
            guideline.cites.update(dict.fromkeys(episode.spoken))
            guideline.time = max(guideline.time, episode.time)
    return guidelines


def _sentences(text: str) -> list[str]:
    return [sentence.strip() for sentence in _SENTENCE.split(text) if 0 < len(sentence.strip()) <= 2 * MAX_GUIDELINE_CHARS]


def _note_name(text: str) -> str:
    """Return the name of the note: of a rule with a condition, by the condition; so what is said of it later has the same
    name."""
    about = text.partition(":")[0] if text.startswith("If ") and ":" in text else text
    return slug(
        [word for word in re.findall(r"[\w'’]+", about) if word.casefold() not in _FRAMING and content_words(word)], FOLDER
    )


def _screen(episode: Episode, secrets: Secrets, *, asks: bool) -> Episode | None:
    """Return an episode with its texts as they may be stored; None if they may not be.

    Args:
        asks: whether a model sees the answer, and so may copy a secret from it.
    """
    try:
        feedback, goal = screen(episode.feedback, secrets)[0], screen(episode.goal, secrets)[0]
        answer = screen(episode.answer, secrets)[0] if asks else episode.answer
    except SecretFound:
        return None
    return msgspec.structs.replace(episode, feedback=feedback, goal=goal, answer=answer)


def _heading(note: NoteVersion) -> str:
    return f"{note.name}, trust {Trust(note.trust).name.lower()}"


def _question(batch: Sequence[Episode], known_texts: Sequence[str]) -> Ask:
    parts = [("guidelines that there are", "\n".join(known_texts) or "none")]
    for at, episode in enumerate(batch, 1):
        parts += [(f"request {at}", episode.goal), (f"answer {at}", episode.answer), (f"feedback {at}", episode.feedback)]
    listed = {"text": {"type": "string"}, "sources": {"type": "array", "items": {"type": "integer"}}}
    schema = object_schema({"guidelines": {"type": "array", "items": object_schema(listed)}})
    return Ask(prompt=quote_parts(parts), system=SYSTEM, schema=schema, purpose=f"guidelines from {len(batch)} feedbacks")
