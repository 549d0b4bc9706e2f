"""Another process of the system: it looks at a session from outside, writes to it, or dies while it writes.

    PYTHONPATH=tests python -m torture.onlooker

reads commands, one JSON object a line, and answers each with one. It refuses to judge what it sees.
"""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

import kilburn
from kilburn.errors import KilburnError
from kilburn.models.scripted import Scripted
from torture.oracle import RULER, Look, look

__all__ = ["Onlooker"]

DIED = 9
TESTS = str(Path(__file__).resolve().parent.parent)


class Onlooker:
    """The other process, started when it is first needed, and again after it died."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def look(self, path: str, name: str, window: int) -> Look:
        """What a fresh reader sees."""
        return msgspec.convert(self._ask({"do": "look", "path": path, "name": name, "window": window}), Look)

    def start_watching(self, path: str, name: str, window: int) -> None:
        """Look again and again, until `stop_watching`."""
        self._send({"do": "watch", "path": path, "name": name, "window": window})

    def stop_watching(self) -> Look:
        """What was wrong with anything seen meanwhile."""
        return msgspec.convert(self._ask({"do": "stop"}), Look)

    def append(self, path: str, name: str, window: int, policy: str, messages: list[Any], *, die: bool = False) -> str:
        """Append as another writer; the address, an error's words, or "" where it died as a policy asked its model."""
        order = {"do": "append", "path": path, "name": name, "window": window, "policy": policy, "messages": messages, "die": die}
        said = self._ask(order)
        return str(said["said"]) if said else ""

    def close(self) -> None:
        """End the other process."""
        child, self._child = self._child, None
        if child is not None:
            child.communicate(timeout=600)

    def _send(self, order: dict[str, Any]) -> subprocess.Popen[bytes]:
        if self._child is None:
            known = [TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._child = subprocess.Popen(
                [sys.executable, "-m", "torture.onlooker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(known)},
            )
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()
        return self._child

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        child = self._send(order)
        assert child.stdout is not None
        line = child.stdout.readline()
        if line:
            said: dict[str, Any] = msgspec.json.decode(line)
            return said
        self.close()
        if child.returncode != DIED:
            raise RuntimeError(f"the other process ended with {child.returncode}")
        return {}


def _source() -> io.RawIOBase:
    """Standard input without a buffer, so that `select` sees every command that has come."""
    return io.FileIO(sys.stdin.fileno(), closefd=False)


def _looked(order: dict[str, Any]) -> Look:
    path, window = order["path"], order["window"]
    try:
        with kilburn.open(path, window=window, policy="fifo", tokenizer=RULER, readonly=True) as store:
            return look(store.session(order["name"]), window)
    except KilburnError as error:
        return Look(error=f"{type(error).__name__}: {error}")


def _watched(order: dict[str, Any]) -> Look:
    seen = Look()
    while not select.select([sys.stdin], [], [], 0)[0]:
        found = _looked(order)
        seen.faults += [fault for fault in found.faults if fault not in seen.faults][:20]
        seen.error = found.error or seen.error
    _source().readline()
    return seen


def _appended(order: dict[str, Any]) -> dict[str, str]:
    def answer(request: Any) -> str:
        if order["die"]:
            os._exit(DIED)
        return "The agent goes on."

    model = Scripted([answer] * 100)
    try:
        with kilburn.open(order["path"], window=order["window"], policy=order["policy"], tokenizer=RULER, model=model) as store:
            return {"said": store.session(order["name"]).append(*order["messages"])}
    except KilburnError as error:
        return {"said": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer commands until standard input ends."""
    for line in iter(_source().readline, b""):
        order = msgspec.json.decode(line)
        work = {"look": _looked, "watch": _watched, "append": _appended}[order["do"]]
        sys.stdout.buffer.write(msgspec.json.encode(work(order)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
