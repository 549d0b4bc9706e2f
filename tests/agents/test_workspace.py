"""A working folder of its own: what a branch writes is merged as a whole or refused by name, and nothing else moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.tool import Tool
from kilburn.agents.workspace import open_workspace
from kilburn.errors import MergeConflict, SpecError, WorkspaceError
from kilburn.kernel.branches import Inherit
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Reply, Request
from kilburn.testing import Scripted, check_laws
from waiting import MINUTES

IDENTITY = {f"GIT_{role}_{field}": "x" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> str:
    environment = {**os.environ, **IDENTITY}
    return subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("__", "/")).write_text(text, encoding="utf-8")


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder, without Git's and ours."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if not path.is_symlink() else b"-> " + os.readlink(path).encode()
        for path in sorted(folder.rglob("*"))
        if not {".git", ".kilburn"} & set(path.relative_to(folder).parts) and (path.is_symlink() or not path.is_dir())
    }


def plain(root: Path) -> Path:
    root.mkdir()
    write(root, a="one\ntwo\nthree\nfour\nfive\n", b="b", sub__c="c")
    return root


def repository(root: Path) -> Path:
    plain(root)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


both = pytest.mark.parametrize("made", [plain, repository])
Maker = Callable[[Path], Path]


@both
def test_what_a_branch_writes_comes_into_the_parent_at_once(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    space = open_workspace(root, "work/b1")
    assert files(space.path) == files(root)
    assert space.changes() == {}
    (space.path / "b").unlink()
    write(space.path, a="new\n", new__deep="x")
    (space.path / "bytes").write_bytes(bytes(range(256)) * 100)
    (space.path / "run").write_text("#!/bin/sh\n")
    (space.path / "run").chmod(0o755)
    (space.path / "link").symlink_to("a")
    expected, before = files(space.path), files(root)
    told = {"a": "M", "b": "D", "bytes": "A", "link": "A", "new/deep": "A", "run": "A"}
    assert space.changes() == told
    assert files(root) == before, "until then the parent sees nothing"
    assert space.merge() == told
    assert files(root) == expected
    assert os.access(root / "run", os.X_OK)
    assert not space.path.exists()
    for call in (space.merge, space.changes):
        with pytest.raises(WorkspaceError, match="closed"):
            call()


def test_the_repository_of_the_parent_is_left_alone(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    write(root, a="dirty\n", staged="s", untracked="u")
    git(root, "add", "staged")
    status, branches = git(root, "status", "--porcelain"), git(root, "branch", "--all")
    space = open_workspace(root, "b1")
    assert files(space.path) == files(root), "what nobody committed is there too"
    assert git(space.path, "status", "--porcelain") == "", "a worktree in which Git works"
    write(space.path, other="o")
    git(space.path, "add", "other")
    git(space.path, "commit", "--quiet", "-m", "inside")
    assert space.merge() == {"other": "A"}
    assert sorted(git(root, "status", "--porcelain").splitlines()) == sorted([*status.splitlines(), "?? other"])
    assert git(root, "branch", "--all") == branches
    assert git(root, "worktree", "list").count("\n") == 1
    assert git(root, "for-each-ref", "refs/kilburn") == ""
    git(root, "fsck")


@both
def test_branches_side_by_side_do_not_collide(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")

    def work(number: int) -> None:
        space = open_workspace(root, f"work/b{number}")
        write(space.path, **{f"own{number}": str(number)})
        lines = (space.path / "a").read_text().splitlines()
        lines[number] += f" by {number}"
        barrier.wait()
        space.merge() if number % 4 == 0 else None

    barrier = threading.Barrier(5, timeout=600)
    workers = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(600)
    assert {name for name in files(root) if name.startswith("own")} == {"own0", "own4"}
    for number in (1, 2, 3):
        assert open_workspace(root, f"work/b{number}").merge() == {f"own{number}": "A"}
    assert len([name for name in files(root) if name.startswith("own")]) == 5


@both
def test_different_lines_of_a_text_are_both_kept(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    one, two = open_workspace(root, "b1"), open_workspace(root, "b2")
    write(one.path, a="ONE\ntwo\nthree\nfour\nfive\n")
    write(two.path, a="one\ntwo\nthree\nfour\nFIVE\n")
    one.merge()
    two.merge()
    assert (root / "a").read_text() == "ONE\ntwo\nthree\nfour\nFIVE\n"


@both
def test_a_conflict_changes_nothing_and_names_the_files(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    (root / "bin").write_bytes(b"\0\1\2")
    space = open_workspace(root, "b1")
    write(space.path, a="theirs\n", fine="f", sub__c="theirs", both="theirs")
    (space.path / "bin").write_bytes(b"\0\1\3")
    write(root, a="ours\n", both="ours")
    (root / "bin").write_bytes(b"\0\1\4")
    (root / "sub" / "c").unlink()
    before = files(root)
    with pytest.raises(MergeConflict, match="the parent changed them too") as caught:
        space.merge()
    assert caught.value.paths == ("a", "bin", "both", "sub/c")
    assert files(root) == before
    assert space.changes() == {"a": "M", "bin": "M", "both": "A", "fine": "A", "sub/c": "M"}
    write(root, a="one\ntwo\nthree\nfour\nfive\n", both="theirs", sub__c="c")
    (root / "bin").write_bytes(b"\0\1\2")
    space.merge()
    assert (root / "fine").read_text() == "f"


@both
def test_files_and_folders_may_change_places(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    space = open_workspace(root, "b1")
    (space.path / "sub" / "c").unlink()
    (space.path / "sub").rmdir()
    write(space.path, sub="a file now")
    (space.path / "b").unlink()
    write(space.path, b__inside="a folder now")
    expected = files(space.path)
    space.merge()
    assert files(root) == expected


@both
def test_what_git_ignores_is_left_alone(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    write(root, **{".gitignore": "*.log\nbuild\n"})
    write(root, **{"x.log": "mine", "build__x": "mine"})
    space = open_workspace(root, "b1")
    assert "x.log" not in files(space.path)
    write(space.path, **{"y.log": "theirs", "new": "n"})
    assert space.changes() == {"new": "A"}
    (space.path / ".gitignore").unlink()
    write(space.path, **{"x.log": "theirs"})
    (space.path / "build").symlink_to("/etc")
    before = files(root)
    with pytest.raises(MergeConflict, match="in the way") as caught:
        space.merge()
    assert caught.value.paths == ("build", "x.log")
    assert files(root) == before


@both
def test_a_merge_never_writes_through_a_link_that_leads_out(made: Maker, tmp_path: Path) -> None:
    root, outside = made(tmp_path / "root"), tmp_path / "outside"
    outside.mkdir()
    write(root, **{".gitignore": "way\n"})
    space = open_workspace(root, "b1")
    (root / "way").symlink_to(outside)
    (space.path / ".gitignore").unlink()
    write(space.path, way__file="x")
    with pytest.raises(MergeConflict):
        space.merge()
    assert files(outside) == {}


def test_a_repository_inside_would_be_lost_so_it_is_refused(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    space = open_workspace(root, "b1")
    repository(space.path / "inner")
    with pytest.raises(WorkspaceError, match="inner is a repository of its own"):
        space.merge()
    assert "inner" not in os.listdir(root)


@both
def test_repositories_in_the_folder_would_be_missing_so_it_is_not_opened(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    repository(root / "inner")
    with pytest.raises(WorkspaceError, match="inner is a repository of its own, and its files would be missing"):
        open_workspace(root, "b1")
    assert git(root / "inner", "status", "--porcelain") == ""


@both
def test_branches_of_branches_and_worktrees_side_by_side(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    outer = open_workspace(root, "b1")
    write(outer.path, new="outer")
    inner = open_workspace(outer.path, "b1")
    write(inner.path, new="inner")
    assert inner.merge() == {"new": "M"}
    assert outer.merge() == {"new": "A"}
    assert (root / "new").read_text() == "inner"
    if made is repository:
        git(root, "worktree", "add", "--quiet", str(tmp_path / "second"))
        one, two = open_workspace(root, "b1"), open_workspace(tmp_path / "second", "b1")
        write(one.path, x="one")
        write(two.path, x="two")
        one.merge()
        two.merge()
        assert [(folder / "x").read_text() for folder in (root, tmp_path / "second")] == ["one", "two"]


@both
def test_it_is_discarded_and_opened_again(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    space = open_workspace(root, "b1")
    write(space.path, new="x")
    assert open_workspace(root, "b1").changes() == {"new": "A"}, "as an earlier run left it"
    assert open_workspace(root, "b1/b2").path != open_workspace(root, "b1 b2").path
    space.discard()
    space.discard()
    assert not space.path.exists()
    assert open_workspace(root, "b1").changes() == {}


def test_a_branch_may_break_its_own_folder(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    space = open_workspace(root, "b1")
    (space.path / ".git").unlink()
    write(space.path, new="x")
    assert space.merge() == {"new": "A"}
    assert git(root, "worktree", "list").count("\n") == 1


def test_below_a_repository_and_without_a_commit(tmp_path: Path) -> None:
    root = tmp_path / "root"
    plain(root)
    git(root, "init", "--quiet")
    space = open_workspace(root / "sub", "b1")
    assert files(space.path) == {"c": b"c"}
    write(space.path, d="d")
    assert space.merge() == {"sub/d": "A"}
    assert (root / "sub" / "d").read_text() == "d"
    write(root, **{".gitignore": "sub\n"})
    inner = open_workspace(root / "sub", "b2")
    assert files(inner.path) == {"c": b"c", "d": b"d"}, "a folder that the repository ignores is a plain one"


def test_names_that_are_no_words(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    names = ["a b\n", "-x", "ümlaut", "'\"$(x)", os.fsdecode(b"\xff")]
    space = open_workspace(root, "../../../etc; rm -rf /")
    assert space.path.resolve().is_relative_to(root.resolve())
    for name in names:
        (space.path / name).write_text("x")
    space.merge()
    assert set(names) <= set(os.listdir(root))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="no folder"):
        open_workspace(tmp_path / "nosuch", "b1")
    (tmp_path / ".git").write_text("nonsense")
    with pytest.raises(WorkspaceError, match="Git refuses"):
        open_workspace(tmp_path, "b1")
    assert sorted(os.listdir(tmp_path)) == [".git"]


CRASH = """
import sys
from kilburn.agents.workspace import open_workspace

