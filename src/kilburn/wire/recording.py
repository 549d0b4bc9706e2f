"""Reads recorded runs from files: chat JSONL, trajectories, exports of Kilburn, plain or gzipped.

A run is a name and its messages in the chat (or messages) form, ready for `Process.append`. Whether roles are known
and calls are paired is checked there, not here.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from kilburn.errors import InvalidMessage

__all__ = ["MOST", "RecordedRun", "bounded_lines", "read_as", "read_lines", "read_runs"]

T = TypeVar("T")

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
GZIP = b"\x1f\x8b"

MOST = 1 << 30
"""Bytes of one unpacked file: a few kilobytes of gzip can unpack to terabytes."""

LONGEST = 128 << 20
"""Bytes of one line."""


class RecordedRun(msgspec.Struct, frozen=True):
    """One recorded run: a name, unique within what was read together, and its messages in order."""

    name: str
    messages: list[dict[str, Any]]


def read_runs(path: str | Path) -> Iterator[RecordedRun]:
    """The runs of a file, or of all `.jsonl` and `.jsonl.gz` files below a folder, sorted by name.

    A file holds one message a line (one run), or one run a line: `{"messages": [...]}`, or the
    trajectory form `{"id", "head", "steps": [{"thought", "action", "observation"}]}`, where a step
    becomes an assistant message with one call of `run`, and its result. An export of Kilburn holds
    one run for each of its sessions.

    Raises:
        InvalidMessage: no such file, or a line that is none of these; it names file and line.
    """
    used: dict[str, int] = {}
    for file in _files(Path(path)):
        for run in _runs_of(file):
            used[run.name] = used.get(run.name, 0) + 1
            yield run if used[run.name] == 1 else RecordedRun(f"{run.name}#{used[run.name]}", run.messages)


def read_lines(path: str | Path, most: int = MOST) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, one a line, each with its place (`file:line`); empty lines are skipped.

    Args:
        most: bytes that the file may have, unpacked.

    Raises:
        InvalidMessage: the file cannot be read or is too large, or a line is no JSON object; it names the line.
    """
    return read_as(path, dict[str, Any], "write one JSON object a line", most)


def read_as(path: str | Path, form: type[T], advice: str, most: int = MOST) -> Iterator[tuple[str, T]]:
    """The lines of a file, plain or gzipped, decoded as a `form`, each with where it stands; empty lines are skipped.

    Args:
        advice: what a line should be, for the error. most: bytes that the file may have, unpacked.

    Raises:
        InvalidMessage: the file cannot be read or is too large, or a line is no such JSON; it names the line.
    """
    name = Path(path).name
    decode = msgspec.json.Decoder(form).decode
    for number, line in enumerate(_raw_lines(Path(path), most), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            value = decode(line)
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"{where}: {str(error)[:200]}", advice=advice) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidMessage(f"{where}: not JSON: {error}", advice=advice) from None
        except RecursionError:
            raise InvalidMessage(f"{where}: nested too deep", advice=advice) from None
        yield where, value


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    if not found:
        raise InvalidMessage(f"no .jsonl or .jsonl.gz file below {path}", advice="give a file, or a folder that holds some")
    return found


def bounded_lines(lines: IO[bytes] | gzip.GzipFile, name: str, most: int = MOST) -> Iterator[bytes]:
    """The lines of a file, read up to a bound; `lines` unpacks while it is read.

    Raises:
        InvalidMessage: a line of more than `LONGEST` bytes, or more than `most` in all.
    """
    left, number = most, 0
    while line := lines.readline(min(left, LONGEST) + 1):
        number += 1
        if len(line) > left:
            raise InvalidMessage(f"{name}:{number}: the file has more than {most:,} bytes, unpacked", advice="split it")
        if len(line) > LONGEST:
            raise InvalidMessage(f"{name}:{number}: a line of more than {LONGEST:,} bytes", advice="one message a line is less")
        left -= len(line)
        yield line


def _raw_lines(path: Path, most: int = MOST) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            if packed:
                with gzip.open(raw) as unpacked:
                    yield from bounded_lines(unpacked, path.name, most)
            else:
                yield from bounded_lines(raw, path.name, most)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidMessage(f"{path}: a broken gzip file: {error}", advice="fetch or write it again") from error
    except OSError as error:
        raise InvalidMessage(f"{path}: {error.strerror or error}", advice="check the path") from error


def _runs_of(file: Path) -> Iterator[RecordedRun]:
    stem = file.name.removesuffix(".gz").rpartition(".")[0] or file.name
    name, gathered = stem, list[dict[str, Any]]()
    for where, value in read_lines(file):
        if "role" in value:
            gathered.append(value)
        elif "kilburn" in value or isinstance(value.get("message"), dict):
            if "kilburn" in value and gathered:
                yield RecordedRun(name, gathered)
                gathered = []
            if "kilburn" in value:
                name = str(value.get("session", stem))
            else:
                gathered.append(value["message"])
        elif "state" in value or "parts" in value:
            continue  # an export's line about a message that is not whole any more
        else:
            yield _line_run(value, where, stem)
    if gathered:
        yield RecordedRun(name, gathered)


def _line_run(value: dict[str, Any], where: str, stem: str) -> RecordedRun:
    name = str(value.get("id") or f"{stem}:{where.rpartition(':')[2]}")
    if isinstance(value.get("steps"), list):
        return RecordedRun(
            name, [*_objects(value.get("head", []), f"{where}: head"), *_steps(_objects(value["steps"], f"{where}: steps"))]
        )
    if isinstance(value.get("messages"), list):
        return RecordedRun(name, _objects(value["messages"], f"{where}: messages"))
    raise InvalidMessage(
        f"{where}: neither a message nor a run; its keys are {', '.join(map(repr, list(value)[:6])) or 'none'}",
        advice="a message has `role`, a run `messages` or `steps`",
    )


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidMessage(f"{where} is no list of objects")
    return value


def _steps(steps: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(steps, start=1):
        thought, action, observation = (str(step.get(key) or "") for key in ("thought", "action", "observation"))
        if not action:
            yield {"role": "assistant", "content": thought}
            if observation:
                yield {"role": "user", "content": observation}
            continue
        arguments = msgspec.json.encode({"command": action}).decode()
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}
        yield {"role": "assistant", "content": thought, "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{number}", "content": observation}
