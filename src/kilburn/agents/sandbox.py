"""Runs Python that a model wrote, outside of this program, with functions of ours that it can call.

A *sandbox* keeps variables from one *cell* to the next, like a notebook. What the code says, and what it asks for, is
data: it comes as JSON, is checked, and has bounds. The code is never run by this program's own interpreter.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kilburn.errors import KilburnError, SandboxRefused, SpecError
from kilburn.kernel.resolve import locate, names

__all__ = ["Bounds", "Callbacks", "Cell", "CellOutcome", "Sandbox", "open_sandbox"]

USUAL = ("cpython", "monty")
"""The order in which `open_sandbox("auto")` tries them: full Python before a subset."""
KIND = "agents.sandboxes"


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What one cell may take.

    Args:
        seconds: how long it may run. The time in which a function of ours runs does not count.
        memory: bytes that the code may take, beside the interpreter and the files.
        output: characters of its output that are kept, and characters of its error.
    """

    seconds: float = 30.0
    memory: int = 512 * 1024 * 1024
    output: int = 20_000

    def __post_init__(self) -> None:
        if not (0 < self.seconds < 1e6 and self.memory > 0 and self.output >= 0):
            raise SpecError(f"bounds that cannot be: {self}", advice="give positive seconds and memory, output of 0 or more")


class CellOutcome(StrEnum):
    """How a cell ended."""

    OK = "ok"
    ERROR = "error"
    """The code raised, or is no Python."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"
    """The process inside died, or did what only an attack does; see `Cell.error`."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one piece of code did.

    Args:
        output: what it printed, up to `Bounds.output` characters, and the value of a last expression.
        cut: characters of output that were not kept.
        error: the traceback, or why the cell was stopped; "" if its outcome is `ok`.
        outcome: how it ended.
        seconds: how long it took, with the functions of ours that it called.
        lost: whether the variables are gone. The next cell then starts with those that the sandbox was opened with.
    """

    output: str
    cut: int = 0
    error: str = ""
    outcome: CellOutcome = CellOutcome.OK
    seconds: float = 0.0
    lost: bool = False


class Sandbox(Protocol):
    """Python outside of this program. One cell at a time; closing it ends all that runs inside."""

    name: str
    lacks: tuple[str, ...]
    """What this sandbox does not have on this machine, in words. What its page promises holds without it."""

    def run(self, code: str) -> Cell:
        """Run one cell. What the code does wrong is in the cell's outcome, and raises nothing.

        Raises:
            SandboxError: the sandbox is closed, runs a cell already, or cannot be started again.
        """
        ...

    def get(self, name: str) -> Any:
        """The JSON value of a variable inside.

        Raises:
            NoValue: there is no such variable, or JSON cannot carry what it holds.
            SandboxError: as for `run`.
        """
        ...

    def close(self) -> None:
        """End everything inside. Closing again does nothing."""
        ...

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Callbacks:
    """Functions of ours that the code inside calls by name, with JSON values.

    Args:
        functions: by name. Arguments are checked against their type hints, where they have any. They run in the
            thread that called `Sandbox.run`.

    Raises:
        SpecError: a name that is no name in Python.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = dict(functions)
        check_names(functions)
        self._signatures = {name: inspect.signature(function) for name, function in functions.items()}
        self._hints = {name: typing.get_type_hints(function) for name, function in functions.items()}

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
            hint = self._hints[name].get(parameter)
            if hint is None or self._signatures[name].parameters[parameter].kind in (2, 4):
                continue
            try:
                bound.arguments[parameter] = msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                raise TypeError(f"{name}: {parameter}: {error}") from error
        return self.functions[name](*bound.args, **bound.kwargs)


def check_names(given: Mapping[str, Any]) -> None:
    """Raise `SpecError` for a name that Python code cannot use."""
    for name in given:
        if not name.isidentifier():
            raise SpecError(f"{name[:100]!r} is no name in Python", advice="use letters, digits and _")


def value_of(text: str) -> Any:
    """The value of JSON that came from inside.

    Raises:
        ValueError: it is no JSON, holds a number that JSON cannot carry, or is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"JSON cannot carry {name}")


def open_sandbox(
    name: str = "auto",
    *,
    calls: Mapping[str, Callable[..., Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    files: Mapping[str, Path] | None = None,
    bounds: Bounds | None = None,
) -> Sandbox:
    """Open a sandbox for code that a model wrote.

    Args:
        name: `cpython` (full Python; Linux), `monty` (a subset of Python; extra `repl`), or `auto`: the first of
            them that this machine can keep.
        calls: functions of ours that the code can call by name; see `Callbacks`.
        variables: JSON values that the code finds under these names.
        files: text files (UTF-8; other bytes become U+FFFD) whose whole text the code finds as `str`.
        bounds: of each cell.

    Raises:
        SandboxRefused: this machine lacks what the sandbox needs. There is no less safe one to fall back to.
        MissingExtra: the named sandbox is not installed.
        SpecError: no sandbox of this name, a name that is no name in Python, or a file that cannot be read.
    """
    refused: list[str] = []
    for each in USUAL if name == "auto" else (name,):
        made = locate(KIND, each, foreign=False)
        if made is None:
            raise SpecError(f"no sandbox named {each[:100]!r}", advice=f"known: auto, {', '.join(names(KIND))}")
        try:
            opened: Sandbox = made(
                calls=Callbacks(calls or {}), variables=variables or {}, files=files or {}, bounds=bounds or Bounds()
            )
        except SpecError:
            raise
        except KilburnError as error:
            if name != "auto":
                raise
            refused.append(f"{each}: {error.what}" + (f" ({error.advice})" if error.advice else ""))
        else:
            return opened
    raise SandboxRefused("; ".join(refused), advice="use Linux on x86-64, or install kilburn[repl]")
