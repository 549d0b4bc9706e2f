"""Which files of a folder are texts, and what is passed over, and why."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kilburn.errors import SpecError
from kilburn.memory.files import File, read_texts


def found(path: Path, **limits: int) -> dict[str, File]:
    return {file.path: file for file in read_texts(path, **limits)}


def test_texts_are_told_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "notes").write_text("no ending, and a text: é😀")
    (tmp_path / "a.png").write_text("a text with an odd name")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "wide.txt").write_bytes("wide".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes(b"\x89PNG\0\1\2")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    (tmp_path / "d.txt").write_bytes(b" \n\n ")
    (tmp_path / "e.txt").write_bytes(b"")
    (tmp_path / "f.txt").write_text("x" * 101)
    files = found(tmp_path, largest=100)
    assert {name: file.text for name, file in files.items() if not file.skipped} == {
        "deep/er/notes": "no ending, and a text: é😀",
        "a.png": "a text with an odd name",
        "mark.txt": "with a mark",
        "wide.txt": "wide",
    }
    assert {name: file.skipped for name, file in files.items() if file.skipped} == {
        "b.txt": "binary",
        "c.txt": "no text in UTF-8",
        "d.txt": "empty",
        "e.txt": "empty",
        "f.txt": "more than 100 bytes",
    }


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "key").write_text("canary")
    (inside / ".git").mkdir(parents=True)
    (inside / ".git" / "config").write_text("canary")
    (inside / ".env").write_text("canary")
    (inside / "link").symlink_to(outside / "deep" / "key")
    (inside / "folder").symlink_to(outside / "deep")
    (inside / "up").symlink_to("../..")
    (inside / "nowhere").symlink_to("gone")
    (inside / "self").symlink_to("self")
    (inside / "kept").write_text("a text")
    os.mkfifo(inside / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(inside / "socket"))
        files = found(inside)
    assert [name for name, file in files.items() if file.text] == ["kept"]
    assert {files[name].skipped for name in ("link", "folder", "up", "nowhere", "self")} == {"a link"}
    assert {files[name].skipped for name in (".git", ".env")} == {"hidden"}
    assert files["pipe"].skipped.startswith("no file")
    assert files["socket"].skipped
    assert not any("canary" in file.text for file in files.values())


def test_a_link_that_was_asked_for_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("text")
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "file").symlink_to("a/x.md")
    assert found(tmp_path / "folder")["x.md"].text == "text"
    assert found(tmp_path / "file")["file"].text == "text"


@pytest.mark.parametrize("name", ["gone", "a\0b", "x" * 5000])
def test_what_is_not_there_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="give the path"):
        list(read_texts(tmp_path / name))


def test_a_device_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="neither"):
        list(read_texts(tmp_path / "pipe"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "a").chmod(0)
    (tmp_path / "b").mkdir(mode=0)
    assert {file.skipped for file in read_texts(tmp_path)} == {"Permission denied"}
