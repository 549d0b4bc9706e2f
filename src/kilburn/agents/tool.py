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
from collections.abc import Callable
from typing import Any

import msgspec

from kilburn.errors import SpecError, ToolError
from kilburn.model import ToolSpec

__all__ = ["Tool"]


class Tool:
    """One function that a model may call.

    Args:
        function: plain or async; every parameter has a type and is JSON-able; no *args or **kwargs.
        name: how the model calls it; the function's own name by default.

    Raises:
        SpecError: a parameter without a type, or one that JSON cannot carry.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or function.__name__
        try:
            hints = typing.get_type_hints(function)
            fields = [self._field(parameter, hints) for parameter in inspect.signature(function).parameters.values()]
            self._arguments = msgspec.defstruct(f"{self.name}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
            schema, components = msgspec.json.schema_components([self._arguments], ref_template="#/$defs/{name}")
        except (TypeError, NameError) as error:
            raise SpecError(f"{self.name} cannot be a tool: {error}", advice="give each parameter a JSON-able type") from error
        own = components.pop(self._arguments.__name__, schema[0])
        parameters = {key: value for key, value in own.items() if key != "title"} | ({"$defs": components} if components else {})
        description = inspect.cleandoc(function.__doc__ or "") or self.name
        self.spec = ToolSpec(name=self.name, description=description, parameters={"properties": {}, **parameters})

    def _field(self, parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name not in hints:
            raise TypeError(f"parameter {parameter.name!r} has no type")
        if parameter.default is parameter.empty:
            return parameter.name, hints[parameter.name]
        default = parameter.default
        if isinstance(default, list | dict | set):
            kept = default
            return parameter.name, hints[parameter.name], msgspec.field(default_factory=lambda: type(kept)(kept))
        return parameter.name, hints[parameter.name], default

    def call(self, arguments: str, loop: asyncio.AbstractEventLoop | None = None) -> str:
        """Run the function on JSON arguments; returns its result as text (JSON, unless it is a string).

        Args:
            loop: a running event loop for async functions; without one, they get their own.

        Raises:
            ToolError: the arguments do not fit, or the function raised.
        """
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments, strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ToolError(f"{self.name}: {error}", advice="see the tool's parameters") from error
        values = {field: getattr(given, field) for field in self._arguments.__struct_fields__}
        try:
            result = self.function(**values)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_await(result), loop).result() if loop else asyncio.run(_await(result))
            return _text(result)
        except Exception as error:
            raise ToolError(f"{self.name}: {type(error).__name__}: {error}") from error


async def _await(value: Any) -> Any:
    return await value


def _text(result: Any) -> str:
    """A result as text that JSON can carry: lone surrogates are written out."""
    text = result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
