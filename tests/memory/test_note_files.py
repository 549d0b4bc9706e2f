"""Notes as a folder of Markdown: what only one side changed is taken over, what both did is shown and never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kilburn
from kilburn.errors import SpecError
from kilburn.memory.note_files import LIST, export_notes, import_notes
from kilburn.memory.notes import Notes
from kilburn.page import digest_of


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    with kilburn.open(str(tmp_path / "agent.db"), tokenizer="chars/4", embedder=None) as store:
        made = store.notes("ana")
        made.write("core/human", "Ana drinks tea.\n")
        made.write("todo", "buy milk\n")
        yield made


@pytest.fixture
def folder(notes: Notes, tmp_path: Path) -> Path:
    place = tmp_path / "out"
    assert export_notes(notes, place).written == ("core/human", "todo")
    return place


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.md"))
        if path.is_file() and not path.is_symlink()
    }


def says(notes: Notes) -> dict[str, str]:
    return {note.name: note.text for note in notes.list()}


def test_an_export_is_a_file_for_each_note_that_its_owner_alone_can_read(notes: Notes, folder: Path) -> None:
    assert files(folder) == {"core/human.md": "Ana drinks tea.\n", "todo.md": "buy milk\n"}
    assert (folder / "todo.md").stat().st_mode & 0o777 == 0o600
    assert export_notes(notes, folder).unchanged == 2
    done = import_notes(notes, folder)
    assert (done.unchanged, done.written, done.conflicts, done.skipped) == (2, (), (), ())


def test_an_edited_file_comes_back_as_a_version_and_a_new_one_as_a_note(notes: Notes, folder: Path) -> None:
    (folder / "core" / "human.md").write_text("Ana drinks coffee.\n", encoding="utf-8")
    (folder / "workflows").mkdir()
    (folder / "workflows" / "release.md").write_text("Tag it.\n", encoding="utf-8")
    assert import_notes(notes, folder).written == ("core/human", "workflows/release")
    assert [one.text for one in notes.history("core/human")] == ["Ana drinks tea.\n", "Ana drinks coffee.\n"]
    assert says(notes)["workflows/release"] == "Tag it.\n"
    again = import_notes(notes, folder)
    assert (again.written, again.unchanged) == ((), 3)
    assert export_notes(notes, folder).unchanged == 3


def test_what_only_the_store_changed_is_exported_and_no_import_takes_it_back(notes: Notes, folder: Path) -> None:
    notes.write("todo", "buy bread\n")
    notes.rename("core/human", "core/ana")
    done = import_notes(notes, folder)
    assert (set(done.newer), done.written, done.conflicts) == ({"core/human", "todo"}, (), ())
    assert says(notes) == {"core/ana": "Ana drinks tea.\n", "todo": "buy bread\n"}
    exported = export_notes(notes, folder)
    assert (exported.written, exported.removed) == (("core/ana", "todo"), ("core/human",))
    assert files(folder) == {"core/ana.md": "Ana drinks tea.\n", "todo.md": "buy bread\n"}


def test_a_conflict_is_shown_and_neither_side_is_overwritten(notes: Notes, folder: Path) -> None:
    notes.write("todo", "buy bread\n")
    (folder / "todo.md").write_text("buy eggs\n", encoding="utf-8")
    for done in (import_notes(notes, folder), export_notes(notes, folder)):
        ((name, shown),) = done.conflicts
        assert name == "todo"
        assert shown.splitlines()[-2:] == ["-buy bread", "+buy eggs"]
        assert "todo" not in done.written
    assert says(notes)["todo"] == "buy bread\n"
    assert files(folder)["todo.md"] == "buy eggs\n"
    (folder / "todo.md").write_text("buy bread\nbuy eggs\n", encoding="utf-8")
    done = import_notes(notes, folder, resolved=["todo"])
    assert (done.written, done.conflicts) == (("todo",), ())
    assert says(notes)["todo"] == "buy bread\nbuy eggs\n"
    assert [one.text for one in notes.history("todo")] == ["buy milk\n", "buy bread\n", "buy bread\nbuy eggs\n"]


def test_a_note_that_was_deleted_on_one_side_and_edited_on_the_other_is_a_conflict(notes: Notes, folder: Path) -> None:
    notes.delete("todo")
    (folder / "todo.md").write_text("buy eggs\n", encoding="utf-8")
    (folder / "core" / "human.md").unlink()
    notes.write("core/human", "Ana drinks water.\n")
    done = import_notes(notes, folder, delete=True)
    assert [name for name, _ in done.conflicts] == ["todo", "core/human"]
    assert [name for name, _ in export_notes(notes, folder).conflicts] == ["todo"]
    assert says(notes) == {"core/human": "Ana drinks water.\n"}
    assert files(folder)["todo.md"] == "buy eggs\n"


def test_a_deleted_file_deletes_its_note_only_where_that_is_asked_for(notes: Notes, folder: Path) -> None:
    (folder / "todo.md").unlink()
    assert import_notes(notes, folder).gone == ("todo",)
    assert "todo" in says(notes)
    assert import_notes(notes, folder, delete=True).removed == ("todo",)
    assert says(notes) == {"core/human": "Ana drinks tea.\n"}
    assert [one.text for one in notes.history("todo")] == ["buy milk\n"]


def test_a_file_that_was_there_before_is_not_overwritten(notes: Notes, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "todo.md").write_text("my own\n", encoding="utf-8")
    done = export_notes(notes, tmp_path / "mine")
    assert [name for name, _ in done.conflicts] == ["todo"]
    assert files(tmp_path / "mine") == {"core/human.md": "Ana drinks tea.\n", "todo.md": "my own\n"}


def test_no_link_is_followed_on_either_way(notes: Notes, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.md").write_text("a secret\n", encoding="utf-8")
    (folder / "link.md").symlink_to(outside / "secret.md")
    (folder / "folder").symlink_to(outside)
    done = import_notes(notes, folder)
    assert dict(done.skipped) == {"folder": "a link", "link.md": "a link"}
    notes.write("link", "x\n")
    notes.write("folder/a", "x\n")
    notes.write("folder/secret", "x\n")
    assert {file for file, _ in export_notes(notes, folder).skipped} == {"folder/a.md", "folder/secret.md", "link.md"}
    assert {path.name: path.read_text(encoding="utf-8") for path in outside.iterdir()} == {"secret.md": "a secret\n"}


def test_a_second_name_of_a_file_elsewhere_is_not_written_through(notes: Notes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("buy milk\n", encoding="utf-8")
    (folder / "todo.md").unlink()
    os.link(tmp_path / "elsewhere", folder / "todo.md")
    notes.write("todo", "buy bread\n")
    assert export_notes(notes, folder).written == ("todo",)
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == "buy milk\n"


def test_odd_and_huge_files_are_passed_over_with_a_reason(notes: Notes, folder: Path) -> None:
    (folder / "huge.md").write_text("x" * 500_000, encoding="utf-8")
    (folder / "long.md").write_text("x" * 100_001, encoding="utf-8")
    (folder / "binary.md").write_bytes(b"\0\1")
    (folder / "picture.png").write_text("x", encoding="utf-8")
    (folder / "a\nb.md").write_text("x", encoding="utf-8")
    (folder / "dot..md").write_text("x", encoding="utf-8")
    (folder / ".hidden.md").write_text("x", encoding="utf-8")
    skipped = dict(import_notes(notes, folder).skipped)
    assert set(skipped) == {"huge.md", "long.md", "binary.md", "picture.png", "a\nb.md", "dot..md"}
    assert "more than 400,000 bytes" in skipped["huge.md"]
    assert "100,001 characters" in skipped["long.md"]
    assert "U+000A" in skipped["a\nb.md"]
    assert set(says(notes)) == {"core/human", "todo"}


def test_two_notes_that_would_have_one_file_are_not_written_over_each_other(notes: Notes, folder: Path) -> None:
    notes.write("Todo", "other\n")
    notes.write("todo.md", "third\n")
    skipped = dict(export_notes(notes, folder).skipped)
    assert set(skipped) == {"todo.md"}
    assert "rename one" in skipped["todo.md"]
    assert len([path for path in folder.iterdir() if path.name.casefold() == "todo.md"]) <= 2


def test_windows_line_ends_are_no_edit_of_every_line(notes: Notes, folder: Path) -> None:
    (folder / "core" / "human.md").write_bytes(b"Ana drinks tea.\r\n")
    assert import_notes(notes, folder).unchanged == 2
    (folder / "core" / "human.md").write_bytes(b"Ana drinks tea.\r\nOften.\r\n")
    assert import_notes(notes, folder).written == ("core/human",)
    assert says(notes)["core/human"] == "Ana drinks tea.\nOften.\n"


def test_a_list_that_was_tampered_with_is_refused(notes: Notes, folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.md"
    victim.write_text("buy milk\n", encoding="utf-8")
    listed = json.loads((folder / LIST).read_text(encoding="utf-8"))
    for path in ("../victim.md", "/etc/passwd", "a/../../victim.md"):
        (folder / LIST).write_text(json.dumps(listed | {"notes": {path: listed["notes"]["todo.md"]}}), encoding="utf-8")
        for work in (export_notes, import_notes):
            with pytest.raises(SpecError, match="cannot be used"):
                work(notes, folder)
    (folder / LIST).write_text("{", encoding="utf-8")
    with pytest.raises(SpecError, match="cannot be used"):
        export_notes(notes, folder)
    (folder / LIST).write_text(json.dumps(listed | {"owner": "bob"}), encoding="utf-8")
    with pytest.raises(SpecError, match="notes of 'bob'"):
        import_notes(notes, folder, delete=True)
    assert victim.read_text(encoding="utf-8") == "buy milk\n"


def test_a_folder_that_is_none_is_refused(notes: Notes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for work in (export_notes, import_notes):
        with pytest.raises(SpecError):
            work(notes, tmp_path / "file")
    with pytest.raises(SpecError):
        import_notes(notes, tmp_path / "nowhere")
    with pytest.raises(SpecError, match="no file of the note 'x'"):
        import_notes(notes, tmp_path, resolved=["x"])


@pytest.mark.parametrize("instead", ["link", "file"])
def test_what_stands_in_place_of_a_folder_deletes_none_of_its_notes(
    notes: Notes, folder: Path, tmp_path: Path, instead: str
) -> None:
    (folder / "core").rename(tmp_path / "elsewhere")
    if instead == "link":
        (folder / "core").symlink_to(tmp_path / "elsewhere")
    else:
        (folder / "core").write_text("no folder", encoding="utf-8")
    done = import_notes(notes, folder, delete=True)
    assert (done.removed, [file for file, _ in done.skipped]) == ((), ["core"])
    assert says(notes) == {"core/human": "Ana drinks tea.\n", "todo": "buy milk\n"}


def test_a_list_that_names_another_kind_of_file_removes_none(notes: Notes, tmp_path: Path) -> None:
    place = tmp_path / "foreign"
    place.mkdir()
    (place / "main.py").write_text("precious", encoding="utf-8")
    entry = {"name": "old", "digest": digest_of("precious")}
    (place / LIST).write_text(json.dumps({"owner": "ana", "notes": {"main.py": entry}, "format": 1}), encoding="utf-8")
    for do in (export_notes, import_notes):
        with pytest.raises(SpecError, match="no file of a note"):
            do(notes, place)
    assert (place / "main.py").exists()


def test_line_ends_of_windows_are_no_edit(notes: Notes, folder: Path) -> None:
    (folder / "todo.md").write_bytes(b"buy milk\r\nand tea\r\n")
    assert import_notes(notes, folder).written == ("todo",)
    assert says(notes)["todo"] == "buy milk\nand tea\n"
    again = export_notes(notes, folder)
    assert (again.unchanged, again.conflicts) == (2, ())
    notes.write("todo", "buy bread\n")
    assert export_notes(notes, folder).written == ("todo",)
    assert files(folder)["todo.md"] == "buy bread\n"


def test_what_an_export_that_was_killed_left_goes_with_the_next_one_and_nothing_else_does(notes: Notes, folder: Path) -> None:
    left = [folder / ".kilburn-0123456789abcdef.part", folder / "core" / ".kilburn-fedcba9876543210.part"]
    mine = [folder / ".kilburn-0123456789abcdef.part.md", folder / ".kilburn-mine.part", folder / ".gitignore"]
    for path in (*left, *mine):
        path.write_text("half", encoding="utf-8")
    written = folder / ".kilburn-00000000000000ff.part"
    with written.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        export_notes(notes, folder)
        assert [path.exists() for path in (*left, *mine)] == [False, False, True, True, True]
        assert written.exists(), "another export writes it"
    export_notes(notes, folder)
    assert not written.exists()
    link = folder / ".kilburn-00000000000000aa.part"
    link.symlink_to(mine[1])
    export_notes(notes, folder)
    assert mine[1].exists()


def test_a_mark_at_the_beginning_is_kept_where_it_is_the_notes_own(notes: Notes, folder: Path) -> None:
    notes.write("marked", "\ufeffone\n")
    export_notes(notes, folder)
    assert export_notes(notes, folder).unchanged == 3
    assert import_notes(notes, folder).unchanged == 3
    (folder / "marked.md").write_text("\ufefftwo\n", encoding="utf-8")
    (folder / "todo.md").write_text("\ufeffbuy tea\n", encoding="utf-8")
    import_notes(notes, folder)
    assert (says(notes)["marked"], says(notes)["todo"]) == ("\ufefftwo\n", "buy tea\n")
    done = import_notes(notes, folder)
    assert (done.written, done.unchanged, done.conflicts) == ((), 3, ())
