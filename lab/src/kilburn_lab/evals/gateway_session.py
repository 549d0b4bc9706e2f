"""A long session of a coding assistant that resends everything, through the gateway: what is shipped, cached, and lost.

Recorded runs are joined to one session, one task after the other. An Anthropic client replays it against a scripted upstream,
which answers with what the recorded agent did, judges every request, and counts the cached prefix as the provider does. Beside
the gateway: the same client without it (its prompts outgrow the window), and a client that truncates its own history.

    report = evaluate()
    print(report.table())
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

import kilburn
from kilburn.errors import MissingExtra, SpecError
from kilburn.gateway.app import Settings, build
from kilburn.message import Kind, Message, Part
from kilburn.prices import find_prices
from kilburn.testing.upstream import CHARS_PER_TOKEN, Sent, Upstream, calling, serving
from kilburn.wire.form import parse
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.cost import cost_of
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.trajectories import read, synthetic

SYSTEMS = ("pass-through", "truncation", "kilburn")

SHELL = {
    "name": "shell",
    "description": "Run one command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
MARK = {"cache_control": {"type": "ephemeral"}}
MODEL = "scripted"
REPLY = 1000
"""Tokens that a reply may take."""

LOOKS_BACK = 7
"""After so many steps the scripted model first looks at its task again, where it is offered the tool."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system over the whole session. Tokens are the upstream's, four characters each.

    Args:
        requests: that the upstream got; refused: those that a provider would have refused; beyond: those whose prompt was
            larger than the window.
        shipped: tokens of all prompts; largest: of the largest.
        shared: of these, in the prefix that an earlier prompt began with too; cached: that the provider's cache had.
        cost: dollars of all prompts, at the "hosted" prices.
        lost: bytes of the history that the model can no longer reach, neither in its last prompt nor by a tool.
        recalls: calls of the memory tools that were answered. failed: plans in which the policy raised, or returned nonsense.
    """

    system: str
    requests: int
    refused: int
    beyond: int
    shipped: int
    largest: int
    shared: int
    cached: int
    cost: float
    lost: int
    recalls: int
    failed: int = 0


class SessionReport(EvalReport, frozen=True, kw_only=True):
    """All systems."""

    runs: int
    steps: int
    tokens: int
    window: int
    policy: str
    rows: list[SessionRow]

    def failures(self) -> dict[str, int]:
        """See `EvalReport`."""
        failed = sum(row.failed for row in self.rows)
        return {self.policy: failed} if failed else {}

    def table(self) -> str:
        """Plain text: a row for each system."""
        columns = (
            "system={system} | requests={requests:,} | refused={refused} | beyond={beyond} | shipped={shipped:,} | "
            "largest={largest:,} | shared prefix={prefix:.1%} | cached={known:.1%} | cost=${cost:.2f} | bytes lost={lost:,} | "
            "recalls={recalls}"
        )
        rows = table_of(
            self.rows,
            columns,
            ("system",),
            prefix=lambda row: row.shared / row.shipped,
            known=lambda row: row.cached / row.shipped,
        )
        return (
            f"{self.runs} recorded runs as one session: {self.steps} requests of the client, {self.tokens:,} tokens; window "
            f"{self.window:,}, policy {self.policy}\n\n{rows}"
        )


class RecordedSession:
    """A session as it was recorded: what the user said, and for each step the reply and the tool's output.

    `steps` are pairs: the reply, and what the client sends next, as blocks of the messages form, or None at the end.
    """

    def __init__(self, runs: Iterable[Trajectory]) -> None:
        self.system = ""
        self.first: list[dict[str, Any]] = []
        self.steps: list[tuple[Message, list[dict[str, Any]] | None]] = []
        self.runs = number = 0
        for run in runs:
            self.runs += 1
            texts = [message.content for message in run.head if message.role == "system"]
            self.system = self.system or "\n\n".join(texts) or "You are a programmer."
            task = [{"type": "text", "text": message.content} for message in run.head if message.role != "system"]
            if self.steps:
                self.steps[-1] = (self.steps[-1][0], task)
            else:
                self.first = task
            for step in run.steps:
                if step.user:  # beside what the tool said, as a client sends it
                    sent = self.steps[-1][1] if self.steps else None
                    (self.first if sent is None else sent).append({"type": "text", "text": step.observation})
                    continue
                number += 1
                id = f"toolu_{number:05d}"
                said = calling(("shell", {"command": step.action}, id), text=step.thought.strip())
                output = [{"type": "text", "text": step.observation}] if step.observation.strip() else "(no output)"
                self.steps.append((said, [{"type": "tool_result", "tool_use_id": id, "content": output}]))
            self.steps.append((calling(text=f"That is done: {run.id}."), None))

    @property
    def tokens(self) -> int:
        """Of everything that is said."""
        return sum(len(part.text) for reply, _ in self.steps for part in reply.parts) // CHARS_PER_TOKEN + _tokens(
            [self.first, *(following for _, following in self.steps)]
        )


class Speech:
    """What the scripted model says in one step: the recorded reply, and before it a look at its task, if it may."""

    def __init__(self, reply: Message, *, looks_back: bool) -> None:
        self._reply = reply
        self._looks_back = looks_back
        self.looked = False

    def __call__(self, sent: Sent) -> Message:
        """The reply to one request."""
        offered = {tool["name"] for tool in sent.body.get("tools", ())}
        if self._looks_back and not self.looked and "recall" in offered:
            self.looked = True
            return calling(("recall", {"address": "p2"}))
        return self._reply


class Client:
    """A coding assistant on Anthropic's SDK: it keeps its whole history and sends it again with each request.

    Args:
        url: where the API is.
        recorded: the session.
        room: tokens to which it truncates its history, the oldest steps first; None for no limit.
    """

    def __init__(self, url: str, recorded: RecordedSession, *, room: int | None = None) -> None:
        try:
            import anthropic
        except ImportError:
            raise MissingExtra("anthropic", "anthropic") from None
        self._sdk = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
        self._system = [{"type": "text", "text": recorded.system, **MARK}]
        self._room = room
        self.history: list[dict[str, Any]] = [{"role": "user", "content": recorded.first}]

    def ask(self, following: Sequence[Mapping[str, Any]] | None, *, stream: bool) -> str:
        """One request; the reply and what follows go into the history. Returns why the reply ended."""
        messages: Any = self._marked(self.kept())
        asked: Any = {"model": MODEL, "max_tokens": REPLY, "system": self._system, "tools": [SHELL], "messages": messages}
        if stream:
            with self._sdk.messages.stream(**asked) as streaming:
                reply = streaming.get_final_message()
        else:
            reply = self._sdk.messages.create(**asked)
        content = [block.to_dict(exclude_none=True) for block in reply.content]
        self.history.append({"role": "assistant", "content": content})
        if following is not None:
            self.history.append({"role": "user", "content": list(following)})
        return str(reply.stop_reason)

    def close(self) -> None:
        """Close the connections."""
        self._sdk.close()

    def kept(self) -> list[dict[str, Any]]:
        """What it sends: the history, or the task and as many of the newest messages as there is room for."""
        if self._room is None:
            return self.history
        left = self._room - _tokens(self._system) - _tokens([SHELL]) - _tokens(self.history[0])
        kept: list[dict[str, Any]] = []
        for at in range(len(self.history) - 1, 1, -2):
            pair = self.history[at - 1 : at + 1]
            left -= _tokens(pair)
            if left < 0 and kept:
                break
            kept = [*pair, *kept]
        return [self.history[0], *kept]

    @staticmethod
    def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a mark for the cache on the last one, as coding assistants set it."""
        *blocks, last = messages[-1]["content"]
        return [*messages[:-1], {**messages[-1], "content": [*blocks, {**last, **MARK}]}]


