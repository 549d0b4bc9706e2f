"""Models in a measurement: how they are asked to fill in a form, and what they were asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kilburn.kernel.resolve import resolve
from kilburn.model import Delta, Model, Reply, Request, complete
from kilburn_lab.evals.report import table_of

T = TypeVar("T")


def filled(model: Model, system: str, asked: str, forms: Sequence[Mapping[str, Any]], tokens: int, kind: type[T]) -> T | None:
    """What a model writes into one of some forms, with as little chance as it knows; None if its reply is none of them.

    Args:
        forms: by the name of each field, the JSON schema of its value; every field is wanted. tokens: of the reply, at most.
        kind: of what is returned.

    Raises:
        Refused, Overlong, RateLimited, Unavailable: as the model.
    """
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {**form}, "required": [*form], "additionalProperties": False} for form in forms
    ]
    chat = model.form == "chat"
    request = Request(
        messages=[*([{"role": "system", "content": system}] if chat else []), {"role": "user", "content": asked}],
        system=None if chat else system,
        schema={"anyOf": schemas} if len(schemas) > 1 else schemas[0],
        max_tokens=tokens,
        temperature=0.0,
    )
    try:
        return msgspec.json.decode(complete(model, request).text, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None


class Spent(msgspec.Struct):
    """What a model was asked: times, tokens of its prompts and of its replies by its own count, seconds."""

    asks: int = 0
    read: int = 0
    written: int = 0
    seconds: float = 0.0


class Metered:
    """A model whose use is counted. It is asked the same thing once only: work that is done again costs nothing.

    Args:
        model: a model, or its spec.

    Raises:
        SpecError: no such model.
    """

    def __init__(self, model: str | Model) -> None:
        self.model: Any = resolve("models", model)
        self.spent = Spent()
        self._known: dict[bytes, Reply] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply, as the model streams it; whole where it is known.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: as the model.
        """
        key = msgspec.json.encode((request.messages, request.system, request.tools, request.max_tokens, request.schema))
        if key in self._known:
            yield self._known[key]
            return
        begun = time.perf_counter()
        self.spent.asks += 1
        try:
            for piece in self.model.stream(request):
                if isinstance(piece, Reply):
                    self._known[key] = piece
                    if piece.usage is not None:
                        self.spent.read += piece.usage.prompt
                        self.spent.written += piece.usage.reply
                yield piece
        finally:
            self.spent.seconds += time.perf_counter() - begun


def name_of(model: str | Model) -> str:
    """A model's spec, or its name."""
    return model if isinstance(model, str) else model.name


def total_of(spent: Iterable[Spent]) -> Spent:
    """All of it together."""
    total = Spent()
    for one in spent:
        for name in Spent.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def spent_tables(rows: Iterable[tuple[int, str, dict[str, Spent]]]) -> list[str]:
    """One table of what models were asked, or none if none was.

    Args:
        rows: window, policy, and by the model's part what was asked of it.
    """
    body = [(window, policy, part, spent) for window, policy, parts in rows for part, spent in parts.items() if spent.asks]
    columns = (
        "window={one[0]} | policy={one[1]} | model as={one[2]} | asks={one[3].asks:,} | tokens read={one[3].read:,} | "
        "written={one[3].written:,} | seconds={one[3].seconds:,.0f}"
    )
    return [table_of(body, columns, one=lambda one: one)] if body else []
