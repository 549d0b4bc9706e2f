"""The program around the verbs: its options, its exit status, its errors.

    0    done 1    it was done and something is wrong (findings, overflow, loss), or it failed 2    the arguments
    cannot be used: no such file, session or address, a broken input, an unknown option 130  interrupted

Standard output is for results; standard error is for people. With --json an error is the last line of standard error, as
one JSON object. `kilburn.cli.commands` has the table of commands.
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

Unusable: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
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
"""What to do about an error of the operating system."""


@cache
def _made(commands: typer.Typer) -> Any:
    """The program of some commands: made once, as making it takes longer than most commands, and a process may run many."""
    return typer.main.get_command(commands)


def load() -> Commands:
    """The whole program with every verb loaded, those of other packages too."""
    program = _made(app)
    assert isinstance(program, Commands)
    program.load(program.list_commands(None))
    return program


def _inherited(name: str, otherwise: str) -> Any:
    """A callback that takes the program's option if the verb has none."""

    def choose(ctx: typer.Context, value: str | None) -> str:
        return value or ctx.find_root().params.get(name) or otherwise

    return choose


Db = Annotated[
    str | None,
    Option(
        "--db",
        metavar="FILE",
        callback=_inherited("db", "agent.db"),
        help="The store's file, or its URL in PostgreSQL; else $KILBURN_DB, else agent.db.",
    ),
]
Tenant = Annotated[
    str | None,
    Option(
        "--tenant",
        metavar="NAME",
        callback=_inherited("tenant", "default"),
        help="The partition; else $KILBURN_TENANT, else default.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON, for programs; an error too, on standard error.")]
Force = Annotated[bool, Option("--force", help="Replace a file that is there already.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
Why = Annotated[str, Option(metavar="TEXT", help="A reason for the ledger; say nothing of the content.")]


def _show_version(value: bool) -> None:
    if value:
        tell(f"kilburn {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
    db: Annotated[
        str | None,
        Option(metavar="FILE", envvar="KILBURN_DB", help="The store's file, or its URL in PostgreSQL; agent.db by default."),
    ] = None,
    tenant: Annotated[str | None, Option(metavar="NAME", envvar="KILBURN_TENANT", help="The partition in it.")] = None,
    debug: Annotated[bool, Option("--debug", envvar="KILBURN_DEBUG", help="Show where an error came from.")] = False,
) -> None:
    """A one-level store for LLM agents: the whole past is addressable, the window never overflows, nothing is lost."""


def main(arguments: Sequence[str] | None = None, *, commands: typer.Typer = app, name: str = "kilburn") -> int:
    """Run one verb; returns the exit status. Without arguments it takes those of the operating-system process.

    Args:
        commands: other than Kilburn's own: a program of `lab/recipes/` has the same exit statuses and errors. name: its name.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- it is open as long as the session
    if sys.stdout is None:
        closed = OSError("standard output is closed; give it a file, a pipe or /dev/null")
        return _fail(words, closed, f"{name}: {closed}", 1)
    with warnings.catch_warnings():
        # The figures say it in words where they are shown.
        warnings.simplefilter("ignore", HitRateWarning)
        warnings.simplefilter("always", DamageWarning)
        warnings.showwarning = lambda message, *_, **__: say(f"{name}: {message}")
        status = _run(words, commands, name)
    if arguments is None:
        gc.freeze()  # the process ends, and the search for cycles at its end takes 40 ms
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _hush()
        return 1
    return status


def _run(arguments: list[str], commands: typer.Typer, name: str) -> int:
    try:
        status = _made(commands).main(args=arguments, prog_name=name, standalone_mode=False)
        if status == INTERRUPTED:  # the parser has caught it
            return _fail(arguments, KeyboardInterrupt(), f"{name}: interrupted", INTERRUPTED)
        return status if isinstance(status, int) else 0
    except Unusable as error:
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
        return _fail(arguments, error, f"{name}: {' '.join(_words_of(error).split())}", status)
    except Exception as error:
        if not _wants_json(arguments):
            raise
        say(traceback.format_exc())  # a fault of this program: what Python would print, and then the object
        return _fail(arguments, error, "", 1)


def _fail(arguments: list[str], error: BaseException, words: str, status: int) -> int:
    """Tell people, or a program that gave --json, on standard error; returns the exit status.

    Standard output holds results only: what reads it takes no error for one.
    """
    if _wants_json(arguments):
        say(spelled(json.dumps({"error": described(error) | {"status": status}}, ensure_ascii=False)))
    elif words:
        say(words)
    return status


def described(error: BaseException) -> dict[str, str]:
    """An error for a program: its type, the boundary where it happened, what it was and what to do, "" where not known."""
    message, advice, boundary = _message_of(error), _advice_of(error), ""
    if isinstance(error, KilburnError):
        boundary = error.boundary
    elif isinstance(error, Unusable):
        boundary = "command line"
        context = getattr(error, "ctx", None)
        advice = f"see {f'{context.command_path} ' if context is not None else ''}--help"
    elif isinstance(error, OSError):
        boundary = "system"
    return {"type": type(error).__name__, "boundary": boundary, "message": message, "advice": advice}


def _message_of(error: BaseException) -> str:
    if isinstance(error, Unusable):
        return str(error.format_message())
    if isinstance(error, KilburnError):
        return error.what + "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or {"KeyboardInterrupt": "interrupted", "Abort": "aborted"}.get(type(error).__name__, "")


def _wants_json(arguments: list[str]) -> bool:
    """Whether a program is to read what is said. The command line may be the fault itself, so its words are looked at."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in words


def _wants_debug(arguments: list[str]) -> bool:
    verb = next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    return "--debug" in arguments[:verb] or bool(os.environ.get("KILBURN_DEBUG"))


def _advice_of(error: BaseException) -> str:
    return error.advice if isinstance(error, KilburnError) else NEXT.get(getattr(error, "errno", None) or 0, "")


def _words_of(error: BaseException) -> str:
    return ": ".join(filter(None, (_message_of(error), _advice_of(error))))


def _hush() -> None:
    """The reader of our output is gone: write nothing more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