def _bytes(message: dict[str, Any]) -> int:
    return sum(len(part.text.encode()) for parsed in parse(message) for part in parsed.parts)


def _tokens(value: Any) -> int:
    return len(msgspec.json.encode(value)) // CHARS_PER_TOKEN


def evaluate(
    data: Path | None = None,
    *,
    runs: int = 3,
    window: int = 8000,
    policy: str = "cost",
    seed: int = 0,
    progress: Progress = unwatched,
) -> SessionReport:
    """Replay one session through each system.

    Args:
        data: recorded runs, see `kilburn_lab.evals.trajectories.read`; made-up ones where left out.
        runs: that are joined.
        window: tokens of four characters, of the gateway's window and of the client that truncates.
        policy: of the gateway.
        progress: called with the requests that are done, and their total.

    Raises:
        SpecError: a number below 1. InvalidMessage: the file cannot be read. MissingExtra: no anthropic, starlette, ...
    """
    if min(runs, window) < 1:
        raise SpecError(f"runs={runs}, window={window}", advice="give 1 or more")
    recorded = RecordedSession(islice(synthetic(runs, seed) if data is None else read(data), runs))
    done, total = count(1), len(SYSTEMS) * len(recorded.steps)
    progress(0, total)

    def step() -> None:
        progress(next(done), total)

    rows = [_replayed(system, recorded, window, policy, step) for system in SYSTEMS]
    steps = len(recorded.steps)
    return SessionReport(runs=recorded.runs, steps=steps, tokens=recorded.tokens, window=window, policy=policy, rows=rows)


