"""Reads recorded runs from files: chat JSONL, runs of messages or of steps, SWE-agent's `.traj`, exports of Kilburn.

All of them plain or gzipped. A run is a name and its messages in the chat (or messages) form, ready for
`Session.append`. Whether roles are known and calls are paired is checked there, not here.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.wire.plain import NOT_JSON
from kilburn.wire.trajectory import Trajectory, read_trajectory, trajectory_messages

T = TypeVar("T")

SUFFIXES = tuple(f"{end}{packed}" for end in (".jsonl", ".ndjson", ".traj") for packed in ("", ".gz"))
GZIP = b"\x1f\x8b"

FORMS = "a message a line, a run a line ({messages} or {id, head, steps}), an export of Kilburn, or SWE-agent's .traj; .gz too"
"""What `read_runs` reads, in words."""

MAX_FILE_BYTES = 1 << 30
"""Bytes of one unpacked file: a few kilobytes of gzip can unpack to terabytes."""

MAX_LINE_BYTES = 128 << 20
"""Bytes of one line, and of one object over several lines."""


MAX_SHARED_MESSAGES = 5_000_000
"""Messages that the sessions of one export may take from earlier ones: a few bytes can stand for all of a session."""


class RecordedRun(msgspec.Struct, frozen=True):
    """One recorded run: a name, unique within what was read together, and its messages in order.

    Args:
        trajectory: the same run as steps, where the file tells it so.
    """

    name: str
    messages: list[dict[str, Any]]
    trajectory: Trajectory | None = None


class SharedBeginning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a line of an export says of a session: it begins with so many messages of an earlier session."""

    session: str
    lines: Annotated[int, msgspec.Meta(ge=1)]


class Names:
    """Names for runs, each given once: runs of several models share the names of their tasks."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def given(self, name: str) -> str:
        """Return the name, or the first of `NAME#2`, `NAME#3`, ... that is free."""
        free, times = name, 1
        while free in self._taken:
            times += 1
            free = f"{name}#{times}"
        self._taken.add(free)
        return free


def read_runs(path: str | Path) -> Iterator[RecordedRun]:
    """Yield the runs of a file, or of all files of these kinds below a folder, sorted by name.

    A `.jsonl` file holds one message a line (one run), or one run a line: `{"messages": [...]}`, or the
    trajectory form `{"id", "head", "steps": [{"thought", "action", "observation"}]}`, where a step
    becomes an assistant message with one call of `run`, and its result. A `.traj` file is one run of SWE-agent. An
    export of Kilburn holds one run for each of its sessions.

    Raises:
        InvalidMessage: no such file, or a line that is none of these; it names file and line.
    """
    names = Names()
    for file in _files(Path(path)):
        for run in _read_runs(file):
            yield msgspec.structs.replace(run, name=names.given(run.name))


def read_lines(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file, one a line, each with its place (`file:line`); empty lines are skipped.

    A file that holds one object over several lines, as `.traj` files do, has that one.

    Args:
        max_bytes: bytes that the file may have, unpacked.

    Raises:
        InvalidMessage: the file cannot be read or is too large, or a line is no JSON object; it names the line.
    """
    return read_as(path, dict[str, Any], "write one JSON object a line", max_bytes, spread=True)


def read_as(
    path: str | Path, form: type[T], advice: str, max_bytes: int = MAX_FILE_BYTES, *, spread: bool = False
) -> Iterator[tuple[str, T]]:
    """Yield the lines of a file, plain or gzipped, decoded as a `form`, each with where it stands; empty lines are skipped.

    Args:
        advice: what a line should be, for the error. max_bytes: bytes that the file may have, unpacked.
        spread: whether the file may be one object over several lines.

    Raises:
        InvalidMessage: the file cannot be read or is too large, or a line is no such JSON; it names the line.
    """
    name = Path(path).name
    decode = msgspec.json.Decoder(form).decode
    lines = ((number, line) for number, line in enumerate(_raw_lines(Path(path), max_bytes), start=1) if line.strip())
    first = True
    for number, line in lines:
        where = f"{name}:{number}"
        try:
            value = decode(line)
        except msgspec.ValidationError as error:
            if line.lstrip().startswith(b"["):
                advice = f"{advice}; `jq -c '.[]'` makes lines of a list"
            raise InvalidMessage(f"{where}: {str(error)[:200]}", advice=advice) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            whole = _whole(line, lines, name, decode) if spread and first else None
            if whole is None:
                raise InvalidMessage(f"{where}: not JSON: {error}", advice=advice) from None
            value = whole
        except RecursionError:
            raise InvalidMessage(f"{where}: nested too deep", advice=advice) from None
        first = False
        yield where, value


def _whole(line: bytes, lines: Iterator[tuple[int, bytes]], name: str, decode: Callable[[bytes], T]) -> T | None:
    """Return the one object that a line begins and the following ones end; None if that is no JSON either."""
    if not line.lstrip().startswith(b"{"):
        return None
    whole = bytearray(line)
    for number, more in lines:
        whole += more
        if len(whole) > MAX_LINE_BYTES:
            raise InvalidMessage(
                f"{name}:{number}: an object of more than {MAX_LINE_BYTES:,} bytes", advice="write one object a line"
            )
    try:
        return decode(bytes(whole))
    except NOT_JSON:
        return None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    if not files:
        raise InvalidMessage(f"no .jsonl or .traj file below {path}", advice="give a file, or a folder that holds some")
    return files


