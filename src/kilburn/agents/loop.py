"""The agent loop: a model, tools, and a session that never overflows.

The loop is one generator. `run` runs it to its end, `stream` yields its events, and the async forms drive it from a
thread. Tool calls of one reply run in parallel. The session answers the memory tools, and manages the context.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from kilburn import tracing
from kilburn.agents.access import Action, CallQuestion, Confirm, Confirmation, Consent, Deed, Permit, Rights, decide, flatten
from kilburn.agents.tool import Tool
from kilburn.arguments import checked, plain_number
from kilburn.backend import SegmentKind
from kilburn.budget import Budget
from kilburn.effect import Outcome
from kilburn.errors import (
    AccessDenied,
    Cancelled,
    Forgotten,
    KilburnError,
    Overlong,
    PinsExceedWindow,
    SpecError,
    ToolError,
    ToolsRefused,
)
from kilburn.event import Act, Data, encodable
from kilburn.kernel.consultation import Breaker
from kilburn.kernel.receipts import ranges
from kilburn.kernel.render import Prompt, to_send
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.memory import brought, memory_tools
from kilburn.memory.brought import Brought
from kilburn.memory.core_memory import CoreMemory
from kilburn.memory.learning import Learning
from kilburn.memory.sleep import SleepTime
from kilburn.memory.taint import tainted
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Delta, Finish, Model, Reply, Request, Tokens, ToolSpec, is_count, stream_pieces, takes_tools
from kilburn.models.scheduler import ScheduledModel
from kilburn.prices import Prices, is_amount
from kilburn.tokens.calibrated import is_plausible
from kilburn.wire.sent import is_compaction

__all__ = ["UNLIMITED", "Agent", "Called", "Limits", "Returned", "RunResult", "Said", "Stopped"]

log = logging.getLogger("kilburn")

MAX_WORKERS = 8
MAX_LEARNING_TOKENS = 8_000
"""Tokens that learning with a model may take after a run."""
LEARNING_POLICIES = ("plain", "facts(summary=False)")
"""The learning policies of a chat whose model runs on another machine anyway: rules, then the model."""
RETURNED = "returned"
"""The `finish` of a run that a tool ended."""
MIN_WINDOW_TOKENS = 256
"""Tokens below which the window does not shrink when a provider rejects a prompt as too long: a shorter prompt is rejected for
another reason."""


REFUSALS = {
    Consent.NO: "the user was asked, and said no",
    Consent.TIMEOUT: "the user was asked, and did not answer in time",
    Consent.BUSY: "the user has not answered an earlier question yet",
    Consent.ABSENT: "there is nobody to ask",
    Consent.FAILED: "the user could not be asked",
    Consent.INVALID: "the user could not be asked",
    Consent.CANCELLED: "the run was given up",
}

ADVICE = {
    "tool": "go on without it, or say what you need it for",
    "file": "use a path there",
    **dict.fromkeys(("session", "memory", "document"), "use what this session has"),
    "untrusted": "go on without it, or say what should be done",
    "irreversible": "do not try it again; go on without it, or say what should be done",
}
"""Advice for the model about a refusal, by its cause."""


MAX_CALLS, MAX_TOKENS, MAX_SECONDS = 10_000, 20_000_000, 6 * 3600.0
"""Default limits. They end a run that would never end: the largest run with a paid model that the docs measure took 1,309
calls."""
INTEGER_LIMITS = ("steps", "calls", "tokens", "reply")
"""The limits of a run that are whole numbers."""

T = TypeVar("T")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one `run`; None for no limit. `UNLIMITED` has none.

    Args:
        steps: the agent's own calls of the model, without those of its branches.
        calls: calls of all models: the agent's, those of its branches and sub-calls; and of functions that code calls.
        tokens: tokens of all prompts and replies, as the provider reports them. If it reports nothing, or an implausible
            number, they are counted here.
        seconds: wall time, tools included; checked before each call.
        money: costs in the currency of `prices`. By default, the price of 20,000,000 fresh prompt tokens; without prices there
            is no limit of money.
        reply: tokens of one reply.
        prices: prices of tokens.

    Raises:
        SpecError: a limit that is no number, is negative or infinite, or a limit of money without prices.
    """

    steps: int | None = 50
    calls: int | None = MAX_CALLS
    tokens: int | None = MAX_TOKENS
    seconds: float | None = MAX_SECONDS
    money: float | msgspec.UnsetType | None = msgspec.UNSET
    reply: int = 1024
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        if not isinstance(self.prices, Prices):
            raise SpecError(f"prices={self.prices!r}"[:200], advice="give a Prices(...), or one of kilburn.prices.PRICES")
        for name in (*INTEGER_LIMITS, "seconds", "money"):
            value = plain_number(getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
            if (value is None and name != "reply") or value is msgspec.UNSET:
                continue
            if not (is_count(value) if name in INTEGER_LIMITS else is_amount(value)):
                kind = "a whole number" if name in INTEGER_LIMITS else "a number"
                raise SpecError(f"{name}={value!r} is no limit"[:200], advice=f"give {kind}, 0 or more; None for no limit")
        if isinstance(self.money, int | float) and not self.prices.known:
            advice = "give prices=Prices(input=..., output=...) per million tokens, such as kilburn.prices.PRICES['hosted']"
            raise SpecError(f"money={self.money!r} without prices: what a call costs is not known", advice=advice)

    def most(self, name: str) -> float | None:
        """Return the limit of that name; None if there is none."""
        if name == "money" and self.money is msgspec.UNSET:
            return self.prices.input * MAX_TOKENS / 1e6 or None
        limit: float | None = getattr(self, name)
        return limit

    def reached(self, *, steps: int, tokens: int, seconds: float, money: float = 0.0, calls: int = 0, share: float = 1.0) -> str:
        """Return the name of the limit that has been reached, or "".

        Args:
            share: fraction of each limit that counts as reached.
        """
        spent = {"steps": steps, "calls": calls, "tokens": tokens, "seconds": seconds, "money": money}
        return next(
            (name for name, amount in spent.items() if (limit := self.most(name)) is not None and amount >= limit * share), ""
        )


UNLIMITED = Limits(steps=None, calls=None, tokens=None, seconds=None, money=None)
"""No limits, except that of a reply."""


def plausible_usage(reported: Tokens | None, counted: Tokens, cap: int) -> Tokens:
    """Return the usage that the provider reports if it is plausible, otherwise the one counted here. So limits hold even if a
    provider reports nothing, 0 for a long text, or more than any prompt has.

    Args:
        cap: token limit of the reply; the reported tokens include hidden thinking.
    """
    if not isinstance(reported, Tokens) or not reported.sound or not reported.prompt or (counted.reply and not reported.reply):
        return counted
    if not is_plausible(counted.prompt, reported.prompt) or not is_plausible(counted.reply, min(reported.reply, counted.reply)):
        return counted
    if not is_plausible(max(counted.reply, cap), max(reported.reply, counted.reply, cap)):
        return counted
    beside = reported.beside
    if beside is not None and not is_plausible(counted.prompt + cap, max(beside.total, counted.prompt + cap)):
        return msgspec.structs.replace(reported, beside=None)
    return reported


def set_up(session: Session, system: str, beside: int) -> None:
    """Begin a session with a system prompt if it is new, and leave room for what is sent beside its pages.

    Args:
        system: the prompt, or "" for none.
        beside: tokens of what is sent beside the pages, such as tool schemas; the overhead of the counter is added.
    """
    if system and not session.window.last:
        session.append({"role": "system", "content": system})
    budget, overhead = session.prompts.budget, beside + int(getattr(session.counter, "overhead", 0))
    if overhead != budget.overhead:
        session.edits.resize(Budget(budget.window, budget.reserve, overhead))


def shrink(session: Session, tokens: int, error: Overlong) -> None:
    """Make a window a quarter smaller than the prompt that was too long for the provider.

    Args:
        tokens: tokens of the pages of the prompt.
        error: the error of the provider.

    Raises:
        Overlong: `error` itself, if the pins leave nothing to remove.
    """
    budget = session.prompts.budget
    room = max(min(tokens, budget.capacity) * 3 // 4, min(budget.capacity, MIN_WINDOW_TOKENS))
    try:
        session.edits.resize(Budget(budget.overhead + budget.reserve + room, budget.reserve, budget.overhead))
    except PinsExceedWindow:
        raise error from None


def with_sources(message: Message, pages: tuple[int, ...], cites: tuple[tuple[int, int], ...] = ()) -> Message:
    """Return a reply with its sources. A compaction in it cites all that the prompt showed; the model's own words have no source.

    Args:
        pages: pages of the session. cites: pages of other segments, by number of the segment and page.
    """
    if not any(map(is_compaction, message.parts)):
        return message
    return msgspec.structs.replace(message, sources=pages, cites=(*message.cites, *cites))


RUNNING: ContextVar[Account | None] = ContextVar("kilburn.agents.within", default=None)
"""The account of the run whose tool is at work."""


class Account:
    """The costs of a run. A run within another one, such as a branch, is charged to both.

    Args:
        limits: limits of the run.
        above: account of the run that started this one; None for that of the run whose tool starts this one, if there is one.

    `given_up` is set when a run was cancelled: its branches end, and stay open.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float], above: Account | None = None) -> None:
        above = RUNNING.get() if above is None else above
        self.limits, self.clock, self.above = limits, clock, above
        self.outcome = RunResult()
        self.given_up = False
        self._began = clock()
        self._lock: threading.Lock = above._lock if above is not None else threading.Lock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Charge this run for what its tool begins."""
        token = RUNNING.set(self)
        try:
            yield
        finally:
            RUNNING.reset(token)

    def charge(self, usage: Tokens) -> None:
        """Add one call of the model."""
        with self._lock:
            self.outcome.steps += 1
            account: Account | None = self
            while account is not None:
                account.outcome.add(1, usage.total, account.limits.prices.cost(usage))
                account = account.above

    def add_spent(self, spent: RunResult) -> None:
        """Count what an earlier part of the run spent; the runs above count it themselves."""
        with self._lock:
            self.outcome.steps += spent.steps
            self.outcome.add(spent.calls, spent.tokens, spent.money)
            self._began -= spent.seconds

    def reached(self, *, below: bool = False, share: float = 1.0) -> str:
        """Return the name of the limit of this run that has been reached, or "".

        Args:
            below: whether a branch asks, which takes no step of this run.
            share: fraction of each limit that counts as reached.
        """
        spent = self.outcome
        spent.seconds = self.clock() - self._began
        return self.limits.reached(
            steps=-1 if below else spent.steps,
            calls=spent.calls,
            tokens=spent.tokens,
            seconds=spent.seconds,
            money=spent.money,
            share=share,
        )

    def reached_limit(self, *, below: bool = False) -> str:
        """Return the name of the limit of this run, or of one above it, that has been reached, or "".

        Args:
            below: whether a branch asks.

        Raises:
            Cancelled: a run above it was cancelled.
        """
        self.check_cancelled()
        return self.reached(below=below) or (self.above.reached_limit(below=True) if self.above is not None else "")

    def check_cancelled(self) -> None:
        """Raise if a run above this one was cancelled.

        Raises:
            Cancelled: one was.
        """
        above = self.above
        while above is not None:
            if above.given_up:
                raise Cancelled("the run that began this branch was given up", advice="run the agent again to go on with it")
            above = above.above

    def remaining_seconds(self) -> float | None:
        """Return the seconds that are left for one call of the model; None for no limit."""
        own_seconds = None if self.limits.seconds is None else max(1.0, self.limits.seconds - (self.clock() - self._began))
        above = self.above.remaining_seconds() if self.above is not None else None
        return min((seconds for seconds in (own_seconds, above) if seconds is not None), default=None)


class Said(msgspec.Struct, frozen=True):
    """A piece of the model's text as it came."""

    text: str
    reasoning: bool = False


class Called(msgspec.Struct, frozen=True):
    """The model calls a tool."""

    call: str
    name: str
    arguments: str


class Returned(msgspec.Struct, frozen=True):
    """The result of a tool; `failed` if it raised, its arguments did not fit, or the call was not allowed."""

    call: str
    text: str
    failed: bool = False


class RunResult(msgspec.Struct, kw_only=True):
    """The result of a run.

    `finish`: "stop", "length", "refused", "returned" of a branch, or the limit that was reached: "steps", "calls", "tokens",
    "seconds" or "money". `text` is the text of the last reply. `steps` are the agent's own calls of its model, `calls` all calls,
    those of its branches included. The other sums are over all calls.
    """

    finish: str = Finish.STOP
    text: str = ""
    steps: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0

    def add(self, calls: int, tokens: int, money: float) -> None:
        """Add what calls of models cost together."""
        self.calls += calls
        self.tokens += tokens
        self.money += money


class Stopped(msgspec.Struct, frozen=True):
    """The last event of every run."""

    outcome: RunResult


class InBranch(msgspec.Struct, frozen=True):
    """Something happened in a branch.

    Args:
        branch: the name of its session, such as "work/b1".
        depth: 1 in a branch of the agent itself, 2 in a branch of that, and so on.
        event: the event; a branch ends with a `Stopped` of its own.
    """

    branch: str
    depth: int
    event: Said | Called | Returned | Stopped


RunEvent = Said | Called | Returned | InBranch | Stopped


def in_branch(branch: str, event: RunEvent) -> InBranch:
    """Wrap an event of a branch for the agent above it."""
    if isinstance(event, InBranch):
        return msgspec.structs.replace(event, depth=event.depth + 1)
    return InBranch(branch, 1, event)


def run_to_end(events: Generator[RunEvent, None, T], show: Callable[[RunEvent], Any]) -> T:
    """Run events to their end and return the result; each event is shown as it comes."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            result: T = end.value
            return result
        show(event)


def text_message(
    role: Role, text: str, *, trust: Trust | None = None, sources: tuple[int, ...] = (), cites: tuple[tuple[int, int], ...] = ()
) -> Message:
    """Return a message of one text."""
    part = Part(kind=Kind.TEXT, text=text)
    return Message(role=role, parts=(part,), trust=trust, sources=sources, cites=cites)


def result_message(
    part: Part, text: str, failed: bool = False, *, sources: tuple[int, ...] = (), cites: tuple[tuple[int, int], ...] = ()
) -> Message:
    """Return the result of a call, as a message."""
    # Anthropic's form has a flag for failures; in the chat form only the text says so.
    result = Part(kind=Kind.RESULT, text=text, call=part.call, extra='{"is_error":true}' if failed else None)
    return Message(role=Role.TOOL, parts=(result,), sources=sources, cites=cites)


@checked
class Agent:
    """A model with tools that works in a session.

    Args:
        model: a spec such as "local" or "chat('gpt-5')", as `kilburn.open` takes it, or an object with `stream`.
        tools: typed Python functions, or `Tool`s.
        session: the session with the agent's whole past.
        limits: limits of one run.
        memory: whether the model is offered recall, search_memory, pin and note. For a model that takes no tools, or refuses
            these, a search for the user's words brings evicted text instead.
        system: appended as a pinned system message if the session is new.
        clock: monotonic seconds, for `Limits.seconds`.
        above: the account of the run that this agent works for.
        beside: tools that the model is offered besides these and memory.
        notes: notes beside each prompt, within `recall`: names of notes of the session's user, or a `CoreMemory`.
        recall: tokens beside each prompt for these notes, and for passages of memories, documents and other sessions about the
            user's words; a quarter of the window at most. 0 for nothing.
        learn: one or several memory policies that learn from the user's messages after each run, in a thread. "plain" calls no
            model; the others ask the agent's model, with at most 8,000 tokens, until the user's next message. A model that
            keeps failing is left alone for a while. None for nothing. A `SleepTime` has its own triggers and policies.
        rights: rights of the agent. The attribute may be set at any time; each call is checked just before it is made.
        confirm: asks a person about a call if the rights or the tool require it; None means no. It is called in its own thread,
            one question at a time. A `Confirmation` is shared with other agents.

    Raises:
        SpecError: no model, two tools of one name, or invalid limits.
        MissingExtra, Unavailable: the named model cannot be made.
    """

    returned: str | None = None
    """The text with which a tool ended the run; None while it goes on."""
    caller: Agent | None = None
    """The agent that this one works for; its rights bound those of this one."""
    learning: Learning | None = None
    """The current or last learning from the session."""
    searches = False
    """Whether a search brings evicted text, because the model takes no tools."""
    _span: tracing.Span = tracing.NONE
    _function_name = ""
    """The name under which another agent calls it, for its span."""

    def __init__(
        self,
        model: Model | str,
        tools: Sequence[Callable[..., Any] | Tool],
        session: Session,
        *,
        limits: Limits | None = None,
        memory: bool = True,
        system: str = "",
        clock: Callable[[], float] = time.monotonic,
        above: Account | None = None,
        beside: Sequence[ToolSpec] = (),
        notes: CoreMemory | Sequence[str] = (),
        recall: int = 0,
        learn: Any = None,
        rights: Rights | None = None,
        confirm: Confirm | Confirmation | None = None,
    ) -> None:
        self.model: Model = resolve("models", model)
        self.recall, self.learn = recall, learn
        if recall < 0:
            raise SpecError(f"recall={recall}", advice="give tokens; 0 for nothing")
        for policy in (learn if isinstance(learn, list | tuple) else (learn,)) if learn is not None else ():
            if not isinstance(policy, SleepTime):
                resolve("memory", policy)  # so that an invalid spec is reported now
        if isinstance(notes, CoreMemory):
            self.core = notes
        else:
            self.core = CoreMemory(session.store.notes(session.info.user), *notes)
        if self.core.names and recall <= 0:
            raise SpecError(f"notes={notes!r} without room for them"[:200], advice="give recall=TOKENS, such as 500")
        self.session, self.clock, self.above = session, clock, above
        self.rights = rights or Rights()
        self.confirmation = confirm if isinstance(confirm, Confirmation) else Confirmation(confirm)
        if limits is not None and not isinstance(limits, Limits):
            raise SpecError(f"limits={limits!r}"[:200], advice="give Limits(...), or UNLIMITED")
        self.limits = limits or Limits()
        self.account = Account(self.limits, clock, above)
        self._runs, self._spares = 0, Breaker()
        self._shown: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        own_tools = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in own_tools}
        self.specs: tuple[ToolSpec, ...] = (*(tool.spec for tool in own_tools), *beside, *(self._offered() if memory else ()))
        if len({spec.name for spec in self.specs}) != len(self.specs):
            names = sorted(spec.name for spec in self.specs[len(own_tools) :])
            raise SpecError("two tools have the same name", advice=f"rename one; taken already: {', '.join(names)}")
        self.memory = memory
        if memory and not takes_tools(self.model):
            self._go_without()
        set_up(session, system, self._beside())

    def _can_go_without(self) -> bool:
        """Return whether the agent can work without the tools that it offers: they are memory tools."""
        return self.memory and not self.searches and all(spec.name in memory_tools.NAMES for spec in self.specs)

    def _go_without(self) -> None:
        """Offer no memory tools from now on: what they would bring is searched for."""
        self.specs = tuple(spec for spec in self.specs if spec.name not in memory_tools.NAMES)
        self.searches = True

    def _beside(self) -> int:
        """Return the tokens that are sent besides the window: the tools, and what a search brings."""
        session = self.session
        tools = session.counter.count(msgspec.json.encode(self.specs).decode()) if self.specs else 0
        return tools + self._room

    @property
    def _room(self) -> int:
        """Tokens that are reserved for what is brought beside a prompt."""
        window = self.session.prompts.budget.window
        return self._known_room + (brought.room_for(window) if self.searches else 0)

    @property
    def _known_room(self) -> int:
        """Of these, those for notes and what is known."""
        return max(0, min(self.recall, self.session.prompts.budget.window // 4))

    def _learn(self) -> None:
        """Learn from what was said, in a thread. What an earlier thread has not done yet is done after the next run."""
        if isinstance(self.learn, SleepTime):
            self.learn.wake()
            return
        last = self.learning
        if self.learn is None or self.session.backend.readonly or (last is not None and not last.done):
            return
        # A model that keeps failing is left alone for a while.
        self._runs += 1
        if last is not None and last.failed is not None:
            self._spares.note(Outcome.FAILED if last.failed else Outcome.DONE, self._runs)
        policies = [*self.learn] if isinstance(self.learn, list | tuple) else [self.learn]
        if self._spares.is_open(self._runs):
            policies = [policy for policy in policies if policy == LEARNING_POLICIES[0]]
        if not policies:
            return
        try:
            self.learning = Learning(self.session.store, self.session, policies, self.model, tokens=MAX_LEARNING_TOKENS)
        except KilburnError as error:
            log.warning("session %s: nothing was learned: %s", self.session.name, type(error).__name__)

    def run(self, text: str | dict[str, Any] | Message | None = None) -> RunResult:
        """Work until the model stops calling tools, or a limit is reached.

        Args:
            text: the user's message; None to continue from the session.

        Raises:
            ModelError: the model failed; everything before is in the session.
        """
        for event in self.stream(text):
            if isinstance(event, Stopped):
                return event.outcome
        raise AssertionError("a run ended without its last event")

    async def arun(self, text: str | dict[str, Any] | Message | None = None) -> RunResult:
        """`run` for async callers; async tools run on the caller's event loop."""
        async for event in self.astream(text):
            if isinstance(event, Stopped):
                return event.outcome
        raise AssertionError("a run ended without its last event")

    async def astream(self, text: str | dict[str, Any] | Message | None = None) -> AsyncIterator[RunEvent]:
        """`stream` for async callers. If it is cancelled, the step that is under way is waited for, and nothing follows it."""
        events = self.stream(text, loop=asyncio.get_running_loop())
        step: asyncio.Task[RunEvent | None] | None = None
        try:
            while True:
                step = asyncio.create_task(asyncio.to_thread(next, events, None))
                event = await asyncio.shield(step)
                if event is None:
                    return
                yield event
        finally:
            if step is not None and not step.done():
                self.confirmation.cancel()
                self.account.given_up = True
                # Jobs in the scheduler's queue are cancelled instead of awaited; one may join the queue just now.
                while not step.done() and isinstance(self.model, ScheduledModel):
                    self.model.cancel()
                    await asyncio.wait([step], timeout=0.05)
                await asyncio.wait([step])
                step.exception()  # the caller has stopped, and its own exception propagates
            await asyncio.to_thread(events.close)  # type: ignore[attr-defined]

    def stream(
        self, text: str | dict[str, Any] | Message | None = None, *, loop: asyncio.AbstractEventLoop | None = None
    ) -> Iterator[RunEvent]:
        """Yield the run's events as they happen; the last one is `Stopped`. Closing it early stops the model, and the branches.

        Events of branches are among them, as `InBranch`: in order for each branch, interleaved for parallel branches. Branches
        do not wait for the caller to take an event.
        """
        with self._traced():
            yield from self._events(text, loop)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Run in a span, which gets the figures of the run or its error."""
        model = {tracing.OPERATION: "invoke_agent", tracing.AGENT: self._function_name, tracing.MODEL: self.model.name}
        span = tracing.begin(f"invoke_agent {self._function_name}", model, about={tracing.CONVERSATION: self.session.name})
        outer_span, self._span = self._span, span
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            if span.wanted:
                spent = self.account.outcome
                figures = {"steps": spent.steps, "calls": spent.calls, "tokens": spent.tokens, "finish": str(spent.finish)}
                span.set({f"kilburn.{name}": value for name, value in figures.items()})
            span.end()
            self._span = outer_span

    def _events(self, text: str | dict[str, Any] | Message | None, loop: asyncio.AbstractEventLoop | None) -> Iterator[RunEvent]:
        self.account, self.returned = Account(self.limits, self.clock, self.above), None
        if self.learning is not None:
            self.learning.close(0)  # its questions to the model would delay this reply
        outcome = self.account.outcome
        yield from self._resume(text is None, loop)
        if text is not None:
            with self._span.current(), tracing.compacting(self.session):
                self.session.append({"role": "user", "content": text} if isinstance(text, str) else text)
        if self.above is None:
            self.confirmation.begin()
        while self.returned is None:
            spent = self.account.reached_limit()
            if spent:
                outcome.finish = spent
                break
            reply = yield from self._reply()
            outcome.text = reply.text
            if not reply.calls:
                outcome.finish = reply.finish
                break
            yield from self._work(reply.calls, loop)
        if self.returned is not None:
            outcome.finish, outcome.text = RETURNED, self.returned
        self.account.reached()
        self._learn()
        yield Stopped(outcome)

    def _resume(self, goes_on: bool, loop: asyncio.AbstractEventLoop | None) -> Iterator[RunEvent]:
        """Finish what an earlier run left undone, before this one begins.

        Args:
            goes_on: whether this run continues the earlier one; otherwise the user says something new.
        """
        yield from ()

    def _reply(self) -> Generator[RunEvent, None, Reply]:
        """Call the model once. An over-long prompt is compacted and tried once more; memory tools are left out if the model takes
        none."""
        prompt, passages = self._prompt()
        shortened, reply = False, None
        while reply is None:
            try:
                reply = yield from self._stream(self._request(prompt))
            except Overlong as error:
                if shortened:
                    raise
                shortened = True
                shrink(self.session, prompt.tokens, error)
            except ToolsRefused:
                if not self._can_go_without():
                    raise
                self._go_without()
                set_up(self.session, "", self._beside())
            if reply is None:
                prompt, passages = self._prompt()
        fresh = self._with_fresh_calls(reply)
        counted = prompt.tokens + self.session.prompts.budget.overhead - self._unused(passages)
        usage, count = reply.usage, self.session.counter.count
        counted_usage = Tokens(prompt=counted, reply=sum(count(part.text) for part in fresh.message.parts))
        if isinstance(usage, Tokens) and self.session.prompts.observe(usage, counted):
            usage = plausible_usage(usage, counted_usage, self.limits.reply)
        else:
            usage = counted_usage
        self._charge(usage)
        with self._span.current(), tracing.compacting(self.session):
            self._keep(fresh.message, prompt, passages)
        return fresh

    def _keep(self, message: Message, prompt: Prompt, passages: Brought | None) -> None:
        """Admit a reply to a prompt, beside which a search has brought something or not.

        Raises:
            Forgotten: the reply has a provider's compaction, and a page of the prompt was forgotten meanwhile.
        """
        brought.keep(self.session, with_sources(message, prompt.pages), passages.pages if passages is not None else ())

    def _prompt(self) -> tuple[Prompt, Brought | None]:
        """Return the prompt for the model, and the passages in it that a search brought."""
        prompt = to_send(self.session.render(self.model.form))
        missed = None
        if self.searches and not self.session.window.whole:
            missed = brought.bring(self.session, brought.room_for(self.session.prompts.budget.window))
        parts = [part for part in (self._known(), missed) if part is not None]
        if not parts:
            return prompt, None
        passages = Brought(
            text="\n\n".join(part.text for part in parts),
            tokens=sum(part.tokens for part in parts),
            pages=tuple(dict.fromkeys(page for part in parts for page in part.pages)),
            names=tuple(dict.fromkeys(name for part in parts for name in part.names)),
        )
        messages = brought.behind(prompt, passages.text)
        if messages is None:
            return prompt, None
        prompt[:] = messages
        return prompt, passages

    def _known(self) -> Brought | None:
        """Return the notes, and what is known about the user's last words; None for nothing."""
        room, session = self._known_room, self.session
        if not room:
            return None
        try:
            passages = brought.known(
                session.store,
                brought.asked(session),
                room,
                session.info.user,
                without=session.name,
                notes=self.core.shown(),
            )
            self.core.cut[session.number] = frozenset(() if passages is None else passages.cut)
            return passages
        except KilburnError as error:
            log.warning("session %s: nothing was recalled: %s", session.name, type(error).__name__)
            return None

    def _unused(self, passages: Brought | None) -> int:
        """Return the tokens of the room for what is brought that are not in the prompt."""
        return self._room - (passages.tokens if passages is not None else 0)

    def _charge(self, usage: Tokens) -> None:
        """Count what a reply cost, before it is admitted."""
        self.account.charge(usage)

    def _request(self, prompt: Prompt) -> Request:
        return Request(
            messages=prompt,
            system=prompt.system,
            tools=self.specs,
            max_tokens=self.limits.reply,
            timeout=self.account.remaining_seconds(),
        )

    def _stream(self, request: Request) -> Generator[RunEvent, None, Reply]:
        compacted = self._span.wanted and not self.session.window.whole
        with self._span.current({tracing.COMPACTED: True} if compacted else None):
            pieces = stream_pieces(self.model, request)
        for piece in pieces:
            if isinstance(piece, Delta):
                yield Said(piece.text, piece.reasoning)
            else:
                return piece
        raise AssertionError(f"model {self.model.name} ended its stream without a reply")

    def _with_fresh_calls(self, reply: Reply) -> Reply:
        """Return the reply with unique call ids and valid characters. Some engines count call ids from 0 in every reply, and a
        session needs them unique. Some split a character in two, and no store can keep half of one."""
        old_calls = self.session.window.calls
        turn = self.session.window.turn + 1
        parts: list[Part] = []
        new_calls: set[str] = set()
        for index, part in enumerate(reply.message.parts):
            part = msgspec.structs.replace(part, text=encodable(part.text), name=encodable(part.name) if part.name else part.name)
            if part.kind is Kind.CALL and (not part.call or part.call in old_calls or part.call in new_calls):
                ids = (f"call_{turn}_{number}" for number in itertools.count(index))
                part = msgspec.structs.replace(part, call=next(id for id in ids if id not in old_calls and id not in new_calls))
            new_calls.add(part.call or "")
            parts.append(part)
        if tuple(parts) == reply.message.parts:
            return reply
        return msgspec.structs.replace(reply, message=msgspec.structs.replace(reply.message, parts=tuple(parts)))

    def _work(self, calls: Sequence[Part], loop: asyncio.AbstractEventLoop | None) -> Iterator[RunEvent]:
        """Run the calls of one reply, tools side by side; results are admitted in the calls' order."""
        for part in calls:
            yield Called(part.call or "", part.name or "", part.text)
        events: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self._shown = events
        with ThreadPoolExecutor(min(MAX_WORKERS, len(calls))) as pool:
            with self._span.current():
                answers = [pool.submit(tracing.carried(self._called), part, loop) for part in calls]
            try:
                for answer in answers:
                    answer.add_done_callback(lambda _: events.put(None))
                ended = 0
                while ended < len(answers):
                    event = events.get()
                    if event is not None:
                        yield event
                        continue
                    ended += 1
                    for answer in answers:
                        if answer.done():
                            answer.result()
                results = [answer.result() for answer in answers]
            except BaseException as error:
                # Waiting calls are cancelled, and no more questions are asked. After a Ctrl-C, or if the caller closed the
                # stream, branches stop too.
                self.confirmation.cancel()
                self.account.given_up |= not isinstance(error, Exception)
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        with self._span.current(), tracing.compacting(self.session):
            messages = [message for message, _ in results]
            try:
                self.session.append(*messages)
            except Forgotten:
                # The model continues without it.
                messages = memory_tools.without_gone(self.session, messages)
                self.session.append(*messages)
        for message, (_, failed) in zip(messages, results, strict=True):
            part = message.parts[0]
            yield Returned(part.call or "", part.text, failed)

    def show(self, event: RunEvent) -> None:
        """Show something that happens in a branch to whoever reads this agent's `stream`; from any thread."""
        self._shown.put(event)

    def _called(self, part: Part, loop: asyncio.AbstractEventLoop | None) -> tuple[Message, bool]:
        """Carry out one call, as a span."""
        # A model may call a tool that does not exist by any name.
        name = part.name if any(spec.name == part.name for spec in self.specs) else "unknown"
        attributes = {
            tracing.OPERATION: "execute_tool",
            tracing.TOOL: name,
            tracing.TOOL_TYPE: "function",
            tracing.CALL: part.call,
        }
        with tracing.span(f"execute_tool {name}", attributes) as span:
            message, failed = self._invoke(part, loop)
            if failed:
                span.fail("tool_error")
            if span.wanted:
                span.set({"kilburn.pages": " ".join(ranges(message.sources))})
        return message, failed

    def _invoke(self, part: Part, loop: asyncio.AbstractEventLoop | None) -> tuple[Message, bool]:
        """Carry out one call if the agent may; return its result, or an error that the model can act on."""
        name, is_started = part.name or "", False
        try:
            rights = self.bounds
            if self.memory and name in memory_tools.NAMES:
                deed = Deed.READ if name in memory_tools.OURS else Deed.WRITE
                self._permit(rights, part, Action(tool=name, deed=deed, reads=memory_tools.named(self.session, name, part.text)))

                def reach(kind: SegmentKind, segment: str) -> bool:
                    return decide(rights, Action(tool=name, deed=deed, reads=((kind, segment),))).permit is Permit.ALLOW

                reply = memory_tools.call(self.session, name, part.text, part.call, reach)
                return reply.message(part.call or ""), reply.text.startswith("error:")
            tool = self.tools.get(name)
            if tool is None:
                raise ToolError(f"no tool {name!r}", advice=f"there are: {', '.join(spec.name for spec in self.specs) or 'none'}")
            values, is_started = self._permitted(tool, part), True
            account, returned = self.account, self.returned
            try:
                with account.working():
                    text, failed = tool.run(values, loop), False
            finally:
                self.account, self.returned = account, returned  # the tool may have run this agent
        except (ToolError, AccessDenied) as error:
            text, failed = f"error: {error}", True
        # The error text of a call that was not carried out comes from the call itself: it is no untrusted read.
        return result_message(part, text, failed, sources=() if is_started else self._call_page(part)), failed

    def _permitted(self, tool: Tool, part: Part) -> dict[str, Any]:
        """Return the values for a call of a tool that may be carried out.

        Raises:
            ToolError: the arguments do not fit. AccessDenied: the agent may not.
        """
        rights = self.bounds
        values = tool.values(part.text)
        paths = tool.resolved(values) if rights.bounds_files else {}
        self._permit(rights, part, Action(tool=tool.name, deed=tool.deed, paths=tuple(flatten(paths.values()))))
        # A link may have been put there while a person was asked.
        if paths and (resolved := tool.resolved(values | paths)) != paths:
            paths = resolved
            self._permit(rights, part, Action(tool=tool.name, deed=tool.deed, paths=tuple(flatten(paths.values()))))
        return values | paths

    def _offered(self) -> tuple[ToolSpec, ...]:
        return memory_tools.BEYOND if self.rights.reaches else memory_tools.SPECS

    @property
    def bounds(self) -> Rights:
        """What this agent may do now: its rights, under those of the agent that it works for."""
        return self.rights if self.caller is None else self.rights.under(self.caller.bounds)

    def _call_page(self, part: Part) -> tuple[int, ...]:
        """Return the page of a call, if it was not forgotten meanwhile."""
        with self.session.lock:
            page = self.session.window.calls.get(part.call or "")
            return () if page is None else (page,)

    def _permit(self, rights: Rights, part: Part, action: Action) -> None:
        """Let a call through, or raise. A call that was not simply allowed is recorded in the ledger, with the answer of the
        person who was asked: before the call is carried out, if the store can be written at once.

        Raises:
            AccessDenied: it may not be carried out.
        """
        if action.deed is not Deed.READ and rights.heeds_taint:
            clean = {spec.name for spec in self.specs if spec.name not in self.tools or self.tools[spec.name].clean}
            action = msgspec.structs.replace(action, tainted=tainted(self.session, clean))
        decision = decide(rights, action)
        if decision.permit is Permit.ALLOW:
            return
        consent = None
        if decision.permit is Permit.ASK:
            consent = self.confirmation.ask(
                CallQuestion(
                    session=self.session.name, tool=action.tool, arguments=part.text, why=decision.why, seconds=rights.wait
                )
            )
        data: Data = {
            "permit": str(decision.permit),
            "tool": action.tool,
            "against": decision.cause,
            "privileges": [privilege.name for privilege in rights.privileges],
        }
        if consent:
            data["consent"] = str(consent)
        self.session.ledger.record(Act.NOTE, self._call_page(part), policy="access", **data)
        if consent is Consent.YES:
            self.session.ledger.flush()
            return
        answer = f"; {REFUSALS[consent]}" if consent else ""
        raise AccessDenied(decision.why + answer, cause=decision.cause, advice=ADVICE.get(decision.cause, ""))
