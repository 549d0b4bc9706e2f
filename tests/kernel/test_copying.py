"""A copy has everything under the same addresses, whatever killed it in between, and nothing that was forgotten.

The tests that take `target` run with a database of PostgreSQL there, too: see tests/postgres/test_copying.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import kilburn
import waiting
from cli.terminal import kilburn as command
from effort import rounds
from kernel.copied import fill, look, opened, run_copies, writer
from kernel.talk import user
from kilburn.backend import Batch
from kilburn.backends.places import open_backend
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import KilburnError, SpecError, StoreBusy, StoreError
from kilburn.jobs.ending import TimeToLive, keep_rule
from kilburn.kernel.store import Store
from kilburn.move import Add
from kilburn.page import Place


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Where the copy is made."""
    return str(tmp_path / "b.db")


def test_everything_is_copied(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    made = kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    assert look(tmp_path / "b.db") == look(tmp_path / "a.db")
    assert made.kinds == {"forgotten": 1, "session": 5, "memory": 2, "notes": 1, "document": 1}
    assert made.settings == 1
    assert made.vectors > 5
    with opened(tmp_path / "a.db") as ours, opened(tmp_path / "b.db") as theirs:
        for name in ("work", "work/b1", "work/b1/b1", "work/b2"):
            before, after = ours.session(name), theirs.session(name)
            assert after.render() == before.render()
            assert after.window.states == before.window.states
            assert [each.why for each in after.ledger.receipts()] == [each.why for each in before.ledger.receipts()]
        branch = theirs.session("work").branches.open("b1")
        assert branch.recall("p4") == ours.session("work").recall("p4")
        assert theirs.memory("ana").recall("f2") == ours.memory("ana").recall("f2")
        assert theirs.notes("ana").read("plans/today").text == "fix it now"
        for query in ("parser", "Porto", "Hesper", "deep 3"):
            assert [(hit.session, hit.address) for hit in theirs.search(query)] == [
                (hit.session, hit.address) for hit in ours.search(query)
            ]
        theirs.session("work").append(user("it goes on"))
    for path in tmp_path.glob("b.db*"):
        assert b"canary" not in path.read_bytes()


def test_a_second_copy_writes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    first = kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    before = (tmp_path / "a.db").read_bytes(), look(tmp_path / "b.db")
    again = kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    assert first.new > 100
    assert again.new == 0
    assert (again.digest, again.pages, again.events) == (first.digest, first.pages, first.events)
    assert look(tmp_path / "b.db") == before[1]


def test_numbers_that_are_taken_do_not_matter(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    with opened(tmp_path / "b.db", "somebody") as store:
        for number in range(3):
            store.session(f"other {number}").append(user("not yours"))
    with opened(tmp_path / "b.db") as store:
        store.session("mine already").append(user("it stays"))
        store.session("mine, and gone").append(user("it stays"))
        store.forget(session="mine, and gone")
    kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    wanted, found = look(tmp_path / "a.db"), look(tmp_path / "b.db")
    assert found.pop("mine already")
    found["forgotten"].pop("mine already")
    assert found == wanted
    with opened(tmp_path / "b.db") as store:
        receipt = store.forget(session="work", address="p3", dry=True)
        # The call, its result, the branches that saw them, and a fact that was made from it.
        assert {"work", "work/b1", "work/b2", "@memory"} <= receipt.pages.keys() | {"work/b1", "work/b2"}
        assert "@memory" in receipt.pages
        store.forget(session="work")
        assert [info.name for info in store.sessions()] == ["mine already", "copy~2"]
    with Sqlite(tmp_path / "b.db") as backend:
        assert inspect_store(backend) == []


def test_killed_anywhere_it_leaves_the_destination_as_it_was(tmp_path: Path, target: str) -> None:
    check_kills(str(tmp_path / "a.db"), target, rounds(20, 200))


def check_kills(source: str, target: str, kills: int) -> None:
    """A copy that is killed leaves everything as it was, others can write there, and the next one completes."""
    fill(source)
    with opened(target) as store:
        store.session("mine").append(user("it stays"))
    steps = int(run_copies(source, target, [0], to="counted")[0])
    assert steps > 50
    chance = random.Random(41)
    for number in range(kills):
        before = look(target)
        # The last two are those of `sync`, after the transaction.
        step = chance.choice((number % (steps - 2), chance.randrange(steps - 2), steps - 3 - number % 9)) + 1
        assert run_copies(source, target, [step]) == ["killed"]
        assert look(target) == before
        with opened(target) as store:
            store.session("mine").append(user(f"killed {number}"))
    mine = look(target)["mine"]
    assert run_copies(source, target, [0]) != ["killed"]
    assert kilburn.copy(source, target).new == 0
    copied = look(target)
    assert copied.pop("mine") == mine
    assert copied["forgotten"].pop("mine") == []
    assert copied == look(source)


def test_a_copy_follows_a_source_that_is_written_to(tmp_path: Path, target: str) -> None:
    check_live(str(tmp_path / "a.db"), target, rounds(3, 15))


def check_live(source: str, target: str, copies: int) -> None:
    """While somebody appends to the source, each copy has a state that it was in, also after a killed one; the last has all."""
    with opened(source) as store:
        store.session("work").append(*(user(f"{number} comes first") for number in range(40)))
    with writer(source):
        heads = []
        for number in range(copies):
            assert run_copies(source, target, [5 + number]) == ["killed"]
            kilburn.copy(source, target)
            copied = look(target)
            heads.append(copied["work"][4])
            with closing(open_backend(source, readonly=True)) as backend:
                for number, event in enumerate(copied["work"][7]):
                    assert event[0] == number + 1
                assert backend.settings.all()["copies"]
            waiting.until(lambda: _head(source) > heads[-1])
    assert heads == sorted(set(heads))
    kilburn.copy(source, target)
    assert look(target) == look(source)


@pytest.mark.parametrize("seed", range(rounds(2, 20)))
def test_random_copies_of_a_changing_source(tmp_path: Path, target: str, seed: int) -> None:
    gone = check_random(str(tmp_path / "a.db"), target, seed, rounds(25, 60))
    for path in tmp_path.glob("b.db*"):
        assert not [word for word in gone if word.encode() in path.read_bytes()]


def check_random(source: str, target: str, seed: int, steps: int) -> set[str]:
    """Change the source, copy, kill copies and write to the target, in a random order. Each copy is the same as the source, and
    the target's own session is what was written to it. Returns the words that were forgotten in the source."""
    chance = random.Random(seed)
    words: list[str] = []
    mine: list[str] = []

    def word() -> str:
        words.append(f"canary{len(words):05}x")
        return words[-1]

    def change() -> None:
        with opened(source) as store:
            for _ in range(chance.randrange(1, 5)):
                name = f"work {chance.randrange(4)}"
                work = store.session(name, user="ana")
                numbers = [page.id for page, state in work.contents.pages() if page.id > 0 and state.at is not Place.DROPPED]
                act = chance.choice(("append", "append", "fork", "cite", "note", "pin", "page", "session", "branch"))
                if act == "append" or not numbers:
                    work.append(*(user(f"{word()} " * chance.randrange(1, 40)) for _ in range(chance.randrange(1, 5))))
                elif act == "fork":
                    branch = work.fork("look")
                    branch.append({"role": "assistant", "content": word()})
                    if chance.random() < 0.5:
                        branch.branches.exit(f"the branch says {word()}")
                elif act == "cite":
                    fact = Add(text=f"Ana said {word()}", cites=((work.number, chance.choice(numbers)),))
                    store.memory("ana").collection.apply(fact, policy="learner")
                elif act == "note":
                    store.notes("ana").write(f"plans/{chance.randrange(3)}", word())
                elif act == "pin":
                    work.pin(f"p{chance.choice(numbers)}")
                elif act == "page":
                    store.forget(session=name, address=f"p{chance.choice(numbers)}")
                elif act == "session":
                    store.forget(session=name)
                elif below := work.branches.below():
                    store.forget(session=chance.choice(below).name)

    def own() -> None:
        with opened(target) as store:
            mine.append(f"mine {len(mine)}")
            store.session("mine").append(user(mine[-1]))

    def check() -> None:
        copied = look(target)
        pages = copied.pop("mine")[6]
        assert [text for _, _, (text, *_), _ in pages if text] == mine
        copied["forgotten"].pop("mine")
        assert copied == look(source)

    change()
    own()
    for _ in range(steps):
        act = chance.choice((change, change, own, "copy", "kill"))
        if act == "copy":
            kilburn.copy(source, target)
            check()
        elif act == "kill":
            before = look(target)
            (status,) = run_copies(source, target, [chance.randrange(1, 60)])
            # Killed behind the transaction, it is complete.
            if status != "killed" or look(target) != before:
                check()
        elif callable(act):
            act()
    change()
    kilburn.copy(source, target)
    check()
    everything = repr(look(source))
    return {word for word in words if word not in everything}


def _head(place: str) -> int:
    with closing(open_backend(place, readonly=True)) as backend:
        info = backend.segment("work", time=0.0, create=False)
        assert info is not None
        return info.head


def test_what_has_another_thing_of_a_name_is_refused_untouched(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    with opened(tmp_path / "b.db") as store:
        store.session("work").append(user("my own work"))
    before = look(tmp_path / "b.db")
    with pytest.raises(StoreError, match="has another session 'work'"):
        kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    assert look(tmp_path / "b.db") == before
    with Sqlite(tmp_path / "b.db") as backend:
        assert backend.settings.all() == {}
    with Sqlite(tmp_path / "a.db") as backend:
        assert "copies" not in backend.settings.all()


def goes_on(store: Store) -> None:
    work = store.session("work")
    work.append(user("one more"), {"role": "assistant", "content": "well"})
    work.pin("p6")
    store.session("later").append(user("a new one"))


def forgets_a_page(store: Store) -> None:
    store.forget(session="work", address="p3")


def forgets_a_branch(store: Store) -> None:
    store.forget(session="work/b1")


def forgets_a_session(store: Store) -> None:
    store.forget(session="work")


def forgets_a_user(store: Store) -> None:
    store.session("work").append(user("one more"))
    store.forget(user="ana")


def begins_anew(store: Store) -> None:
    store.forget(session="work")
    work = store.session("work", user="ana")
    work.append(user("begun anew"), {"role": "assistant", "content": "well"})
    branch = work.fork("look again")
    branch.append({"role": "assistant", "content": "deep"})
    store.memory("ana").collection.apply(Add(text="Ana begins anew", cites=((work.number, 1),)), policy="learner")


def removes_its_rule(store: Store) -> None:
    keep_rule(store.backend, None)


CHANGES = [goes_on, forgets_a_page, forgets_a_branch, forgets_a_session, forgets_a_user, begins_anew, removes_its_rule]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_copy_follows_its_source(tmp_path: Path, target: str, change: Callable[[Store], None], shifted: bool) -> None:
    check_follows(tmp_path / "a.db", target, change, shifted=shifted)


def check_follows(source: Path, target: str, change: Callable[[Store], None], *, shifted: bool) -> None:
    """After a change of the source a second copy makes the target the same; a third has nothing to do.

    Args:
        shifted: whether somebody else has a session there, so that numbers differ.
    """
    if shifted:
        with opened(target, "somebody") as store:
            store.session("other").append(user("not yours"))
    fill(source)
    with opened(source) as store:
        keep_rule(store.backend, TimeToLive(forget=1e9))
    kilburn.copy(str(source), target)
    with opened(source) as store:
        change(store)
    kilburn.copy(str(source), target)
    assert look(target) == look(source)
    assert kilburn.copy(str(source), target).new == 0


def test_a_new_store_in_the_place_of_one_that_is_gone_takes_nothing_from_its_copy(tmp_path: Path, target: str) -> None:
    place = tmp_path / "a.db"
    fill(place)
    kilburn.copy(str(place), target)
    before = look(target)
    for noted in (True, False):
        for file in tmp_path.glob("a.db*"):
            file.unlink()
        with opened(place) as store:
            store.session("first").append(user("it gets the number of a session that was copied"))
            store.session("second").append(user("new"))
        with opened(place) as store:
            store.forget(session="first")
        with pytest.raises(StoreError, match="another store that was"):
            kilburn.copy(str(place), target, note=noted)
        assert look(target) == before
        opened(target).close()


def test_a_copy_of_which_nothing_is_left_in_the_source_goes_too(tmp_path: Path, target: str) -> None:
    place = tmp_path / "a.db"
    with opened(place) as store:
        store.session("only").append(user("canaryonly"))
    kilburn.copy(str(place), target)
    with opened(place) as store:
        store.forget(session="only")
    kilburn.copy(str(place), target)
    with opened(target) as store:
        assert store.sessions() == []


def test_a_copy_that_was_written_to_is_not_overwritten(tmp_path: Path, target: str) -> None:
    fill(tmp_path / "a.db")
    kilburn.copy(str(tmp_path / "a.db"), target)
    with opened(target) as store:
        store.session("work").append(user("work goes on in the copy"))
    before = look(target)
    with pytest.raises(StoreError, match="has another session 'work'"):
        kilburn.copy(str(tmp_path / "a.db"), target)
    assert look(target) == before
    with opened(tmp_path / "a.db") as store:
        for _ in range(20):
            store.session("work").append(user("and in the source"))
    with pytest.raises(StoreError, match="has another session 'work'"):
        kilburn.copy(str(tmp_path / "a.db"), target)
    assert look(target) == before


def test_what_was_forgotten_in_the_copy_does_not_come_back(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    with Sqlite(tmp_path / "b.db") as backend:
        found = backend.segment("copy~2", time=0.0, create=False)
        assert found is not None
        backend.commit(found.number, Batch(head=found.head, erase=[1]))
    with opened(tmp_path / "a.db") as store:
        store.session("work").append(user("the source goes on"))
    before = look(tmp_path / "b.db")
    with pytest.raises(StoreError, match="was forgotten there"):
        kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    assert look(tmp_path / "b.db") == before
    with opened(tmp_path / "b.db") as store:
        # Whoever is refused for good is not kept from writing to it.
        store.session("its own").append(user("goes on"))
    kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "c.db"))
    with opened(tmp_path / "c.db") as store:
        store.forget(session="copy~2")
    with pytest.raises(StoreError, match="was forgotten there"):
        kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "c.db"))


