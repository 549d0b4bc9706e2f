"""Runs Python code of a model outside of this program, with callbacks into it.

A *sandbox* keeps variables from one *cell* to the next, like a notebook. The output and the calls of the code are data: they
arrive as JSON, are checked, and have bounds. The code is never run by this program's own interpreter.
"""

from __future__ import annotations

import inspect
import json
import keyword
import logging
import os
import stat
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, ClassVar, Self

import msgspec

from kilburn.arguments import check_fields, checking, plain_number
from kilburn.errors import KilburnError, NoValue, SandboxError, SandboxRefused, SpecError
from kilburn.extras import command
from kilburn.kernel.resolve import locate, names
from kilburn.prices import is_amount

log = logging.getLogger("kilburn")

__all__ = ["Bounds", "Sandbox", "open_sandbox"]

DEFAULT_ORDER = ("cpython", "monty")
"""The order in which `open_sandbox("auto")` tries them: full Python before a subset."""
KIND = "recursion.sandboxes"
MAX_DEPTH = 100
"""Nesting depth of a value that comes from inside."""
MAX_CALL_BYTES = 8_000_000
"""Bytes of JSON that code can pass to a callback in one call."""
MAX_ANSWER_BYTES = 128_000_000
"""Bytes of JSON that a callback can return, unless the code's memory is smaller."""
MAX_ERROR_CHARS = 10_000
"""Characters of a callback's error message that the code gets."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one cell.

    Args:
        seconds: running time of the code. While a callback runs, only the processor time of the code counts.
        total: running time with callbacks. A callback that runs at its end is not interrupted, but no other begins.
        calls: number of callbacks.
        memory: bytes of the code, besides the interpreter and the files.
        output: characters of the output that are kept, and of the error; a million at most.
    """

    seconds: float = 30.0
    total: float = 3600.0
    calls: int = 10_000
    memory: int = 512 * 1024 * 1024
    output: int = 20_000

    def __post_init__(self) -> None:
        check_fields(self)
        times, counts = (self.seconds, self.total), (0 < self.memory < 1 << 62, self.calls >= 0, 0 <= self.output <= 1_000_000)
        if not (all(0 < seconds < 1e6 for seconds in times) and all(counts)):
            advice = "give positive seconds and memory, calls of 0 or more, output of 0 to a million"
            raise SpecError(f"bounds that cannot be: {self}", advice=advice)


