"""A working folder for each branch, so that agents that write in parallel do not collide.

It begins with the contents of the parent's folder, uncommitted changes included. The changes of the branch are merged into the
parent's folder as a whole, or refused with the names of the files that both changed. Git does the work: in the folder's own
repository, as a worktree; in a folder without a repository, as a plain copy with a repository below `.kilburn`. The parent's
commits, branches and index are not touched. Ignored files and empty folders are neither copied nor merged.

The plan of a merge is written to a journal first. If the program ends during the merge, opening any working folder of the same
root finishes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kilburn.errors import MergeConflict, WorkspaceError
from kilburn.file import sync_folder, write_file

__all__ = ["open_workspace"]

HOME = ".kilburn"
"""The folder of the working folders of a folder without a repository."""

SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "merge.directoryRenames=false", "advice.addEmbeddedRepo=false")
AUTHOR = {"GIT_AUTHOR_NAME": "kilburn", "GIT_AUTHOR_EMAIL": "", "GIT_COMMITTER_NAME": "kilburn", "GIT_COMMITTER_EMAIL": ""}
LINK = "160000"
"""The mode of a nested repository; a tree has none of its files."""


class PathChange(msgspec.Struct, frozen=True):
    """A path that differs between two trees: "A" added, "M" modified, "D" deleted, "T" of another type."""

    path: str
    status: str


class MergePlan(msgspec.Struct, frozen=True):
    """A merge that is under way: the paths that are written and deleted in the folder, as bytes, and where the files to write
    are."""

    staged: str
    write: tuple[bytes, ...]
    delete: tuple[bytes, ...]


class Repository:
    """The repository that has the trees of a folder.

    Raises:
        WorkspaceError: there is no such folder, no Git, or Git refuses.
    """

    def __init__(self, root: Path) -> None:
        self.top = root.resolve()
        if not self.top.is_dir():
            raise WorkspaceError(f"{root} is no folder", advice="give the folder that the branch works on")
        self.inside = Path()
        places = self._there()
        self.own = places is None
        if places is None:
            self.home = self.top / HOME
            self.dir = self.index_dir = self.home / "git"
            self.home.mkdir(exist_ok=True)
            exclude = self.dir / "info" / "exclude"
            with self._alone():
                if not exclude.exists() or exclude.read_text(encoding="utf-8") != f"/{HOME}/\n":
                    self.git("init", "--quiet", "--bare", str(self.dir))
                    exclude.parent.mkdir(exist_ok=True)
                    exclude.write_text(f"/{HOME}/\n", encoding="utf-8")
        else:
            top, index_dir, common = places
            self.inside, self.top = self.top.relative_to(top), top
            # A folder's own, also where it is a worktree beside others: what is written down is about this folder.
            self.dir, self.index_dir, self.home = common, index_dir, index_dir / "kilburn"
            self.home.mkdir(exist_ok=True)

    def _there(self) -> tuple[Path, Path, Path] | None:
        """Return the top folder, the folder of the index and the folder of the repository; None where there is none that has this
        folder's files."""
        questions = ("rev-parse", "--show-toplevel", "--absolute-git-dir", "--git-common-dir")
        process = self._run(["git", *questions], cwd=self.top)
        if process.returncode:
            if b"not a git repository" in process.stderr:
                return None
            raise WorkspaceError(f"Git refuses {self.top}: {_error_text(process)}", advice="see what `git status` says there")
        top, index_dir, common = (Path(os.fsdecode(line)) for line in process.stdout.splitlines())
        if self.top != top and not self._run(["git", "check-ignore", "--quiet", str(self.top)], cwd=self.top).returncode:
            return None
        return top.resolve(), index_dir, (self.top / common).resolve()

    def git(self, *words: str, index: Path | None = None, tree: Path | None = None, data: bytes = b"", fine: int = 0) -> bytes:
        """Run Git; its output.

        Args:
            index: file of the index; None for a command that writes no index.
            tree: folder with the files; None for the parent's.
            fine: another exit status, besides 0, that is no error.

        Raises:
            WorkspaceError: Git failed.
        """
        settings = [word for setting in SETTINGS for word in ("-c", setting)]
        if self.own:
            settings += ["-c", "core.excludesFile=/dev/null", "-c", "core.bare=false"]
        place = [f"--git-dir={self.dir}", f"--work-tree={tree or self.top}"] if words[0] not in ("init", "worktree") else []
        place = place or ([f"--git-dir={self.dir}"] if words[0] == "worktree" else [])
        process = self._run(["git", *settings, *place, *words], cwd=tree or self.top, data=data, index=index)
        if process.returncode not in (0, fine):
            raise WorkspaceError(f"git {words[0]} failed: {_error_text(process)}", advice="nothing was changed in the folder")
        return process.stdout

    def _run(
        self, words: list[str], *, cwd: Path, data: bytes = b"", index: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {**AUTHOR, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
        try:
            return subprocess.run(words, cwd=cwd, input=data, env=environment, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise WorkspaceError("Git is not installed", advice="install Git 2.38 or later") from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.home / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other programs that work on this folder; an interrupted merge is finished first."""
        with self._alone():
            self._finish()
            for stale in self.home.glob("merge-*"):
                shutil.rmtree(stale, ignore_errors=True)
            yield

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.home, prefix="scratch-") as folder:
            yield Path(folder)

    def snapshot(self, folder: Path, index: Path) -> str:
        """Return the tree of a folder's files as they are now, new files included and what Git ignores left out.

        Args:
            index: index of the folder; it is copied, not written.
        """
        with self._scratch() as scratch:
            mine = scratch / "index"
            if index.exists():
                # With its time: Git reads a file that is as old as its index, even if the size did not change.
                shutil.copy2(index, mine)
            self.git("add", "--all", "--", ".", index=mine, tree=folder)
            return self.git("write-tree", index=mine, tree=folder).decode().strip()

    def of_parent(self) -> str:
        """Return the tree of the parent's folder now."""
        return self.snapshot(self.top, self.index_dir / "index")

    def commit(self, tree: str, *parents: str) -> str:
        """Return a commit of a tree, which no branch points to."""
        words = [word for parent in parents for word in ("-p", parent)]
        return self.git("commit-tree", tree, *words, "-m", "a working folder of kilburn").decode().strip()

    def known(self, revision: str) -> str | None:
        """Return the commit that a name points to, if there is one."""
        commit = self.git("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}", fine=1).decode().strip()
        return commit or None

    def links(self, tree: str) -> list[str]:
        """Return the repositories inside, of which a tree holds no files."""
        output = self.git("ls-tree", "-r", "-z", tree).decode("utf-8", "surrogateescape").split("\0")[:-1]
        return [line.partition("\t")[2] for line in output if line.startswith(LINK)]

    def changes(self, old_tree: str, new_tree: str) -> list[PathChange]:
        """Return the paths that the branch changed: path -> "A" added, "M" modified, "D" deleted, "T" of another type."""
        output = self.git("diff-tree", "-r", "-z", "--no-renames", "--raw", old_tree, new_tree).decode("utf-8", "surrogateescape")
        fields = iter(output.split("\0")[:-1])
        return [PathChange(path, head.split()[4][0]) for head, path in zip(fields, fields, strict=True)]

    def check_out(self, tree: str, paths: Iterable[str] | None, to: Path, index: Path) -> None:
        """Write files of a tree into a folder; None for all."""
        self.git("read-tree", tree, index=index)
        selection = ["--all"] if paths is None else ["-z", "--stdin"]
        data = b"" if paths is None else b"".join(os.fsencode(path) + b"\0" for path in paths)
        to.mkdir(parents=True, exist_ok=True)
        self.git("checkout-index", f"--prefix={to}/", *selection, index=index, data=data)

    # A merge, all or nothing

    def bring(self, old_tree: str, new_tree: str) -> None:
        """Change the parent's files from one tree to another: all of them, or none.

        Raises:
            MergeConflict: a file that is in no tree is in the way. WorkspaceError: a file could not be written.
        """
        changes = self.changes(old_tree, new_tree)
        delete = tuple(change.path for change in changes if change.status == "D")
        write = tuple(change.path for change in changes if change.status != "D")
        added = {change.path for change in changes if change.status == "A"}
        replaced = tuple(path for path in (*write, *delete) if path not in added)
        if blocked := [path for path in write if self._is_blocked(path, path in added, frozenset(delete))]:
            raise _conflict(blocked, "what Git ignores is in the way")
        staged = Path(tempfile.mkdtemp(dir=self.home, prefix="merge-"))
        try:
            self.check_out(new_tree, write, staged / "after", staged / "index")
            self.check_out(old_tree, replaced, staged / "before", staged / "index")
            if self.of_parent() != self.git("rev-parse", f"{old_tree}^{{tree}}").decode().strip():
                raise WorkspaceError("the folder changed during the merge", advice="merge again")
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        forward = MergePlan(str(staged / "after"), _encode_paths(write), _encode_paths(delete))
        back = MergePlan(str(staged / "before"), _encode_paths(replaced), _encode_paths(sorted(added)))
        self._write_down(forward)
        try:
            self._finish()
        except WorkspaceError:
            self._write_down(back)
            self._finish()
            raise

    def _is_blocked(self, path: str, new: bool, delete: frozenset[str]) -> bool:
        """Return whether something stands where a file goes that no tree knows, or that leads out of the folder."""
        target = self.top / path
        parents = [parent for parent in Path(path).parents if parent != Path()]
        if any(
            os.path.lexists(place) and not _is_folder(place) and str(parent) not in delete
            for parent in parents
            for place in [self.top / parent]
        ):
            return True
        if _is_folder(target):
            files = (Path(folder, name) for folder, _, names in os.walk(target) for name in names)
            links = (
                Path(folder, name) for folder, names, _ in os.walk(target) for name in names if Path(folder, name).is_symlink()
            )
            return any(str(file.relative_to(self.top)) not in delete for paths in (files, links) for file in paths)
        return new and os.path.lexists(target)

    @property
    def _journal(self) -> Path:
        return self.home / "merge.json"

    def _write_down(self, plan: MergePlan) -> None:
        with write_file(self._journal, force=True) as file:
            file.write(msgspec.json.encode(plan))

    def _finish(self) -> None:
        """Carry out the merge plan in the journal, if there is one; carrying it out twice does no harm."""
        if not self._journal.exists():
            return
        plan = msgspec.json.decode(self._journal.read_bytes(), type=MergePlan)
        try:
            self._carry_out(plan)
        except OSError as error:
            raise WorkspaceError(f"not merged: {error}", advice="see to the file and merge again") from error
        self._journal.unlink()
        sync_folder(self.home)
        shutil.rmtree(Path(plan.staged).parent, ignore_errors=True)

    def _carry_out(self, plan: MergePlan) -> None:
        for path in map(os.fsdecode, plan.delete):
            target = self.top / path
            if os.path.lexists(target) and not _is_folder(target):
                target.unlink()
            with suppress(OSError):
                for parent in list(target.relative_to(self.top).parents)[:-1]:
                    (self.top / parent).rmdir()
        for path in map(os.fsdecode, plan.write):
            target = self.top / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if _is_folder(target):
                for folder, _, _ in os.walk(target, topdown=False):
                    os.rmdir(folder)
            part = target.parent / f".{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.part"
            with suppress(FileNotFoundError):
                part.unlink()
            try:
                shutil.copy2(Path(plan.staged) / path, part, follow_symlinks=False)
                os.replace(part, target)
            finally:
                with suppress(FileNotFoundError):
                    part.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _error_text(process: subprocess.CompletedProcess[bytes]) -> str:
    return process.stderr.decode("utf-8", "replace").strip()[:500]


def _encode_paths(paths: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(os.fsencode, paths))


def _conflict(paths: Iterable[str], why: str) -> MergeConflict:
    return MergeConflict(tuple(sorted(set(paths))), why)


class Workspace:
    """The working folder of a branch; `open_workspace` creates or reopens it.

    Attributes:
        name: of the branch, such as "work/b1".
        path: the folder to work in.
    """

    def __init__(self, repository: Repository, name: str) -> None:
        self.name, self._repository = name, repository
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40]
        key = hashlib.sha256(os.fsencode(repository.top) + b"\0" + name.encode("utf-8", "surrogatepass")).hexdigest()
        self._id = f"{plain}-{key[:8]}"
        self._ref = f"refs/kilburn/{self._id}"
        self._tree = repository.home / "folders" / self._id
        self.path = self._tree / repository.inside

    @property
    def _index(self) -> Path:
        repository = self._repository
        return repository.home / f"{self._id}.index" if repository.own else repository.dir / "worktrees" / self._id / "index"

    def _begin(self) -> None:
        """Make the folder, unless it is there from an earlier run."""
        repository = self._repository
        with repository.lock():
            if repository.known(self._ref) and self._tree.is_dir():
                return
            self._clear()
            head = None if repository.own else repository.known("HEAD")
            base = repository.commit(repository.of_parent(), *([head] if head else []))
            if inner := repository.links(base):
                reason = f"{inner[0]} is a repository of its own, and its files would be missing"
                raise WorkspaceError(reason, advice="open a working folder of that one, or of a folder without it")
            self._tree.parent.mkdir(exist_ok=True)
            if repository.own:
                repository.git("read-tree", base, index=self._index)
                self._tree.mkdir()
                repository.git("checkout-index", "--all", "--index", index=self._index, tree=self._tree)
            else:
                repository.git("worktree", "add", "--quiet", "--detach", str(self._tree), base)
            self.path.mkdir(parents=True, exist_ok=True)
            # Written last: without it, the folder counts as not created.
            repository.git("update-ref", self._ref, base)

    def _clear(self) -> None:
        repository = self._repository
        if repository.known(self._ref):
            repository.git("update-ref", "-d", self._ref)
        if os.path.lexists(self._tree):
            shutil.rmtree(self._tree)
        with suppress(FileNotFoundError):
            (repository.home / f"{self._id}.index").unlink()
        if not repository.own:
            repository.git("worktree", "prune")

    def _base(self) -> str:
        base = self._repository.known(self._ref)
        if base is None or not self._tree.is_dir():
            raise WorkspaceError(f"the working folder of {self.name!r} is closed", advice="open it again")
        return base

    def _now(self) -> str:
        return self._repository.snapshot(self._tree, self._index)

    def changes(self) -> dict[str, str]:
        """What the branch changed: path -> "A" added, "M" modified, "D" deleted, "T" of another type.

        Raises:
            WorkspaceError: it was merged or discarded.
        """
        return {change.path: change.status for change in self._repository.changes(self._base(), self._now())}

    def merge(self) -> dict[str, str]:
        """Merge the changes of the branch into the parent's folder, and close the working folder.

        Files that only the parent changed stay as they are. If both changed different lines of a text, both changes are kept.

        Returns:
            The changes of the branch.

        Raises:
            MergeConflict: both changed the same, or a file that Git ignores is in the way; nothing was changed. The working
                folder stays.
            WorkspaceError: it was merged or discarded; a file cannot be written; a repository inside the folder is new.
        """
        repository = self._repository
        with repository.lock():
            base, tree = self._base(), self._now()
            changes = repository.changes(base, tree)
            if inner := repository.links(tree):
                raise WorkspaceError(f"{inner[0]} is a repository of its own", advice="remove its .git folder, and merge again")
            parent = repository.commit(repository.of_parent(), base)
            merged = repository.git(
                "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", parent, repository.commit(tree, base), fine=1
            )
            new_tree, *conflicts = merged.decode("utf-8", "surrogateescape").rstrip("\0").split("\0")
            if conflicts:
                raise _conflict(conflicts, "the parent changed them too")
            repository.bring(parent, new_tree)
            self._clear()
        return {change.path: change.status for change in changes}

    def discard(self) -> None:
        """Remove the working folder with everything in it; it may be gone already."""
        with self._repository.lock():
            self._clear()


def open_workspace(root: str | os.PathLike[str], name: str) -> Workspace:
    """Return the working folder of a branch: made from what the parent's folder holds now, or as an earlier run left it.

    Args:
        root: the parent's folder; in a Git repository, the worktree is of the whole repository.
        name: of the branch, such as "work/b1".

    Raises:
        WorkspaceError: there is no such folder, no Git, or Git refuses.
    """
    workspace = Workspace(Repository(Path(root)), name)
    workspace._begin()
    return workspace
