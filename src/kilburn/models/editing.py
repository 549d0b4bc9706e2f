"""A messages endpoint that manages the context itself: every request carries the same edits.

`Editing(Messages("..."), provider_edits(policy))` lets the provider do what the policy does here. If it compacts, its block
comes back in the reply, and is sent first from then on. The pages that the block stands for stay in the window until
the session's policy, `compact(provider=True)`, evicts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage, SpecError
from kilburn.model import Delta, Model, Reply, Request
from kilburn.wire.compaction import put_block_first
from kilburn.wire.editing import read_management, write

__all__ = ["Editing"]


class Editing:
    """A model whose provider edits the context.

    Args:
        model: a model of the "messages" form.
        edits: the `context_management` of every request (see `kilburn.wire.editing.provider_edits`), or {} for
            none: compaction blocks are then sent as below, and none is asked for.

    Raises:
        SpecError: another form, or edits that the provider would refuse.
    """

    form = "messages"

    def __init__(self, model: Model, edits: dict[str, Any]) -> None:
        if model.form != "messages":
            raise SpecError(f"{model.name} has the form {model.form!r}", advice="context editing needs a messages endpoint")
        try:
            self.edits = write(read_management(edits)) if edits else {}
        except InvalidMessage as error:
            raise SpecError(f"not a context_management: {error.what}", advice=error.advice) from error
        self.model = model
        self.name = model.name
        self.context = model.context
        self.tokenizer: Any = model.tokenizer

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the model's stream. A request that has its own `context_management`, or a `compaction`, keeps it.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
        """
        options = dict(request.options)
        if self.edits and "compaction" not in options:
            options.setdefault("context_management", self.edits)
        messages = put_block_first(request.messages)
        yield from self.model.stream(msgspec.structs.replace(request, messages=messages, options=options))

    def close(self) -> None:
        """Close the model."""
        close = getattr(self.model, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Editing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