class CellOutcome(StrEnum):
    """How a cell ended."""

    OK = "ok"
    ERROR = "error"
    """The code raised, or is not valid Python."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"
    """The process inside died, or did something that only an attack does; see `Cell.error`."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cell.

    Args:
        output: printed text, up to `Bounds.output` characters, and the value of a last expression.
        cut: characters of output that were not kept.
        error: the traceback, or why the cell was stopped; "" if its outcome is `ok`.
        outcome: how it ended.
        seconds: running time, callbacks included.
        lost: whether the variables were lost. The next cell then starts with the variables of the opening.
    """

    output: str
    cut: int = 0
    error: str = ""
    outcome: CellOutcome = CellOutcome.OK
    seconds: float = 0.0
    lost: bool = False


class SandboxStopped(Exception):
    """The code inside was stopped and its variables are lost, with the reason."""

    def __init__(self, outcome: CellOutcome, why: str) -> None:
        self.outcome, self.why = outcome, why
        super().__init__(why)


class Callbacks:
    """Callbacks: functions of this program that the code inside calls by name, with JSON values.

    Args:
        functions: the functions, by name. Arguments are checked against their type hints. They run in the thread that called
            `Sandbox.run`.
        batched: functions whose last parameter is a list, and that return a list of the same length. A list that is too large
            for one call (`MAX_CALL_BYTES`) is passed in several, in its order.

    Raises:
        SpecError: an invalid Python name, or a batched function that does not exist or has no parameter.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], batched: Collection[str] = ()) -> None:
        self.functions = dict(functions)
        _check_names(functions)
        self._signatures = {name: inspect.signature(function) for name, function in functions.items()}
        self._hints = {name: _hints(function) for name, function in functions.items()}
        self.lists: dict[str, str] = {}
        """The list parameter of each batched function."""
        for name in batched:
            if name not in functions or not self._signatures[name].parameters:
                raise SpecError(f"{name[:100]!r} is no function with a list", advice="name functions whose last parameter is one")
            self.lists[name] = [*self._signatures[name].parameters][-1]

    def __call__(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call one of them. What it raises is for the code inside.

        Raises:
            NameError: there is no such function.
            TypeError: arguments that do not fit.
        """
        if name not in self.functions:
            raise NameError(f"no function {name[:100]!r} outside")
        bound = self._signatures[name].bind(*args, **kwargs)
        for parameter, value in bound.arguments.items():
            try:
                bound.arguments[parameter] = msgspec.convert(value, self._hints[name][parameter])
            except msgspec.ValidationError as error:
                raise TypeError(f"{name}: {parameter}: {error}") from error
        return self.functions[name](*bound.args, **bound.kwargs)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of each argument as it is bound; anything, where the function does not say."""
    hints = typing.get_type_hints(function)
    argument_hints = {}
    for parameter in inspect.signature(function).parameters.values():
        hint: Any = hints.get(parameter.name, Any)
        if parameter.kind is parameter.VAR_POSITIONAL:
            hint = tuple[hint, ...]
        elif parameter.kind is parameter.VAR_KEYWORD:
            hint = dict[str, hint]
        argument_hints[parameter.name] = hint
    return argument_hints


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise SpecError(f"{name[:100]!r} is no name in Python", advice="use letters, digits and _")


def open_file(path: Path) -> BinaryIO:
    """Return a file to read.

    Raises:
        SpecError: it cannot be read, or is a folder, a pipe or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait
        file = open(descriptor, "rb")  # noqa: SIM115 -- the caller closes it
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", advice="give a file that can be read") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise SpecError(f"{path} is no file", advice="give files, no folders, pipes or devices")
    return file


def plain(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot carry, by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """Encode a value as JSON.

    Raises:
        TypeError, ValueError: JSON cannot carry it.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    return text


def from_json(text: str) -> Any:
    """Decode JSON that came from inside.

    Raises:
        ValueError: it is no JSON, holds a number that JSON cannot carry, or is nested too deep.
    """
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    inner = [value]
    for _ in range(MAX_DEPTH):
        inner = [
            item
            for container in inner
            if isinstance(container, list | dict)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not inner:
            return value
    raise ValueError("nested too deep")


class Sandbox(ABC):
    """Python outside of this program. It runs one cell at a time; closing it ends everything inside.

    Args:
        calls: callbacks of the code.
        variables: JSON values of variables, by name.
        files: text files, or their bytes, whose text the code has as variables, by name.
        bounds: bounds of each cell.
        setup: code that is run at each start, before the first cell.

    Raises:
        SandboxRefused: this machine lacks what the sandbox needs.
        SpecError: an invalid Python name, a value that is no JSON, a file that cannot be read, or a setup that fails.
    """

    name: ClassVar[str]
    lacks: tuple[str, ...] = ()
    """Protections and features that this sandbox does not have on this machine, in words."""
    started = 0
    """Number of starts of the inside. Each start after the first lost the variables."""

    def __init__(
        self,
        *,
        calls: Callbacks,
        variables: Mapping[str, Any],
        files: Mapping[str, Path | bytes],
        bounds: Bounds,
        setup: str = "",
    ) -> None:
        self.calls, self.variables, self.files, self.bounds = calls, dict(variables), dict(files), bounds
        self.setup = setup
        _check_names({**self.variables, **self.files})
        try:
            # Numbers and strings of other libraries become Python's own.
            self.variables = json.loads(to_json(self.variables))
        except (TypeError, ValueError) as error:
            raise SpecError(f"a variable that JSON cannot carry: {error}", advice="give JSON values") from error
        self._closed = False
        self._owner = os.getpid()
        self._turn = Lock()
        self._start()

    def run(self, code: str, *, total: float | None = None) -> Cell:
        """Run one cell. What the code does wrong is in the cell's outcome, and raises nothing.

        Args:
            total: running time with callbacks in seconds, if less than `Bounds.total`.

        Raises:
            SpecError: code that is no text, or an invalid time.
            SandboxError: the sandbox is closed, runs a cell already, or cannot be started again.
        """
        if not isinstance(code, str):
            raise SpecError(f"code: a {type(code).__name__}", advice="give text")
        total = plain_number(total)
        if total is not None and not (is_amount(total) and total > 0):
            raise SpecError(f"total={total!r}"[:200], advice="give seconds, more than 0")
        with self._alone():
            began = time.monotonic()
            max_seconds = self.bounds.total if total is None else min(self.bounds.total, total)
            return msgspec.structs.replace(self._run(code, max_seconds), seconds=time.monotonic() - began)

    def get(self, name: str) -> Any:
        """Return the JSON value of a variable inside.

        Raises:
            NoValue: there is no such variable, or JSON cannot carry what it holds.
            SandboxError: as for `run`.
        """
        if not isinstance(name, str):
            raise SpecError(f"name: a {type(name).__name__}", advice="give the name of a variable")
        with self._alone():
            try:
                return from_json(self._get(name))
            except ValueError as error:
                raise NoValue(f"{name[:100]}: {error}") from error

    def close(self) -> None:
        """End everything inside. Closing again does nothing, nor does closing in a program that was forked from the one that
        opened it."""
        self._closed = True
        if self._owner == os.getpid():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._owner != os.getpid():
            raise SandboxError("another program opened this sandbox, and this one was forked from it", advice="open one here")
        if not self._turn.acquire(blocking=False):
            raise SandboxError("this sandbox runs a cell already", advice="open one for each thread")
        try:
            if self._closed:
                raise SandboxError("this sandbox is closed", advice="open another")
            if not self._alive():
                self._start()
            yield
        except BaseException as error:
            # After a cancellation the code inside may be in any state.
            if not isinstance(error, SandboxError):
                self._end()
            raise
        finally:
            self._turn.release()

    def _start(self) -> None:
        self._begin()
        self.started += 1
        if self.setup:
            cell = self._run(self.setup, self.bounds.total)
            if cell.outcome is not CellOutcome.OK:
                self._end()
                raise SpecError(f"the variables cannot be set up: {cell.error[-200:]}", advice="give the sandbox more memory")

    def _answer(self, name: str, arguments: str) -> bytes:
        """Call a function of ours with arguments that came as JSON; return JSON of its result, or of its exception.

        It is `{"result": value}` or `{"raised": [type, message]}`.
        """
        try:
            args, kwargs = msgspec.convert(from_json(arguments), tuple[list[Any], dict[str, Any]])
            answer = msgspec.json.encode({"result": self.calls(name, args, kwargs)})
            if len(answer) > (max_bytes := min(MAX_ANSWER_BYTES, self.bounds.memory)):
                raise ValueError(f"{name} gives {len(answer):,} bytes, and code can take {max_bytes:,} at once: ask for less")
        except Exception as error:  # noqa: BLE001 - it is the code's to handle
            return msgspec.json.encode({"raised": [type(error).__name__, plain(str(error))[:MAX_ERROR_CHARS]]})
        return answer

    @abstractmethod
    def _begin(self) -> None:
        """Start the inside, with the variables and files.

        Raises:
            SandboxRefused: it does not start, whatever the reason.
        """

    @abstractmethod
    def _alive(self) -> bool:
        """Return whether the inside still has its variables."""

    @abstractmethod
    def _run(self, code: str, total: float) -> Cell:
        """Run one cell, in so many seconds in all."""

    @abstractmethod
    def _get(self, name: str) -> str:
        """Return a variable as JSON; `ValueError` says why there is none."""

    @abstractmethod
    def _end(self) -> None:
        """End the inside, if it runs."""


@checking
def open_sandbox(
    name: str = "auto",
    *,
    calls: Mapping[str, Callable[..., Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | bytes] | None = None,
    bounds: Bounds | None = None,
    batched: Collection[str] = (),
    setup: str = "",
) -> Sandbox:
    """Open a sandbox for code that a model wrote.

    Args:
        name: `cpython` (full Python; Linux), `monty` (a subset of Python; extra `repl`), or `auto`: the first of them that
            starts on this machine. `Sandbox.lacks` says why others cannot start.
        calls: callbacks of the code, by name; see `Callbacks`.
        variables: JSON values of variables, by name.
        files: text files, or their bytes (UTF-8; other bytes become U+FFFD), whose whole text the code has as `str`, by name.
            Bytes are passed in memory.
        bounds: bounds of each cell.
        batched: names of callbacks that take a long list in pieces; see `Callbacks`.
        setup: code that is run at each start, before the first cell.

    Raises:
        SandboxRefused: this machine lacks what the sandbox needs. There is no less safe fallback.
        MissingExtra: the named sandbox is not installed.
        SpecError: no sandbox of this name, an invalid Python name, a file that cannot be read, or a setup that fails.
    """
    functions = Callbacks(calls or {}, batched)
    refused: list[str] = []
    for kind in DEFAULT_ORDER if name == "auto" else (name,):
        sandbox_class = locate(KIND, kind, foreign=False)
        if sandbox_class is None:
            raise SpecError(f"no sandbox named {kind[:100]!r}", advice=f"known: auto, {', '.join(names(KIND))}")
        try:
            opened: Sandbox = sandbox_class(
                calls=functions, variables=variables or {}, files=files or {}, bounds=bounds or Bounds(), setup=setup
            )
        except SpecError:
            raise
        except KilburnError as error:
            if name != "auto":
                raise
            refused.append(f"{kind}: {error.what}" + (f" ({error.advice})" if error.advice else ""))
        else:
            if refused:
                log.info("the sandbox is %s, because others cannot start: %s", kind, "; ".join(refused))
            opened.lacks = (*(f"it is not {reason}" for reason in refused), *opened.lacks)
            return opened
    raise SandboxRefused("; ".join(refused), advice=f"use Linux on x86-64, or {command('repl')}")
