"""An agent that delegates parts of its work to branches of its own session, and gets one result from each.

`branch(description, prompt)` and `return(message)` are tools. A branch begins with the agent's own window (or less) and runs the
same loop. Its steps never enter the main window: they are folded into its result, and can be recalled by address. That is
ContextFold (arXiv 2510.11967), where the folded steps are lost. Several calls of one reply run as parallel branches; a branch may
have branches. A sub-agent that looks like a function is a branch with other tools, another model or another policy: see
`SubAgent`.

The costs of a branch are charged to every run above it; its steps count for itself. At its own limit the last steps are taken
back, and the model is asked once to return. A crash leaves the call open and the branch intact: the next run resumes the branch,
or closes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from kilburn.agents.access import Action, Deed, Rights
from kilburn.agents.loop import (
    Agent,
    Limits,
    RunEvent,
    RunResult,
    Said,
    Stopped,
    in_branch,
    result_message,
    run_to_end,
    text_message,
)
from kilburn.agents.tool import Tool, decode_texts, text_spec
from kilburn.agents.workspace import open_workspace
from kilburn.arguments import check_fields, checked
from kilburn.errors import AccessDenied, KernelError, SpecError, ToolError, WorkspaceError
from kilburn.event import Act
from kilburn.kernel.branches import Inherit
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Model, ToolSpec
from kilburn.page import Place, address_of, digest_of

__all__ = ["Branching", "SubAgent"]

LIMITS = frozenset({"steps", "calls", "tokens", "seconds", "money"})
STEPS_TAKEN_BACK = 2
"""Steps that are taken back from a branch at its limit, as in ContextFold: they are unfinished."""


class BranchOutcome(StrEnum):
    """How a branch ended, as its ledger records it."""

    RETURNED = "returned"
    PROSE = "said"
    """It answered in prose, which is its result."""
    FORCED = "forced"
    """It reached its limit, and returned when it was asked to."""
    NOTHING = "nothing"
    """It has no result: a limit was reached, or the model said nothing."""
    ABANDONED = "abandoned"
    """It did not end before the user went on."""


Tools = tuple[Callable[..., Any] | Tool, ...]


class SubAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that looks like a function of a description and a prompt.

    Args:
        name: name of the tool.
        purpose: description of the tool.
        inherit: the context that it begins with.
        tools: its own tools; None for those of the calling agent. With a `folder`, a function that makes them for a folder.
        model: its own model; None for the caller's.
        policy: policy of its window, such as "fifo"; "" for that of the store.
        system: its own system prompt, if it does not inherit the history.
        limits: limits of one of its runs.
        rights: its rights, within those of the caller.
        folder: the folder that it works on: each branch gets a working folder, which is merged when it returns. The paths that
            its tools declare cannot leave that folder. A branch of a branch works on the folder of the branch.

    Raises:
        SpecError: a field of a wrong type, or a folder without a function that makes the tools.
    """

    name: str = "branch"
    purpose: str = (
        "Work on a part of the task in a branch. It sees all that you see. Its steps stay out of your window: you get only "
        "the message that it returns. Several calls in one reply run side by side."
    )
    inherit: Inherit = Inherit.HISTORY
    tools: Tools | Callable[[Path], Tools] | None = None
    model: Model | None = None
    policy: str = ""
    system: str = ""
    limits: Limits = Limits(steps=30)
    rights: Rights = Rights()
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.folder is not None) != callable(self.tools):
            raise SpecError(f"{self.name}: a folder needs tools that are made for it", advice="give tools=lambda path: (...)")

    @property
    def spec(self) -> ToolSpec:
        """What the model is offered."""
        texts = {"description": "three to five words", "prompt": "what is to be done, and what must come back"}
        return text_spec(self.name, self.purpose, **texts)


RETURN = text_spec(
    "return",
    "End the branch that you work in. The message is all that the main line will see of it.",
    message="what was found or done, and what is left",
)


