"""An episode through the real thing: the product's agent, its session, policy, window and ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import Overlong
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Kind, Part
from kilburn.model import Delta, Reply, Request
from kilburn.models.scripted import Scripted
from kilburn.policy import Policy
from kilburn.wire import chat
from kilburn_lab.training.calls import LedgerCalls, ModelCall
from kilburn_lab.training.words import WordTokenizer


class PromptCounter(Protocol):
    """What counts a session's tokens, and makes a prompt of its messages."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def envelope(self) -> int:
        """Tokens of a message beside its text."""

    def count(self, text: str) -> int:
        """Tokens of a text."""

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """The tokens of a prompt in the chat form, up to where the reply begins."""


class Exported(Protocol):
    """What an export says of itself."""

    @property
    def reply(self) -> int:
        """Tokens of a reply, at most."""


class TrainedModel(Protocol):
    """The export of a recipe, as a model of the product."""

    form: str
    name: str
    context: int | None

    @property
    def tokenizer(self) -> PromptCounter:
        """Its tokens."""

    @property
    def described(self) -> Exported:
        """What it is."""

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply."""


class Shown:
    """A model that keeps what another one was shown, and what it said.

    Args:
        rewrite: what becomes of a reply's text before it is kept, for ablations.
    """

    form = "chat"

    def __init__(self, model: TrainedModel, rewrite: Callable[[str], str] = lambda text: text) -> None:
        self.model, self.rewrite = model, rewrite
        self.name, self.context, self.tokenizer = model.name, model.context, model.tokenizer
        self.prompts: list[list[dict[str, Any]]] = []
        self.replies: list[str] = []
        self.said: list[dict[str, Any]] = []

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """What the other one says, rewritten."""
        self.prompts.append(msgspec.json.decode(msgspec.json.encode(request.messages)))
        for piece in self.model.stream(request):
            if isinstance(piece, Reply):
                parts = tuple(map(self._part, piece.message.parts))
                piece = msgspec.structs.replace(piece, message=msgspec.structs.replace(piece.message, parts=parts))
                self.replies.append(piece.text)
                self.said += chat.render([piece.message])
            yield piece

    def _part(self, part: Part) -> Part:
        return msgspec.structs.replace(part, text=self.rewrite(part.text)) if part.kind is Kind.TEXT else part

    @property
    def sizes(self) -> list[int]:
        """The tokens of each prompt, as the transformer reads it."""
        return [len(self.tokenizer.prompt(prompt)) for prompt in self.prompts]


class Played(msgspec.Struct, kw_only=True):
    """How an episode went.

    Args:
        finish: of the run: "stop" where the agent ended it. text: its last reply.
        sizes: tokens of each prompt. replies: each reply's text.
        whole: tokens of the whole transcript: the last prompt, had nothing left.
    """

    finish: str
    text: str
    sizes: list[int]
    replies: list[str]
    whole: int

    @property
    def peak(self) -> int:
        """Tokens of the largest prompt."""
        return max(self.sizes, default=0)


def play(
    model: TrainedModel,
    task: str,
    tools: Sequence[Callable[..., Any]],
    *,
    policy: str | Policy,
    window: int,
    steps: int,
    rewrite: Callable[[str], str] = lambda text: text,
    store: Store | None = None,
    name: str = "episode",
    second: TrainedModel | None = None,
) -> Played:
    """Let a trained model work at a task as the product's agent, in a session with this policy and window.

    Args:
        second: whom the policy asks; None for the model itself.
        store: where the session is kept, with a window and a policy of its own; in memory where None.
    """
    shown = Shown(model, rewrite)
    if store is not None:
        return _played(shown, store.session(name), task, tools, steps)
    asked = shown if second is None else second
    with kilburn.open(":memory:", window=window, policy=policy, tokenizer=model.tokenizer, model=asked, embedder=None) as opened:
        return _played(shown, opened.session(name), task, tools, steps)


def _played(shown: Shown, session: Session, task: str, tools: Sequence[Callable[..., Any]], steps: int) -> Played:
    limits = Limits(steps=steps, reply=shown.model.described.reply)
    agent = Agent(shown, tools, session, limits=limits, memory=False)
    try:
        result = agent.run(task)
        finish, text = result.finish, result.text
    except Overlong:
        finish, text = "overlong", ""
    return Played(
        finish=finish,
        text=text,
        sizes=shown.sizes,
        replies=shown.replies,
        whole=len(shown.tokenizer.prompt(session.contents.messages())) - 1,
    )


def demonstrated_calls(
    replies: Sequence[str],
    words: WordTokenizer,
    task: str,
    tools: Sequence[Callable[..., Any]],
    *,
    policy: str | Policy,
    window: int,
    counter: PromptCounter,
) -> list[ModelCall]:
    """The calls of a demonstrator who gives these replies to a task, out of the ledger of a session: each prompt is what the
    kernel shows, with what had left and what stood in its place."""
    script = Scripted([words.message(reply, f"call_{number}") for number, reply in enumerate(replies)], tokenizer=counter)
    with kilburn.open(":memory:", window=window, policy=policy, tokenizer=counter, embedder=None) as store:
        session = store.session("demonstrated")
        Agent(script, tools, session, limits=Limits(steps=len(replies)), memory=False).run(task)
        return list(LedgerCalls(session))
