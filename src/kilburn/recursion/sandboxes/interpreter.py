"""The Python inside the `cpython` sandbox: reads requests, runs cells, sends results. It imports only the standard library.

A message is four bytes of length and JSON. Nothing here is a security boundary: code can change every line of it. The boundary
is what `lockdown` gave up, and the program outside checks every message.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import contextlib
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

MODULES = """
_strptime abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc colorsys
contextlib copy csv dataclasses datetime decimal difflib encodings.ascii encodings.cp1252 encodings.latin_1
encodings.unicode_escape encodings.utf_16 encodings.utf_32 encodings.utf_8 encodings.utf_8_sig enum errno fnmatch fractions
functools gc graphlib gzip hashlib heapq hmac html html.entities html.parser inspect io ipaddress itertools json keyword
linecache locale math numbers operator pprint queue random re reprlib secrets shlex statistics string stringprep struct sys
textwrap time timeit token tokenize traceback types typing unicodedata urllib.parse uuid warnings weakref
xml.etree.ElementTree zlib
"""
"""Modules that code can import: they are loaded before access to files is given up."""
TRUSTED_NAMESPACES = [
    (vars(module), dict(vars(module))) for module in (builtins, sys, ast, codecs, io, json, linecache, os, traceback)
]
"""The names of the modules that this one relies on, with their values before code can replace them."""
PYTHONS = frozenset(vars(builtins))
"""The names of Python's builtins."""
RESERVE_BYTES = 1 << 20
"""Bytes that are freed when the memory is full, so that the end of the cell can be reported and the next cell can make room."""


class Output(io.TextIOBase):
    """A stream that keeps the first characters and counts the rest."""

    def __init__(self, max_chars: int) -> None:
        self.kept: list[str] = []
        self.room, self.cut = max_chars, 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Keep what there is room for; the length of the text."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        head = text[: self.room]
        if head:
            self.kept.append(head)
        self.room -= len(head)
        self.cut += len(text) - len(head)
        return len(text)