@checked
class Branching(Agent):
    """An agent whose model may branch.

    Args:
        agents: the sub-agents that it may call; by default a branch of itself.
        max_branches: maximum number of branches of one run, nested ones included.
        depth: nesting depth of branches; 1 for branches without branches.

    The other arguments are those of `Agent`.

    Raises:
        SpecError: two tools have the same name.
    """

    def __init__(
        self,
        model: Model,
        tools: Sequence[Callable[..., Any] | Tool],
        session: Session,
        *,
        agents: Sequence[SubAgent] = (SubAgent(),),
        max_branches: int = 10,
        depth: int = 1,
        **options: Any,
    ) -> None:
        self.agents = {agent.name: agent for agent in agents}
        self.max_branches, self.depth, self.level = max_branches, depth, 0
        self._begun: list[str] = []
        self._options = options
        super().__init__(model, tools, session, beside=(*(agent.spec for agent in agents), RETURN), **options)

    def _resume(self, goes_on: bool, loop: asyncio.AbstractEventLoop | None) -> Iterator[RunEvent]:
        """Resume the branches that an earlier run left open; close them if the user says something new instead."""
        if not self.level:
            self._begun.clear()
        window = self.session.window
        waiting = [window.pages[number] for number in window.waiting()]
        calls = [
            Part(kind=Kind.CALL, text=self.session.contents.text(page.id), call=page.call, name=page.name)
            for page in waiting
            if page.name in self.agents
        ]
        if not calls:
            return
        if goes_on:
            yield from self._work(calls, loop)
            return
        for part in calls:
            branch = self._open_branch(part)
            text = "[it was not done: the user went on]"
            if branch is None:
                self.session.append(result_message(part, text))
            else:
                _close(branch, text)

    def _invoke(self, part: Part, loop: asyncio.AbstractEventLoop | None) -> tuple[Message, bool]:
        try:
            if part.name == RETURN.name:
                return self._return(part)
            if part.name in self.agents:
                self._permit(self.bounds, part, Action(tool=part.name, deed=Deed.READ))
                return self._branch(self.agents[part.name], part), False
        except (AccessDenied, ToolError, KernelError, msgspec.ValidationError, msgspec.DecodeError) as error:
            # A failure of a model or a store is none of these: it leaves the branch open, and the next run resumes it.
            text = f"error: {error}"
            return result_message(part, text), True
        return super()._invoke(part, loop)

    def _return(self, part: Part) -> tuple[Message, bool]:
        if not self.level:
            raise ToolError("this is no branch: there is nothing to return to", advice="answer the user in your own words")
        self.returned = decode_texts(RETURN, part.text)["message"]
        return result_message(part, "[returned]"), False

    def _branch(self, agent: SubAgent, part: Part) -> Message:
        """Begin the branch of a call, or resume it, and run it until it returns."""
        texts = decode_texts(agent.spec, part.text)
        branch = self._open_branch(part)
        if branch is None and (earlier := self._done(part)) is not None:
            return earlier
        if branch is None:
            if self.level >= self.depth:
                raise ToolError("a branch here cannot branch again", advice="do it here, or return")
            with self.session.lock:
                if len(self._begun) >= self.max_branches:
                    raise ToolError(f"{self.max_branches} branches were begun, which is all", advice="do the rest here")
                self._begun.append(part.call or "")
            branch = self.session.fork(branch_prompt(texts["prompt"]), inherit=agent.inherit, call=part.call, system=agent.system)
            limits = {name: limit for name in sorted(LIMITS) if (limit := agent.limits.most(name)) is not None}
            branch.ledger.record(Act.NOTE, policy="user", why="what it may spend", limits=limits)
        outcome, text = _read_outcome(branch)
        if outcome is None:
            outcome, text = self._work_in(agent, branch)
            _record_outcome(branch, outcome, text)
        message = branch.branches.returning(text)
        branch.store.release(branch.name)
        return message

    def _done(self, part: Part) -> Message | None:
        """Return the result of an identical earlier call if it has left the window since, because the model cannot know that it
        was done; None if the model sees the result and calls again all the same."""
        window, digest = self.session.window, digest_of(part.text)
        for _, fork in reversed(list(self.session.branches.children())):
            call = window.pages.get(fork.call)
            if call is None or call.name != part.name or call.digest != digest or call.call == part.call:
                continue
            result = next((page for page in window.group(call.id) if window.pages[page].answers == call.id), None)
            if result is None or window.at(result) in (Place.IN, Place.RETIRED, Place.DROPPED):
                return None
            if any(page.answers and result in page.sources for page in window.resident()):
                return None  # it was recalled, and the recalled text is in the window
            notice = f"[it was done before, {address_of(result)}; ask in other words to have it done again]"
            return result_message(part, f"{notice}\n{self.session.contents.text(result)}", sources=(result,))
        return None

    def _open_branch(self, part: Part) -> Session | None:
        """Return the branch that was begun for a call, if there is one."""
        page = self.session.window.calls.get(part.call or "")
        name = next((info.name for info, fork in self.session.branches.children() if fork.call == page), None)
        return self.session.branches.open(name.removeprefix(f"{self.session.name}/")) if name else None

    def _work_in(self, agent: SubAgent, branch: Session) -> tuple[BranchOutcome, str]:
        """Work in a branch to its end, and merge its working folder, if it has one and a result."""
        if agent.folder is None:
            return self._inside(agent, branch).finish()
        try:
            space = open_workspace(agent.folder, branch.name)
        except WorkspaceError as error:
            return BranchOutcome.NOTHING, f"[no result: {error}]"
        outcome, text = self._inside(agent, branch, space.path).finish()
        if outcome is BranchOutcome.NOTHING:
            return outcome, f"{text}\n[its files were not merged]"
        try:
            changes = space.merge()
        except WorkspaceError as error:
            return outcome, f"{text}\n[its files were not merged: {error.what.removeprefix('not merged: ')}]"
        return outcome, f"{text}\n[files: {', '.join(changes) or 'none changed'}]"

    def _inside(self, agent: SubAgent, branch: Session, path: Path | None = None) -> Branching:
        if agent.policy:
            branch.edits.decide_by(resolve("policies", agent.policy), agent.policy)
        options = self._options | {"limits": agent.limits, "above": self.account, "system": ""}
        options |= {"rights": agent.rights, "confirm": self.confirmation}
        agents, tools = [*self.agents.values()], agent.tools
        if path is not None:
            tools = tools(path) if callable(tools) else tools
            agents = [
                msgspec.structs.replace(sub_agent, folder=path) if sub_agent.folder == agent.folder else sub_agent
                for sub_agent in agents
            ]
            options["rights"] = agent.rights.within(path)
        inner = Branching(
            agent.model or self.model,
            [*self.tools.values()] if tools is None or callable(tools) else tools,
            branch,
            agents=agents,
            max_branches=self.max_branches,
            depth=self.depth,
            **options,
        )
        inner.level, inner._begun, inner.caller, inner._function_name = self.level + 1, self._begun, self, agent.name
        return inner

    def finish(self) -> tuple[BranchOutcome, str]:
        """Run this branch to its end; return the outcome and the result. The agent that began the branch sees each event."""
        end = Stopped(self.account.outcome)
        for event in self.stream():
            if isinstance(event, Stopped):
                end = event
            else:
                self._show(event)
        ended = self._outcome(end.outcome)
        self._show(end)
        return ended

    def _outcome(self, result: RunResult) -> tuple[BranchOutcome, str]:
        """Return how a run in this branch ended, and its result; at a limit it is asked for one."""
        if self.returned is not None:
            return BranchOutcome.RETURNED, self.returned
        if result.finish not in LIMITS:
            return (BranchOutcome.PROSE, result.text) if result.text else (BranchOutcome.NOTHING, f"[no result: {result.finish}]")
        above = self.account.above
        if result.steps and not (above is not None and above.reached_limit(below=True)):
            return self._forced(result.finish)
        return BranchOutcome.NOTHING, f"[no result: the limit of {result.finish} was reached]"

    def _show(self, event: RunEvent) -> None:
        """Show what happens here to the agent that began this branch.

        Raises:
            Cancelled: that run was cancelled while the model is still speaking; its reply is not admitted.
        """
        if isinstance(event, Said):
            self.account.check_cancelled()
        if self.caller is not None:
            self.caller.show(in_branch(self.session.name, event))

    def _forced(self, limit: str) -> tuple[BranchOutcome, str]:
        """Take the last steps back, and ask once for the result."""
        fork, pages = self.session.branches.forked, self.session.window.pages
        assert fork is not None
        own_pages = [page for number, page in pages.items() if number > fork.known]
        steps = sorted({page.message for page in own_pages if page.role is Role.ASSISTANT})[-STEPS_TAKEN_BACK:]
        self.session.edits.take_back([page.id for page in own_pages if steps and page.message >= steps[0]])
        text = f"[The limit of {limit} is reached; your last steps were taken back. Call return now: what is done, what is left?]"
        self.session.append(text_message(Role.USER, text, trust=Trust.AGENT))
        reply = run_to_end(self._reply(), self._show)
        for part in reply.calls:
            self._invoke(part, None) if part.name == RETURN.name else None
        if self.returned is not None or reply.text:
            return BranchOutcome.FORCED, self.returned if self.returned is not None else reply.text
        return BranchOutcome.NOTHING, f"[no result: the limit of {limit} was reached]"


