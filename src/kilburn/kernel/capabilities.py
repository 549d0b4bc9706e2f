"""Protocols of parts that the kernel uses but does not import: provider forms, counters, attachments, models, memories, orders.

`kilburn.opening` registers the module that implements each protocol. To read the kernel, you need none of these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

from kilburn.budget import Counter
from kilburn.effect import Answer, Ask
from kilburn.errors import KernelError
from kilburn.message import Message
from kilburn.model import Model
from kilburn.page import Span


class Forms(Protocol):
    """The providers' forms of messages: `kilburn.wire.form`."""

    def parse(self, value: Any) -> list[Message]:
        """Return the messages that a value is: a dict of any provider's form, or several of them."""
        ...

    def dump(self, parsed: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the original dicts of the messages that `parse` returned."""
        ...

    def render(self, prompt: list[Message], form: str) -> tuple[Any, list[dict[str, Any]]]:
        """Return the system prompt, where the form has one beside the messages, and the messages of a prompt."""
        ...


class Counters(Protocol):
    """The token counters: `kilburn.tokens.choice`."""

    def counter_for(self, name: str | Counter) -> Counter:
        """Return the counter for the name of a model or of a tokenizer."""
        ...

    def counter_of_model(self, name: str) -> Counter | None:
        """Return the counter for a model that a request names; None if nothing is known of the name."""
        ...


class Attachments(Protocol):
    """What content that is not text costs, and what can be read of it: `kilburn.tokens.media`."""

    def image_cost(self, counter: Counter, url: str, *, low: bool = False) -> int:
        """Return the tokens of an image."""
        ...

    def block_tokens(self, counter: Counter, block: str) -> int:
        """Return the tokens of a provider's block."""
        ...

    def strings_tokens(self, counter: Counter, strings: Iterable[tuple[str, str]]) -> int:
        """Return the tokens of strings with their keys."""
        ...

    def describe(self, block: str, *, use_name: bool = True) -> str:
        """Return one line on a provider's block."""
        ...

    def describe_image(self, url: str) -> str:
        """Return one line on an image."""
        ...

    def readable_text(self, block: str) -> str:
        """Return the text of a provider's block."""
        ...

    def document_text(self, block: str) -> str:
        """Return the text of the PDFs in a provider's block."""
        ...


class Answers(Protocol):
    """What answers the questions of policies: `kilburn.answering`."""

    def answerer(self, model: Model | None) -> Callable[[Ask], Answer]:
        """Return what answers by a model; without one, every outcome is NO_MODEL."""
        ...


class Memories(Protocol):
    """The memories and the notes of a store: `kilburn.memory` has them."""

    def make_memory(self, store: Any, collection: Any) -> Any:
        """Return the memory whose facts a collection of the store holds."""
        ...

    def make_notes(self, store: Any, owner: str) -> Any:
        """Return the notes of an owner."""
        ...


class Orders(Protocol):
    """Finds the standing orders of a user: `kilburn.selection.orders`."""

    def find_orders(self, text: str) -> tuple[Span, ...]:
        """Return the standing orders in a user's message, as spans in order."""
        ...


class Capabilities:
    """The parts that the kernel uses; `register` sets them."""

    forms: Forms
    counters: Counters
    attachments: Attachments
    answers: Answers
    memories: Memories
    orders: Orders

    def register(
        self,
        *,
        forms: Forms,
        counters: Counters,
        attachments: Attachments,
        answers: Answers,
        memories: Memories,
        orders: Orders,
    ) -> None:
        """Use these parts from now on."""
        self.forms, self.counters, self.attachments, self.answers, self.memories = forms, counters, attachments, answers, memories
        self.orders = orders

    def __getattr__(self, name: str) -> NoReturn:
        if name in Capabilities.__annotations__:
            raise KernelError(f"no {name} are registered", advice="import kilburn.opening, which registers them")
        raise AttributeError(name)


capabilities = Capabilities()