def _replayed(system: str, recorded: RecordedSession, window: int, policy: str, step: Callable[[], None]) -> SessionRow:
    upstream, recalls = Upstream(), 0
    with tempfile.TemporaryDirectory(prefix="kilburn-session-") as folder, ExitStack() as stack:
        url, db = stack.enter_context(serving(upstream)), str(Path(folder) / "session.db")
        if system == "kilburn":
            settings = Settings(
                db=db, upstream=url, window=window, policy=policy, tokenizer=f"chars/{CHARS_PER_TOKEN}", embedder=None
            )
            url = stack.enter_context(serving(build(settings)))
        client = Client(url, recorded, room=window - REPLY if system == "truncation" else None)
        stack.callback(client.close)
        for index, (reply, following) in enumerate(recorded.steps):
            upstream.otherwise = agent = Speech(reply, looks_back=index % LOOKS_BACK == LOOKS_BACK - 1)
            client.ask(following, stream=index % 2 == 0)
            recalls += agent.looked
            step()
        gone = sum(map(_bytes, client.history)) - sum(map(_bytes, client.kept())) if system == "truncation" else 0
        failed = 0
        stack.close()
        if system == "kilburn":
            gone, failed = lost(db, client.history), _failures(db)
    sent = upstream.prompts
    shipped, cached = sum(each.tokens for each in sent), sum(each.cached for each in sent)
    return SessionRow(
        system=system,
        requests=len(sent),
        refused=len(upstream.refused),
        beyond=sum(each.tokens > window for each in sent),
        shipped=shipped,
        largest=max(each.tokens for each in sent),
        shared=sum(each.shared for each in sent),
        cached=cached,
        cost=cost_of(shipped, cached, find_prices("hosted")),
        lost=gone,
        recalls=recalls,
        failed=failed,
    )


def lost(db: str, history: Sequence[dict[str, Any]]) -> int:
    """Bytes of a client's history that a store does not give back: the parts of its messages, in their order, among those of
    the largest session."""
    wanted = [part for message in parse(history) for part in message.parts]
    with kilburn.open(db, tokenizer=f"chars/{CHARS_PER_TOKEN}", embedder=None) as store:
        session = store.session(max(store.sessions(), key=lambda info: info.pages).name)
        found = iter(session.recall(f"p1-p{session.window.last}").parts)
        return sum(len(part.text.encode()) for part in wanted if not any(_is(text, part) for text in found))


def _failures(db: str) -> int:
    """Plans of the policy that failed, in all sessions of a store."""
    with kilburn.open(db, tokenizer=f"chars/{CHARS_PER_TOKEN}", embedder=None) as store:
        return sum(store.session(info.name).stats().policy_failures for info in store.sessions())


def _is(text: str, part: Part) -> bool:
    """Whether a recalled text is this part. The store has a call's arguments as the model wrote them, a client what they say."""
    if part.kind is not Kind.CALL or text == part.text:
        return text == part.text
    try:
        return bool(msgspec.json.decode(text) == msgspec.json.decode(part.text))
    except msgspec.DecodeError:
        return False
