"""`kilburn.file`: what somebody named is written whole or not at all, and nothing else is touched."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import kilburn
from kilburn.errors import SpecError
from kilburn.file import check_target, write_file


def put(path: Path, data: bytes = b"new", *, force: bool = False) -> None:
    with write_file(path, force=force) as file:
        file.write(data)


def test_a_new_file_is_whole_and_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        put(tmp_path / "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_there_stays_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o644)
    with pytest.raises(SpecError, match="--force"):
        put(path)
    assert path.read_bytes() == b"old"
    put(path, force=True)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_that_comes_meanwhile_stays_too(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def meet() -> None:
        with write_file(path) as file:
            file.write(b"new")
            path.write_bytes(b"another's")

    with pytest.raises(SpecError):
        meet()
    assert path.read_bytes() == b"another's"
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with write_file(path, force=True) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("link", "link.part", ".link.part"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("link", "nowhere"):
        with pytest.raises(SpecError):
            put(tmp_path / name)
        put(tmp_path / name, force=True)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert not (tmp_path / "gone").exists()


def test_no_store_is_replaced_whatever_leads_to_it(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with kilburn.open(str(db), policy="fifo") as store:
        store.session("a").append({"role": "user", "content": "x"})
        companions = [Path(f"{db}{end}") for end in ("-wal", "-shm")]
        assert all(each.exists() for each in companions)
        (tmp_path / "sub").mkdir()
        names = [*companions, db, tmp_path / "sub" / ".." / "agent.db", Path(os.path.relpath(db)), Path(f"{db}-journal")]
        for number, file in enumerate((db, *companions)):
            os.link(file, tmp_path / f"hard{number}")
            (tmp_path / f"soft{number}").symlink_to(file)
            names += [tmp_path / f"hard{number}", tmp_path / f"soft{number}"]
        before = db.read_bytes()
        for name in names:
            for force in (False, True):
                with pytest.raises(SpecError, match="database"):
                    put(name, force=force)
        assert db.read_bytes() == before


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_refused(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(SpecError, match=r"no file|leads to a device"):
            check_target(path, force=force)


def test_a_folder_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        put(tmp_path / "no" / "a")
    assert caught.value.filename == str(tmp_path / "no" / "a")


def test_a_link_that_leads_to_a_device_is_refused_whatever_is_behind_it(tmp_path: Path) -> None:
    """Replacing the link would be replacing the machine's own, where it is called /dev/stdout."""
    with open(tmp_path / "regular", "wb") as file:
        (tmp_path / "out").symlink_to(f"/proc/self/fd/{file.fileno()}")
        (tmp_path / "further").symlink_to(tmp_path / "out")
        for name in ("out", "further"):
            with pytest.raises(SpecError, match="leads to a device"), write_file(tmp_path / name, force=True):
                raise AssertionError("it was opened")
            assert (tmp_path / name).is_symlink()


def killed(write: Callable[[], None]) -> None:
    """In a program of its own, which is killed by it."""
    child = os.fork()
    if not child:
        try:
            write()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def half(path: Path, force: bool) -> None:
    with write_file(path, force=force) as file:
        file.write(b"canary" * 10_000)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("force", [False, True])
def test_a_program_that_is_killed_leaves_nothing(tmp_path: Path, force: bool) -> None:
    path = tmp_path / "a"
    if force:
        path.write_bytes(b"old")
    for _ in range(3):
        killed(lambda: half(path, force))
    if hasattr(os, "O_TMPFILE"):
        assert os.listdir(tmp_path) == (["a"] if force else [])
    put(path, force=force)
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == b"new"


def test_what_a_killed_program_left_is_removed_by_the_next_and_what_is_written_is_not(tmp_path: Path) -> None:
    """Where a file must have a name while it is written."""
    left, other, own = tmp_path / ".kilburn-0.part", tmp_path / ".another.part", tmp_path / "b"
    left.write_bytes(b"canary")
    other.write_bytes(b"somebody's")
    (tmp_path / ".kilburn-link.part").symlink_to(other)
    os.mkfifo(tmp_path / ".kilburn-pipe.part")
    at_work = tmp_path / ".kilburn-1.part"
    with at_work.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(own)
        assert at_work.exists()
    assert not left.exists()
    assert other.read_bytes() == b"somebody's"
    put(own, force=True)
    assert not at_work.exists()
    assert own.read_bytes() == b"new"
