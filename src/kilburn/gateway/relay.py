"""Answers one request of a client.

The relay finds the session, sends the prompt upstream, and answers the model's calls of our tools in hidden rounds. The client
sees one reply. The session stays valid after every failure: a message is appended completely or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from typing import Any

import anyio
import msgspec

from kilburn import tracing
from kilburn.agents.loop import shrink, with_sources
from kilburn.budget import Budget
from kilburn.errors import (
    EmptyPrompt,
    Forgotten,
    KernelError,
    KilburnError,
    ModelError,
    Overlong,
    RateLimited,
    SpecError,
    StoreBusy,
    StoreError,
    StoreStale,
    StoreUnavailable,
    ToolsRefused,
    Unavailable,
    WireError,
)
from kilburn.gateway import figures, spans
from kilburn.gateway.conversations import Conversation, shortened
from kilburn.gateway.events import Events, Shape, detect_shape
from kilburn.gateway.exchange import Exchange, together
from kilburn.gateway.faults import LONGEST_MODEL, MemoryTools, Offer, answered, brought
from kilburn.gateway.form import Form, ParsedRequest, Reading, hidden
from kilburn.gateway.history import MAX_READ_ATTEMPTS, Histories, named
from kilburn.gateway.keys import Key, Link
from kilburn.gateway.memories import Learners, Remembered, remembered
from kilburn.gateway.problems import client_message, unread_reason
from kilburn.gateway.repeats import Hold
from kilburn.gateway.threads import in_thread
from kilburn.gateway.upstream import Response, UpstreamApi, error_status, gathered, read_error, replayed
from kilburn.kernel.receipts import ranges
from kilburn.kernel.render import to_send
from kilburn.kernel.session import retried
from kilburn.memory.brought import Brought, room_for
from kilburn.memory.memory_tools import OFFERED, without_gone
from kilburn.message import Kind, Message, Part, Trust
from kilburn.model import Finish, Reply
from kilburn.models.provider_errors import provider_error
from kilburn.models.retry import Retry

log = logging.getLogger("kilburn.gateway")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

WARNING = "x-kilburn-warning"
"""Response header: parts of the newest request that the prompt omits or shortens, and what does not fit beside it (tools, the
reply)."""

UNREAD = "x-kilburn-unread"
"""Response header with the reason why an answer has no session or was not stored."""

MAX_WARNING_CHARS = 1_000
"""Maximum length of the header with warnings, in characters. The log has all of them; up to the colon, unless contents are
logged."""

_OF_REASONING = re.compile(
    r"signature|encrypted.content|reasoning|different conversation|`?(redacted_)?thinking`? block|extra_content", re.IGNORECASE
)
"""Matches the errors of providers that refuse reasoning of another model, another account or another conversation."""

MAX_ERROR_BYTES = 1 << 20
"""Maximum size of an upstream's error that is read, in bytes."""

TOOLS = msgspec.json.encode(OFFERED)
"""The descriptions of our tools, whose tokens are counted; other forms of them differ by a few tokens."""

HIDDEN_ROUND_RETRY = Retry()
"""Retries of a hidden round within one request, and the pauses between them."""

SOON = 1.0
"""Retry-After, in seconds, for a request that failed because the store was busy or restarting."""

LINGER = 1.0
"""Seconds that an upstream may keep its stream open after the end of the reply."""


