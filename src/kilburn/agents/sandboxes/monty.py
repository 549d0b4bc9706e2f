"""Monty: an interpreter for a subset of Python, written in Rust, in a worker process of its own (extra `repl`).

It has no inheritance, `yield` or `del`, few modules, and no way to the machine but the functions that it is given. It
starts in a tenth of a second, and a cell takes tens of microseconds.
"""

from __future__ import annotations

import builtins
import io
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kilburn.agents.sandbox import Cell, CellOutcome, Sandbox, json_of, open_file, plain, value_of
from kilburn.errors import MissingExtra, SandboxError, SandboxRefused

__all__ = ["Monty"]

GRACE = 1.0
"""Seconds beyond the bound until the worker is killed, which otherwise stops by itself."""
FOREVER = 1_000_000_000
"""Calls of functions of ours: how many there may be is theirs to say."""


class Monty(Sandbox):
    """See `open_sandbox`. The value of a last expression is not shown; print it.

    Raises:
        MissingExtra: pydantic-monty is not installed.
        SandboxRefused: its worker does not start.
    """

    name = "monty"
    lacks = (
        "a subset of Python: no inheritance, yield or del, and few modules",
        "no second layer: only the interpreter keeps the machine out, and its worker has the rights of its user",
    )

    def _begin(self) -> None:
        try:
            import pydantic_monty
        except ImportError as error:
            raise MissingExtra("pydantic-monty", "repl") from error
        self._library = pydantic_monty
        texts = {}
        for name, source in self.files.items():
            with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as file:
                texts[name] = file.read().decode("utf-8", "replace")
        mark = secrets.token_hex(8)
        self._hidden = {f"{name}_{mark}": name for name in self.calls.functions}
        self._lookup = dict.fromkeys(self._hidden, _nowhere)
        self._restore = "".join(f"{name} = {name}_{mark}\n" for name in self.calls.functions) + "None"
        self._session: Any = None
        self._inside = ExitStack()
        try:
            pool = self._inside.enter_context(pydantic_monty.Monty(max_processes=1, feed_duration_limit_grace=GRACE))
            session = pool.checkout(
                limits={
                    "max_feed_duration_secs": self.bounds.seconds,
                    "max_memory": self.bounds.memory + sum(len(text.encode()) for text in texts.values()),
                    "max_suspensions": FOREVER,
                },
                os_policy={"sleep": "zero"},
            )
            self._session = self._inside.enter_context(session)
            self._session.feed_run("None", inputs={**self.variables, **texts})
        except (OSError, RuntimeError, pydantic_monty.MontyError) as error:
            self._end()
            raise SandboxRefused(f"its worker does not start: {error}") from error

    def _alive(self) -> bool:
        return self._session is not None

    def _run(self, code: str) -> Cell:
        output = Output(self.bounds.output)
        try:
            # The names of our functions may hold something else by now.
            self._feed(self._restore)
            # Without a last value nothing is converted for us.
            self._feed(f"{code}\nNone", output.write)
        except self._library.MontyError as error:
            outcome, said = self._judged(error)
            lost = outcome in (CellOutcome.TIMEOUT, CellOutcome.KILLED)
            if lost:
                # The library leaves open what a stopped interpreter's memory holds.
                self._end()
            most = self.bounds.output
            return Cell(
                output="".join(output.kept), cut=output.cut, error=said[-most:] if most else "", outcome=outcome, lost=lost
            )
        return Cell(output="".join(output.kept), cut=output.cut)

    def _get(self, name: str) -> str:
        if not name.isidentifier():
            raise ValueError("no name in Python")
        hidden = f"json_{secrets.token_hex(8)}"
        try:
            return str(self._feed(f"import json as {hidden}\n{hidden}.dumps({name}, allow_nan=False)"))
        except self._library.MontyError as error:
            if self._judged(error)[0] in (CellOutcome.TIMEOUT, CellOutcome.KILLED):
                self._end()
            raise ValueError(str(error)[:1000]) from error

    def _end(self) -> None:
        self._session = None
        self._inside.close()

    def _feed(self, code: str, write: Callable[[str, str], None] | None = None) -> Any:
        """Run code and serve its calls; returns the value of its last expression."""
        if self._session is None:
            raise SandboxError("this sandbox was closed while it ran a cell")
        state = self._session.feed_start(plain(code), external_lookup=self._lookup, print_callback=write or _nowhere)
        while not isinstance(state, self._library.MontyComplete):
            ours = isinstance(state, self._library.FunctionSnapshot) and self._hidden.get(state.function_name)
            state = state.resume(self._answer(ours, state.args, state.kwargs)) if ours else state.resume_auto()
        return state.output

    def _judged(self, error: Exception) -> tuple[CellOutcome, str]:
        """The outcome that an error of the library stands for, and what to say of it."""
        library = self._library
        if isinstance(error, library.MontyCrashedError):
            kind = CellOutcome.TIMEOUT if error.timed_out else CellOutcome.KILLED
            return kind, f"{error}; the variables are lost"
        inner = error.exception() if isinstance(error, library.MontyRuntimeError) else None
        if isinstance(inner, TimeoutError) and "limit exceeded" in str(inner):
            return CellOutcome.TIMEOUT, f"stopped after {self.bounds.seconds:g} s; the variables are lost\n{_display(error)}"
        return CellOutcome.MEMORY if isinstance(inner, MemoryError) else CellOutcome.ERROR, _display(error)

    def _answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Run a function of ours for the code inside: what crosses is JSON, and errors are Python's own."""
        try:
            given, named = value_of(json_of([args, kwargs]))
            return {"return_value": value_of(json_of(self.calls(name, given, named)))}
        except Exception as error:  # noqa: BLE001 - it is the code's to handle
            known = isinstance(getattr(builtins, type(error).__name__, None), type)
            return {"exception": error if known else RuntimeError(f"{type(error).__name__}: {error}")}


class Output:
    """Keeps the first characters that are printed and counts the rest."""

    def __init__(self, most: int) -> None:
        self.kept: list[str] = []
        self.room, self.cut = most, 0

    def write(self, stream: str, text: str) -> None:
        kept = text[: self.room]
        if kept:
            self.kept.append(kept)
        self.room -= len(kept)
        self.cut += len(text) - len(kept)


def _nowhere(stream: str, text: str) -> None:
    pass


def _display(error: Exception) -> str:
    return str(error.display()) if hasattr(error, "display") else str(error)
