"""The program around the verbs: its options, its exit status, its errors.

    0    done 1    it was done and something is wrong (findings, overflow, loss), or it failed 2    the arguments
    cannot be used: no such file, session or address, a broken input, an unknown option 130  interrupted

Standard output is for results; standard error is for people. With --json an error is the last line of standard error, as
one JSON object. A verb is loaded when it is used: its module registers it with `app`. Other packages bring verbs by an entry
point of the group `kilburn.commands`, whose name is the verb and whose value is a `typer.Typer`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.main
from typer import Option
from typer.core import TyperGroup

from kilburn import __version__
from kilburn.errors import Forgotten, KernelError, KilburnError, MemoryRefused, MissingExtra, SpecError, WireError
from kilburn.kernel.session import HitRateWarning
from kilburn.search.found import DamageWarning
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

VERBS = {
    "ask": "Ask about files that are larger than any window.",
    "chat": "Talk with a model; it can recall what left its window.",
    "demo": "An agent reads the Python standard library: watch its window.",
    "forget": "Forget pages, with what was made from them, for good.",
    "remember": "Remember a fact for long, for one user or for all.",
    "fsck": "Check a store, and mend what can be mended.",
    "ps": "List the sessions of a store.",
    "stats": "Show the figures of one session.",
    "show": "Show a session's page table, or all about some pages.",
    "learn": "Learn facts from what was said in a session.",
    "mcp": "Serve one user's sessions, memory and documents over MCP.",
    "policies": "List the policies that ship with Kilburn.",
    "recall": "Write the exact text at an address.",
    "search": "Find passages in sessions, facts and documents.",
    "window": "What a session's prompt holds, what would leave, and undo.",
    "receipts": "List what each compaction took out, why, by which policy.",
    "replay": "Stream recorded runs through a window.",
    "serve": "Serve OpenAI's and Anthropic's API, with one upstream behind.",
    "top": "Watch the levels live.",
    "metrics": "A Grafana board, and alerts, for a gateway's /metrics.",
    "dashboard": "Show in a browser what left each window, and the way back.",
    "sessions": "How sessions end: archived, then forgotten.",
    "cold": "Texts that nobody has read for long, in a folder or bucket.",
    "copy": "Copy everything of a store into another, and compare both.",
    "export": "Write sessions as JSONL, every message as it was appended.",
    "import": "Import sessions into a store: all of a file, or nothing.",
    "memories": "What is remembered for long.",
    "notes": "Texts with names that a user or an agent keeps.",
    "workflows": "How tasks were done, learned from successes.",
    "guidelines": "How to work, learned from feedback.",
    "documents": "Texts to be searched beside the memory.",
    "worker": "Do what waits: learn, embed, expire, erase.",
    "keys": "The gateway's keys: who may come in.",
    "models": "Model files: which are known, which are here.",
    "postgres": "A PostgreSQL of one's own, for a store.",
}
"""Each verb, and what `--help` says of it before it is loaded."""

ENTRIES = "kilburn.commands"
"""The group of entry points with verbs of other packages."""


LABORATORY = "lab"
"""The verb of the laboratory, which pages name and not everybody has."""


class Verbs(TyperGroup):
    """The verbs of `kilburn`; each is loaded when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All verbs, those of other packages too."""
        return [*VERBS, *sorted(entry.name for entry in entry_points(group=ENTRIES) if entry.name not in VERBS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb, loaded; None where there is no such verb."""
        if cmd_name not in self.commands:
            if cmd_name in VERBS:
                _register(cmd_name)
            else:
                others = entry_points(group=ENTRIES, name=cmd_name)
                if not others and cmd_name == LABORATORY:
                    raise MissingExtra("the laboratory, kilburn-lab,", LABORATORY)
                for entry in others:
                    app.add_typer(entry.load(), name=cmd_name)
            self.commands.update(getattr(typer.main.get_command(app), "commands", {}))
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """What each verb does, without loading any."""
        others = {entry.name: (entry.dist.metadata["Summary"] if entry.dist else "") for entry in entry_points(group=ENTRIES)}
        with formatter.section("Commands"):
            formatter.write_dl([(verb, VERBS.get(verb) or others[verb]) for verb in self.list_commands(ctx)])