class Relay:
    """Answers the requests of one tenant.

    Args:
        histories: the tenant's sessions.
        upstream: the upstream that answers prompts.
        rounds: maximum number of rounds in which calls of our tools are answered within one request.
        learners: the learners that read finished turns.
        offer: decides which models get our tools.
        fails_open: whether the client gets a reply that the store refuses.
    """

    def __init__(
        self,
        histories: Histories,
        upstream: UpstreamApi,
        learners: Learners,
        offer: Offer,
        *,
        rounds: int = 5,
        fails_open: bool = False,
    ) -> None:
        self.offer, self.fails_open = offer, fails_open
        self.histories, self.upstream, self.rounds, self.learners = histories, upstream, rounds, learners

    async def answer(
        self,
        form: Form,
        body: bytes,
        path: str,
        headers: Mapping[str, str],
        key: Key,
        exchange: Exchange,
        send: Send,
        hold: Hold,
        fields: Mapping[str, msgspec.Raw] | None = None,
    ) -> None:
        """Answer one request, and record its figures in `exchange`.

        Args:
            hold: the request's lease: if an equal request was just answered, this one gets the same reply.
            fields: the body's fields, if it was parsed already.

        Raises:
            KilburnError: the request failed before anything was sent to the client.
        """
        conversation, work = await in_thread(self._begin, form, body, headers, key, exchange, hold, fields)
        rounds = _Rounds(self, conversation, work, path, headers, exchange, send)
        try:
            await rounds.run()
        finally:
            await rounds.give()

    def _begin(
        self,
        form: Form,
        body: bytes,
        headers: Mapping[str, str],
        key: Key,
        exchange: Exchange,
        hold: Hold,
        fields: Mapping[str, msgspec.Raw] | None,
    ) -> tuple[Conversation, _Work]:
        exchange.form = form.name
        req = form.open(body, fields)
        exchange.model, exchange.stream = req.model[:LONGEST_MODEL], req.stream
        name = named(headers.get("x-kilburn-session", ""))
        faults = req.faults and headers.get("x-kilburn-faults", "").lower() != "off"
        for remaining in reversed(range(MAX_READ_ATTEMPTS)):
            work = _Work(self, form, req, key, exchange, faults=faults)
            link = key.link is not Link.OFF
            conversation = self.histories.take(form, req, name, key.user, link=link, hold=hold, prepare=work.prepare)
            try:
                figures.begin(exchange, conversation)
                work.reply = conversation.reply() if hold.repeated else None
                if work.reply is not None:
                    return conversation, work
                work.known = remembered(self.histories.store, form, req, key.user, work.room, conversation.session.name)
                if work.known is not None:
                    # Another program may have forgotten the session during the search.
                    self.histories.refresh(conversation)
                work.render()
                return conversation, work
            except StoreStale:
                # Another gateway has continued the session: it is read again.
                self.histories.lose(conversation)
                if not remaining:
                    raise
            except BaseException:
                self.histories.give(conversation)
                raise
        raise AssertionError("a prompt is made or an error is raised")


