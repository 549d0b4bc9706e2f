"""The Python inside the `cpython` sandbox: reads requests, runs cells, sends what they did. Only the standard library.

A message is four bytes of length and JSON. Nothing here is a boundary: code can change every line of it. What it cannot
do is what `lockdown` gave up, and the program outside checks every message.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import io
import json
import linecache
import os
import signal
import sys
import traceback
import types
import typing

__all__ = ["main"]

MODULES = """
_strptime abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc colorsys
contextlib copy csv dataclasses datetime decimal difflib encodings.ascii encodings.cp1252 encodings.latin_1
encodings.unicode_escape encodings.utf_16 encodings.utf_32 encodings.utf_8 encodings.utf_8_sig enum errno fnmatch fractions
functools gc graphlib gzip hashlib heapq hmac html html.entities html.parser inspect io ipaddress itertools json keyword
linecache locale math numbers operator pprint queue random re reprlib secrets shlex statistics string stringprep struct sys
textwrap time timeit token tokenize traceback types typing unicodedata urllib.parse uuid warnings weakref
xml.etree.ElementTree zlib
"""
"""What code can import, as words: these modules are loaded before files are given up."""
dumps, loads = json.dumps, json.loads


class Output(io.TextIOBase):
    """Keeps the first characters that are written and counts the rest."""

    def __init__(self, most: int) -> None:
        self.kept: list[str] = []
        self.room, self.cut = most, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        kept = text[: self.room]
        if kept:
            self.kept.append(kept)
        self.room -= len(kept)
        self.cut += len(text) - len(kept)
        return len(text)


class Interpreter:
    """The variables inside, and the conversation with the program outside.

    Args:
        link: descriptor of the connection.
    """

    def __init__(self, link: int) -> None:
        self.link = link
        self.cells = 0
        self.running = self.stopped = False
        """Whether code of a cell runs, and whether this cell was told to stop."""
        signal.signal(signal.SIGINT, self.stop)

    def stop(self, *_: object) -> None:
        """The program outside says that the cell's time is over."""
        self.stopped = True
        if self.running:
            raise KeyboardInterrupt

    def receive(self) -> dict[str, typing.Any]:
        return loads(self._read(int.from_bytes(self._read(4), "big")))  # type: ignore[no-any-return]

    def _read(self, length: int) -> bytes:
        pieces = []
        while length:
            piece = os.read(self.link, min(length, 1 << 20))
            if not piece:
                raise SystemExit
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def send(self, message: dict[str, typing.Any]) -> None:
        text = dumps(message, ensure_ascii=False).encode()
        rest = memoryview(len(text).to_bytes(4, "big") + text)
        while rest:
            rest = rest[os.write(self.link, rest) :]

    def begin(self, hello: dict[str, typing.Any], lock: typing.Callable[[int, tuple[str, ...]], list[str]]) -> None:
        """Take what the sandbox was opened with, and give up the rest of the machine."""
        self.room, self.most = hello["output"], hello["most"]
        self.calls = {name: self._function(name) for name in hello["calls"]}
        module = types.ModuleType("__main__")
        self.variables = module.__dict__
        self.variables |= {"__builtins__": builtins, **hello["variables"]}
        for name, descriptor in hello["files"].items():
            with open(descriptor, "rb") as file:
                self.variables[name] = file.read().decode("utf-8", "replace")
        for name in MODULES.split():
            importlib.import_module(name)
        sys.modules["__main__"] = module
        os.environ.clear()
        sys.path.clear()
        sys.argv[:] = [""]
        gc.collect()
        gc.freeze()
        try:
            lacks = lock(hello["memory"], tuple(hello["without"]))
        except OSError as error:
            self.send({"type": "refused", "why": str(error)})
            raise SystemExit from error
        self.send({"type": "ready", "lacks": lacks})

    def serve(self) -> None:
        """Answer requests until the connection ends."""
        while True:
            request = self.receive()
            self.stopped = False
            self.send(self.run(request["run"]) if "run" in request else self.get(request["get"]))

    def run(self, code: str) -> dict[str, typing.Any]:
        self.cells += 1
        self.variables |= self.calls
        output = Output(self.room)
        sys.stdout = sys.stderr = output
        sys.stdin = io.StringIO()
        error = self._attempt(lambda: self._execute(code, f"<cell {self.cells}>"))
        return {
            "type": "ended",
            "outcome": "timeout" if self.stopped else error[0] if error else "ok",
            "error": error[1] if error else "",
            "output": plain("".join(output.kept)),
            "cut": output.cut,
        }

    def get(self, name: str) -> dict[str, typing.Any]:
        if name not in self.variables:
            return {"type": "value", "why": f"there is no variable {name!r}"}
        found = ""

        def encode() -> None:
            nonlocal found
            found = self._json(self.variables[name])

        error = self._attempt(encode)
        return {"type": "value", "why": error[1].strip().rpartition("\n")[2]} if error else {"type": "value", "value": found}

    def _attempt(self, work: typing.Callable[[], None]) -> tuple[str, str] | None:
        """Do what runs code of the cell; returns the outcome and the error, or None."""
        try:
            try:
                self.running = True
                work()
            except BaseException as error:  # noqa: BLE001 - whatever code raises
                kind = "memory" if isinstance(error, MemoryError) else "error"
                return kind, plain(said(error))[-self.room :] if self.room else ""
            finally:
                self.running = False
        except MemoryError:
            return "memory", "MemoryError"
        except BaseException as error:  # noqa: BLE001 - or its exception does
            return "error", type(error).__name__
        return None

    def _execute(self, code: str, name: str) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        body = ast.parse(code, name).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        exec(compile(ast.Module(body, []), name, "exec"), self.variables)  # noqa: S102 - this process is for it
        # The value of a last expression is shown, as at a prompt.
        exec(compile(ast.Interactive(last), name, "single"), self.variables)  # noqa: S102

    def _json(self, value: object) -> str:
        text = dumps(value, allow_nan=False, ensure_ascii=False)
        if len(text.encode()) > self.most:
            raise ValueError(f"more than {self.most:,} bytes as JSON")
        return text

    def _function(self, name: str) -> typing.Callable[..., typing.Any]:
        def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            message = {"type": "call", "name": name, "arguments": self._json([args, kwargs])}
            # A message is sent and received whole; being told to stop waits until then.
            self.running = False
            self.send(message)
            answer = self.receive()
            self.running = True
            if self.stopped:
                raise KeyboardInterrupt
            if "raised" not in answer:
                return answer["result"]
            kind, said = answer["raised"]
            made = getattr(builtins, kind, None)
            if isinstance(made, type) and issubclass(made, Exception):
                raise made(said)
            raise RuntimeError(f"{kind}: {said}")

        call.__name__ = call.__qualname__ = name
        return call


def said(error: BaseException) -> str:
    """A traceback with the lines of cells only."""
    told = each = traceback.TracebackException.from_exception(error)
    while each:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if frame.filename.startswith("<cell ")])
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    return "".join(told.format())


def plain(text: str) -> str:
    """Text that UTF-8 can carry: lone surrogates are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def main(link: int, lock: typing.Callable[[int, tuple[str, ...]], list[str]]) -> None:
    """Serve the program outside until it closes the connection.

    Args:
        link: descriptor of the connection.
        lock: gives up the machine; see `lockdown.lock`.
    """
    inside = Interpreter(link)
    inside.begin(inside.receive(), lock)
    inside.serve()