def _register(verb: str) -> ModuleType:
    """Import the module that registers a verb with `app`. The type checker sees each import, and no other verb is loaded."""
    match verb:
        case "ask":
            from kilburn.cli import ask

            return ask
        case "chat":
            from kilburn.cli import chat

            return chat
        case "demo":
            from kilburn.cli import demo

            return demo
        case "forget":
            from kilburn.cli import forget

            return forget
        case "notes":
            from kilburn.cli import notes

            return notes
        case "workflows":
            from kilburn.cli import workflows

            return workflows
        case "guidelines":
            from kilburn.cli import guidelines

            return guidelines
        case "remember" | "memories":
            from kilburn.cli import memories

            return memories
        case "fsck":
            from kilburn.cli import fsck

            return fsck
        case "ps" | "stats" | "show":
            from kilburn.cli import session

            return session
        case "learn":
            from kilburn.cli import learn

            return learn
        case "mcp":
            from kilburn.cli import mcp

            return mcp
        case "policies":
            from kilburn.cli import policies

            return policies
        case "recall" | "search":
            from kilburn.cli import recall

            return recall
        case "window":
            from kilburn.cli import window

            return window
        case "receipts":
            from kilburn.cli import receipts

            return receipts
        case "replay":
            from kilburn.cli import replay

            return replay
        case "serve":
            from kilburn.cli import serve

            return serve
        case "top":
            from kilburn.cli import top

            return top
        case "metrics":
            from kilburn.cli import metrics

            return metrics
        case "dashboard":
            from kilburn.cli import dashboard

            return dashboard
        case "sessions":
            from kilburn.cli import sessions

            return sessions
        case "cold":
            from kilburn.cli import cold

            return cold
        case "copy":
            from kilburn.cli import copy

            return copy
        case "export" | "import":
            from kilburn.cli import transfer

            return transfer
        case "documents":
            from kilburn.cli import documents

            return documents
        case "keys":
            from kilburn.cli import keys

            return keys
        case "worker":
            from kilburn.cli import worker

            return worker
        case "models":
            from kilburn.cli import models

            return models
        case "postgres":
            from kilburn.cli import postgres

            return postgres
    raise KeyError(verb)


@cache
def _made(commands: typer.Typer) -> Any:
    """The program of some commands: made once, as making it takes longer than most commands, and a process may run many."""
    return typer.main.get_command(commands)


def load() -> Verbs:
    """The whole program with every verb loaded, those of other packages too."""
    program = _made(app)
    assert isinstance(program, Verbs)
    for verb in program.list_commands(None):
        program.get_command(None, verb)
    return program


app = typer.Typer(
    name="kilburn",
    cls=Verbs,
    help="A one-level store for LLM agents: the whole past is addressable, the window never overflows, nothing is lost.",
    epilog="Begin with: kilburn demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def _show_version(wanted: bool) -> None:
    if wanted:
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- it is open as long as the session
    if sys.stdout is None:
        closed = OSError("standard output is closed; give it a file, a pipe or /dev/null")
        return _fail(given, closed, f"{name}: {closed}", 1)
    with warnings.catch_warnings():
        # The figures say it in words where they are shown.
        warnings.simplefilter("ignore", HitRateWarning)
        warnings.simplefilter("always", DamageWarning)
        warnings.showwarning = lambda message, *_, **__: say(f"{name}: {message}")
        status = _run(given, commands, name)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _hush()
        return 1
    return status


def _run(given: list[str], commands: typer.Typer, name: str) -> int:
    try:
        status = _made(commands).main(args=given, prog_name=name, standalone_mode=False)
        if status == INTERRUPTED:  # the parser has caught it
            return _fail(given, KeyboardInterrupt(), f"{name}: interrupted", INTERRUPTED)
        return status if isinstance(status, int) else 0
    except Unusable as error:
        words = io.StringIO()
        error.show(file=words)
        return _fail(given, error, words.getvalue().rstrip("\n"), int(error.exit_code))
    except typer.Abort as error:
        return _fail(given, error, "Aborted!", 1)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt as error:
        return _fail(given, error, f"{name}: interrupted", INTERRUPTED)
    except (KilburnError, OSError, UnicodeError) as error:
        if isinstance(error, BrokenPipeError):
            _hush()
            return 1
        if _wants_debug(given):
            say(traceback.format_exc())
        status = 2 if isinstance(error, USAGE) and not isinstance(error, Forgotten) else 1
        return _fail(given, error, f"{name}: {' '.join(_words_of(error).split())}", status)
    except Exception as error:
        if not _wants_json(given):
            raise
        say(traceback.format_exc())  # a fault of this program: what Python would print, and then the object
        return _fail(given, error, "", 1)


def _fail(given: list[str], error: BaseException, words: str, status: int) -> int:
    """Tell people, or a program that gave --json, on standard error; returns the exit status.

    Standard output holds results only: what reads it takes no error for one.
    """
    if _wants_json(given):
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


def _wants_json(given: list[str]) -> bool:
    """Whether a program is to read what is said. The command line may be the fault itself, so its words are looked at."""
    words = given[: given.index("--")] if "--" in given else given
    return "--json" in words


def _wants_debug(given: list[str]) -> bool:
    verb = next((at for at, word in enumerate(given) if not word.startswith("-")), len(given))
    return "--debug" in given[:verb] or bool(os.environ.get("KILBURN_DEBUG"))


def _advice_of(error: BaseException) -> str:
    return error.advice if isinstance(error, KilburnError) else NEXT.get(getattr(error, "errno", None) or 0, "")


def _words_of(error: BaseException) -> str:
    return ": ".join(filter(None, (_message_of(error), _advice_of(error))))


def _hush() -> None:
    """The reader of our output is gone: write nothing more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
