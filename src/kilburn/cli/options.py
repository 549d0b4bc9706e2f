"""Arguments and options of commands, from signatures and docstrings.

The signature of a command has the types and defaults. The section `Args:` of its docstring has an entry for each parameter: its
name, the names of the option if they differ, the metavar, and the help text. A parameter without a default, or with its metavar
in brackets, is a positional argument. The section `Advanced:` has options that few people need in their first week.

    def move(place: str, older: str = "30d", dry: bool = False) -> None:
        '''Move texts that nobody has read for long.

Args:
            place PLACE: A folder, or s3://BUCKET/PATH.
            older --older-than TIME: Move texts that were not read for this long.
            dry --dry-run: Move nothing.
        '''

A parameter whose type is a struct of options stands for the struct's fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from typer import Argument, Option

SECTION = re.compile(r"^(Args|Advanced):\n((?:    .*\n*)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+)((?: [^\s:]+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)

ADVANCED = "Advanced"
"""The panel of `--help` for the options of the section `Advanced:`."""


class OptionEntry(NamedTuple):
    """An entry of a section: names of the option, metavar, help text, and the panel under `--help`."""

    names: tuple[str, ...]
    metavar: str | None
    help: str
    panel: str | None


def parse_docstring(docstring: str | None) -> tuple[str, dict[str, OptionEntry]]:
    """Return a docstring without its sections, and the entries of the sections by the names of their parameters."""
    text = cleandoc(docstring or "") + "\n"
    entries = {}
    for section, body in SECTION.findall(text):
        for parameter, words, help_text in ENTRY.findall(body):
            names = tuple(word for word in words.split() if word.startswith("-"))
            metavar = next((word for word in words.split() if word not in names), None)
            panel = ADVANCED if section == ADVANCED else None
            entries[parameter] = OptionEntry(names, metavar, " ".join(help_text.split()), panel)
    return SECTION.sub("", text).strip(), entries


def _described(parameter: Parameter, entry: OptionEntry | None) -> Parameter:
    """Return a parameter with the annotation that Typer needs."""
    if entry is None:
        return parameter
    annotation, required = parameter.annotation, parameter.default is Parameter.empty
    kind, *settings = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    is_argument = required or (entry.metavar or "").startswith("[")
    info = copy(settings[0]) if settings else Argument(show_default=bool(parameter.default)) if is_argument else Option()
    info.metavar = (entry.metavar or "").strip("[]") or None
    info.help, info.rich_help_panel = entry.help, entry.panel
    if is_argument:
        info.show_default = not required and bool(parameter.default)
    else:
        # Typer would add --no-NAME to the name of a flag that it chooses itself.
        info.param_decls = entry.names or (f"--{parameter.name.replace('_', '-')}",)
    return parameter.replace(annotation=Annotated[kind, info])


def command_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command's function as Typer needs it: annotated by its docstring, and with fields in place of structs.

    Raises:
        TypeError: an entry of the docstring names no parameter.
    """
    help_text, entries = parse_docstring(function.__doc__)
    plain: list[Parameter] = []
    groups: dict[str, tuple[type, list[Parameter]]] = {}
    for parameter in signature(function, eval_str=True).parameters.values():
        if hasattr(parameter.annotation, "__struct_fields__"):
            groups[parameter.name] = parameter.annotation, _fields(parameter.annotation)
        else:
            plain.append(_described(parameter, entries.get(parameter.name)))
    if unknown := entries.keys() - {parameter.name for parameter in plain}:
        raise TypeError(f"{function.__name__} has no parameter {min(unknown)!r}, which its docstring describes")
    if not entries and not groups:
        return function
    parameters = [*plain, *(field for _, fields in groups.values() for field in fields)]

    @wraps(function)
    def command(**values: Any) -> None:
        structs = {
            name: kind(**{field.name: values.pop(field.name) for field in fields}) for name, (kind, fields) in groups.items()
        }
        function(**values, **structs)

    command.__doc__ = help_text
    command.__signature__ = Signature([item.replace(kind=Parameter.KEYWORD_ONLY) for item in parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command


def _fields(struct: Any) -> list[Parameter]:
    """Return the fields of a struct as parameters."""
    import msgspec  # takes a third of the time of `kilburn --help`, which does not need it

    hints, (_, entries) = get_type_hints(struct, include_extras=True), parse_docstring(struct.__doc__)
    return [
        _described(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]),
            entries.get(field.name),
        )
        for field in msgspec.structs.fields(struct)
    ]
