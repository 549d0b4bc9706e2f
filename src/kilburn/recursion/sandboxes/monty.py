"""Monty: an interpreter for a subset of Python, written in Rust, in a worker process of its own (extra `repl`).

It has no inheritance, `yield` or `del`, few modules, and no access to the machine except by callbacks. It starts in a tenth of a
second, and a cell takes tens of microseconds.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from kilburn.errors import MissingExtra, SandboxError, SandboxRefused
from kilburn.recursion.sandbox import MAX_CALL_BYTES, Cell, CellOutcome, Sandbox, SandboxStopped, open_file, plain, to_json
from kilburn.recursion.sandboxes.interpreter import Output, pieces, raised

GRACE_SECONDS = 1.0
"""Seconds beyond the bound after which a worker that did not stop by itself is killed."""
MAX_SUSPENSIONS = 1_000_000_000
"""Effectively no bound of the library's suspensions; calls and their time are bounded here."""
PYTHONS = """
abs all any bin bool bytes chr complex dict divmod enumerate eval exec filter float format frozenset getattr hasattr hash hex id
int isinstance iter len list map max min next object oct open ord pow print property range repr reversed round set setattr
slice sorted str sum tuple type zip
"""
"""Python's builtins that are restored if a failed cell replaced them."""
entered: set[int] = set()
"""The process id in which the library's threads run. A forked process inherits the set, but not the threads."""


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
        if entered and os.getpid() not in entered:
            reason = "pydantic-monty ran in the program that this one was forked from, and would wait for ever here"
            raise SandboxRefused(reason, advice="spawn programs instead of forking them, or use cpython")
        entered.add(os.getpid())
        self._library = pydantic_monty
        texts = {}
        for name, source in self.files.items():
            with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as file:
                texts[name] = file.read().decode("utf-8", "replace")
        mark = secrets.token_hex(8)
        self._hidden = {f"{name}_{mark}": name for name in self.calls.functions}
        self._lookup = dict.fromkeys(self._hidden, _nowhere)
        self._session: Any = None
        self._inside = ExitStack()
        try:
            pool = self._inside.enter_context(
                # The second limit is for requests that run no code, such as the end of an unresponsive worker.
                pydantic_monty.Monty(
                    max_processes=1,
                    feed_duration_limit_grace=GRACE_SECONDS,
                    request_timeout=self.bounds.seconds + 2 * GRACE_SECONDS,
                )
            )
            session = pool.checkout(
                limits={
                    "max_feed_duration_secs": self.bounds.seconds,
                    "max_memory": self.bounds.memory + sum(len(text.encode()) for text in texts.values()),
                    "max_suspensions": MAX_SUSPENSIONS,
                },
                os_policy={"sleep": "zero"},
            )
            self._session = self._inside.enter_context(session)
            self._session.feed_run("None", inputs={**self.variables, **texts})
            builtin_names = [name for name in PYTHONS.split() if self._has(name)]
        except BaseException as error:
            self._end()
            if not _is_of_library(error):
                raise
            advice = "look at this machine's limits of processes, memory and open files, or install pydantic-monty again"
            raise SandboxRefused(f"its worker does not start: {error}", advice=advice) from error
        # One feed before each cell: it restores the callbacks, which code may have replaced, and saves Python's builtins.
        ours = "".join(f"{name} = {name}_{mark}\n" for name in self.calls.functions)
        self._before = f"{ours}before_{mark} = [{', '.join(builtin_names)}]\nNone"
        self._after = f"{', '.join(builtin_names)} = before_{mark}\nNone"

    def _has(self, name: str) -> bool:
        try:
            self._session.feed_run(f"{name}\nNone", external_lookup={})
        except self._library.MontyRuntimeError:
            return False
        return True

    def _alive(self) -> bool:
        return self._session is not None

    def _run(self, code: str, total: float) -> Cell:
        output = Output(self.bounds.output)

        def write(stream: str, text: str) -> None:
            output.write(text)

        outcome, error_text, lost = CellOutcome.OK, "", False
        try:
            try:
                self._feed(self._before, total)
                # `None` as the last value avoids a conversion of the result.
                self._feed(f"{code}\nNone", total, write)
            except self._library.MontyError as error:
                outcome, error_text = self._judged(error)
                # An interpreter without room for this has none for any code.
                self._feed(self._after, total)
        except (SandboxStopped, self._library.MontyError) as error:
            # The library leaves the state of a stopped interpreter undefined.
            lost = True
            self._end()
            if outcome is CellOutcome.OK:
                outcome, error_text = (error.outcome, error.why) if isinstance(error, SandboxStopped) else self._judged(error)
            error_text += "\nthe variables are lost"
        max_chars = self.bounds.output
        return Cell(
            output="".join(output.kept),
            cut=output.cut,
            error=error_text[-max_chars:] if max_chars else "",
            outcome=outcome,
            lost=lost,
        )

    def _get(self, name: str) -> str:
        if not name.isidentifier():
            raise ValueError("no name in Python")
        hidden = f"json_{secrets.token_hex(8)}"
        try:
            return str(self._feed(f"import json as {hidden}\n{hidden}.dumps({name}, allow_nan=False)", self.bounds.seconds))
        except SandboxStopped as stopped:
            self._end()
            raise ValueError(f"{stopped.why}; the variables are lost") from stopped
        except self._library.MontyError as error:
            raise ValueError(str(error)[:1000]) from error

    def _end(self) -> None:
        self._session = None
        # A dead worker raises when it is told to end.
        with suppress(Exception):
            self._inside.close()

    def _feed(self, code: str, total: float, write: Callable[[str, str], None] | None = None) -> Any:
        """Run code and serve its calls; returns the value of its last expression.

        Raises:
            SandboxStopped: the session cannot be used further. MontyError: the code raised, and the session continues.
        """
        library, calls = self._library, 0
        began = time.monotonic()
        limit = began + self.bounds.seconds + GRACE_SECONDS
        try:
            state = self._live().feed_start(plain(code), external_lookup=self._lookup, print_callback=write or _nowhere)
            while not isinstance(state, library.MontyComplete):
                step_began = time.monotonic()
                if step_began > limit or step_began > began + total:
                    # The library's clock stops while it waits for a name, a path or a call.
                    raise SandboxStopped(CellOutcome.TIMEOUT, f"stopped after {min(self.bounds.seconds, total):g} s")
                ours = isinstance(state, library.FunctionSnapshot) and self._hidden.get(state.function_name)
                if not ours:
                    state = state.resume_auto()
                    continue
                calls += 1
                answer = self._called(ours, state.args, state.kwargs, calls)
                limit += time.monotonic() - step_began
                state = state.resume(answer)
        except library.MontyCrashedError as error:
            kind = CellOutcome.TIMEOUT if error.timed_out else CellOutcome.KILLED
            raise SandboxStopped(kind, str(error)) from error
        except library.MontyError as error:
            inner = error.exception() if isinstance(error, library.MontyRuntimeError) else None
            if isinstance(inner, TimeoutError) and "limit exceeded" in str(inner):
                raise SandboxStopped(
                    CellOutcome.TIMEOUT, f"stopped after {self.bounds.seconds:g} s\n{_display(error)}"
                ) from error
            raise
        except (SandboxStopped, SandboxError):
            raise
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise SandboxStopped(CellOutcome.KILLED, f"the interpreter broke off: {error}") from error
        return state.output

    def _live(self) -> Any:
        if self._session is None:
            raise SandboxError("this sandbox was closed while it ran a cell")
        return self._session

    def _judged(self, error: Exception) -> tuple[CellOutcome, str]:
        """Return the outcome that an error of the code stands for, with its text."""
        inner = error.exception() if isinstance(error, self._library.MontyRuntimeError) else None
        return CellOutcome.MEMORY if isinstance(inner, MemoryError) else CellOutcome.ERROR, _display(error)

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], calls: int) -> dict[str, Any]:
        """Call a function of ours for the code inside: what crosses is JSON, and errors are Python's own."""
        try:
            if calls > self.bounds.calls:
                raise RuntimeError(f"no more than {self.bounds.calls:,} calls in one cell")
            text = to_json([args, kwargs])
            if len(text.encode()) <= MAX_CALL_BYTES:
                return {"return_value": self._one(name, text)}
            if name not in self.calls.lists:
                raise ValueError(f"{len(text.encode()):,} bytes as JSON, more than {MAX_CALL_BYTES:,}: pass it in pieces")
            results: list[Any] = []
            for part in pieces(args, kwargs, self.calls.lists[name], MAX_CALL_BYTES):
                results += self._one(name, to_json(part))
        except Exception as error:  # noqa: BLE001 - it is the code's to handle
            return {"exception": error}
        return {"return_value": results}

    def _one(self, name: str, arguments: str) -> Any:
        answer = json.loads(self._answer(name, arguments))
        if "raised" in answer:
            raise raised(*answer["raised"])
        return answer["result"]


def _nowhere(stream: str, text: str) -> None:
    pass


def _display(error: Exception) -> str:
    return str(error.display()) if hasattr(error, "display") else str(error)


def _is_of_library(error: BaseException) -> bool:
    """Return whether the library, or the machine it runs on, went wrong, and not a person who ends the program.

    A panic of the library is no `Exception`.
    """
    return (isinstance(error, Exception) and not isinstance(error, SandboxError)) or type(error).__name__ == "PanicException"
