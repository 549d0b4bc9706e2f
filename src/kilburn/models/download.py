"""One download of a file, which appears under its own name only when it is complete.

The bytes are written to `<file>.partial` beside the target, under a lock, with a journal of the bytes that are known
to be good. `commit` hashes the whole file, records the digest in `<file>.sha256` (the format of `sha256sum`) and
renames the file. `wheels` and `hub` know where the bytes come from.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from kilburn.errors import Unavailable
from kilburn.file import sync_folder, write_file

__all__ = ["digest"]

Progress = Callable[[str, int, int], None]
"""Called with a name, the bytes done and the bytes in total (0 if unknown)."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


def folder() -> Path:
    """The folder of this user's weights; it need not exist yet.

    `$KILBURN_HOME/models`, else `$XDG_CACHE_HOME/kilburn/models`, else `~/.cache/kilburn/models`. Raises
    `Unavailable` if none of the three is known.
    """
    if home := os.environ.get("KILBURN_HOME"):
        return Path(os.path.abspath(os.path.expanduser(home))) / "models"
    # The XDG specification says that a relative path is to be ignored.
    if (cache := os.environ.get("XDG_CACHE_HOME", "")) and os.path.isabs(cache):
        return Path(cache) / "kilburn" / "models"
    try:
        return Path.home() / ".cache" / "kilburn" / "models"
    except RuntimeError as error:
        raise Unavailable(f"no home folder for weights: {error}", advice="set KILBURN_HOME to a folder") from error


def digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded_digest(path: Path) -> tuple[str, int] | None:
    """The sha256 and size in bytes that were recorded when the file was downloaded, or None."""
    try:
        lines = _beside(path, ".sha256").read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if len(lines) != 2 or not lines[1].startswith("# bytes ") or not lines[1][8:].isdigit():
        return None
    return lines[0].partition(" ")[0], int(lines[1][8:])


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a disk into `Unavailable` with an advice."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what, advice = "no space left", "free some, or set KILBURN_HOME to a larger disk; a pull continues where it stopped"
        elif error.errno in _CLOSED:
            what, advice = "not permitted", "set KILBURN_HOME to a folder that you may write"
        else:
            what, advice = error.strerror or str(error), "set KILBURN_HOME to another folder"
        raise Unavailable(f"{path}: {what}", advice=advice) from error


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that has no other name; the file is created if `flags` say so.

    The files beside a target have predictable names, because a later pull continues with them. An attacker could put
    a link there. So no link is followed, and a file with a second name is not written to. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.ELOOP, "a link to another file, or no file", str(path))
    return descriptor


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class Download:
    """The one download of a target at a time, on this machine; others wait in `with`.

    If the block is left without `commit`, the bytes that the journal lists are kept, and the next download continues.
    With an empty journal nothing is kept. All methods raise `Unavailable` for disk errors.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = _beside(target, ".partial")
        self.scratch = _beside(target, ".scratch")
        """A folder for wheels; emptied at both ends."""
        self._journal = _beside(target, ".partial.journal")
        self._closing = ExitStack()

    def __enter__(self) -> Download:
        try:
            with disk_errors(self.target.parent):
                self.target.parent.mkdir(parents=True, exist_ok=True)
                # The system releases the lock when this process ends, however it ends. The file stays. If it were
                # removed, a third process could lock a new file while a second one holds the old.
                name = _beside(self.target, ".lock")
                lock = self._closing.enter_context(open(open_own(name, os.O_WRONLY | os.O_CREAT), "ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._sweep()
                self.scratch.mkdir(exist_ok=True)
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._closing, disk_errors(self.scratch):
            self._sweep()
            if not self.journal():
                self.discard()

    def _sweep(self) -> None:
        # A child of a killed pull may still be writing there; its files are removed at the next pull.
        shutil.rmtree(self.scratch, ignore_errors=True)

    def room(self, size: int) -> None:
        """Raise early if `size` more bytes do not fit on the disk."""
        with disk_errors(self.target.parent):
            free = shutil.disk_usage(self.target.parent).free
        if free < size:
            raise Unavailable(
                f"{self.target.parent}: {size:,} bytes needed, {free:,} free",
                advice="free some, or set KILBURN_HOME to a larger disk",
            )

    def journal(self) -> tuple[str, ...]:
        """The lines so far; none if there is no partial file. A line that a crash tore is left out."""
        if not self.partial.is_file():
            return ()
        try:
            text = self._journal.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return ()
        return tuple(text.split("\n")[:-1])

    def vouch(self, line: str) -> None:
        """Note in the journal that bytes of the partial file have reached the disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with disk_errors(self._journal), open(open_own(self._journal, flags), "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove the partial file and its journal; the next download starts at zero."""
        with disk_errors(self.partial):
            self.partial.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)

    def commit(self, size: int, sha256: str = "", *, magic: bytes = b"GGUF") -> Path:
        """Make the partial file the target, if it has this size, this digest and begins with `magic`.

        An empty `sha256` is taken from the bytes and recorded. Raises `Unavailable`, and removes the
        partial file, where anything differs.
        """
        with disk_errors(self.partial):
            found = self.partial.stat().st_size
            with self.partial.open("rb") as file:
                begin = file.read(len(magic))
        actual = digest(self.partial)
        wrong = ""
        if size and found != size:
            wrong = f"{found:,} bytes instead of {size:,}"
        elif sha256 and actual != sha256:
            wrong = f"sha256 {actual} instead of {sha256}"
        elif begin != magic:
            wrong = f"no GGUF file: it begins with {begin!r}"
        if wrong:
            self.discard()
            raise Unavailable(f"{self.target.name}: {wrong}", advice="the bad file was removed; pull again, or get it elsewhere")
        self.write_digest(actual, found)
        with disk_errors(self.target):
            with open(open_own(self.partial, os.O_RDWR), "rb+") as file:
                os.fsync(file.fileno())
            self.partial.replace(self.target)
            self._journal.unlink(missing_ok=True)
            sync_folder(self.target.parent)
        return self.target

    def write_digest(self, sha256: str, size: int) -> None:
        """Write `<file>.sha256`; `sha256sum -c` reads it, and skips the line with the size."""
        beside = _beside(self.target, ".sha256")
        with disk_errors(beside), write_file(beside, force=True, mode=0o644) as file:
            file.write(f"{sha256}  {self.target.name}\n# bytes {size}\n".encode("ascii"))