left = int(sys.argv[2])

def hook(event, arguments):
    global left
    if event == "os.rename" and str(arguments[0]).endswith(".part"):
        left -= 1
        if left == 0:
            {what}

space = open_workspace(sys.argv[1], "b1")
for number in range(4):
    (space.path / f"new{{number}}").write_text("x")
(space.path / "a").write_text("changed")
(space.path / "b").unlink()
sys.addaudithook(hook)
space.merge()
"""


def broken(root: Path, at: int, what: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(CRASH).format(what=what)
    return subprocess.run(
        [sys.executable, "-c", program, str(root), str(at)], capture_output=True, text=True, check=False, timeout=600
    )


@both
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_crash_in_the_middle_is_finished_by_the_next_who_opens(made: Maker, at: int, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    before = files(root)
    assert broken(root, at, "__import__('os')._exit(9)").returncode == 9
    space = open_workspace(root, "b2")
    now = files(root)
    changed = {"a": b"changed", "sub/c": b"c", **{f"new{number}": b"x" for number in range(4)}}
    if at == 1:
        assert now == before, "nothing was written down yet"
        assert open_workspace(root, "b1").merge()
    assert {name: data for name, data in files(root).items() if not name.endswith(".part")} == changed
    assert not [name for name in files(root) if name.endswith(".part")]
    assert space.path.is_dir()


@both
@pytest.mark.parametrize("at", [5])
def test_a_file_that_cannot_be_written_leaves_the_parent_as_it_was(made: Maker, at: int, tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    before = files(root)
    done = broken(root, at, "raise OSError(28, 'No space left on device')")
    assert "WorkspaceError: workspace: not merged: [Errno 28]" in done.stderr
    assert files(root) == before
    assert len(open_workspace(root, "b1").merge()) == 6


def writing(path: Path) -> tuple[Tool, ...]:
    def save(name: str, text: str) -> str:
        """Write a file."""
        (path / name).write_text(text, encoding="utf-8")
        return "saved"

    def peek(path: str) -> str:
        """Read a file."""
        return Path(path).read_text(encoding="utf-8")

    return (Tool(save), Tool(peek, does="read", paths=("path",)))


def said(name: str, call: str, /, **arguments: str) -> Part:
    return Part(kind=Kind.CALL, text=json.dumps(arguments), call=call, name=name)


def spoken(*parts: Part) -> Reply:
    return Reply(message=Message(role=Role.ASSISTANT, parts=parts), finish=Finish.CALLS)


def coder(root: Path, steps: Callable[[str], list[Part]]) -> Branching:
    """An agent whose branches, "one" and "two" side by side, make these calls, and return."""

    def reply(request: Request) -> Any:
        messages = list(request.messages)
        prompt = next(str(one["content"]) for one in reversed(messages) if one["role"] == "user")
        task = prompt.split("\n")[0]
        if task == "go":
            done = any(one["role"] == "tool" for one in messages)
            both = (said("coder", f"c-{name}", description="a part", prompt=name) for name in ("one", "two"))
            return "done" if done else spoken(*both)
        step = sum(one["role"] == "tool" for one in messages)
        every = [*steps(task), said("return", "r", message=f"{task} is done")]
        return spoken(msgspec.structs.replace(every[step], call=f"{task}-{step}"))

    agents = (SubAgent(name="coder", inherit=Inherit.NOTHING, folder=root, tools=writing),)
    session = kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4").session("work")
    return Branching(Scripted([reply] * 20), [], session, agents=agents)


@both
def test_branches_of_an_agent_write_side_by_side_in_folders_of_their_own(made: Maker, tmp_path: Path) -> None:
    root = made(tmp_path / "root")

    def steps(task: str) -> list[Part]:
        return [
            said("save", "", name="draft", text="x"),
            said("save", "", name=task, text=task),
            said("peek", "", path=str(root / "a")),
        ]

    one = coder(root, steps)
    assert one.run("go").text == "done"
    results = [message["content"] for message in one.session.contents.messages() if message["role"] == "tool"]
    assert ["[files: draft, one]" in results[0], "[files: draft, two]" in results[1]] == [True, True], (
        "the same file, with the same text"
    )
    assert (root / "one").read_text() == "one"
    for name in ("b1", "b2"):
        inside = [
            message["content"] for message in one.session.branches.open(name).contents.messages() if message["role"] == "tool"
        ]
        assert "peek may only go to" in inside[2], "a declared path cannot leave the working folder"
    check_laws(one.session)


def test_a_conflict_of_two_branches_is_told_and_loses_nothing(tmp_path: Path) -> None:
    root, side_by_side = repository(tmp_path / "root"), threading.Barrier(2)

    def steps(task: str) -> list[Part]:
        side_by_side.wait(MINUTES)  # else one may begin with what the other has merged
        return [said("save", "", name="a", text=task), said("save", "", name=task, text=task)]

    one = coder(root, steps)
    one.run("go")
    results = sorted(
        message["content"].split("\n[b")[0] for message in one.session.contents.messages() if message["role"] == "tool"
    )
    told = "is done\n[its files were not merged: a: the parent changed them too]"
    assert sum(told in result for result in results) == 1
    assert sum("is done\n[files: a, " in result for result in results) == 1
    won = (root / "a").read_text()
    lost = next(name for name in ("b1", "b2") if (open_workspace(root, f"work/{name}").changes()))
    other = open_workspace(root, f"work/{lost}")
    assert {won, (other.path / "a").read_text()} == {"one", "two"}


def test_a_folder_needs_tools_for_it(tmp_path: Path) -> None:
    for wrong in ({"folder": tmp_path}, {"folder": tmp_path, "tools": writing(tmp_path)}, {"tools": writing}):
        with pytest.raises(SpecError, match="tools that are made for it"):
            SubAgent(**wrong)
