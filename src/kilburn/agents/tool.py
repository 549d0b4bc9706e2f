"""A tool is a typed Python function: its signature is the schema, its docstring the description.

    def read(path: str, start: int = 1) -> str:
        \"\"\"Read a text file from line `start` on.\"\"\"

Arguments are checked against the types before the function sees them. An exception of the function becomes a
`ToolError`, which an agent shows to the model.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kilburn.agents.access import Deed, whereabouts
from kilburn.errors import KilburnError, SpecError, ToolError
from kilburn.model import ToolSpec

__all__ = ["Tool"]


def text_spec(name: str, purpose: str, /, **texts: str) -> ToolSpec:
    """Return the specification of a tool whose arguments are texts, all of them required.

    Args:
        texts: description of each text, by its name.
    """
    properties = {text: {"type": "string", "description": about} for text, about in texts.items()}
    parameters = {"type": "object", "properties": properties, "required": [*texts], "additionalProperties": False}
    return ToolSpec(name=name, description=purpose, parameters=parameters)


def decode_texts(spec: ToolSpec, arguments: str) -> dict[str, str]:
    """Decode the texts of a call of such a tool, by their names, from JSON.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the arguments do not fit.
    """
    fields = [(name, str) for name in spec.parameters["properties"]]
    decoded = msgspec.json.decode(arguments or "{}", type=msgspec.defstruct(spec.name, fields, forbid_unknown_fields=True))
    return msgspec.structs.asdict(decoded)


class Tool:
    """A function that a model may call.

    Args:
        function: plain or async; every parameter has a type and is JSON-able; no *args or **kwargs.
        name: name of the tool; the function's name by default.
        does: effect of the tool: "read", "write" or "irreversible".
        paths: parameters that are paths of files or folders, or lists of them. If the agent's rights name folders, these are
            checked, and the function gets them resolved.
        clean: whether its results contain no foreign text, such as those of a clock: they are not an untrusted read.

    Raises:
        SpecError: a parameter without a type, or of a type that JSON cannot carry; a path that is no parameter; another value
            of `does`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        does: Deed | str = Deed.WRITE,
        paths: Sequence[str] = (),
        clean: bool = False,
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        self.paths, self.clean = tuple(paths), clean
        if does not in [*Deed]:
            raise SpecError(f"does={does!r} of {self.name}"[:200], advice=f"use one of {', '.join(Deed)}")
        self.deed = Deed(does)
        try:
            hints = typing.get_type_hints(function)
            fields = [self._field(parameter, hints) for parameter in inspect.signature(function).parameters.values()]
            self._arguments = msgspec.defstruct(f"{self.name}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
            schema, components = msgspec.json.schema_components([self._arguments], ref_template="#/$defs/{name}")
        except (TypeError, NameError) as error:
            raise SpecError(f"{self.name} cannot be a tool: {error}", advice="give each parameter a JSON-able type") from error
        if isinstance(paths, str) or (unknown := set(paths) - set(self._arguments.__struct_fields__)):
            path_name = paths if isinstance(paths, str) else min(unknown)
            raise SpecError(f"paths={path_name!r} of {self.name}", advice="give a tuple of the names of its parameters")
        argument_schema = components.pop(self._arguments.__name__, schema[0])
        parameters = {key: value for key, value in argument_schema.items() if key != "title"} | (
            {"$defs": components} if components else {}
        )
        description = inspect.cleandoc(function.__doc__ or "") or self.name
        self.spec = ToolSpec(name=self.name, description=description, parameters={"properties": {}, **parameters})

    def _field(self, parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name not in hints:
            raise TypeError(f"parameter {parameter.name!r} has no type")
        if parameter.default is parameter.empty:
            return parameter.name, hints[parameter.name]
        default = parameter.default
        if isinstance(default, list | dict | set):
            template = default
            return parameter.name, hints[parameter.name], msgspec.field(default_factory=lambda: type(template)(template))
        return parameter.name, hints[parameter.name], default

    def call(self, arguments: str, loop: asyncio.AbstractEventLoop | None = None) -> str:
        """Run the function on JSON arguments; returns its result as text (JSON, unless it is a string).

        Args:
            loop: a running event loop for async functions; without one, they get their own.

        Raises:
            ToolError: the arguments do not fit, or the function raised.
        """
        return self.run(self.values(arguments), loop)

    def values(self, arguments: str) -> dict[str, Any]:
        """Return the values of all parameters, from JSON arguments.

        Raises:
            ToolError: the arguments do not fit.
        """
        try:
            decoded = msgspec.json.decode(arguments or "{}", type=self._arguments, strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ToolError(f"{self.name}: {error}", advice="see the tool's parameters") from error
        return {field: getattr(decoded, field) for field in self._arguments.__struct_fields__}

    def resolved(self, values: dict[str, Any]) -> dict[str, str | list[str]]:
        """Resolve the parameters that are paths; those without a value are left out.

        Raises:
            ToolError: one is not a path.
        """
        paths = {name: values[name] for name in self.paths if values[name] is not None}
        try:
            return {
                name: [whereabouts(path) for path in value] if isinstance(value, list | tuple | set) else whereabouts(value)
                for name, value in paths.items()
            }
        except (TypeError, ValueError, OSError) as error:
            raise ToolError(f"{self.name}: not a path: {error}", advice="give the path of a file or folder") from error

    def run(self, values: dict[str, Any], loop: asyncio.AbstractEventLoop | None = None) -> str:
        """Run the function on the values of its parameters; see `call`.

        Raises:
            ToolError: the function raised.
        """
        return self._run(values, loop, _text)

    def json(self, values: dict[str, Any]) -> str:
        """Return the function's result as JSON, for code that goes on with the value.

        Raises:
            ToolError: the function raised, or JSON cannot carry its result.
        """
        return self._run(values, None, lambda result: msgspec.json.encode(result).decode())

    def _run(self, values: dict[str, Any], loop: asyncio.AbstractEventLoop | None, form: Callable[[Any], str]) -> str:
        try:
            result = self.function(**values)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_await(result), loop).result() if loop else asyncio.run(_await(result))
            return form(result)
        except KilburnError as error:
            raise ToolError(f"{self.name}: {error.what}", advice=error.advice) from error
        except Exception as error:
            raise ToolError(f"{self.name}: {type(error).__name__}: {error}") from error


async def _await(value: Any) -> Any:
    return await value


def _text(result: Any) -> str:
    """Return a result as text that JSON can carry: lone surrogates are written out."""
    text = result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