class _Interpreter:
    """The variables inside, and the conversation with the program outside.

    Args:
        link: descriptor of the connection.
    """

    def __init__(self, link: int) -> None:
        self.link = link
        self.cells = 0
        self.running = self.stopped = False
        """Whether code of a cell runs, and whether this cell was told to stop."""
        self.calling = False
        """Whether the answer of a callback is awaited."""
        self.depth = sys.getrecursionlimit()
        self.reserve = bytes(RESERVE_BYTES)
        signal.signal(signal.SIGINT, self.stop)

    def stop(self, *_: object) -> None:
        """Stop the cell: the program outside says that its time is over."""
        self.stopped = True
        if self.running:
            raise KeyboardInterrupt

    def receive(self) -> dict[str, typing.Any]:
        return json.loads(self._read(int.from_bytes(self._read(4), "big")))  # type: ignore[no-any-return]

    def _read(self, length: int) -> bytes:
        pieces: list[bytes] = []
        try:
            while length:
                pieces.append(self._some(min(length, 1 << 20)))
                length -= len(pieces[-1])
            return b"".join(pieces)
        except MemoryError:
            # A message without room is still read to its end: the next one begins after it.
            pieces.clear()
            while length:
                length -= len(self._some(min(length, 1 << 12)))
            raise

    def _some(self, max_bytes: int) -> bytes:
        piece = os.read(self.link, max_bytes)
        if not piece:
            raise SystemExit
        return piece

    def send(self, message: dict[str, typing.Any]) -> None:
        text = json.dumps(message, ensure_ascii=False).encode()
        rest = memoryview(len(text).to_bytes(4, "big") + text)
        while rest:
            rest = rest[os.write(self.link, rest) :]

    def begin(self, hello: dict[str, typing.Any], lock: typing.Callable[[int, tuple[str, ...]], list[str]]) -> None:
        """Take what the sandbox was opened with, and give up the rest of the machine."""
        try:
            self._take(hello)
            lacks = lock(hello["memory"], tuple(hello["without"]))
        except (OSError, ValueError, MemoryError) as error:
            why = "there is not enough memory for its variables and files" if isinstance(error, MemoryError) else str(error)
            self.send({"type": "refused", "why": why})
            raise SystemExit from error
        self.send({"type": "ready", "lacks": lacks})

    def _take(self, hello: dict[str, typing.Any]) -> None:
        self.room, self.most, self.calls = hello["output"], hello["most"], hello["calls"]
        module = types.ModuleType("__main__")
        self.variables = module.__dict__
        self.variables |= {"__builtins__": builtins, **hello["variables"]}
        for name, descriptor in hello["files"].items():
            with open(descriptor, "rb") as file:
                self.variables[name] = file.read().decode("utf-8", "replace")
        for name in MODULES.split():
            importlib.import_module(name)
        sys.modules["__main__"] = module
        self.modules = dict(sys.modules)
        os.environ.clear()
        sys.path.clear()
        sys.argv[:] = [""]
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Answer requests until the connection ends."""
        while True:
            request = self.receive()
            self.stopped = False
            reply = self.run(request["run"]) if "run" in request else self.get(request["get"])
            self.send({**reply, "number": request["number"]})

    def run(self, code: str) -> dict[str, typing.Any]:
        self.cells += 1
        self._restore()
        if not self.reserve:
            with contextlib.suppress(MemoryError):
                self.reserve = bytes(RESERVE_BYTES)
        old_values = {name: self.variables[name] for name in PYTHONS & self.variables.keys()}
        output = Output(self.room)
        sys.stdout = sys.stderr = output
        sys.stdin = io.StringIO()
        error = self._attempt(lambda: self._execute(code, f"<cell {self.cells}>", self.variables))
        restored = self._python_again(old_values) if error else []
        works = (error is None and computes()) or self._works()
        return {
            "type": "ended",
            "outcome": "timeout" if self.stopped else error[0] if error else "ok",
            "error": error[1] if error else "",
            "output": plain("".join(output.kept)),
            "cut": output.cut,
            "again": restored,
            "spoiled": not works,
        }

    def _restore(self) -> None:
        """Undo changes of code to what this module relies on. Names that are called here are not looked up where code can change
        them."""
        for names, values in TRUSTED_NAMESPACES:
            names.update(values)
        sys.modules.update(self.modules)
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), self.depth))
        self.variables["__builtins__"] = builtins
        self.variables |= {name: self._function(name, batched) for name, batched in self.calls.items()}

    def _python_again(self, old_values: dict[str, object]) -> list[str]:
        """Restore Python's own names that a failed cell replaced; return them."""
        changed = [name for name in PYTHONS & self.variables.keys() if self.variables[name] is not old_values.get(name, PYTHONS)]
        for name in changed:
            del self.variables[name]
        self.variables |= old_values
        return sorted(changed)

    def _works(self) -> bool:
        """Return whether a cell can still run, print, fail and be reported. Not everything that code does can be undone."""
        try:
            self._restore()
            output = sys.stdout = sys.stderr = Output(100)
            try:
                self._execute("print(2)\n1 / 0", "<cell 0>", {"__builtins__": builtins})
            except ZeroDivisionError as error:
                return json.loads(json.dumps(output.kept)) == ["2", "\n"] and "1 / 0" in format_error(error)
        except BaseException:  # noqa: BLE001 - whatever code put there
            pass
        return False

    def get(self, name: str) -> dict[str, typing.Any]:
        self._restore()
        if name not in self.variables:
            return {"type": "value", "why": f"there is no variable {name!r}"}
        text = ""

        def encode() -> None:
            nonlocal text
            text = self._json(self.variables[name])

        error = self._attempt(encode)
        return {"type": "value", "why": error[1].strip().rpartition("\n")[2]} if error else {"type": "value", "value": text}

    def _attempt(self, work: typing.Callable[[], None]) -> tuple[str, str] | None:
        """Do what runs code of the cell; returns the outcome and the error, or None."""
        try:
            try:
                self.running = True
                work()
            except BaseException as error:  # noqa: BLE001 - whatever code raises
                self.reserve = b""
                self._restore()
                kind = "memory" if isinstance(error, MemoryError) else "error"
                return kind, plain(format_error(error))[-self.room :] if self.room else ""
            finally:
                self.running = False
        except MemoryError:
            return "memory", "MemoryError"
        except BaseException as error:  # noqa: BLE001 - or its exception does
            return "error", type(error).__name__
        return None

    def _execute(self, code: str, name: str, variables: dict[str, typing.Any]) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        body = ast.parse(code, name).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        exec(compile(ast.Module(body, []), name, "exec"), variables)  # noqa: S102 - this process is for it
        # The value of a last expression is shown, as at a prompt.
        exec(compile(ast.Interactive(last), name, "single"), variables)  # noqa: S102

    def _json(self, value: object) -> str:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        if (size := len(text.encode())) > self.most:
            raise ValueError(f"{size:,} bytes as JSON, more than {self.most:,}: pass it in pieces")
        return text

    def _function(self, name: str, batched: str | None) -> typing.Callable[..., typing.Any]:
        def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            if batched is None:
                return self._call(name, self._json([args, kwargs]))
            results: list[typing.Any] = []
            for part_args, part_kwargs in pieces(args, kwargs, batched, self.most):
                results += self._call(name, self._json([part_args, part_kwargs]))
            return results

        call.__name__ = call.__qualname__ = name
        return call

    def _call(self, name: str, arguments: str) -> typing.Any:
        if self.calling:
            raise RuntimeError(f"{name} was called within a call")
        # A message is sent and received whole; an interrupt waits until then.
        self.running, self.calling = False, True
        try:
            self.send({"type": "call", "name": name, "arguments": arguments})
            answer = self.receive()
        finally:
            self.running, self.calling = True, False
        if self.stopped:
            raise KeyboardInterrupt
        if "raised" not in answer:
            return answer["result"]
        raise raised(*answer["raised"])