def bounded_lines(lines: IO[bytes] | gzip.GzipFile, name: str, max_bytes: int = MAX_FILE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, read up to a bound; `lines` unpacks while it is read.

    Raises:
        InvalidMessage: a line of more than `MAX_LINE_BYTES` bytes, or more than `max_bytes` in all.
    """
    remaining, number = max_bytes, 0
    while line := lines.readline(min(remaining, MAX_LINE_BYTES) + 1):
        number += 1
        if len(line) > remaining:
            raise InvalidMessage(f"{name}:{number}: the file has more than {max_bytes:,} bytes, unpacked", advice="split it")
        if len(line) > MAX_LINE_BYTES:
            raise InvalidMessage(
                f"{name}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes", advice="one message a line is less"
            )
        remaining -= len(line)
        yield line


def _raw_lines(path: Path, max_bytes: int = MAX_FILE_BYTES) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] == GZIP:  # a pipe cannot go back
                with gzip.open(raw) as unpacked:
                    yield from bounded_lines(unpacked, path.name, max_bytes)
            else:
                yield from bounded_lines(raw, path.name, max_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidMessage(f"{path}: a broken gzip file: {error}", advice="fetch or write it again") from error
    except OSError as error:
        raise InvalidMessage(f"{path}: {error.strerror or error}", advice="check the path") from error


def _read_runs(file: Path) -> Iterator[RecordedRun]:
    stem = file_stem(file)
    name, messages = stem, list[dict[str, Any]]()
    # Of an export: the lines of each session, None for a message that no wire form says whole.
    sessions: dict[str, list[dict[str, Any] | None]] = {}
    shared = 0
    for where, value in read_lines(file):
        if "parts" in value and sessions:
            sessions[name].append(None)
        elif "role" in value:
            messages.append(value)
        elif "kilburn" in value or isinstance(value.get("message"), dict):
            if "kilburn" in value and messages:
                yield RecordedRun(name, messages)
                messages = []
            if "kilburn" in value:
                name = str(value.get("session", stem))
                sessions[name] = []
            else:
                messages.append(value["message"])
                sessions.setdefault(name, []).append(value["message"])
        elif "same" in value:
            same = shared_beginning(value["same"], where, shared)
            shared += same.lines
            sessions[name] = sessions.get(same.session, [])[: same.lines]
            if len(sessions[name]) < same.lines:
                raise InvalidMessage(
                    f"{where}: no session with {same.lines} such messages is before it", advice="export it again"
                )
            messages += [message for message in sessions[name] if message is not None]
        elif "state" in value:
            continue
        else:
            yield parse_run(value, where, stem)
    if messages:
        yield RecordedRun(name, messages)


def shared_beginning(value: Any, where: str, earlier: int) -> SharedBeginning:
    """Return the beginning that a line of an export names.

    Args:
        earlier: messages that earlier such lines of the file stand for.

    Raises:
        InvalidMessage: it is malformed, or they are too many; `where` is in its message.
    """
    try:
        same = msgspec.convert(value, SharedBeginning)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"{where}: {error}", advice="export it again") from None
    if earlier + same.lines > MAX_SHARED_MESSAGES:
        raise InvalidMessage(
            f"{where}: its sessions share more than {MAX_SHARED_MESSAGES:,} messages", advice="export fewer sessions"
        )
    return same


def file_stem(file: Path) -> str:
    """Return what a file is called without its endings."""
    return file.name.removesuffix(".gz").rpartition(".")[0] or file.name


def is_run(value: dict[str, Any]) -> bool:
    """Return whether a JSON object is a whole run."""
    return "role" not in value and any(isinstance(value.get(key), list) for key in ("messages", "steps", "trajectory"))


def parse_run(value: dict[str, Any], where: str, stem: str) -> RecordedRun:
    """Return the run that a JSON object is.

    Args:
        stem: the file's name; a run without an id is called after it and its line.

    Raises:
        InvalidMessage: it is none; `where` is in its message.
    """
    if not is_run(value):
        raise InvalidMessage(
            f"{where}: neither a message nor a run; its keys are {', '.join(map(repr, list(value)[:6])) or 'none'}",
            advice=f"give {FORMS}",
        )
    line = where.rpartition(":")[2]
    otherwise = stem if "trajectory" in value else f"{stem}:{line}"
    if isinstance(value.get("steps"), list) or isinstance(value.get("trajectory"), list):
        trajectory = read_trajectory(value, where, otherwise)
        return RecordedRun(trajectory.id, trajectory_messages(trajectory), trajectory)
    messages = value["messages"]
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidMessage(f"{where}: messages is no list of objects", advice="a message is {role, content}")
    return RecordedRun(str(value.get("id") or otherwise), messages)
