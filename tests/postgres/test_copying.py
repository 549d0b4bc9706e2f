"""A store moves from a file into PostgreSQL and back, with everything, whatever is killed in between."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kilburn
from backends.server_files import files_with
from cli.terminal import kilburn as command
from kernel.copied import fill, look, opened
from kernel.talk import user
from kernel.test_copying import (
    begins_anew,
    check_follows,
    forgets_a_page,
    forgets_a_session,
    goes_on,
    test_a_copy_of_which_nothing_is_left_in_the_source_goes_too,
    test_a_copy_that_was_written_to_is_not_overwritten,
    test_a_new_store_in_the_place_of_one_that_is_gone_takes_nothing_from_its_copy,
    test_nobody_writes_into_half_a_copy,
)
from kilburn.backends.places import open_backend
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import SpecError
from kilburn.kernel.copying import copy as copied
from kilburn.kernel.store import Store

pytestmark = pytest.mark.slow

__all__ = [
    "test_a_copy_of_which_nothing_is_left_in_the_source_goes_too",
    "test_a_copy_that_was_written_to_is_not_overwritten",
    "test_a_new_store_in_the_place_of_one_that_is_gone_takes_nothing_from_its_copy",
    "test_nobody_writes_into_half_a_copy",
]

KILLED = """
import os, signal, sys
from kilburn.backends.places import open_backend
from kilburn.kernel.copying import copy

source, target, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def killing(verb, writes):
    def do(*given, **more):
        if writes(more):
            step()
        made = verb(*given, **more)
        if writes(more):
            step()
        return made
    return do

ours, theirs = open_backend(source, readonly=True), open_backend(target)
for name in ("segment", "commit", "erase", "keep_setting", "keep_vectors", "sync"):
    setattr(theirs, name, killing(getattr(theirs, name), lambda more: more.get("create", True)))
copy(ours, theirs, "source")
theirs.close()
ours.close()
"""
"""Copies, and kills itself before or after a verb that writes."""


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


def killed_on_the_way(source: str, target: str) -> int:
    """Copy with a program that is killed on its way, each time a little later; returns how often it was."""
    for kills, left in enumerate((1, 2, 5, 16, 25, 26, 31, 32, 10_000)):
        words = [sys.executable, "-c", KILLED, source, target, str(left)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            return kills
        assert done.returncode == -9, done.stderr
        with closing(open_backend(target)) as backend:
            if left > 2:
                assert backend.settings()["copying"] == "source"
    raise AssertionError


def test_killed_on_the_way_it_goes_on(tmp_path: Path, url: str) -> None:
    fill(tmp_path / "a.db")
    assert killed_on_the_way(str(tmp_path / "a.db"), url) > 5
    assert look(url) == look(tmp_path / "a.db")
    assert killed_on_the_way(url, str(tmp_path / "c.db")) > 5
    assert look(tmp_path / "c.db") == look(tmp_path / "a.db")


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
        assert "hushhush" not in repr(backend.settings())
