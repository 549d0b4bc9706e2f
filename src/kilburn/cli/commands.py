"""The table of commands, and how they are loaded and shown under `--help`.

A command's module registers it with `app` when it is imported, and it is imported when the command is used. Other packages
bring commands by an entry point of the group `kilburn.commands`, whose name is the command and whose value is a `typer.Typer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from kilburn.cli.options import command_function
from kilburn.errors import MissingExtra


class CommandRow(NamedTuple):
    """A row of the table: the summary of a command in `--help`, and its module if the name differs."""

    summary: str
    module: str = ""


PANELS = {
    "Everyday": {
        "serve": CommandRow("Serve the APIs of OpenAI and Anthropic in front of one upstream."),
        "chat": CommandRow("Chat with a model that can recall what left its window."),
        "ask": CommandRow("Ask questions about files that are larger than any window."),
        "ps": CommandRow("List the sessions of a store.", "session"),
        "recall": CommandRow("Print the exact text at an address."),
        "search": CommandRow("Search sessions, memories and documents.", "recall"),
        "receipts": CommandRow("List compactions: what left the window, when and why."),
        "dashboard": CommandRow("Show sessions and their compactions in a browser."),
        "demo": CommandRow("Watch an agent read the Python standard library."),
    },
    "Memory": {
        "remember": CommandRow("Remember a fact, for one user or for all.", "memories"),
        "learn": CommandRow("Learn facts from the messages of a session."),
        "memories": CommandRow("List, inspect and retract remembered facts."),
        "notes": CommandRow("Write and read named notes, with all their versions."),
        "documents": CommandRow("Add and list documents that are searched with the memory."),
        "workflows": CommandRow("List and write workflows learned from successful tasks."),
        "guidelines": CommandRow("List and write guidelines learned from feedback."),
        "forget": CommandRow("Forget pages, and all that was derived from them, for good."),
    },
    "Sessions and stores": {
        "import": CommandRow("Import sessions from JSONL, completely or not at all.", "transfer"),
        "export": CommandRow("Export sessions as JSONL, each message as it was appended.", "transfer"),
        "copy": CommandRow("Copy a store into another one, and compare the two."),
        "show": CommandRow("Show the page table of a session, or some of its pages.", "session"),
        "stats": CommandRow("Show the figures of a session.", "session"),
        "window": CommandRow("Show what a prompt holds, preview evictions, and undo them."),
        "replay": CommandRow("Replay recorded runs through a window."),
        "sessions": CommandRow("Archive and forget old sessions by a retention rule."),
        "fsck": CommandRow("Check a store, and repair what can be repaired."),
    },
    "Operations": {
        "keys": CommandRow("Create, list and revoke the keys of a gateway's clients."),
        "worker": CommandRow("Run background work: learning, embedding, expiry, erasure."),
        "postgres": CommandRow("Run a local PostgreSQL server for a store."),
        "cold": CommandRow("Move texts that are rarely read to a folder or a bucket."),
        "metrics": CommandRow("Print a Grafana board, and alerts, for a gateway's metrics."),
        "models": CommandRow("List and download model files."),
        "mcp": CommandRow("Serve one user's sessions, memory and documents over MCP."),
        "top": CommandRow("Watch the windows of all sessions live."),
        "policies": CommandRow("List the policies that ship with Kilburn."),
    },
}
"""The panels of `kilburn --help`, with their commands."""

COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}

Function = TypeVar("Function", bound=Callable[..., Any])

ENTRY_POINTS = "kilburn.commands"
"""The group of entry points for commands of other packages."""

LABORATORY = "lab"
"""The command of the laboratory, a separate distribution that the documentation mentions."""


def _entry_points() -> list[Any]:
    from importlib.metadata import entry_points  # takes 12 ms, and most commands do not need it

    return sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)


class _Coercion:
    """Converts the value of a parameter, with Typer only if the value does not have the right type already.

    Typer converts each value with pydantic, even None, and importing pydantic takes longer than most commands.
    """

    def __init__(self, param: Any) -> None:
        self._type, self._parser = param.type_descriptor.annotation, param.type_descriptor.parameter_info.parser

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value for the command's function."""
        if param.multiple or param.nargs == -1:
            if self._type == list[str] and self._parser is None and not isinstance(value, str):
                return list(value or ())
        elif value is None or (type(value) is self._type and self._parser is None):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _without_pydantic(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "_runtime_param", param) is None:
            param._runtime_param = _Coercion(param)
    return params


class PlainCommand(TyperCommand):
    """A command with a help panel for each `rich_help_panel` of its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with `--help`."""
        return _without_pydantic(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options, and then the options of each panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


class PlainGroup(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with `--help`."""
        return _without_pydantic(super().get_params(ctx))


class Commands(PlainGroup):
    """The commands of `kilburn`. Each is imported when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, including those of other packages."""
        return [*COMMANDS, *(entry.name for entry in _entry_points() if entry.name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load and return a command; None if there is no such command."""
        if cmd_name not in self.commands:
            self.load([cmd_name])
        return self.commands.get(cmd_name)

    def load(self, names: Sequence[str]) -> None:
        """Import the modules of commands.

        Raises:
            MissingExtra: the laboratory is not installed.
        """
        for name in names:
            if name in COMMANDS:
                importlib.import_module(f".{COMMANDS[name].module or name}", __package__)
                continue
            entries = [entry for entry in _entry_points() if entry.name == name]
            if not entries and name == LABORATORY:
                raise MissingExtra("the laboratory, kilburn-lab,", LABORATORY)
            for entry in entries:
                app.add_typer(entry.load(), name=name)
        self.commands.update(getattr(typer.main.get_command(app), "commands", {}))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. The error for an unknown name suggests similar names."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from difflib import get_close_matches  # only for an error

            near = " or ".join(repr(match) for match in get_close_matches(name, self.list_commands(ctx), 2))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summaries of the commands in panels, without loading any."""
        panels = {panel: {name: entry.summary for name, entry in rows.items()} for panel, rows in PANELS.items()}
        for entry in _entry_points():
            if entry.name == LABORATORY:
                panels.setdefault("Laboratory", {})[entry.name] = "Measure policies, memory and caches."
            elif entry.name not in COMMANDS:
                summary = entry.dist.metadata["Summary"] if entry.dist else ""
                panels.setdefault("Other packages", {})[entry.name] = summary
        width = max(len(name) for rows in panels.values() for name in rows)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in rows.items()])


class Application(typer.Typer):
    """A Typer application whose commands are of class `PlainCommand`, with plain help."""

    def __init__(self, *, cls: type[TyperGroup] = PlainGroup, **settings: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = PlainCommand, **settings: Any
    ) -> Callable[[Function], Function]:
        """Register a command, whose options are described in its docstring; see `kilburn.cli.options`."""
        register = super().command(name, cls=cls, **settings)

        def decorate(function: Function) -> Function:
            register(command_function(function))
            return function

        return decorate


app = Application(
    name="kilburn",
    cls=Commands,
    help="A one-level store for LLM agents: the whole past is addressable, the window never overflows, nothing is lost.",
    epilog="Begin with: kilburn demo",
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def command_group(name: str) -> Application:
    """Register a command with subcommands, and return the group to which they are added."""
    group = Application(help=COMMANDS[name].summary)
    app.add_typer(group, name=name)
    return group
