"""Notes against a dict: random edits by two writers, renames, deletions, restored and forgotten versions, and reopening."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, KernelError, LawBroken, NoteConflict, UnknownAddress
from kilburn.memory.notes import Notes, NoteVersion
from kilburn.message import Kind, Trust
from kilburn.move import Add, Restore, Retire
from kilburn.testing.clock import FakeClock
from kilburn.testing.laws import check_collection

NAMES = st.sampled_from(["a", "b", "core/a", "core/b"])
WRITERS = st.integers(0, 1)
PICK = st.integers(0, 1000)


class NotesMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder, self.clock, self.said = tempfile.mkdtemp(), FakeClock(), 0
        self.model: dict[str, str] = {}
        self.versions: dict[str, NoteVersion] = {}
        """All that were written and not forgotten, by address."""
        self.stores = [self._open(), self._open()]

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def _open(self) -> Store:
        backend = Sqlite(str(Path(self.folder) / "n.db"), synchronous="OFF")
        return Store(backend, Budget(2000), "fifo", tokenizer="chars/4", clock=self.clock)

    def _notes(self, writer: int) -> Notes:
        return self.stores[writer].notes("ana")

    def _text(self) -> str:
        self.said += 1
        return f"text{self.said}"

    def _kept(self, note: NoteVersion) -> None:
        self.versions[note.address] = note

    @rule(writer=WRITERS, name=NAMES, seen=st.sampled_from(["now", "older", "none", "any"]), agent=st.booleans())
    def write(self, writer: int, name: str, seen: str, agent: bool) -> None:
        notes, text = self._notes(writer), self._text()
        now = notes.read(name).digest if name in self.model else ""
        given = {"now": now, "older": "0" * 64, "none": "", "any": None}[seen]
        if given not in (now, None):
            with pytest.raises(NoteConflict):
                notes.write(name, text, seen=given)
            return
        before = notes.read(name).trust if name in self.model else Trust.OPERATOR
        note = notes.write(name, text, seen=given, policy="agent" if agent else "user")
        assert note.trust is min(before, Trust.AGENT if agent else Trust.USER)
        self.model[name] = text
        self._kept(note)

    @rule(writer=WRITERS, name=NAMES, to=NAMES)
    def rename(self, writer: int, name: str, to: str) -> None:
        notes = self._notes(writer)
        if name not in self.model or to in self.model:
            with pytest.raises((UnknownAddress, NoteConflict)):
                notes.rename(name, to)
            return
        self._kept(notes.rename(name, to))
        self.model[to] = self.model.pop(name)

    @rule(writer=WRITERS, name=NAMES)
    def delete(self, writer: int, name: str) -> None:
        if name not in self.model:
            with pytest.raises(UnknownAddress):
                self._notes(writer).delete(name)
            return
        assert not self._notes(writer).delete(name).in_force
        del self.model[name]

    @rule(writer=WRITERS, name=NAMES, pick=PICK)
    def restore(self, writer: int, name: str, pick: int) -> None:
        notes = self._notes(writer)
        own = sorted(address for address, note in self.versions.items() if note.name == name)
        if not own:
            return
        address = own[pick % len(own)]
        if name in self.model and notes.read(name).address == address:
            with pytest.raises(KernelError):
                notes.restore(name, address)
            return
        self.model[name] = notes.restore(name, address).text

    @rule(writer=WRITERS, name=NAMES)
    def forget(self, writer: int, name: str) -> None:
        notes = self._notes(writer)
        if not any(note.name == name for note in self.versions.values()):
            with pytest.raises(UnknownAddress):
                notes.forget(name)
            return
        notes.forget(name)
        left = {note.address: note for each in self._in_force() for note in notes.history(each)}
        self.versions = {address: note for address, note in self.versions.items() if _is_kept(notes, address)}
        assert left.keys() <= self.versions.keys()
        assert name not in self._in_force()
        self.model = {each: text for each, text in self.model.items() if each in self._in_force()}

    def _in_force(self) -> set[str]:
        return {note.name for note in self._notes(0).list()}

    @rule(writer=WRITERS, name=NAMES, pick=PICK)
    def break_the_law(self, writer: int, name: str, pick: int) -> None:
        """Whatever is tried at the kernel, no name gets a second page."""
        if name not in self.model:
            return
        collection = self._notes(writer).collection
        page = self._notes(writer).read(name).page
        retired = [note.page for note in self.versions.values() if note.name == name and note.page != page]
        tries: list[list[Add | Restore | Retire]] = [[Add(text="x", kind=Kind.TEXT, name=name)]]
        if retired:
            tries.append([Restore((retired[pick % len(retired)],))])
        for changes in tries:
            with pytest.raises(LawBroken):
                collection.apply(*changes)

    @rule(writer=WRITERS)
    def reopen(self, writer: int) -> None:
        self.stores[writer].close()
        self.stores[writer] = self._open()

    @invariant()
    def holds(self) -> None:
        for writer in range(len(getattr(self, "stores", ()))):
            notes = self._notes(writer)
            assert {note.name: note.text for note in notes.list()} == self.model
        if getattr(self, "stores", ()):
            check_collection(self._notes(0).collection)
            for name in self.model:
                assert [note.in_force for note in self._notes(1).history(name) if note.name == name].count(True) == 1


def _is_kept(notes: Notes, address: str) -> bool:
    try:
        notes.collection.contents.resolve(address)
    except Forgotten:
        return False
    return True


NotesMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestNotesMachine = NotesMachine.TestCase