def computes() -> bool:
    """Return whether Python still runs code, at a glance."""
    try:
        return bool(eval(compile("1 + 1 == 2", "<cell 0>", "eval"), {}))  # noqa: S307 - it is our own
    except BaseException:  # noqa: BLE001 - whatever code put there
        return False


def pieces(
    args: typing.Sequence[typing.Any], kwargs: dict[str, typing.Any], batched: str, max_bytes: int
) -> list[tuple[list[typing.Any], dict[str, typing.Any]]]:
    """Return the arguments of one call as those of several, each with a part of its list, of so many bytes of JSON at most.

    Args:
        batched: the parameter of the list; it is the last one.

    Raises:
        ValueError: one item alone is too large.
    """
    is_keyword = batched in kwargs
    items = kwargs[batched] if is_keyword else args[-1] if args else None
    if not isinstance(items, list | tuple):
        return [(list(args), kwargs)]

    def with_part(part: list[typing.Any]) -> tuple[list[typing.Any], dict[str, typing.Any]]:
        return (list(args), {**kwargs, batched: part}) if is_keyword else ([*args[:-1], part], kwargs)

    max_bytes -= len(json.dumps(with_part([]), ensure_ascii=False).encode())
    parts: list[list[typing.Any]] = [[]]
    total = 0
    for at, item in enumerate(items):
        size = len(json.dumps(item, ensure_ascii=False).encode()) + 2
        if size > max_bytes:
            raise ValueError(f"item {at} of {batched} takes {size:,} bytes as JSON, more than {max_bytes:,}: cut it")
        if total + size > max_bytes:
            parts.append([])
            total = 0
        parts[-1].append(item)
        total += size
    return [with_part(part) for part in parts]


def raised(kind: str, message: str) -> Exception:
    """Return an exception of ours as one of the code's: Python's own of that name, or a RuntimeError that names it."""
    exception = getattr(builtins, kind, None)
    if isinstance(exception, type) and issubclass(exception, Exception):
        try:
            return exception(message)
        except TypeError:
            pass  # its arguments are others
    return RuntimeError(f"{kind}: {message}")


def format_error(error: BaseException) -> str:
    """Return a traceback with the lines of cells only."""
    formatted = link = traceback.TracebackException.from_exception(error)
    while link:
        link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if frame.filename.startswith("<cell ")])
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    return "".join(formatted.format())


def plain(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot carry, by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def main(link: int, lock: typing.Callable[[int, tuple[str, ...]], list[str]]) -> None:
    """Serve the program outside until it closes the connection.

    Args:
        link: descriptor of the connection.
        lock: gives up the machine; see `lockdown.lock`.
    """
    inside = _Interpreter(link)
    inside.begin(inside.receive(), lock)
    inside.serve()
