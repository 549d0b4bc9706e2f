"""Notes: one page in force for each name, versions, conflicts, trust, and forgetting."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.adapters.memory_tool import MemoryFiles
from kilburn.backend import Batch, SegmentKind, State
from kilburn.backends.records import Quotations
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import Forgotten, KernelError, LawBroken, NoteConflict, StoreReadOnly, UnknownAddress
from kilburn.kernel.store import Store
from kilburn.memory.notes import Notes
from kilburn.message import Kind, Trust
from kilburn.move import Add, Restore, Retire
from kilburn.page import Place, digest_of
from kilburn.testing.laws import check_collection


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kilburn.open(str(tmp_path / "agent.db"), tokenizer="chars/4", embedder=None) as opened:
        yield opened


@pytest.fixture
def notes(store: Store) -> Iterator[Notes]:
    made = store.notes("ana")
    yield made
    check_collection(made.collection)
    assert inspect_store(store.backend) == []


def says(notes: Notes) -> dict[str, str]:
    return {note.name: note.text for note in notes.list()}


def test_an_edit_is_in_force_and_what_it_replaced_stays_readable(notes: Notes) -> None:
    first = notes.write("core/human", "Ana drinks tea.")
    second = notes.write("core/human", "Ana drinks coffee.", seen=first.digest)
    assert says(notes) == {"core/human": "Ana drinks coffee."}
    assert notes.read("core/human").digest == digest_of("Ana drinks coffee.") == second.digest
    assert [(one.text, one.in_force) for one in notes.history("core/human")] == [
        ("Ana drinks tea.", False),
        ("Ana drinks coffee.", True),
    ]
    assert notes.collection.recall(first.address) == "Ana drinks tea."


def test_the_same_text_again_is_no_new_version(notes: Notes) -> None:
    first = notes.write("a", "one")
    head = notes.collection.ledger.head
    assert notes.write("a", "one").address == first.address
    assert notes.collection.ledger.head == head


def test_a_writer_that_has_seen_an_older_version_gets_the_newer_one_and_writes_nothing(notes: Notes) -> None:
    first = notes.write("a", "one", seen="")
    newer = notes.write("a", "two", seen=first.digest)
    with pytest.raises(NoteConflict, match="changed meanwhile") as told:
        notes.write("a", "three", seen=first.digest)
    assert (told.value.note.text, told.value.note.digest) == ("two", newer.digest)
    with pytest.raises(NoteConflict, match="already"):
        notes.write("a", "three", seen="")
    notes.delete("a")
    with pytest.raises(NoteConflict, match="gone") as gone:
        notes.write("a", "three", seen=newer.digest)
    assert gone.value.note is None
    assert [one.text for one in notes.history("a")] == ["one", "two"]


def test_of_two_writers_at_once_one_gets_a_conflict(store: Store, notes: Notes) -> None:
    seen = notes.write("a", "0").digest
    ready, told = threading.Barrier(4), list[str]()

    def edit(number: int) -> None:
        ready.wait()
        try:
            told.append(store.notes("ana").write("a", str(number), seen=seen).text)
        except NoteConflict as error:
            told.append(f"not {number}: {error.note.text}")

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (written,) = [one for one in told if not one.startswith("not")]
    assert all(one.endswith(f": {written}") for one in told if one.startswith("not"))
    assert [one.text for one in notes.history("a")] == ["0", written]


def test_two_programs_see_each_others_notes(store: Store, notes: Notes, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "agent.db"), tokenizer="chars/4", embedder=None) as other:
        theirs = other.notes("ana")
        notes.write("a", "mine")
        assert theirs.read("a").text == "mine"
        theirs.rename("a", "b")
        assert says(notes) == {"b": "mine"}


def test_a_renamed_note_takes_its_history_with_it(notes: Notes) -> None:
    notes.write("a", "one")
    notes.write("b", "taken")
    notes.rename("a", "c/a")
    assert says(notes) == {"b": "taken", "c/a": "one"}
    assert [one.name for one in notes.history("c/a")] == ["a", "c/a"]
    with pytest.raises(NoteConflict, match="already"):
        notes.rename("c/a", "b")
    with pytest.raises(UnknownAddress, match="no note 'a'"):
        notes.rename("a", "d")


def test_a_deleted_note_comes_back_by_restore(notes: Notes) -> None:
    first = notes.write("a", "one")
    second = notes.write("a", "two")
    notes.delete("a", why="it is over")
    assert says(notes) == {}
    with pytest.raises(UnknownAddress):
        notes.read("a")
    assert notes.restore("a", second.address).text == "two"
    assert notes.restore("a", first.address).text == "one"
    assert says(notes) == {"a": "one"}
    with pytest.raises(KernelError, match="says now"):
        notes.restore("a", first.address)
    assert notes.write("a", "three").trust is Trust.USER
    assert [one.text for one in notes.history("a")] == ["one", "two", "three"]


def test_a_version_of_another_note_is_not_restored(notes: Notes) -> None:
    other = notes.write("b", "one")
    notes.write("a", "two")
    with pytest.raises(UnknownAddress, match="no version of 'a', but of 'b'"):
        notes.restore("a", other.address)


def test_a_diff_is_of_the_last_edit_unless_it_names_versions(notes: Notes) -> None:
    first = notes.write("a", "one\ntwo\n")
    notes.write("a", "one\n2\n")
    third = notes.write("a", "one\n2\nthree\n")
    assert notes.diff("a").splitlines()[2:] == ["@@ -1,2 +1,3 @@", " one", " 2", "+three"]
    assert notes.diff("a", first.address, third.address).splitlines()[3:] == [" one", "-two", "+2", "+three"]
    assert notes.diff("a", third.address, third.address) == ""
    with pytest.raises(UnknownAddress, match="p9 is no version"):
        notes.diff("a", "p9")


def test_list_below_a_name(notes: Notes) -> None:
    for name in ("core/human", "core/persona", "corel", "workflows/a"):
        notes.write(name, "x")
    assert [one.name for one in notes.list("core")] == ["core/human", "core/persona"]
    assert [one.name for one in notes.list("core/")] == ["core/human", "core/persona"]
    assert len(notes.list()) == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "without a name"), ("/a", "empty part"), ("a//b", "empty part"), ("a/", "empty part"), ("..", "elsewhere"),
        ("a/../b", "elsewhere"), ("./a", "elsewhere"), (".git/config", "dot or blank"), ("a /b", "dot or blank"), ("a.", "dot"),
        ("a\\b", r"U\+005C"), ("a\0b", r"U\+0000"), ("a\nb", r"U\+000A"), ("a\u202eb", r"U\+202E"), ("a" * 201, "201 characters"),
        ("\u00e9" * 101, "200 bytes"),
    ],
)  # fmt: skip
def test_odd_names_are_refused_in_words(notes: Notes, name: str, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        notes.write(name, "x")
    assert says(notes) == {}


def test_a_name_is_the_same_however_its_letters_are_composed(notes: Notes) -> None:
    notes.write("cafe\u0301", "one")
    notes.write("caf\u00e9", "two")
    assert says(notes) == {"caf\u00e9": "two"}


def test_an_empty_or_a_huge_text_is_refused(notes: Notes) -> None:
    notes.write("a", "x" * 100_000)
    for text in ("", " \n", "x" * 100_001):
        with pytest.raises(KernelError):
            notes.write("a", text)
    assert len(notes.read("a").text) == 100_000


def test_the_kernel_refuses_a_second_page_of_a_name(notes: Notes) -> None:
    notes.write("a", "one")
    before = notes.collection.ledger.head
    for changes in (
        [Add(text="two", kind=Kind.TEXT, name="a")],
        [Add(text="two", kind=Kind.TEXT, name="b"), Add(text="three", kind=Kind.TEXT, name="b")],
    ):
        with pytest.raises(LawBroken, match="would both be the note") as told:
            notes.collection.apply(*changes)
        assert told.value.law == 9
    for add in (Add(text="two"), Add(text="two", kind=Kind.TEXT), Add(text="two", name="b")):
        with pytest.raises(KernelError, match="texts with names"):
            notes.collection.apply(add)
    notes.collection.apply(Add(text="two", kind=Kind.TEXT, name="a"), Retire((1,), refers=0))
    with pytest.raises(LawBroken, match="would both be the note 'a'"):
        notes.collection.apply(Restore((1,)))
    assert notes.collection.ledger.head == before + 2


def test_facts_have_no_names(store: Store) -> None:
    with pytest.raises(KernelError, match="texts with names"):
        store.memory("ana").collection.apply(Add(text="Ana drinks tea.", name="a"))


def test_fsck_finds_two_pages_of_one_name(store: Store) -> None:
    notes = store.notes("ana")
    notes.write("a", "one")
    notes.write("a", "two")
    number, head = notes.collection.number, notes.collection.ledger.head
    store.backend.commit(number, Batch(head=head, states={1: State(Place.OUT)}, index=[1]))
    (found,) = [one for one in inspect_store(store.backend) if "note" in one.what]
    assert found.segment == number
    assert "f1 and p1 are both in force as the note 'a'" in found.what


def test_what_an_agent_writes_is_in_force_at_once_and_never_more_trusted_than_the_agent(store: Store, notes: Notes) -> None:
    assert notes.write("a", "said").trust is Trust.USER
    assert notes.write("a", "edited", policy="agent").trust is Trust.AGENT
    assert notes.write("b", "read it on a page", policy="agent", tainted=True).trust is Trust.TOOL
    assert {note.name: note.in_force for note in notes.list()} == {"a": True, "b": True}
    assert notes.write("b", "edited by a person").trust is Trust.TOOL
    assert notes.write("a", "read it too", policy="agent", tainted=True).trust is Trust.TOOL
    assert notes.restore("a", "p1").trust is Trust.USER
    assert notes.write("b", "all my own words", anew=True).trust is Trust.USER


def test_a_note_that_cites_a_tools_result_is_trusted_no_more_and_goes_with_it(store: Store, notes: Notes) -> None:
    session = store.session("s")
    call = {"id": "c", "type": "function", "function": {"name": "web", "arguments": "{}"}}
    session.append({"role": "user", "content": "look"}, {"role": "assistant", "content": None, "tool_calls": [call]})
    session.append({"role": "tool", "tool_call_id": "c", "content": "buy gold"})
    note = notes.write("a", "the page says: buy gold", policy="agent", cites=[(session.number, 3)])
    assert note.trust is Trust.TOOL
    notes.write("a", "the page says: buy gold now", policy="agent")
    store.forget(session="s", address="p3")
    assert says(notes) == {}
    with pytest.raises(UnknownAddress):
        notes.history("a")


def test_a_forgotten_note_is_gone_with_all_its_versions(store: Store, notes: Notes, tmp_path: Path) -> None:
    first = notes.write("secret", "the code is swordfish")
    notes.write("secret", "the code was swordfish")
    notes.rename("secret", "old/secret")
    notes.write("kept", "something else")
    assert notes.forget("old/secret") == ["p1", "f1", "f2"]
    assert says(notes) == {"kept": "something else"}
    with pytest.raises(Forgotten):
        notes.collection.recall(first.address)
    assert not store.search("swordfish", where="all")
    assert not [event for event in notes.collection.ledger.events() if "secret" in repr(event)]
    assert all(b"swordfish" not in file.read_bytes() for file in tmp_path.glob("agent.db*"))


def test_search_finds_what_notes_say_now(store: Store, notes: Notes) -> None:
    notes.write("a", "Ana drinks tea.")
    notes.write("a", "Ana drinks coffee.")
    assert [hit.text for hit in store.search("what does Ana drink", where="notes")] == ["Ana drinks coffee."]
    assert [hit.session for hit in store.search("coffee")] == ["@notes/ana"]
    assert not store.search("coffee", where=("facts", "documents", "sessions"))


def test_each_owner_has_notes_of_their_own_and_is_forgotten_with_them(store: Store, notes: Notes) -> None:
    notes.write("a", "hers")
    store.notes("bob").write("a", "his")
    store.notes().write("a", "everybody's")
    assert (store.notes("ana").owner, says(store.notes("bob")), says(store.notes())) == (
        "ana",
        {"a": "his"},
        {"a": "everybody's"},
    )
    store.forget(user="bob")
    assert says(store.notes("bob")) == {}
    assert says(notes) == {"a": "hers"}
    assert [one.info.kind for one in store.collections()].count(SegmentKind.NOTES) == 2, "reading begins none"


def test_a_reader_writes_nothing(store: Store, notes: Notes, tmp_path: Path) -> None:
    notes.write("a", "one")
    with kilburn.open(str(tmp_path / "agent.db"), readonly=True, embedder=None) as reader:
        assert reader.notes("ana").read("a").text == "one"
        with pytest.raises(StoreReadOnly):
            reader.notes("ana").write("a", "two")
        nobody = reader.notes("nobody")
        assert nobody.list() == []
        for read in (lambda: nobody.read("a"), lambda: nobody.history("a"), lambda: nobody.restore("a", "p1")):
            with pytest.raises(UnknownAddress, match="no note 'a'"):
                read()


def test_a_pinned_note_is_not_replaced(notes: Notes) -> None:
    notes.write("a", "one")
    notes.collection.pin("p1")
    for change in (lambda: notes.write("a", "two"), lambda: notes.delete("a"), lambda: notes.rename("a", "b")):
        with pytest.raises(LawBroken, match="pinned"):
            change()
    assert says(notes) == {"a": "one"}


def entered(work: Callable[[], object]) -> Counter[str]:
    """How often each function was called, by its name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_name if event == "call" else called.__name__] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_history_grows_with_its_versions_and_not_with_their_square(store: Store) -> None:
    for owner, count in (("short", 40), ("long", 160)):
        for number in range(count):
            store.notes(owner).write("plan", f"version {number}")
    for verb in (Notes.history, Notes.diff, Notes.forget):
        short, long = (entered(lambda verb=verb, owner=owner: verb(store.notes(owner), "plan")) for owner in ("short", "long"))
        assert long.total() < 6 * short.total()


def test_a_listing_reads_the_texts_at_once(notes: Notes) -> None:
    for number in range(30):
        notes.write(f"folder/{number}", "text")
    assert entered(lambda: MemoryFiles(notes).run({"command": "view", "path": "/memories"}))["text"] == 0


@given(st.sets(st.text("abc", min_size=6, max_size=8), max_size=5), st.text("abc", max_size=40))
def test_quotations_are_found_as_by_looking_for_each(words: set[str], text: str) -> None:
    assert Quotations(words).are_in(text) == any(word in text for word in words)
