"""What the tests of the command line share: running it here or as a process of its own, and what it said."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer import Typer

from kilburn.cli import main
from kilburn.cli.shell import app

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You keep the log of a lighthouse."},
    {"role": "user", "content": "Monday: oil 12 gallons, the brig Hesper passed at noon."},
    {"role": "assistant", "content": "Logged."},
    {"role": "user", "content": "Tuesday: oil 11 gallons, fog, the bell rang for nine hours."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "log.txt"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "wind south-west 4\r\nrain"},
]


@dataclass(frozen=True)
class Said:
    """Exit status, and what came on standard output and standard error."""

    status: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


def kilburn(*words: object, commands: Typer = app, name: str = "kilburn") -> Said:
    """Run the command line in this process, or another program of `commands`."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline=""), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(word) for word in words], commands=commands, name=name)
    out.flush()
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return Said(status, buffer.getvalue(), err.getvalue())


def program(*words: object, folder: Path, given: bytes = b"", seconds: float = 600, **environment: str) -> Said:
    """Run the command line as a process of its own, with a home that is empty."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KILBURN_")}
    done = subprocess.run(
        [sys.executable, "-m", "kilburn", *map(str, words)],
        cwd=folder,
        env=kept
        | {"PYTHONUTF8": "1", "COLUMNS": "200", "NO_COLOR": "1", "KILBURN_QUIET": "1", "KILBURN_MODEL_SERVERS": ""}
        | environment,
        input=given,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr.decode("utf-8"))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
