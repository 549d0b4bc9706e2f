"""The program around the commands: its options, exit status and errors.

    0    the command succeeded
    1    the command failed, or reports a problem (findings, overflow, loss)
    2    the arguments are unusable: no such file, session or address, a broken input, an unknown option
    130  the command was interrupted

Standard output is for results, standard error for people. With --json, an error is the last line of standard error, as one JSON
object. `kilburn.cli.commands` has the table of commands.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer
import typer.main
from typer import Option

from kilburn import __version__
from kilburn.cli.commands import Commands
from kilburn.cli.commands import app as app
from kilburn.errors import (
    DamageWarning,
    Forgotten,
    HitRateWarning,
    KernelError,
    KilburnError,
    MemoryRefused,
    SpecError,
    WireError,
)
from kilburn.terminal import say, spelled, tell

USAGE = (WireError, SpecError, KernelError, MemoryRefused)
"""Errors in the arguments."""

ParserError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Errors of the command line's parser; their messages quote the arguments."""

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

NEXT = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file",
    errno.EACCES: "check who may read and write there",
    errno.EPERM: "check who may read and write there",
    errno.EROFS: "give a place that can be written to",
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room on the disk",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
}
"""Advice for errors of the operating system."""


@cache
def _build(commands: typer.Typer) -> Any:
    """Build the program of some commands. It is cached, because building it takes longer than most commands."""
    return typer.main.get_command(commands)


def load() -> Commands:
    """Return the whole program with every command loaded, including those of other packages."""
    program = _build(app)
    assert isinstance(program, Commands)
    program.load(program.list_commands(None))
    return program


def _inherited(name: str, default: str) -> Any:
    """Return a callback that uses the program's option if the command has none."""

    def choose(ctx: typer.Context, value: str | None) -> str:
        return value or ctx.find_root().params.get(name) or default

    return choose


Db = Annotated[
    str | None,
    Option(
        "--db",
        metavar="FILE",
        callback=_inherited("db", "agent.db"),
        help="The file of the store, or its URL in PostgreSQL; by default $KILBURN_DB, then agent.db.",
    ),
]
Tenant = Annotated[
    str | None,
    Option(
        "--tenant",
        metavar="NAME",
        callback=_inherited("tenant", "default"),
        help="The partition of the store; by default $KILBURN_TENANT, then default.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON, for programs; errors, too, on standard error.")]
Force = Annotated[bool, Option("--force", help="Replace an existing file.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]
Why = Annotated[str, Option(metavar="TEXT", help="Record this reason in the ledger; it must not quote the content.")]


def _show_version(value: bool) -> None:
    if value:
        tell(f"kilburn {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
    db: Annotated[
        str | None,
        Option(metavar="FILE", envvar="KILBURN_DB", help="The file of the store, or its URL in PostgreSQL; by default agent.db."),
    ] = None,
    tenant: Annotated[str | None, Option(metavar="NAME", envvar="KILBURN_TENANT", help="The partition of the store.")] = None,
    debug: Annotated[bool, Option("--debug", envvar="KILBURN_DEBUG", help="Print the traceback of an error.")] = False,
) -> None:
    """A one-level store for LLM agents: the whole past is addressable, the window never overflows, nothing is lost."""


def main(arguments: Sequence[str] | None = None, *, commands: typer.Typer = app, name: str = "kilburn") -> int:
    """Run one command, and return the exit status. Without `arguments`, those of the process are used.

    Args:
        commands: other commands than Kilburn's, for a program of `lab/recipes/` with the same exit statuses and errors.
        name: the name of the program.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- it stays open as long as the process
    if sys.stdout is None:
        closed = OSError("standard output is closed; give it a file, a pipe or /dev/null")
        return _fail(words, closed, f"{name}: {closed}", 1)
    with warnings.catch_warnings():
        # The printed figures contain this warning.
        warnings.simplefilter("ignore", HitRateWarning)
        warnings.simplefilter("always", DamageWarning)
        warnings.showwarning = lambda message, *_, **__: say(f"{name}: {message}")
        status = _run(words, commands, name)
    if arguments is None:
        gc.freeze()  # saves the search for cycles at the end of the process, which takes 40 ms
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _hush()
        return 1
    return status


def _run(arguments: list[str], commands: typer.Typer, name: str) -> int:
    try:
        status = _build(commands).main(args=arguments, prog_name=name, standalone_mode=False)
        if status == INTERRUPTED:  # the parser has caught the exception
            return _fail(arguments, KeyboardInterrupt(), f"{name}: interrupted", INTERRUPTED)
        return status if isinstance(status, int) else 0
    except ParserError as error:
        words = io.StringIO()
        error.show(file=words)
        return _fail(arguments, error, words.getvalue().rstrip("\n"), int(error.exit_code))
    except typer.Abort as error:
        return _fail(arguments, error, "Aborted!", 1)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt as error:
        return _fail(arguments, error, f"{name}: interrupted", INTERRUPTED)
    except (KilburnError, OSError, UnicodeError) as error:
        if isinstance(error, BrokenPipeError):
            _hush()
            return 1
        if _wants_debug(arguments):
            say(traceback.format_exc())
        status = 2 if isinstance(error, USAGE) and not isinstance(error, Forgotten) else 1
        return _fail(arguments, error, f"{name}: {' '.join(_describe(error).split())}", status)
    except Exception as error:
        if not _wants_json(arguments):
            raise
        say(traceback.format_exc())  # a bug of this program: print the traceback, and then the JSON object
        return _fail(arguments, error, "", 1)


def _fail(arguments: list[str], error: BaseException, words: str, status: int) -> int:
    """Print an error on standard error, as JSON with --json, and return the exit status."""
    if _wants_json(arguments):
        say(spelled(json.dumps({"error": described(error) | {"status": status}}, ensure_ascii=False)))
    elif words:
        say(words)
    return status


def described(error: BaseException) -> dict[str, str]:
    """Describe an error for a program: its type, boundary, message and advice; "" if unknown."""
    message, advice, boundary = _format_message(error), _find_advice(error), ""
    if isinstance(error, KilburnError):
        boundary = error.boundary
    elif isinstance(error, ParserError):
        boundary = "command line"
        context = getattr(error, "ctx", None)
        advice = f"see {f'{context.command_path} ' if context is not None else ''}--help"
    elif isinstance(error, OSError):
        boundary = "system"
    return {"type": type(error).__name__, "boundary": boundary, "message": message, "advice": advice}


def _format_message(error: BaseException) -> str:
    if isinstance(error, ParserError):
        return str(error.format_message())
    if isinstance(error, KilburnError):
        return error.what + "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or {"KeyboardInterrupt": "interrupted", "Abort": "aborted"}.get(type(error).__name__, "")


def _wants_json(arguments: list[str]) -> bool:
    """Return whether --json is given. The arguments are searched, because the parser may have refused them."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in words


def _wants_debug(arguments: list[str]) -> bool:
    verb = next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    return "--debug" in arguments[:verb] or bool(os.environ.get("KILBURN_DEBUG"))


def _find_advice(error: BaseException) -> str:
    return error.advice if isinstance(error, KilburnError) else NEXT.get(getattr(error, "errno", None) or 0, "")


def _describe(error: BaseException) -> str:
    return ": ".join(filter(None, (_format_message(error), _find_advice(error))))


def _hush() -> None:
    """Write nothing more to standard output, whose reader has closed it, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