class _Work:
    """The prompt of one request, rendered anew for each round."""

    def __init__(
        self,
        relay: Relay,
        form: Form,
        req: ParsedRequest,
        key: Key,
        exchange: Exchange,
        *,
        faults: bool,
    ) -> None:
        self.form, self.asked, self.key, self._exchange = form, req, key, exchange
        self.conversation: Conversation
        self.known: Remembered | None = None
        self._fields = 0
        """Tokens of the client's tools and other fields beside the conversation."""
        self._histories, self._store = relay.histories, relay.histories.store
        self._automatic = relay.offer.how is MemoryTools.AUTO
        self._kept_there = not req.previous or relay.upstream.speaks(form)
        """Whether the upstream has the earlier history that the request omits."""
        self.wanted = faults
        self.tools = req.open and relay.offer.to(req.model, req.fields)
        """Whether our tools may be offered; otherwise the gateway searches for passages itself."""
        self.faults = False
        """Whether the body offers our tools."""
        self.brought: Brought | None = None
        self.reply: Message | None = None
        """The reply to an equal request, which is repeated without asking the upstream."""
        self.keeps = req.choices == 1
        self.body = b""
        self.tokens = 0
        self.pages: tuple[int, ...] = ()
        """The pages that the prompt shows."""

    def prepare(self, conversation: Conversation) -> None:
        """Count by the tokenizer of the request's model, and fit the window to the request, before anything is appended."""
        self.conversation = conversation
        conversation.session.prompts.count_for(self.asked.model)
        self._fields = sum(map(conversation.cost, self.asked.beside))
        self._fit(conversation.session.prompts.budget)

    @property
    def room(self) -> int:
        """Tokens reserved for long-term memory."""
        return min(self.key.memory, self.conversation.session.prompts.budget.window // 4)

    @property
    def _found(self) -> int:
        """Tokens reserved for the passages of a search."""
        return room_for(self.conversation.session.prompts.budget.window) if self.wanted and not self.tools else 0

    @property
    def _beside(self) -> int:
        """Tokens sent beside the conversation. Room for memory and tools is always reserved, so that the window has the same size
        in each turn."""
        tools = self.conversation.cost(TOOLS) if self.wanted and self.tools else self._found
        return self._fields + self.room + tools

    def _fit(self, budget: Budget) -> None:
        """Reserve room for the reply and for the fields beside the conversation: at most half of the window for each, and so that
        the conversation keeps three eighths of it.

        Each request sets the reserve anew. If it allows a reply as long as the window, the model's own window is larger, and this
        window bounds the prompt alone.
        """
        window, reply = budget.window, self.asked.reply
        reserve = max(self._store.budget.reserve, min(reply, window // 2) if reply < window else 0)
        if reply > window // 2:
            self._warn(f"of a reply of {reply} tokens, {reserve} are reserved in the window of {window}")
        # A window shrinks after a provider refused a prompt as too long; its reserve does not.
        beside, room = self._beside, max(0, min(window // 2, window - reserve - 3 * window // 8))
        overhead = min(beside, room) + int(getattr(self.conversation.session.counter, "overhead", 0))
        if beside > room:
            self._warn(f"tools and other fields take {beside} tokens, and the window of {window} has room for {room}")
        if overhead != budget.overhead or reserve != budget.reserve:
            with tracing.compacting(self.conversation.session):
                self.conversation.session.edits.resize(Budget(budget.window, reserve, overhead))

    def _warn(self, *lines: str) -> None:
        """Add warnings to those of earlier rounds, without duplicates."""
        self._exchange.warnings = [*dict.fromkeys([*self._exchange.warnings, *lines])]

    def render(self) -> None:
        """Make the body that goes upstream: the client's own bytes, as long as nothing is evicted.

        Raises:
            StoreStale: another gateway has continued the session.
        """
        conversation = self.conversation
        session = conversation.session
        if not conversation.renewed:
            # Nothing was appended, and another program may have forgotten pages that the client still sends.
            self._histories.refresh(conversation)
            if session.window.turn < conversation.turn:
                raise StoreStale("the database was killed and has lost the request", advice="ask again")
        conversation.renewed = False
        self._fit(session.prompts.budget)
        misses = self.wanted and (not conversation.whole or bool(conversation.earlier))
        self.faults, self.brought = misses and self.tools, None
        self.tokens = session.prompts.use
        is_theirs = conversation.whole and conversation.verbatim and not conversation.unsigned
        if is_theirs and self._kept_there and not misses and session.prompts.use <= session.prompts.capacity:
            session.prompts.sent_whole(request=self._exchange.request)
            self.body = self._with_memory(self.asked.raw)
            self.pages = tuple(range(1, session.window.last + 1))
            return
        try:
            prompt = to_send(conversation.render(self.form.rendered, self._exchange.request))
        except Forgotten as error:
            raise StoreStale(f"the prompt cannot be made: {error.what}", advice="ask again") from error
        self.tokens, self.pages = prompt.tokens, prompt.pages
        self._warn(*shortened(session.window))
        self.body = self._with_memory(self.form.splice(self.asked, prompt, OFFERED if self.faults else ()))
        beside = () if self.known is None else self.known.pages
        if misses and not self.tools and (passages := self._brought(beside)) is not None:
            body = (
                Remembered("", passages.text, passages.tokens, Trust.USER).beside(self.form, self.body)
                if passages.text
                else self.body
            )
            if body is not self.body or not passages.text:
                self.body, self.brought = body, passages

    def _brought(self, beside: Sequence[tuple[int, int]]) -> Brought | None:
        attributes = {tracing.OPERATION: "search_memory", tracing.CONVERSATION: self.conversation.name}
        with tracing.span("search_memory", attributes) as span:
            passages = brought(self._store, self.conversation, self._found, beside)
            span.set({tracing.RECORDS: 0 if passages is None else len(passages.pages)})
        self._exchange.lookups.append(("brought", "abstained" if passages is None or not passages.text else "found"))
        return passages

    def _with_memory(self, body: bytes) -> bytes:
        return body if self.known is None else self.known.beside(self.form, body)

    @property
    def counted(self) -> int:
        """Tokens of the whole request, by the session's own counter."""
        tokens = sum(beside.tokens for beside in (self.known, self.brought) if beside is not None)
        return self.tokens + self.conversation.session.prompts.budget.overhead - (self.room + self._found - tokens)

    def may_refuse_tools(self, error: ModelError) -> bool:
        """Return whether an error may be about our tools, which the client did not request and whose refusal it must not see.
        Providers have no common words for it, so any refusal may be one."""
        return self.faults and self._automatic and (isinstance(error, ToolsRefused) or error.status in (400, 422))

    def without(self) -> None:
        """Render the prompt without our tools, after the upstream refused them."""
        self.tools = False
        self.render()

    def without_reasoning(self, error: ModelError) -> bool:
        """Render the prompt without reasoning and signatures, if an error may be about these; return whether it has changed.
        Providers refuse those of another model or account, or of a changed conversation."""
        may_be = error.status in (400, 422) and _OF_REASONING.search(error.what)
        if not may_be or not self.conversation.session.prompts.leave_out_reasoning():
            return False
        self.conversation.unsigned = True
        self.render()
        return True

    def heard(self, message: Message) -> Message:
        """Return the reply as a message. Its trust is at most that of the texts beside the question. A compaction in it cites the
        pages of the prompt."""
        message = with_sources(message, self.pages, () if self.known is None else self.known.pages)
        if self.known is None or self.known.trust >= Trust.AGENT:
            return message
        return msgspec.structs.replace(message, trust=self.known.trust)

    def shrink(self, error: Overlong) -> None:
        """Render a shorter prompt, after the upstream refused it as too long."""
        with tracing.compacting(self.conversation.session):
            shrink(self.conversation.session, self.tokens, error)
        self.render()


class _Rounds:
    """The rounds between a request and the end of its answer."""

    def __init__(
        self,
        relay: Relay,
        conversation: Conversation,
        work: _Work,
        path: str,
        headers: Mapping[str, str],
        exchange: Exchange,
        send: Send,
    ) -> None:
        self._relay, self._conversation, self._work = relay, conversation, work
        self._path, self._headers, self._exchange, self._send = path, headers, exchange, send
        self._turn = conversation.turn
        self._started = self._given = False
        self._retried = False
        self._refusal: ModelError | None = None
        """The refusal after which our tools were omitted."""
        self._unsigned = False
        """Whether reasoning and signatures were omitted after a refusal."""
        self._failed = 0
        """Number of attempts at a hidden round that the upstream was too busy for."""
        self._reading: Reading | None = None
        self._shape: Shape | None = None
        """Shape of the upstream's answers, the same in each round, since the client gets one reply."""
        self._shown: list[Part] = []
        """Texts of the earlier rounds that the client has seen."""
        self._call = tracing.NONE
        """Span of the present or last call of the upstream."""
        self._ended: float | None = None
        """End of that call, in seconds since the epoch; None while it runs."""

    async def run(self) -> None:
        """Run rounds until the reply is complete."""
        try:
            while await self._round():
                pass
        except (ModelError, StoreError, EmptyPrompt) as error:
            if not self._started:
                raise
            await self._break_off(error)

    async def give(self) -> None:
        """Release the session once, when the reply is durable. This happens before the client gets the end of the reply, because
        it may send its next request at once."""
        if not self._given:
            await in_thread(self._give)

    def _give(self) -> None:
        self._given = True
        try:
            self._relay.histories.store.backend.sync(self._conversation.number)
            figures.end(self._exchange, self._conversation)
        except StoreError as error:
            if not self._let_go(error):
                raise
        finally:
            self._relay.histories.give(self._conversation)

    def _let_go(self, error: StoreError) -> bool:
        """Return whether the client gets a reply that the store refused. Its next history contains the reply."""
        if not self._relay.fails_open or not (reason := unread_reason(error)):
            return False
        self._exchange.unread, self._exchange.unkept = reason, error
        log.warning("a reply was not stored: %s", error)
        return True

    async def _round(self) -> bool:
        """Ask the upstream once; return whether another round follows."""
        exchange = self._exchange
        exchange.rounds += 1
        # A provider would repeat its first answer under the same idempotency key.
        headers = self._headers if exchange.rounds == 1 else {n: v for n, v in self._headers.items() if n != "idempotency-key"}
        began, self._call, self._ended = time.perf_counter(), self._called(), None
        try:
            return await self._asked({**headers, **self._call.carried()}, began)
        except BaseException as error:
            self._call.fail(type(error).__name__)
            raise
        finally:
            self._over(began)
            self._call.end(self._ended)

    def _called(self) -> tracing.Span:
        if not self._exchange.span.wanted:
            return tracing.NONE
        self._exchange.pages = " ".join(ranges(self._work.pages))
        return spans.call(self._exchange, self._work.form, compacted=not self._conversation.whole)

    def _over(self, began: float) -> None:
        """Record the end of the call of the upstream, once."""
        if self._ended is None:
            self._ended = time.time()
            self._exchange.upstream.append(time.perf_counter() - began)

    async def _asked(self, headers: Mapping[str, str], began: float) -> bool:
        work, exchange = self._work, self._exchange
        async with AsyncExitStack() as stack:
            asking = await self._asking(headers)
            try:
                with self._call.current(), _waiting(exchange):
                    answer = await stack.enter_async_context(asking)
            except (Overlong, ToolsRefused) as error:
                if await self._mended(error):
                    return True
                raise
            except (RateLimited, Unavailable) as error:
                if await self._later(error):
                    return True
                raise
            if answer.status >= 400:
                return await self._refused(answer)
            if self._reading is None:
                self._reading = work.form.reading(work.faults, holds=work.keeps)
            reading = self._reading
            shape, pieces = await detect_shape(_timed(answer.pieces, exchange))
            answer = answer._replace(pieces=pieces)
            if self._shape not in (None, shape):
                raise Unavailable("the upstream answered once with events and once without", advice="check the upstream")
            self._shape = shape
            if shape is Shape.EVENTS:
                failed = await self._stream(answer, reading)
                if failed is None:
                    return True
            elif shape is Shape.OTHER:
                await self._through(answer)
                return False
            else:
                failed = await gathered(answer)
                reading.take(failed)
                if reading.failed is not None and await self._unsaid(reading, reading.failed):
                    return True
        self._over(began)
        if reading.failed is not None:
            # The error came inside the reply.
            exchange.problem = "upstream_error"
            self._call.fail("upstream_error")
            await self._finish(failed, answer)
            return False
        try:
            reply = reading.reply()
        except Unavailable as error:
            self._unread(error.__cause__ or error)
            ends = shape is Shape.WHOLE or reading.ended or not reading.changed
            await self._finish(reading.end() if ends else b"", answer)
            return False
        if await in_thread(self._goes_on, reply, reading):
            reading.again()
            return True
        await self._finish(reading.end(), answer)
        return False

    async def _asking(self, headers: Mapping[str, str]) -> AbstractAsyncContextManager[Response]:
        """Return the upstream's answer, or the session's stored reply in its place."""
        work = self._work
        if work.reply is None:
            asking: AbstractAsyncContextManager[Response] = self._relay.upstream.ask(
                "POST", self._path, work.body, headers, work.form
            )
            return asking
        calls = any(part.kind is Kind.CALL for part in work.reply.parts)
        reply = Reply(message=work.reply, finish=Finish.CALLS if calls else Finish.STOP)
        return nullcontext(await replayed(reply, work.form, work.asked.model, streamed=work.asked.stream))

    def _unread(self, error: BaseException | None = None) -> None:
        """Report a reply that is passed on without being stored. The client's next history contains it."""
        # The error's message may quote the conversation.
        why = type(error).__name__ if error is not None else "neither events nor JSON"
        log.warning("session %s: the upstream's reply is passed on and not stored: %s", self._conversation.number, why)
        self._exchange.problem = "odd_reply"

    async def _through(self, answer: Response) -> None:
        """Pass on an answer that is no reply of any form.

        Raises:
            Unavailable: a redirection.
        """
        if 300 <= answer.status < 400:
            raise Unavailable(f"the upstream sent no valid reply, with status {answer.status}", advice="check the upstream")
        self._unread()
        await self.give()
        await self._start(answer.status, answer.headers)
        async for piece in answer.pieces:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def _goes_on(self, reply: Reply, reading: Reading) -> bool:
        """Store a reply; return whether another round follows, or release the session otherwise."""
        try:
            if self._answered(reply, reading):
                return True
            if self._work.keeps and reading.id:
                self._relay.histories.replied(self._conversation, reading.id)
        except StoreError as error:
            # The client cannot use a reply with calls of our tools.
            if reading.ours(reply) or not self._let_go(error):
                raise
        self._give()
        return False

    def _answered(self, reply: Reply, reading: Reading) -> bool:
        """Store a reply, answer its calls of our tools, and return whether another round follows."""
        work, conversation = self._work, self._conversation
        if self._refusal is not None:
            certain = isinstance(self._refusal, ToolsRefused)
            self._relay.offer.refused(work.asked.model, work.asked.fields, certain=certain)
        ours = reading.ours(reply)
        self._exchange.finish = str(reply.finish)
        spans.answered(self._call, str(reply.finish), reply.usage)
        if reply.usage is not None:
            self._exchange.usage = together(self._exchange.usage, reply.usage)
        if not work.keeps:
            return False
        goes_on = bool(ours) and len(ours) == len(reply.calls) and reading.rounds <= self._relay.rounds
        message = reply.message
        if goes_on:
            # The client gets one reply, whose visible parts are stored once it is complete: the client may retry before.
            visible = work.form.shown(message)
            self._shown += visible
            ids = set(map(id, visible))
            message = msgspec.structs.replace(message, parts=tuple(part for part in message.parts if id(part) not in ids))
        elif self._shown:
            message = work.form.led(message, self._shown)
        if not ours:
            learns = work.key.learn and not reply.calls
            if learns:
                self._relay.learners.mark(conversation.session)
            # This is the request's last write.
            with self._relay.histories.store.backend.lasting():
                self._keep(reply, [work.heard(message)])
            if learns:
                self._relay.learners.learn(self._relay.histories.store, conversation.session, work.key.user)
            return False
        over = reading.rounds >= self._relay.rounds
        call_message, tokens_before = work.heard(hidden(message)), conversation.session.ledger.figures.tokens_seen
        results = answered(self._relay.histories.store, conversation, ours, self._exchange, over=over)
        self._keep(reply, [call_message, *results], more=goes_on)
        figures.hide(conversation, tokens_before)
        if not goes_on:
            return False
        retried(self._render_current)
        return True

    def _render_current(self) -> None:
        self._relay.histories.current(self._conversation)
        self._work.render()

    def _keep(self, reply: Reply, messages: list[Message], *, more: bool = False) -> None:
        """Append a reply, and correct the token counter by its usage.

        Raises:
            StoreStale: a source of the reply was forgotten meanwhile.
        """
        try:
            pages = () if self._work.brought is None else self._work.brought.pages
            try:
                self._relay.histories.said(self._conversation, messages, pages, more=more)
            except Forgotten:
                if messages == (rest := without_gone(self._conversation.session, messages)):
                    raise
                # The model continues without the forgotten pages.
                self._relay.histories.said(self._conversation, rest, pages, more=more)
        except Forgotten as error:
            raise StoreStale(f"the reply is not stored: {error.what}", advice="ask again") from error
        if reply.usage is not None and self._work.reply is None:
            # The reply is stored, and the session is fitted when it is next rendered.
            with suppress(StoreError):
                self._conversation.session.prompts.observe(reply.usage, self._work.counted)

    async def _refused(self, answer: Response) -> bool:
        """Handle an error of the upstream; return whether to ask again with a mended prompt."""
        body = await gathered(answer, MAX_ERROR_BYTES)
        error, _ = read_error("the upstream", answer, body)
        if await self._mended(error) or await self._later(error):
            return True
        if self._started:
            raise error
        self._exchange.problem = type(error).__name__
        await self.give()
        await self._start(answer.status, answer.headers, len(body))
        await self._send({"type": "http.response.body", "body": body})
        return False

    async def _later(self, error: ModelError) -> bool:
        """Return whether a hidden round that the upstream was too busy for can be retried, after a pause. The client cannot retry
        it, because it has received the beginning of the stream and its status."""
        hidden_round = self._started and self._reading is not None and self._reading.rounds > 0
        if not hidden_round or not isinstance(error, (RateLimited, Unavailable)):
            return False
        self._failed += 1
        pause = HIDDEN_ROUND_RETRY.pause(self._failed, error)
        if pause is None:
            return False
        await anyio.sleep(pause)
        return True

    async def _mended(self, error: ModelError) -> bool:
        """Return whether the prompt has been mended after a refusal: shortened, or without our tools, or without reasoning. Each
        happens once in a request."""
        if not self._unsigned and await in_thread(self._work.without_reasoning, error):
            self._unsigned = True
            return True
        begins = self._reading is None or not self._reading.rounds
        if begins and self._refusal is None and not isinstance(error, Overlong) and self._work.may_refuse_tools(error):
            self._refusal = error
            await in_thread(self._work.without)
            return True
        if not isinstance(error, Overlong) or self._retried:
            return False
        self._retried = True
        try:
            await in_thread(self._work.shrink, error)
        except Overlong:
            return False
        return True

    async def _unsaid(self, reading: Reading, failed: dict[str, Any]) -> bool:
        """Return whether a stream that has only an error so far can be requested again without the client noticing."""
        if self._started and not self._work.wanted:
            return False
        error = provider_error("the upstream", None, failed, "")
        if not await self._mended(error) and not await self._later(error):
            return False
        if self._started:
            reading.begin_again()
        else:
            self._reading = self._shape = None
        return True

    async def _stream(self, answer: Response, reading: Reading) -> bytes | None:
        """Pass a stream on. Return the error at its end, which the client gets once the session is released, or None if the
        stream had only an error that has been mended."""
        events, over, failed = Events(), False, b""
        patience = asyncio.timeout(None)
        try:
            async with patience:
                piece: bytes | None = b""
                while piece is not None:
                    piece, out = await anext(answer.pieces, None), b""
                    for event in events.end() if piece is None else events.feed(piece):
                        visible = reading.feed(event)
                        if reading.failed is None:
                            out += visible
                        elif not over and not reading.spoke and await self._unsaid(reading, reading.failed):
                            return None
                        else:
                            failed += visible
                        over = over or reading.failed is not None or event.is_last
                    if not self._started:
                        kind = {"content-type": "text/event-stream", "cache-control": "no-cache"}
                        await self._start(answer.status, {**kind, **answer.headers})
                    if out:
                        await self._send({"type": "http.response.body", "body": out, "more_body": True})
                    if over and patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + LINGER)
        except TimeoutError:
            if not patience.expired():
                raise
        return reading.left() + failed

    async def _finish(self, last: bytes, answer: Response) -> None:
        if not self._started:
            await self._start(answer.status, {"content-type": "application/json", **answer.headers}, len(last))
        await self.give()
        await self._send({"type": "http.response.body", "body": last})

    async def _start(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self._started = True
        own_headers = {"x-kilburn-session": self._conversation.name.encode().decode("latin-1"), "x-kilburn-turn": str(self._turn)}
        if self._exchange.unread:
            own_headers[UNREAD] = self._exchange.unread
        if self._exchange.warnings:
            own_headers[WARNING] = "; ".join(self._exchange.warnings)[:MAX_WARNING_CHARS].encode().decode("latin-1")
        if self._work.brought is not None:
            own_headers["x-kilburn-brought"] = ", ".join(self._work.brought.names).encode().decode("latin-1")
        await start(self._send, status, {**headers, **own_headers}, length)

    async def _break_off(self, error: KilburnError) -> None:
        """End the client's stream with an error."""
        status, code = error_status(error)
        error_body = self._work.form.error(status, client_message(error), code)
        self._exchange.problem = type(error).__name__
        with suppress(StoreError):
            # The store that refused the reply may refuse this too; the client gets the first error.
            await self.give()
        last = b""
        if self._reading is not None:
            # The client gets the events before an upstream's failure, but not the end of a reply that cannot be stored.
            last = self._reading.left() * isinstance(error, ModelError) + self._reading.broken(error_body)
        await self._send({"type": "http.response.body", "body": last})


@contextmanager
def _waiting(exchange: Exchange) -> Iterator[None]:
    """Count the time for which the gateway waits for the upstream, until the client's first byte."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if exchange.first is None:
            exchange.waited = (exchange.waited or 0.0) + time.perf_counter() - began


async def _timed(pieces: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    """Yield an answer's pieces, and count the time until each."""
    piece: bytes | None = b""
    while piece is not None:
        with _waiting(exchange):
            piece = await anext(pieces, None)
        if piece is not None:
            yield piece


async def start(send: Send, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
    """Send the start of a response."""
    listed = [(name.encode("latin-1", "replace"), str(value).encode("latin-1", "replace")) for name, value in headers.items()]
    if length is not None:
        listed.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": listed})


async def forward(
    upstream: UpstreamApi,
    method: str,
    path: str,
    body: bytes | AsyncIterable[bytes],
    headers: Mapping[str, str],
    send: Send,
    form: Form | None = None,
    unread: str = "",
) -> int:
    """Pass a request and its answer through, byte for byte; return the answer's status.

    Args:
        form: the body's form, if it is translated for an upstream that does not speak it.
        unread: the reason why the gateway does not read a request that it should read; the client gets it in a header.
    """
    async with upstream.ask(method, path, body, headers, form) as answer:
        status: int = answer.status
        await start(send, answer.status, {**answer.headers, **({UNREAD: unread} if unread else {})})
        async for piece in answer.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    return status


async def fail(form: Form, error: KilburnError, send: Send) -> None:
    """Answer with an error in the provider's form."""
    match error:
        case WireError() | SpecError() | KernelError():
            status, code = 400, None
        case StoreError():
            status, code = 503, "store_unavailable"
        case _:
            status, code = error_status(error)
    if isinstance(error, StoreError):
        log.warning("%s", error)
    body = msgspec.json.encode(form.error(status, client_message(error), code))
    headers = {"content-type": "application/json"}
    wait = SOON if isinstance(error, StoreBusy | StoreStale | StoreUnavailable) else getattr(error, "retry_after", None)
    if wait is not None:
        headers["retry-after"] = str(math.ceil(wait))
    await start(send, status, headers, len(body))
    await send({"type": "http.response.body", "body": body})
