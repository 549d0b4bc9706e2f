"""A store moves from a file into PostgreSQL and back, with everything, whatever is killed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kilburn
from backends.server_files import files_with
from cli.terminal import kilburn as command
from effort import rounds
from kernel.copied import fill, look, opened, run_copies
from kernel.talk import user
from kernel.test_copying import (
    begins_anew,
    check_follows,
    check_kills,
    check_live,
    check_random,
    forgets_a_page,
    forgets_a_session,
    goes_on,
    test_a_copy_follows_a_source_that_is_written_to,
    test_a_copy_of_which_nothing_is_left_in_the_source_goes_too,
    test_a_copy_that_was_written_to_is_not_overwritten,
    test_a_new_store_in_the_place_of_one_that_is_gone_takes_nothing_from_its_copy,
    test_killed_anywhere_it_leaves_the_destination_as_it_was,
)
from kilburn.backend import Batch
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.copying import copy as copied
from kilburn.errors import SpecError
from kilburn.kernel.store import Store

pytestmark = pytest.mark.slow

__all__ = [
    "test_a_copy_follows_a_source_that_is_written_to",
    "test_a_copy_of_which_nothing_is_left_in_the_source_goes_too",
    "test_a_copy_that_was_written_to_is_not_overwritten",
    "test_a_new_store_in_the_place_of_one_that_is_gone_takes_nothing_from_its_copy",
    "test_killed_anywhere_it_leaves_the_destination_as_it_was",
]


@pytest.fixture
def target(url: str) -> str:
    """Where the copy is made."""
    return url


def test_there_and_back_again(tmp_path: Path, url: str, server: OwnServer) -> None:
    one, three = str(tmp_path / "a.db"), str(tmp_path / "c.db")
    fill(tmp_path / "a.db")
    there = kilburn.copy(one, url)
    assert look(url) == look(tmp_path / "a.db")
    assert files_with(server, "canarypage") == files_with(server, "canarygone") == []
    assert kilburn.copy(one, url).new == 0
    back = kilburn.copy(url, three)
    assert look(tmp_path / "c.db") == look(tmp_path / "a.db")
    assert (back.digest, back.kinds, back.vectors, back.settings) == (there.digest, there.kinds, there.vectors, 1)
    assert there.vectors > 5
    with opened(tmp_path / "a.db") as ours, opened(Path(three)) as theirs, kilburn.open(url, **OPTIONS) as between:
        for name in ("work", "work/b1", "work/b1/b1", "work/b2"):
            before = ours.session(name)
            for after in (between.session(name), theirs.session(name)):
                assert after.render() == before.render()
                assert after.window.states == before.window.states
        assert between.memory("ana").recall("f2") == ours.memory("ana").recall("f2")
        for query in ("parser", "Porto", "Hesper", "deep 3"):
            found = [[(hit.session, hit.address) for hit in store.search(query)] for store in (ours, between, theirs)]
            assert found[0] == found[1] == found[2]
        between.session("work").append(user("it goes on"))


OPTIONS: dict[str, Any] = {"window": 600, "policy": "hybrid", "tokenizer": "chars/4", "embedder": None}


def test_killed_anywhere_on_the_way_back(tmp_path: Path, url: str) -> None:
    check_kills(url, str(tmp_path / "c.db"), rounds(5, 50))


def test_a_copy_follows_a_server_that_is_written_to(tmp_path: Path, url: str) -> None:
    check_live(url, str(tmp_path / "c.db"), 3)


@pytest.mark.parametrize("seed", range(100, 100 + rounds(1, 8)))
def test_random_copies_of_a_changing_source_into_a_server(tmp_path: Path, url: str, server: OwnServer, seed: int) -> None:
    gone = check_random(str(tmp_path / "a.db"), url, seed, rounds(15, 40))
    assert not [word for word in sorted(gone)[-rounds(3, 8) :] if files_with(server, word)]


@pytest.mark.parametrize("seed", range(200, 200 + rounds(1, 8)))
def test_random_copies_of_a_changing_server(tmp_path: Path, url: str, seed: int) -> None:
    check_random(url, str(tmp_path / "c.db"), seed, rounds(15, 40))


def test_what_a_killed_copy_wrote_is_gone_from_the_files(tmp_path: Path, url: str, server: OwnServer) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("one").append(user("it stays"), user("the canaryword"))
    steps = int(run_copies(str(path), url, [0], to="other")[0])
    with Postgres(url, tenant="other") as backend:
        (number,) = [info.number for info in backend.segments()]
        backend.commit(number, Batch(head=backend.segments()[0].head, erase=[1, 2]))
        backend.erase(number)
    assert files_with(server, "canaryword") == []
    assert run_copies(str(path), url, [steps - 3]) == ["killed"]
    assert files_with(server, "canaryword")
    with opened(path) as store:
        store.forget(session="one", address="p2")
    kilburn.copy(str(path), url)
    assert files_with(server, "canaryword") == []


@pytest.mark.parametrize("change", [goes_on, forgets_a_page, forgets_a_session, begins_anew])
def test_a_copy_follows_its_source_and_one_back(tmp_path: Path, url: str, change: Callable[[Store], None]) -> None:
    check_follows(tmp_path / "a.db", url, change, shifted=True)
    kilburn.copy(url, str(tmp_path / "c.db"), to="c")
    with kilburn.open(url, **OPTIONS) as store:
        store.session("copy~2").append(user("and it goes on there"))
        change(store) if change is goes_on else store.forget(session="copy~2")
    kilburn.copy(url, str(tmp_path / "c.db"), to="c")
    assert look(tmp_path / "c.db", "c") == look(url)


def test_what_a_copy_forgets_is_gone_from_the_files(tmp_path: Path, url: str, server: OwnServer) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        for name in ("one", "two"):
            store.session(name).append(user("it stays"), user(f"the canaryword of {name}"))
    kilburn.copy(str(path), url)
    assert files_with(server, "canaryword")
    with opened(path) as store:
        store.forget(session="one")
        store.forget(session="two", address="p2")
    kilburn.copy(str(path), url)
    assert files_with(server, "canaryword") == []


def test_a_database_is_not_copied_into_itself_under_any_name(tmp_path: Path, url: str) -> None:
    with kilburn.open(url, **OPTIONS) as store:
        store.session("work").append(user("what is here"))
    before = look(url)
    with pytest.raises(SpecError):
        kilburn.copy(url, url)
    with Postgres(url, readonly=True) as ours, Postgres(url) as theirs, pytest.raises(SpecError, match="both source and dest"):
        copied(ours, theirs, "by another name")
    assert look(url) == before
    kilburn.copy(url, url, to="other")
    assert look(url, "other") == before
    with kilburn.open(url, **OPTIONS) as store:
        receipt = store.forget(session="work", dry=True)
    assert [each.to.rpartition("#")[2] for each in receipt.exports] == ["other"]


def test_the_verb_copies_and_does_not_show_a_password(tmp_path: Path, url: str) -> None:
    path = tmp_path / "a.db"
    fill(path)
    secret = url.replace("postgres@", "postgres:hushhush@")
    there = command("copy", path, secret, "--json")
    assert there.status == 0, there.err
    again = command("copy", path, secret)
    assert "written now: 0" in again.out
    back = command("copy", secret, tmp_path / "b.db")
    assert there.json["digest"] in back.out
    refused = command("copy", secret, secret)
    assert refused.status == 2
    assert "hushhush" not in "".join(said.out + said.err for said in (there, again, back, refused))
    with Postgres(url) as backend:
        assert "hushhush" not in repr(backend.settings.all())
