"""Law 7 of notes: a note is trusted as the least trusted of all that it was made from, however long the way; what a tool's text
got into is shown so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.errors import NoteConflict, UnknownAddress
from kilburn.memory.core_memory import CoreMemory
from kilburn.memory.notes import NoteVersion
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.testing.laws import check_collection, check_laws

NAMES = st.sampled_from(["a", "b", "c"])
PICKS = st.sets(st.integers(0, 40), max_size=3)
"""What something is made from, among all that is there."""

STEPS = st.one_of(
    st.tuples(st.just("say"), st.sampled_from([Role.USER, Role.ASSISTANT]), st.sampled_from([None, Trust.TOOL]), PICKS),
    st.tuples(st.just("write"), NAMES, st.sampled_from(["user", "agent", "tainted"]), st.booleans(), PICKS),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("restore"), NAMES, st.integers(0, 40)),
    st.tuples(st.just("remember")),
)
OWN = {"user": Trust.USER, "agent": Trust.AGENT, "tainted": Trust.TOOL}


@given(st.lists(STEPS, max_size=14))
def test_trust_is_the_lowest_of_all_that_a_note_was_made_from_and_is_shown(steps: list[tuple[object, ...]]) -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session, notes, memory = store.session("s", user="ana"), store.notes("ana"), store.memory("ana")
        lowest: dict[tuple[int, int], Trust] = {}
        """Of each page, what all that it was made from allows, worked out here."""
        versions: list[NoteVersion] = []
        facts = 0

        def made_from(picks: set[int], number: int) -> list[tuple[int, int]]:
            known = [*lowest]
            return [key for at in sorted(picks) if at < len(known) and (key := known[at])[0] != number]

        def keep(note: NoteVersion, own: Trust, sources: list[tuple[int, int]]) -> None:
            lowest.setdefault((notes.collection.number, note.page), min([own, *(lowest[key] for key in sources)]))
            versions.append(note)

        for at, step in enumerate(steps):
            match step:
                case ("say", Role() as role, trust, set() as picks):
                    cites = made_from(picks, session.number) if role is Role.ASSISTANT else []
                    parts = (Part(kind=Kind.TEXT, text=f"text {at}"),)
                    session.append(Message(role=role, parts=parts, trust=trust, cites=tuple(cites)))  # type: ignore[arg-type]
                    own = Trust.TOOL if trust is not None else Trust.USER if role is Role.USER else Trust.AGENT
                    lowest[session.number, session.window.last] = min([own, *(lowest[key] for key in cites)])
                case ("write", str() as name, str() as who, bool() as anew, set() as picks):
                    cites = made_from(picks, notes.collection.number)
                    before = [note for note in notes.list() if note.name == name and not anew]
                    by = {"policy": "user" if who == "user" else "agent", "tainted": who == "tainted"}
                    note = notes.write(name, f"text {at}", anew=anew, cites=cites, **by)  # type: ignore[arg-type]
                    keep(note, OWN[who], cites + [(notes.collection.number, one.page) for one in before])
                case ("rename", str() as name, str() as to):
                    try:
                        before = [notes.read(name)]
                        note = notes.rename(name, to)
                    except (UnknownAddress, NoteConflict):
                        continue
                    keep(note, Trust.USER, [(notes.collection.number, before[0].page)])
                case ("restore", str() as name, int() as pick):
                    old = [
                        note for note in versions if note.name == name and note.address not in {n.address for n in notes.list()}
                    ]
                    if pick < len(old):
                        assert notes.restore(name, old[pick].address).trust is old[pick].trust
                case _:
                    facts += 1
                    lowest[
                        memory.collection.number, memory.collection.contents.resolve(memory.remember(f"Fact number {at}."))[0]
                    ] = Trust.USER
        for note in versions:
            assert note.trust is lowest[notes.collection.number, note.page]
        for shown in CoreMemory(notes, "a", "b", "c").shown():
            tools = shown.page is not None and lowest[shown.page] is Trust.TOOL
            assert shown.heading.endswith("has a tool's text in it") == tools
        assert len([*memory.pages(proposed=True, history=True)]) == facts, "no note becomes a fact"
        check_collection(notes.collection)
        check_laws(session)
