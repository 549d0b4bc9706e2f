"""Consolidation: a model keeps one note up to date with what is said (sleep-time agents of Letta; arXiv 2504.13171).

It reads the messages since its cursor and the current note, and writes a new note. So the agent need not derive the same things
at each question. Messages after an untrusted text was read are left out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kilburn.backend import SegmentKind
from kilburn.collections.names import LARGEST_NOTE, checked_name
from kilburn.effect import Answer, Ask, Effect, Note, Outcome
from kilburn.memory.brought import format_day
from kilburn.memory.prompts import prompt
from kilburn.memory.view import MemoryView
from kilburn.message import Kind, Trust
from kilburn.move import Add, Retire
from kilburn.wire.quotation import with_headings

MAX_SHOWN_CHARS = 4_000
"""Characters of one message in the question; longer ones are cut."""

TASK = "Keep what will matter later: who the user is, what they want, what was decided and what is open, with names and numbers."

_SYSTEM = prompt("consolidate")


@dataclass(frozen=True)
class Consolidate:
    """Keep a note up to date with a model.

    Args:
        note: its name.
        limit: characters of the note. A longer answer is asked for once more, then rejected.
        task: the content of the note, in a sentence: by default who the user is and what they do. Name expected questions here
            to have their answers prepared.
        messages: messages in one question at most.
        timeout: seconds for one answer.
    """

    note: str = "core/human"
    limit: int = 2_000
    task: str = TASK
    messages: int = 20
    timeout: float = 120.0

    writes = SegmentKind.NOTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "note", checked_name(self.note))
        if not 1 <= self.limit <= LARGEST_NOTE or self.messages < 1 or self.timeout <= 0:
            raise ValueError(f"{self}: limit is 1 to {LARGEST_NOTE}, messages and timeout above 0")

    @property
    def cursor(self) -> str:
        """Of each note, it is known by itself how far it is."""
        return self.note

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """Return the changes that bring the note up to date with the new messages."""
        utterances = [utterance for utterance in view.new if utterance.taint >= Trust.AGENT]
        if not utterances:
            return ()
        page = view.note(self.note)
        old_text = view.text(page.id) if page is not None else ""
        parts = [("the note now", old_text or "(empty)")]
        parts += [
            (f"{utterance.role}, {format_day(utterance.page.time)}", utterance.text[:MAX_SHOWN_CHARS]) for utterance in utterances
        ]
        text = yield from self._answer(parts)
        if len(text) > self.limit:
            text = yield from self._answer([*parts, (f"too long, with {len(text):,} characters", text)])
        if len(text) > self.limit:
            yield Note(outcome=Outcome.REJECTED, why=f"{len(text):,} characters, {self.limit:,} at most")
            return ()
        if not text or text == old_text:
            yield Note(figures={"unchanged": int(bool(text))})
            return ()
        sources = () if page is None else (page.id,)
        cites, why = tuple(utterance.cite for utterance in utterances), "consolidated"
        add = Add(text=text, kind=Kind.TEXT, name=self.note, sources=sources, cites=cites, why=why)
        return (add, *([Retire(sources, refers=0, why=why)] if sources else []))

    def _answer(self, parts: Sequence[tuple[str, str]]) -> Generator[Effect, Answer, str]:
        """Ask the model and return its text; "" if it failed, which the ledger records."""
        answer = yield Ask(
            prompt=with_headings(parts),
            system=_SYSTEM.format(limit=self.limit, task=self.task),
            max_tokens=self.limit,
            purpose="consolidate a note",
            timeout=self.timeout,
        )
        if not answer.ok:
            yield Note(outcome=answer.outcome, why="the model wrote no note")
            return ""
        return answer.text.strip()