def test_forgetting_names_the_copy(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "b.db"), to="other")
    with opened(tmp_path / "a.db") as store:
        receipt = store.forget(session="copy~2", dry=True)
    assert [(each.session, each.to) for each in receipt.exports] == [("copy~2", f"{tmp_path / 'b.db'}#other")]


def test_a_damaged_session_is_left_behind_and_named(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    with apsw.Connection(str(tmp_path / "a.db")) as db:
        db.create_scalar_function("needs_a_kilburn_of_format_5", lambda: None, 0)
        db.execute("UPDATE segment SET created = 77 WHERE name = 'copy~2'")
    db.close()
    done = command("copy", tmp_path / "a.db", tmp_path / "b.db")
    assert done.status == 1
    assert "not copied: copy~2" in done.err
    with Sqlite(tmp_path / "b.db") as backend:
        assert "copy~2" not in [info.name for info in backend.segments()]
        assert inspect_store(backend) == []


def test_a_damaged_session_is_copied_once_it_is_whole(tmp_path: Path, target: str) -> None:
    """Facts, branches and forks name it."""
    place = tmp_path / "a.db"
    fill(place)
    set_created(place, "work", "created + 1")
    assert [name for name, _ in kilburn.copy(str(place), target).left] == ["work"]
    with closing(open_backend(target)) as backend:
        assert "work" not in [info.name for info in backend.segments()]
    assert kilburn.copy(str(place), target).new == 0
    set_created(place, "work", "created - 1")
    assert kilburn.copy(str(place), target).left == ()
    assert look(target) == look(place)
    assert kilburn.copy(str(place), target).new == 0
    with opened(target) as store:
        store.forget(session="work", address="p3")
    with opened(place) as store:
        store.forget(session="work", address="p3")
    assert look(target)["@memory"][6] == look(place)["@memory"][6]


def set_created(place: Path, name: str, value: str) -> None:
    """Change when a session was begun, behind its seal."""
    with apsw.Connection(str(place)) as db:
        db.create_scalar_function("needs_a_kilburn_of_format_5", lambda: None, 0)
        db.execute(f"UPDATE segment SET created = {value} WHERE name = ?", (name,))
    db.close()


def test_what_cites_a_copy_is_not_left_dangling(tmp_path: Path, target: str) -> None:
    """The target's own fact cites a page of the copy that is then forgotten in the source."""
    place = tmp_path / "a.db"
    with opened(place) as store:
        store.session("work").append(user("Ana lives in Porto"), user("in May"))
    kilburn.copy(str(place), target)
    with opened(target) as store:
        store.memory("ana").collection.apply(Add(text="Porto", cites=((store.session("work").number, 1),)), policy="learner")
    with opened(place) as store:
        store.forget(session="work", address="p1")
    before = look(target)
    with pytest.raises(StoreError, match="'@memory/ana' in the destination cites what was forgotten in the source"):
        kilburn.copy(str(place), target)
    assert look(target) == before
    with opened(target) as store:
        store.forget(user="ana")
    kilburn.copy(str(place), target)
    assert look(target)["work"] == look(place)["work"]


def test_nobody_sees_a_copy_or_writes_into_it_before_it_is_complete(tmp_path: Path) -> None:
    place, target = str(tmp_path / "a.db"), str(tmp_path / "b.db")
    fill(tmp_path / "a.db")
    steps = []
    with Sqlite(target, busy_timeout=0.0) as early, opened(target) as store:
        mine = store.session("mine")
        mine.append(user("it stays"))

        def told(done: int, total: int, words: str) -> None:
            steps.append(words)
            assert [info.name for info in early.segments()] == ["mine"]
            with pytest.raises(StoreBusy):
                early.segment("work", time=1.0)

        kilburn.copy(place, target, progress=told)
        assert len(steps) > 10
        mine.append(user("it goes on"))
        with pytest.raises(StoreBusy), early.together():
            kilburn.copy(place, target)
    assert kilburn.copy(place, target).new == 0


def test_a_damaged_text_is_named_and_without_it_the_copy_goes_on(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with opened(tmp_path / "a.db") as store:
            store.session(name).append(user(f"{name} says hello\n" * 20))
    with apsw.Connection(str(tmp_path / "a.db")) as db:
        db.execute("UPDATE content SET data = zeroblob(length(data)) WHERE id = (SELECT content FROM page WHERE segment = 1)")
    db.close()
    done = command("copy", tmp_path / "a.db", tmp_path / "b.db")
    assert done.status == 1
    assert "'one' in the source, p1" in done.err
    command("fsck", "--repair", "--db", tmp_path / "a.db")
    assert command("forget", "one", "p1", "--yes", "--db", tmp_path / "a.db").status == 0
    assert command("copy", tmp_path / "a.db", tmp_path / "b.db").status == 0
    assert look(tmp_path / "b.db") == look(tmp_path / "a.db")


def test_a_store_is_not_copied_into_itself(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    for pair in (("a.db", "a.db"), ("a.db", "./a.db"), (":memory:", "a.db"), ("a.db", ":memory:")):
        with pytest.raises(SpecError):
            kilburn.copy(*(each if each == ":memory:" else str(tmp_path / each) for each in pair))
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    with pytest.raises(SpecError):
        kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "link.db"))
    (tmp_path / "hard.db").hardlink_to(tmp_path / "a.db")
    for tenant in ("default", "other"):
        with pytest.raises(SpecError, match="another name"):
            kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "hard.db"), to=tenant)
    assert not list(tmp_path.glob("hard.db-*"))
    (tmp_path / "hard.db").unlink()
    with pytest.raises(KilburnError, match="there is no file"):
        kilburn.copy(str(tmp_path / "none.db"), str(tmp_path / "b.db"))
    assert not (tmp_path / "b.db").exists()
    kilburn.copy(str(tmp_path / "a.db"), str(tmp_path / "a.db"), to="other")
    assert look(tmp_path / "a.db", "other") == look(tmp_path / "a.db")


def test_the_verb_copies(tmp_path: Path) -> None:
    fill(tmp_path / "a.db")
    done = command("copy", tmp_path / "a.db", tmp_path / "b.db", "--json")
    assert done.status == 0, done.err
    assert done.json["kinds"]["session"] == 5
    assert done.json["new"] > 100
    again = command("copy", tmp_path / "a.db", tmp_path / "b.db")
    assert "written now: 0" in again.out
    assert done.json["digest"] in again.out
    refused = command("copy", tmp_path / "a.db", tmp_path / "a.db", "--json")
    assert refused.status == 2