def branch_prompt(prompt: str) -> str:
    """Return the first message of a branch. It is pinned, so it also reminds the model of its place."""
    return (
        f"{prompt}\n\n[You work in a branch now. The main line sees none of these steps: when this part is done, call "
        "return(message) with everything that it needs.]"
    )


def _record_outcome(branch: Session, outcome: BranchOutcome, text: str) -> None:
    """Write down how a branch ended and its result, before its parent has it."""
    branch.ledger.record(Act.NOTE, policy="user", why=str(outcome), branch=str(outcome))
    branch.append({"role": "assistant", "content": text})


def _close(branch: Session, text: str) -> None:
    """Return from a branch that the user does not want to wait for, with its result if it has one. Its own open branches are
    closed first."""
    outcome, result = _read_outcome(branch)
    if outcome is None:
        for info, fork in branch.branches.children():
            if fork.call in branch.window.waiting():
                _close(branch.branches.open(info.name.removeprefix(f"{branch.name}/")), text)
        _record_outcome(branch, BranchOutcome.ABANDONED, text)
    branch.branches.exit(text if outcome is None else result)


def _read_outcome(branch: Session) -> tuple[BranchOutcome | None, str]:
    """Return how a branch ended and its result, if its parent does not have it yet because of a crash."""
    noted = [event.data["branch"] for event in branch.ledger.events() if event.act is Act.NOTE and "branch" in event.data]
    if not noted:
        return None, ""
    last = branch.window.last
    forgotten = branch.window.at(last) is Place.DROPPED
    return BranchOutcome(noted[-1]), "[its result was forgotten]" if forgotten else branch.contents.text(last)
