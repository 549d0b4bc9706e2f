"""A recursive language model: the input is a variable in a sandbox, and the model reads it by writing code.

The model's window never holds the input: only its description (type, characters, tokens, its beginning), the code, and the
output of the code, shortened. The code can ask a model about pieces of the input, many in parallel (`llm_query`,
`llm_query_batched`), or start the same procedure on a piece (`rlm_query`). The result is the value of the variable
`answer`. From *Recursive Language Models* (arXiv 2512.24601), where the code runs unconfined, the steps are lost, and the
answer is parsed from prose.

The code may also call functions of the caller. Their results are recorded in the same branch, so a resumed run does not call
them again.

Here the root is an agent with a session, so its own window is folded by a policy. The sub-calls are recorded in a branch of
it, the outputs cite them, and the whole run can be replayed from the ledger without a model (`replay`). The code may also read
the agent's own past (`memory.search`, `memory.pages`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from kilburn.agents.access import Action, Deed, Permit, Rights, decide
from kilburn.agents.loop import (
    UNLIMITED,
    Account,
    Agent,
    Called,
    Limits,
    Returned,
    RunEvent,
    result_message,
    run_to_end,
    text_message,
)
from kilburn.agents.tool import Tool, decode_texts
from kilburn.arguments import checked
from kilburn.backend import SegmentKind
from kilburn.errors import AccessDenied, KilburnError, SpecError, StoreStale, ToolError
from kilburn.kernel.render import Prompt
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.brought import Brought, keep
from kilburn.message import Message, Part, Role, Trust
from kilburn.model import Model, Tokens, takes_tools
from kilburn.models.retry import Retry
from kilburn.models.scripted import Scripted
from kilburn.page import digest_of
from kilburn.recursion.briefing import MEMORY, REPL, cell_lines, fenced_code, instructions
from kilburn.recursion.functions import Functions, Past, as_tools, is_called_by
from kilburn.recursion.inquiry import (
    EMPTY,
    AnswerOutcome,
    AnswerVariable,
    Inquiry,
    RecursiveResult,
    SubCalled,
    Watch,
    taken_over_error,
)
from kilburn.recursion.recorded import Key, RunRecord, note
from kilburn.recursion.sandbox import Bounds, CellOutcome, open_sandbox
from kilburn.recursion.sub_calls import Hooks, SubCalls
from kilburn.recursion.variable import Source, Variable, variable
from kilburn.tracing import carried
from kilburn.wire.quotation import quote

__all__ = ["RecursiveModel", "RecursiveResult", "replay", "resume"]

MAX_PROSE_REPLIES = 2
"""Replies in prose that are answered with a reminder; the next one is taken as the answer."""
MAX_FORCED_REPLIES = 2
"""Replies beyond the limit of steps in which the model may answer."""
REMINDER = '[Nothing is answered yet. Run code: call repl, or write a block of ```repl that sets answer["content"].]'
"""Sent to a model that answers in prose."""
BATCHED = {"llm_query_batched", "rlm_query_batched"}
"""Functions whose list may be too large for one call of the sandbox."""

Ended = tuple[AnswerOutcome, Any, str]
"""How a question ended, its answer, and the limit that was reached, or ""."""


@checked
class RecursiveModel(Agent):
    """A model that answers questions about texts that are larger than its window.

    Args:
        model: the root; it writes the code.
        session: the session with the root's steps. Its branches have the sub-calls and the runs below.
        sub: the model that answers `llm_query`; None for the root's model.
        depth: 0 for code without sub-calls, 1 for `llm_query`, 2 for `rlm_query` with `llm_query` in it, and so on.
        limits: limits of one question: `steps` are the root's replies, 30 by default; `calls` the replies of all models, and the
            calls of `functions`; tokens, seconds and money are those of all models.
        functions: functions that the code can call, by name: typed functions, or `Tool`s. They take and return JSON values. The
            model sees their signatures and docstrings. They run in this program, with the agent's rights; results of functions
            that do not only read (`Tool(..., does="read")`) are written at once. Runs below call them too, in parallel.
        on_subcall_start: called with depth, the model's name, and the beginning of the prompt, before a sub-call or a run below.
        on_subcall_complete: called with depth, the model's name, seconds, and the error or None, after it.
        sandbox: name of the sandbox; see `open_sandbox`.
        bounds: bounds of a cell; None for an output that fits the window.
        parallel: models that are asked at the same time at most.
        retry: when a failed sub-call is repeated.
        tools: whether the model is offered tools, if it takes any; without tools it writes its code in fenced blocks.
        recorded: a recorded run in place of the models; see `replay` and `resume`.
        free: semaphore for `parallel`; that of the run above.

    The other arguments are those of `Agent`.

    Depth is 0 for the outermost root, 1 for its sub-calls and the runs below it. The callbacks `on_...` are called in the asking
    thread, also in parallel. Their exceptions are logged, and the run goes on. They are not called for recorded answers, nor for
    calls that a limit refuses.

    Raises:
        SpecError: an invalid number; a function without types, or with a reserved name.
    """

    level = 0
    """Number of runs above this one."""
    inquiry: Inquiry
    """The current question."""

    def __init__(
        self,
        model: Model,
        session: Session,
        *,
        sub: Model | None = None,
        depth: int = 1,
        limits: Limits | None = None,
        functions: Mapping[str, Callable[..., Any] | Tool] | None = None,
        on_subcall_start: Callable[[int, str, str], Any] | None = None,
        on_subcall_complete: Callable[[int, str, float, str | None], Any] | None = None,
        sandbox: str = "auto",
        bounds: Bounds | None = None,
        parallel: int = 4,
        retry: Retry | None = None,
        tools: bool = True,
        above: Account | None = None,
        recorded: RunRecord | None = None,
        free: threading.BoundedSemaphore | None = None,
        **options: Any,
    ) -> None:
        if depth < 0 or parallel < 1:
            raise SpecError(f"depth={depth}, parallel={parallel}", advice="give depth 0 or more, and one call at a time")
        self.sub, self.depth, self.parallel = sub or model, depth, parallel
        self.functions = as_tools(functions or {})
        self.hooks = Hooks(on_subcall_start=on_subcall_start, on_subcall_complete=on_subcall_complete)
        self.sandbox_name, self.retry, self.recorded = sandbox, retry or Retry(attempts=3), recorded
        self.cell_bounds = bounds or Bounds(seconds=60, memory=1 << 30, output=max(400, min(20_000, session.prompts.capacity)))
        self.asked = limits or Limits(steps=30)
        self.free = free or threading.BoundedSemaphore(parallel)
        self.outer, self._options, self._asking = above, options, threading.Lock()
        tools = tools and takes_tools(model)
        super().__init__(
            model,
            [],
            session,
            limits=msgspec.structs.replace(UNLIMITED, reply=self.asked.reply),
            beside=(REPL,) if tools else (),
            **(options if tools else options | {"memory": False}),
        )

    def ask(
        self,
        question: str,
        source: Source | None = None,
        *,
        past: Session | Store | None = None,
        kind: Any = Any,
        watch: Callable[[RunEvent | SubCalled], None] | None = None,
    ) -> RecursiveResult:
        """Answer a question about a text, or about the past. Another question waits for the end of this one.

        Args:
            source: the text, as a `str`, a file, a folder or several of them; None for the past alone.
            past: what `memory` reads: one session, or all sessions of a store.
            kind: required type of the answer, such as `int` or `list[str]`; any JSON value by default.
            watch: receives each event as it happens.

        Raises:
            ModelError: the root failed; everything before is in the session.
            SpecError: no such file; neither text nor past; called by a function that its own code called.
            SandboxRefused, MissingExtra: there is no sandbox on this machine.
            StoreStale: another program resumed this run.
        """
        if source is None and past is None:
            raise SpecError("nothing to ask about", advice="give a text, a file, a folder, or a session")
        if is_called_by(self):
            reason = "a function that the code of this agent called asks it another question"
            raise SpecError(reason, advice="make another agent, in another session")
        with self._asking, _alone(self.session):
            return self._ask([{"role": "user", "content": question}], source, past, kind, watch)

    def _ask(
        self, messages: Sequence[Any], source: Source | None, past: Session | Store | None, kind: Any, watch: Watch | None
    ) -> RecursiveResult:
        with self._traced(), self._span.current():
            return self._answered(messages, source, past, kind, watch)

    def _answered(
        self, messages: Sequence[Any], source: Source | None, past: Session | Store | None, kind: Any, watch: Watch | None
    ) -> RecursiveResult:
        text = None if source is None else variable(source, self.session.counter.count)
        if self.recorded is not None:
            _check_same(self.recorded, text, past)
            if self.recorded.goes_on and self.recorded.ended:
                return _recorded_result(self.recorded)
            if missing := sorted({*self.recorded.functions} - self.functions.keys()):
                reason = f"the code of the recorded run could call {', '.join(missing)}"
                raise SpecError(reason, advice="give the same functions; what they returned then is not asked again")
        run = Inquiry(self.session, self.asked, self.clock, self.outer, recorded=self.recorded, watch=watch)
        self.inquiry, self.account = run, run.own
        run.sub_calls = self._sub_calls(run)
        calls = self._calls(run, past)
        variables, files, setup = text.setup if text is not None else ({}, {}, "")
        with open_sandbox(
            self.sandbox_name,
            calls=calls,
            variables={**variables, "answer": EMPTY},
            files=files,
            bounds=self.cell_bounds,
            batched=BATCHED & calls.keys(),
            setup=setup,
        ) as run.sandbox:
            run.answer = AnswerVariable(run.sandbox, kind)
            run.before = MEMORY if past is not None else ""
            if run.rerun.record is not None:
                run.resume(run.rerun.record)
            else:
                self._tell(messages, text, past is not None)
            outcome, content, limit = self._work_out()
        return self._end(outcome, content, limit)

    def _tell(self, messages: Sequence[Any], text: Variable | None, past: bool) -> None:
        """Append the question, and the description of the text for the model."""
        system = self._system(self.depth, past)
        systems = [page.digest for page, _ in self.session.contents.pages() if page.role is Role.SYSTEM]
        if text is not None:
            description = f"{text.describe()}\nIt begins:\n{quote('context', text.head)}"
        else:
            description = "There is no variable `context`: ask `memory`."
        self.inquiry.begin(
            messages,
            "" if digest_of(system) in systems else system,
            description,
            digest=text.digest if text is not None else "",
            past=past,
            depth=self.depth,
            functions=sorted(self.functions),
            bounds=msgspec.to_builtins(self.cell_bounds),
        )

    def _system(self, depth: int, past: bool = False) -> str:
        return instructions(depth, self.functions.values(), past=past)

    def _end(self, outcome: AnswerOutcome, content: Any, limit: str) -> RecursiveResult:
        """Append the answer, and record how the run ended."""
        run, session = self.inquiry, self.session
        missing = (*run.sub_calls.missing, *run.missing)
        if missing and outcome in (AnswerOutcome.ANSWERED, AnswerOutcome.FORCED):
            outcome = AnswerOutcome.PARTIAL
        run.unpin()
        run.check()
        is_new = content is not None and outcome is not AnswerOutcome.PROSE
        page = session.window.last + 1 if is_new else run.page if content is not None else 0
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        steps, calls, name = run.own.outcome.steps, run.sub_calls.done + run.calls, str(outcome)
        note(session, name, answered=name, limit=limit, page=page, json=not isinstance(content, str), steps=steps, calls=calls)
        if is_new:
            session.append(text_message(Role.ASSISTANT, text, sources=run.last))
        run.write()
        run.whole.reached()
        spent = run.whole.outcome
        return RecursiveResult(
            outcome=outcome,
            content=content,
            limit=limit,
            missing=missing,
            differing=tuple(run.rerun.differing),
            address=f"p{page}" if page else "",
            steps=steps,
            calls=calls,
            tokens=spent.tokens,
            seconds=spent.seconds,
            money=spent.money,
            resident=run.resident,
            sandbox=run.sandbox.name,
            lacks=run.sandbox.lacks,
        )

    # The steps of the root

    def _work_out(self) -> Ended:
        """Run steps until the answer is ready, a limit is reached, or the model answers in prose."""
        run, replies = self.inquiry, 0
        prose: str | None = None
        while not run.answer.ready:
            if limit := run.whole.reached_limit():
                return self._unready(limit)
            if run.own.reached():
                return self._forced()
            if prose is not None and self._fenced(prose):
                prose = None
                continue
            if prose is not None:
                replies += 1
                if replies > MAX_PROSE_REPLIES:
                    return (AnswerOutcome.PROSE, prose, "") if prose.strip() else (AnswerOutcome.NOTHING, None, "")
                run.say(REMINDER)
            prose = self._step()
        return AnswerOutcome.ANSWERED, run.answer.content, ""

    def _forced(self) -> Ended:
        """Ask for the answer once more, without a limit of steps."""
        run, prose = self.inquiry, ""
        self.account = Account(UNLIMITED, self.clock, run.whole)
        for _ in range(MAX_FORCED_REPLIES if self.asked.steps else 0):
            if run.whole.reached_limit():
                break
            run.say('[The limit of steps is reached. Set answer["content"] and answer["ready"] = True now, in one cell.]')
            text = self._step()
            if text is not None and not self._fenced(text):
                prose = text.strip()
            if run.answer.ready:
                return AnswerOutcome.FORCED, run.answer.content, "steps"
        ended = self._unready("steps")
        return (AnswerOutcome.PROSE, prose, "steps") if prose and ended[1] is None else ended

    def _unready(self, limit: str) -> Ended:
        content = self.inquiry.answer.current()
        return (AnswerOutcome.NOTHING if content is None else AnswerOutcome.UNREADY), content, limit

    def _step(self) -> str | None:
        """Take the next reply, from the record or from the model, and run its calls. Return its text if it calls nothing."""
        run = self.inquiry
        reply = run.next_recorded()
        if reply is None:
            for notice in run.rerun.notices():
                run.say(notice)
            run.check()
            reply = run_to_end(self._reply(), run.show)
            run.page = self.session.window.last
        for event in self._work(reply.calls, None):
            run.show(event)
        return None if reply.calls else reply.text

    def _charge(self, usage: Tokens) -> None:
        run = self.inquiry
        run.check()
        super()._charge(usage)
        run.resident = max(run.resident, usage.prompt)
        money = self.asked.prices.cost(usage)
        note(self.session, "spent", spent=1, tokens=usage.total, money=money, resident=run.resident)

    def _keep(self, message: Message, prompt: Prompt, passages: Brought | None) -> None:
        """Admit a reply: its code is made of what the prompt showed, and goes with it."""
        reply = msgspec.structs.replace(message, sources=prompt.pages)
        keep(self.session, reply, passages.pages if passages is not None else ())

    def _can_go_without(self) -> bool:
        """Return whether tools were offered: without them, code is written in fenced blocks."""
        return bool(self.specs)

    def _go_without(self) -> None:
        self.specs, self.memory = (), False

    # Cells

    def _fenced(self, text: str) -> bool:
        """Run the fenced blocks of a reply in prose; return whether there were any."""
        code, run = fenced_code(text), self.inquiry
        if not code:
            return False
        run.show(Called("", REPL.name, code))
        output, failed, cites = self._cell(code, run.page)
        message = text_message(Role.USER, output, trust=Trust.TOOL, sources=(run.page, *run.last), cites=cites)
        page = run.admit(message, run.page)
        run.last = (page,)
        run.show(Returned("", self.session.contents.text(page), failed))
        return True

    def _work(self, calls: Sequence[Part], loop: Any) -> Iterator[RunEvent]:
        """Run the calls of one reply one after the other: a cell may use what the one before it made."""
        run = self.inquiry
        for part in calls:
            yield Called(part.call or "", part.name or "", part.text)
        for part in calls:
            code, failed = self.session.window.calls.get(part.call or "", 0), False
            page = run.rerun.output(code)
            if page is None or part.name == REPL.name:
                message, failed = self._called(part, loop)
                page = run.admit(message, code)
            if part.name == REPL.name:
                run.last = (page,)
            yield Returned(part.call or "", self.session.contents.text(page), failed)

    def _invoke(self, part: Part, loop: Any) -> tuple[Message, bool]:
        if part.name != REPL.name:
            return super()._invoke(part, loop)
        cites: tuple[Key, ...] = ()
        page, failed = self.session.window.calls[part.call or ""], True
        try:
            code = decode_texts(REPL, part.text)["code"]
            self._permit(self.bounds, part, Action(tool=REPL.name, deed=Deed.READ))
            text, failed, cites = self._cell(code, page)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            text = f'error: {error}; call repl with {{"code": "..."}}'
        except AccessDenied as error:
            text = f"error: {error}"
        return result_message(part, text, failed, sources=(page, *self.inquiry.last), cites=cites), failed

    def _cell(self, code: str, page: int) -> tuple[str, bool, tuple[Key, ...]]:
        """Run a cell. Return the text that the model sees, whether the cell failed, and the pages that its output is from.

        Args:
            page: of the model's code.
        """
        run = self.inquiry
        sub_calls, sandbox, number = run.sub_calls, run.sandbox, self.session.number
        sub_calls.origin = tuple((number, source) for source in (page, *run.last))
        counts, started = (sub_calls.done, sub_calls.failed), sandbox.started
        try:
            if run.before:
                sandbox.run(run.before)  # code may have replaced it
            cell = sandbox.run(code, total=self.account.remaining_seconds())
        finally:
            # Answers that were paid for are kept even if the cell is interrupted.
            cites = run.take_cited()
            if run.rerun.output(page) is None:
                sub_calls.note_refused(self.session, page)
        answered, failed = sub_calls.done - counts[0], sub_calls.failed - counts[1]
        lines, wrong = [*cell_lines(cell)], run.answer.check()
        if sandbox.started > started:
            lines.append("[the sandbox was started again: your variables are gone, context and answer are as at the beginning]")
        if answered or failed:
            lines.append(f"[{answered:,} sub-calls answered" + (f", {failed:,} gave nothing" if failed else "") + "]")
        lines += [wrong] if wrong else []
        return "\n".join(lines), cell.outcome is not CellOutcome.OK, cites

    # Functions for the code

    def _sub_calls(self, run: Inquiry) -> SubCalls:
        return SubCalls(
            self.sub if self.depth else None,
            run.whole,
            lambda: run.fork("Sub-calls of the run above.", calls=True),
            free=self.free,
            workers=self.parallel,
            retry=self.retry,
            reply=self.asked.reply,
            recorded=self.recorded,
            watch=None if run.watch is None else lambda answered, failed: run.show(SubCalled(answered, failed)),
            check=run.check,
            hooks=self.hooks,
            depth=self.level + 1,
        )

    def _calls(self, run: Inquiry, past: Session | Store | None) -> dict[str, Callable[..., Any]]:
        """Return the functions that the code can call, by name."""
        functions = run.sub_calls.functions if self.depth else {}
        if self.depth > 1:
            functions |= {"rlm_query": self._query, "rlm_query_batched": self._query_batched}
        if past is not None:
            own_run = self.session.name, run.began
            memory = Past(past, self.session, own_run, run.sub_calls, self._is_readable)
            functions |= {"memory_search": memory.search, "memory_sessions": memory.sessions, "memory_pages": memory.pages}
        return functions | Functions(self.functions, self, self._permitted, run.sub_calls).named

    def _is_readable(self, session: str) -> bool:
        """Return whether code may read another session of the past: where the agent has rights of its own, they must name it."""
        action = Action(tool=REPL.name, deed=Deed.READ, reads=((SegmentKind.SESSION, session),))
        return self.bounds == Rights() or decide(self.bounds, action).permit is Permit.ALLOW

    def _query(self, question: str, text: str) -> Any:
        result = self._below(question, text)
        if isinstance(result, str):
            raise ToolError(f"this piece gave no answer: {result}")
        return result.content

    def _query_batched(self, question: str, texts: list[str]) -> list[Any]:
        with ThreadPoolExecutor(self.parallel) as pool:
            asks = [carried(partial(self._below, question)) for _ in texts]
            results = list(pool.map(lambda ask, text: ask(text), asks, texts))
        return [None if isinstance(result, str) else result.content for result in results]

    def _below(self, question: str, text: str) -> RecursiveResult | str:
        """Answer a question about a piece of the text by a run of its own; return the reason if there is no answer."""
        run, prompt = self.inquiry, f"{question} {text[:100]}"
        sub_calls = run.sub_calls
        digest = variable(text, self.session.counter.count).digest
        if refused := sub_calls.allow(prompt, run=(question, digest)):
            return refused
        recorded = self.recorded.run(question, digest) if self.recorded is not None else None
        # A failed run of a cell whose output the model saw is not run again.
        code = sub_calls.origin[0][1]
        if recorded is not None and recorded.goes_on and not recorded.ended and not run.rerun.is_open(code):
            sub_calls.miss(prompt, "it failed")
            return "it failed"
        below = self._run_below(run, recorded)
        message = text_message(Role.USER, question, trust=Trust.TOOL, cites=(*sub_calls.origin, *sub_calls.take_read()))
        watch = None if run.watch is None else partial(run.show_below, below.session.name)

        def work() -> tuple[RecursiveResult, str]:
            try:
                result = below._ask([message], text, None, Any, watch)
            except KilburnError as error:
                result = RecursiveResult(limit=type(error).__name__)
            return result, "" if result.content is not None else result.limit or str(result.outcome)

        if recorded is None:
            result, why = self.hooks.around(below.level, below.model.name, question, self.clock, work)
        else:
            result, why = work()
        run.end_below(below.session, result)
        if why:
            sub_calls.miss(prompt, why)
            return why
        return result

    def _run_below(self, run: Inquiry, recorded: RunRecord | None) -> RecursiveModel:
        """Make the run below this one: the recorded one that goes on, or a new one in a branch."""
        model = self.model
        if recorded is not None and recorded.goes_on:
            branch = recorded.session
        else:
            system = self._system(self.depth - 1)
            branch = run.fork("Work on a part of what the run above works on.", system=system, calls=False)
        if recorded is not None and not recorded.goes_on:
            model = Scripted(recorded.replies, form=model.form, tokenizer=model.tokenizer)
        below = RecursiveModel(
            model,
            branch,
            sub=self.sub,
            depth=self.depth - 1,
            # The account above limits the costs of all of them.
            limits=msgspec.structs.replace(self.asked, calls=None, tokens=None, seconds=None, money=None),
            functions=self.functions,
            **msgspec.structs.asdict(self.hooks),
            sandbox=self.sandbox_name,
            bounds=self.cell_bounds,
            parallel=self.parallel,
            retry=self.retry,
            tools=bool(self.specs),
            above=run.whole,
            recorded=recorded,
            free=self.free,
            **self._options,
        )
        below.caller, below.level = self, self.level + 1
        return below


def replay(
    recorded: Session, session: Session, source: Source | None = None, *, past: Session | Store | None = None, **options: Any
) -> RecursiveResult:
    """Replay a recorded run without a model: the replies come from its pages, and the answer is the same.

    Args:
        recorded: the session of the run; its last question counts.
        session: a new session for the steps, in any store.
        source: the same text; its digest is checked.
        past: the same past.
        options: those of `RecursiveModel`, such as the sandbox.

    Raises:
        SpecError: nothing was asked there, or the text is another one.
        Unavailable: the code asked for something that is not in the recorded run.
    """
    run = RunRecord(recorded)
    model = Scripted(run.replies, name="recorded", tokenizer=session.counter.name)
    agent = RecursiveModel(model, session, depth=run.depth, recorded=run, **options)
    return agent.ask(run.question, source, past=past)


def resume(
    session: Session,
    model: Model,
    source: Source | None = None,
    *,
    past: Session | Store | None = None,
    kind: Any = Any,
    watch: Callable[[RunEvent | SubCalled], None] | None = None,
    limits: Mapping[str, Any] | None = None,
    question: str = "",
    **options: Any,
) -> RecursiveResult:
    """Resume a run that was interrupted, such as by a crash.

    The recorded cells are run again in a new sandbox. Their calls are answered from the recorded pages. Where these end, also
    within a cell, the models continue. Limits hold for the costs of both parts together. An output that differs from the recorded
    one, because of chance or the clock, stays as the model saw it; the model is told, and `RecursiveResult.differing` has its
    address. If the run has ended, its answer is returned.

    Args:
        session: the session of the run; its last question counts.
        model: the root, the same or another.
        source: the same text; its digest is checked.
        past, kind, watch: see `RecursiveModel.ask`.
        limits: changed limits, by their names in `Limits`. A run that a limit ended without an answer continues if that limit is
            higher now.
        question: the expected question; "" for no check.
        options: those of `RecursiveModel`, such as `sub`.

    Raises:
        SpecError: nothing was asked there, the question or the text is another one, or the session continued with something
            else.
        Forgotten: a page of the run was forgotten. StoreStale: another program resumed it.
        ModelError: the root failed; the run can be resumed again.
    """
    if unknown := sorted({*(limits or {})} - {*Limits.__struct_fields__}):
        raise SpecError(f"no limit {unknown[0]!r}", advice=f"there are: {', '.join(Limits.__struct_fields__)}")
    run = RunRecord(session, goes_on=True, new_limits=limits)
    if question not in ("", run.question):
        raise SpecError("another question was asked there", advice="leave out the question, or name the session of the run")
    run_options = {"limits": msgspec.structs.replace(run.limits, **(limits or {})), "bounds": run.cell_bounds}
    with _alone(session):
        agent = RecursiveModel(model, session, depth=run.depth, recorded=run, **(run_options | options))
        return agent.ask(run.question, source, past=past, kind=kind, watch=watch)


@contextmanager
def _alone(session: Session) -> Iterator[None]:
    """Report a write of another program to a session of this run as a run that was taken over."""
    try:
        yield
    except StoreStale as error:
        raise taken_over_error(session) from error


def _check_same(run: RunRecord, text: Variable | None, past: Session | Store | None) -> None:
    """Make sure that a question is about what the recorded run was about.

    Raises:
        SpecError: it is about something else.
    """
    if run.digest != (text.digest if text is not None else ""):
        raise SpecError("this is not the text of the recorded run", advice="give the same files, unchanged")
    if run.past and past is None:
        raise SpecError("the recorded run read the past", advice="give it again")


def _recorded_result(run: RunRecord) -> RecursiveResult:
    """Return the result of a run that has ended, from its pages."""
    ending, content = run.ended, None
    if ending["page"]:
        text = run.session.contents.text(ending["page"])
        content = msgspec.json.decode(text) if ending["json"] else text
    return RecursiveResult(
        outcome=AnswerOutcome(ending["answered"]),
        content=content,
        limit=ending["limit"],
        missing=run.missing,
        address=f"p{ending['page']}" if ending["page"] else "",
        steps=ending["steps"],
        calls=ending["calls"],
        tokens=run.spent.tokens,
        seconds=run.spent.seconds,
        money=run.spent.money,
        resident=run.resident,
    )
