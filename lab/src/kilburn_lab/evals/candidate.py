"""A Kilburn session as a candidate: it gets a recorded run's events, and shows a prompt before each action."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import Any

import kilburn
from kilburn.effect import Answer, Ask, Effect, Outcome
from kilburn.event import Act
from kilburn.kernel.ledger import Stats
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.memory import memory_tools
from kilburn.message import Message
from kilburn.move import Move
from kilburn.policies.belady import Belady
from kilburn.policy import Policy, View
from kilburn.search.vectors import Vectors
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.baselines import CHARACTERS, PLAIN, Contender
from kilburn_lab.evals.future import future_of
from kilburn_lab.evals.prefix import Block, blocks_of, text_of
from kilburn_lab.evals.references import KINDS, Reference
from kilburn_lab.evals.roster import BELADY
from kilburn_lab.evals.trajectories import shell_call


class KilburnCandidate:
    """A session of Kilburn in a store of its own; close it at the end. `plans` has the milliseconds of plans.

    Args:
        window: tokens of four characters.
        policy: a policy spec, or a policy, as `kilburn.open` takes it.
        model: answers the policy's questions, or None.
        tools: whether actions are presented as tool calls and outputs as their results, for policies that act on
            those; otherwise all are plain messages. In both cases each is one message and one page.
        path: of the store; a session that is there goes on. embedder: of the store; None for words alone.
    """

    def __init__(
        self,
        window: int,
        policy: str | Policy,
        model: Any = None,
        *,
        tools: bool = False,
        path: str = ":memory:",
        embedder: Any = None,
    ) -> None:
        timed = _Timed(resolve("policies", policy))
        self.plans = timed.plans
        self._store = kilburn.open(
            path, window=window, policy=timed, tokenizer=f"chars/{CHARACTERS}", model=model, embedder=embedder, durable=False
        )
        self._session = self._store.session("run")
        self._outputs: list[str] = []
        self._tools = tools
        self._calls = 0

    def thought(self, text: str) -> None:
        """The agent thinks."""
        append_and_wait(self._session, {"role": "assistant", "content": text})

    def action(self, text: str) -> None:
        """The agent acts."""
        if self._tools:
            append_and_wait(self._session, shell_call(f"call-{len(self._outputs)}", "", text))
        else:
            append_and_wait(self._session, {"role": "assistant", "content": text})

    def reply(self, thought: str, action: str) -> None:
        """The agent thinks and acts in one message."""
        if self._tools:
            append_and_wait(self._session, shell_call(f"call-{len(self._outputs)}", thought, action))
        else:
            append_and_wait(self._session, {"role": "assistant", "content": f"{thought}\n{action}"})

    def user(self, text: str) -> None:
        """The user says something."""
        self._outputs.append(append_and_wait(self._session, {"role": "user", "content": text}))

    def observation(self, text: str) -> None:
        """The world answers."""
        if self._tools:
            said = {"role": "tool", "tool_call_id": f"call-{len(self._outputs)}", "content": text}
        else:
            said = {"role": "user", "content": text}
        self._outputs.append(append_and_wait(self._session, said))

    def prompt(self) -> list[Block]:
        """The rendered prompt."""
        return list(blocks_of(self._session.render(format="chat")))

    def prompt_text(self) -> str:
        """The text of the rendered prompt."""
        return text_of(self.prompt())

    def search(self, query: str, tokens: int, **options: Any) -> str:
        """What one search of the session's past brings; `options` are those of `Session.search`."""
        return "\n".join(hit.text for hit in self._session.search(query, tokens=tokens, **options))

    def embed(self) -> None:
        """Wait until every message has its vector; without an embedder nothing happens."""
        if isinstance(self._store.vectors, Vectors):
            self._store.vectors.catch_up()

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The agent calls a memory tool, as in its loop: the call and its result are messages too."""
        self._calls += 1
        id, text = f"memory-{self._calls}", json.dumps(arguments)
        function = {"name": name, "arguments": text}
        called = {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}
        append_and_wait(self._session, called)
        reply = memory_tools.call(self._session, name, text, id)
        append_and_wait(self._session, reply.message(id))
        return reply.text

    def finds(self, reference: Reference) -> bool:
        """Whether one search for the name, with 1,000 tokens of hits, finds it."""
        read = KINDS[reference.kind]
        return any(reference.name in read(hit.text) for hit in self._session.search(reference.name, tokens=1000))

    def recalls(self, reference: Reference) -> bool:
        """Whether one recall of an output that had the name returns it. It counts as a use of that page, which a policy
        sees, so ask when the run is over."""
        return reference.name in KINDS[reference.kind](self._session.recall(self._outputs[reference.origins[-1]]))

    def stats(self) -> Stats:
        """The ledger's figures."""
        return self._session.stats()

    def count_acts(self) -> int:
        """Times that the policy's moves were carried out."""
        return sum(
            event.act is Act.COMPACT and event.data.get("outcome") == Outcome.DONE for event in self._session.ledger.events()
        )

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@contextmanager
def contender_of(window: int, policy: str | Policy, model: Any = None, **options: Any) -> Iterator[Contender]:
    """A baseline by its name, or a session of Kilburn, which is closed at the end; `options` are those of `KilburnCandidate`."""
    if isinstance(policy, str) and policy in PLAIN:
        yield PLAIN[policy](window)
        return
    with closing(KilburnCandidate(window, policy, model, **options)) as made:
        yield made


class _Timed:
    """A policy whose plans are timed, if they move something: milliseconds of the processor, those of its searches included
    and those of a model left out."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.max_depth = getattr(policy, "max_depth", 1)
        self.plans: list[float] = []

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        """The moves of the policy."""
        started, asked = time.thread_time(), 0.0
        plan = self.policy.plan(view)
        moves: Sequence[Move] = ()
        if isinstance(plan, Generator):
            try:
                effect = next(plan)
                while True:
                    before = time.thread_time()
                    answer = yield effect
                    asked += (time.thread_time() - before) * isinstance(effect, Ask)
                    effect = plan.send(answer)
            except StopIteration as stop:
                moves = stop.value
        else:
            moves = plan
        if moves:
            self.plans.append((time.thread_time() - started - asked) * 1000)
        return moves


def append_and_wait(session: Session, message: dict[str, Any] | Message) -> str:
    """Append a message. A question in the background is answered before this returns, because recorded work takes no
    time."""
    address = session.append(message)
    for thread in threading.enumerate():
        if thread.name == "kilburn-later":
            thread.join()
    return address


def prompts(run: Trajectory, contender: Contender, *, reply: bool = False) -> Iterator[tuple[int, str]]:
    """Feed a run to a contender: each step that is the agent's, and what is shown just before its action.

    Args:
        reply: what is shown before the whole reply, its thought not yet told.
    """
    for index, step in enumerate(run.steps):
        if step.user:
            contender.user(step.observation)
            continue
        if not reply:
            contender.thought(step.thought)
        yield index, contender.prompt_text()
        if reply:
            contender.reply(step.thought, step.action)
        else:
            contender.action(step.action)
        contender.observation(step.observation)


def policy_for(run: Trajectory, wanted: list[Reference], spec: str, *, reply: bool = False, tools: bool = False) -> str | Policy:
    """The policy for one run: the spec's, or the optimum that knows this run's future."""
    return Belady(future_of(run, wanted, reply=reply, tools=tools)) if spec == BELADY else spec


@lru_cache(maxsize=1)
def model_of(spec: str) -> Any:
    """The model of a spec, loaded once a process; None for ""."""
    return resolve("models", spec) if spec else None
