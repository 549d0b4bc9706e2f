"""Recursive models that go on: programs are killed at many places, and what they had paid for is not asked again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kilburn
from cli.terminal import kilburn as command
from effort import each_value
from kilburn import Store
from kilburn.agents.loop import Limits, Returned
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, SandboxRefused, SpecError, StoreStale, Unavailable
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request, Tokens
from kilburn.models.retry import Retry
from kilburn.prices import Prices
from kilburn.recursion.inquiry import AnswerOutcome
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult, replay, resume
from kilburn.recursion.sandbox import open_sandbox
from kilburn.recursion.sub_calls import MAX_BATCH
from kilburn.testing import FakeClock, Scripted, check_laws
from kilburn.wire.validity import validate_chat

MANY = MAX_BATCH + 20
"""Calls of which the first are written before the last are asked."""
TEXT = "\n".join(f"{n}: {'odd' if n % 2 else 'even'}" for n in range(MANY))
AT_ONCE = Retry(attempts=2, sleep=lambda _: None)
READY = '\nanswer["ready"] = True'
LOOK = "lines = context.splitlines()\nprint(len(lines), llm_query('first'))"
ASK_ALL = "replies = llm_query_batched(lines)\nprint(len(replies))"
TELL = 'answer["content"] = [len(replies), sum(reply.endswith("ODD") for reply in replies)]' + READY
ANSWER = [MANY, MANY // 2]


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox() -> None:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))


def cell(*codes: str) -> Message:
    parts = [Part(kind=Kind.CALL, text=json.dumps({"code": code}), call=f"c{at}", name="repl") for at, code in enumerate(codes)]
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Answering:
    """A model that answers a prompt in capitals, and writes down first what it was asked."""

    name, form, context, tokenizer = "answering", "chat", None, "chars/4"

    def __init__(
        self, log: Path, *, dies: Callable[[list[str]], bool] = lambda asked: False, usage: Tokens | None = None
    ) -> None:
        self.log, self.dies, self.usage = log, dies, usage
        self._lock = threading.Lock()

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def stream(self, request: Request) -> Iterator[Reply]:
        prompt = request.messages[-1]["content"]
        with self._lock:
            with self.log.open("a") as log:
                log.write(f"{prompt}\n")
            if self.dies(self.asked):
                die()
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=prompt.upper()),)), usage=self.usage)


def opened(folder: Path) -> Store:
    return kilburn.open(folder / "agent.db", window=4000, policy="fifo", tokenizer="chars/4", embedder=None)


def killed(work: Callable[[], Any]) -> None:
    """Do it in a program of its own, which has to be killed by it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def begin(folder: Path, root: Any, sub: Any, **options: Any) -> None:
    asking = {name: options.pop(name) for name in ("watch",) if name in options}
    agent = RecursiveModel(root, opened(folder).session("a"), sub=sub, retry=AT_ONCE, parallel=2, **options)
    agent.ask("how many are odd?", TEXT, **asking)


def go_on(session: Session, root: Any, sub: Any, text: Any = TEXT, **options: Any) -> RecursiveResult:
    return resume(session, root, text, sub=sub, retry=AT_ONCE, parallel=2, **options)


def below(session: Session) -> list[Session]:
    return [session.branches.open(info.name.removeprefix(f"{session.name}/")) for info in session.branches.below()]


def written(session: Session) -> set[str]:
    """The prompts of all sub-calls that stand in the ledger with a reply."""
    found = set()
    for branch in below(session):
        pages = branch.window.pages
        asked = [page.sources[0] for page in pages.values() if page.role is Role.ASSISTANT and page.sources]
        found |= {branch.contents.text(page) for page in asked if pages[page].role is Role.USER}
    return found


def check_all(session: Session) -> None:
    check_laws(session)
    validate_chat(session.render())
    assert {session.window.pages[page].role for page in session.window.pins} == {Role.SYSTEM}
    for branch in below(session):
        check_laws(branch)


SCRIPT = [LOOK, ASK_ALL, TELL]


def on(event: str, number: int) -> Callable[[Any], None]:
    """A watch that kills when an event of this name comes for the n-th time."""
    seen = Counter[str]()

    def watch(one: Any) -> None:
        seen[type(one).__name__] += 1
        if seen[event] == number:
            die()

    return watch


def ask_and_die(folder: Path, sandbox: str) -> None:
    tempfile.tempdir = str(folder / "tmp")  # of this program alone
    text = TEXT * 50 + "the canary sleeps at the wharf"
    agent = RecursiveModel(Scripted([cell("print(len(context))"), die]), opened(folder / "db").session("a"), sandbox=sandbox)
    agent.ask("how long?", text)


@pytest.mark.parametrize("sandbox", ["cpython", "monty"])
def test_a_program_that_is_killed_leaves_no_copy_of_the_text(tmp_path: Path, sandbox: str) -> None:
    if sandbox == "monty":
        pytest.importorskip("pydantic_monty")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "db").mkdir()
    program = multiprocessing.get_context("spawn").Process(target=ask_and_die, args=(tmp_path, sandbox))
    program.start()
    program.join()
    assert program.exitcode == -signal.SIGKILL
    left = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert left
    assert [file for file in left if b"canary" in file.read_bytes()] == []


@pytest.mark.parametrize(
    ("place", "replies"),
    [
        ("before the first cell", 0),
        ("in the first cell", 1),
        ("between cells", 1),
        ("before a cell", 2),
        ("in a batch", 2),
        ("at the end of a batch", 2),
        ("with the answer", 3),
        ("after the answer", 3),
    ],
)
def test_a_run_that_was_killed_goes_on(place: str, replies: int, tmp_path: Path) -> None:
    script: list[Any] = [cell(code) for code in SCRIPT]
    asked: dict[str, Callable[[list[str]], bool]] = {
        "in the first cell": lambda asked: len(asked) == 1,
        "in a batch": lambda asked: len(asked) == MAX_BATCH + 10,
        "at the end of a batch": lambda asked: len(asked) == MANY + 1,
    }
    watch = {"before a cell": on("Called", 2), "with the answer": on("Called", 3), "after the answer": on("Returned", 3)}
    if place == "before the first cell":
        script[0] = die
    elif place == "between cells":
        script[1] = die
    sub = Answering(tmp_path / "log", dies=asked.get(place, lambda _: False))
    killed(lambda: begin(tmp_path, Scripted(script), sub, watch=watch.get(place)))
    before = sub.asked
    with opened(tmp_path) as store:
        session = store.session("a")
        paid = written(session)
        # What waited to be written is lost.
        lost = {"in the first cell": 1, "in a batch": 9, "at the end of a batch": MANY - MAX_BATCH}.get(place, 0)
        assert len(before) - lost <= len(paid) <= len(before)
        root = Scripted([cell(code) for code in SCRIPT[replies:]])
        result = go_on(session, root, Answering(sub.log))
        assert (result.outcome, result.content, result.differing) == (AnswerOutcome.ANSWERED, ANSWER, ())
        assert (len(root.requests), root.left, result.steps, result.calls) == (3 - replies, 0, 3, MANY + 1)
        after = sub.asked[len(before) :]
        assert not paid & set(after)
        assert Counter([*paid, *after]) == Counter(["first", *TEXT.splitlines()])
        check_all(session)
        outputs = [page for page, _ in session.contents.pages() if page.kind is Kind.RESULT]
        assert [len(page.cites) for page in outputs] == [1, MANY, 0]
        if place == "in a batch":
            assert replay(session, store.session("again"), TEXT).content == ANSWER
        events = [*session.ledger.events()]
        ended = go_on(session, Scripted(), Answering(sub.log))
        assert (ended.outcome, ended.content, ended.steps, ended.calls) == (result.outcome, ANSWER, 3, MANY + 1)
        assert [*session.ledger.events()] == events
    assert sub.asked == [*before, *after]
    assert command("fsck", "--db", tmp_path / "agent.db").status == 0


class Roots:
    """Roots of two levels: the upper one begins two runs, one after the other, each of which has two cells."""

    name, form, context, tokenizer = "roots", "chat", None, "chars/4"

    def __init__(self, dies_at: int = 0) -> None:
        self.dies_at, self.asked = dies_at, 0

    def stream(self, request: Request) -> Iterator[Reply]:
        self.asked += 1
        if self.asked == self.dies_at:
            die()
        code = (
            "lines = context.splitlines()\nhalf = len(lines) // 2\n"
            'answer["content"] = [rlm_query("count", "\\n".join(part)) for part in (lines[:half], lines[half:])]' + READY
        )
        if any(message.get("content") == "count" for message in request.messages):
            code = "replies = llm_query_batched(context.splitlines())"
            if any(message["role"] == "tool" for message in request.messages):
                code = 'answer["content"] = sum(reply.endswith("ODD") for reply in replies)' + READY
        yield Reply(message=cell(code), finish="calls")


@pytest.mark.parametrize(("root_dies_at", "sub_dies_at", "replies"), [(3, 0, 2), (0, 2 * MANY - 5, 4), (4, 0, 3)])
def test_a_run_within_a_run_that_was_killed_goes_on(root_dies_at: int, sub_dies_at: int, replies: int, tmp_path: Path) -> None:
    text = "\n".join(f"{n}: {'odd' if n % 2 else 'even'}" for n in range(2 * MANY))
    sub = Answering(tmp_path / "log", dies=lambda asked: len(asked) == sub_dies_at)
    options: dict[str, Any] = {"sub": sub, "depth": 2, "parallel": 2}
    killed(lambda: RecursiveModel(Roots(root_dies_at), opened(tmp_path).session("a"), **options).ask("how many are odd?", text))
    before = sub.asked
    with opened(tmp_path) as store:
        session = store.session("a")
        paid, root = written(session), Roots()
        assert len(paid) >= MANY
        result = go_on(session, root, Answering(sub.log), text)
        assert (result.outcome, result.content, result.calls) == (AnswerOutcome.ANSWERED, [MANY // 2, MANY // 2], 2 * MANY)
        assert root.asked == 5 - replies
        assert Counter([*paid, *sub.asked[len(before) :]]) == Counter(text.splitlines())
        assert [info.name for info, _ in session.branches.children()] == ["a/b1", "a/b2"]
        check_all(session)


# Without a crash: the root is not available, and later it is


def session_of(name: str = "a") -> Session:
    return kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4", embedder=None).session(name)


def cut(session: Session, *script: Any, sub: Any = None, text: Any = TEXT, past: Any = None, **options: Any) -> None:
    """A run that ends because the root is not available."""
    agent = RecursiveModel(Scripted([*script, Unavailable("gone")]), session, sub=sub or Scripted(), retry=AT_ONCE, **options)
    with pytest.raises(Unavailable):
        agent.ask("what?", text, past=past)


def test_what_was_spent_stays_spent(tmp_path: Path) -> None:
    cells, usage = [cell(code) for code in SCRIPT], Tokens(prompt=100, reply=10)
    limits = Limits(steps=5, calls=500, tokens=10**6, money=10**6, prices=Prices(input=1e6))
    options: dict[str, Any] = {"sub": Answering(tmp_path / "log", usage=usage), "retry": AT_ONCE}
    whole = RecursiveModel(Scripted(cells), session_of(), limits=limits, **options).ask("what?", TEXT)
    session = session_of()
    cut(session, *cells[:2], sub=options["sub"], limits=limits)
    again = go_on(session, Scripted(cells[2:]), options["sub"])
    for name in ("outcome", "content", "steps", "calls", "tokens", "money", "resident"):
        assert getattr(again, name) == getattr(whole, name), name
    assert again.money > MANY * 100
    ended = go_on(session, Scripted(), Scripted())
    assert (ended.tokens, ended.money, ended.resident) == (whole.tokens, whole.money, whole.resident)


@pytest.mark.parametrize(
    ("given", "limit", "asked"),
    [({}, "steps", 0), ({"steps": 3}, "", 1), ({"steps": 3, "calls": 2}, "calls", 0), ({"steps": 3, "tokens": 1}, "tokens", 0)],
)
def test_limits_hold_for_both_parts(given: dict[str, Any], limit: str, asked: int, tmp_path: Path) -> None:
    session = session_of()
    cut(session, cell(LOOK), cell('answer["content"] = 7'), sub=Answering(tmp_path / "log"), limits=Limits(steps=2))
    root = Scripted([cell('answer["ready"] = True')] if asked else [])
    if limit == "steps":
        root = Scripted([cell("1"), cell("2")])
    result = go_on(session, root, Scripted(), limits=given)
    assert (result.limit, result.content, root.left) == (limit, 7, 0)
    assert result.outcome is (AnswerOutcome.UNREADY if limit else AnswerOutcome.ANSWERED)
    ended = go_on(session, Scripted(), Scripted())
    assert (ended.outcome, ended.content, ended.limit) == (result.outcome, 7, limit)


def test_slow_calls_are_written_as_they_come_and_their_seconds_are_counted(tmp_path: Path) -> None:
    clock = FakeClock(tick=0)

    class Slow(Answering):
        def stream(self, request: Request) -> Iterator[Reply]:
            seen.append(len(written(session)))
            clock.advance(10)
            yield from super().stream(request)

    seen: list[int] = []
    store = Store(Sqlite(":memory:"), Budget(4000), "fifo", tokenizer="chars/4", clock=clock)
    session, code = store.session("a"), cell("got = [llm_query(str(n)) for n in range(4)]")
    cut(session, code, sub=Slow(tmp_path / "log"), clock=clock, limits=Limits(seconds=50))
    assert seen == [0, 1, 2, 3]
    clock.advance(10_000)
    result = go_on(session, Scripted([code, cell("1")]), Slow(tmp_path / "log"), clock=clock)
    assert (result.outcome, result.limit, result.seconds) == (AnswerOutcome.NOTHING, "seconds", 50)
    assert go_on(session, Scripted(), Scripted()).seconds == 50


def test_cells_and_memory_tools_of_one_reply(tmp_path: Path) -> None:
    """The second of three cells was cut off, after a memory tool was called."""
    session, sub = session_of(), Answering(tmp_path / "log")
    search = Part(kind=Kind.CALL, text='{"query": "odd"}', call="s", name="search_memory")
    cells = cell('a = llm_query("1")', "import time\n" + 'b = llm_query("2") + llm_query("3")', "print(a, b)" + READY)
    reply = Message(role=Role.ASSISTANT, parts=(search, *cells.parts))

    def stop(event: Any) -> None:
        if sub.asked == ["1", "2", "3"]:
            raise KeyboardInterrupt

    agent = RecursiveModel(Scripted([reply]), session, sub=sub, retry=AT_ONCE)
    with pytest.raises(KeyboardInterrupt):
        agent.ask("what?", TEXT, watch=stop)
    assert [page.call for page, _ in session.contents.pages() if page.kind is Kind.RESULT] == ["s", "c0"]
    events: list[Any] = []
    result = go_on(session, Scripted([cell('answer["content"] = a + b' + READY)]), sub, watch=events.append)
    assert (result.content, result.differing, result.steps) == ("123", (), 2)
    assert sub.asked == ["1", "2", "3"]
    assert [event.call for event in events if isinstance(event, Returned)][:4] == ["s", "c0", "c1", "c2"]
    check_all(session)


class Failing(Answering):
    """It fails for some prompts, and is interrupted by one."""

    def __init__(self, log: Path, *, fails: tuple[str, ...] = (), stops: str = "") -> None:
        super().__init__(log)
        self.fails, self.stops = fails, stops

    def stream(self, request: Request) -> Iterator[Reply]:
        prompt = request.messages[-1]["content"]
        if prompt == self.stops:
            raise KeyboardInterrupt
        for reply in super().stream(request):
            if prompt in self.fails:
                raise Unavailable("not for this one")
            yield reply


def test_failures_stay_in_a_cell_that_ended_and_are_asked_again_in_one_that_did_not(tmp_path: Path) -> None:
    first = 'got = llm_query_batched(["1", "2"])\nprint(got)'
    second = 'for n in "3456":\n    got += llm_query_batched([n])\nprint(got)\nanswer["content"] = got' + READY
    session, sub = session_of(), Failing(tmp_path / "log", fails=("2", "4"), stops="5")
    agent = RecursiveModel(Scripted([cell(first), cell(second)]), session, sub=sub, retry=AT_ONCE)
    with pytest.raises(KeyboardInterrupt):
        agent.ask("what?", TEXT)
    assert Counter(sub.asked) == {"1": 1, "2": 2, "3": 1, "4": 2}
    later = Answering(tmp_path / "later")
    result = go_on(session, Scripted(), later)
    assert (result.outcome, result.content, result.differing) == (AnswerOutcome.PARTIAL, ["1", None, "3", "4", "5", "6"], ())
    assert [(missing.prompt, missing.why) for missing in result.missing] == [("2", "Unavailable 2 times")]
    assert later.asked == ["4", "5", "6"]
    for again in (replay(session, session_of("again"), TEXT), go_on(session, Scripted(), Scripted())):
        assert (again.content, again.missing, again.calls) == (result.content, result.missing, result.calls)


def test_code_that_is_not_the_same_again_is_told(tmp_path: Path) -> None:
    session, sub = session_of(), Answering(tmp_path / "log")
    chance = "import os\nx = os.urandom(8).hex()\nprint(x, llm_query(x), llm_query('same'))"
    cut(session, cell(chance), sub=sub)
    seen = session.contents.text(session.window.last)
    root = Scripted([cell('answer["content"] = x' + READY)])
    events: list[Any] = []
    result = go_on(session, root, sub, watch=events.append)
    address = next(page.address for page, _ in session.contents.pages() if page.kind is Kind.RESULT)
    assert (result.outcome, result.differing) == (AnswerOutcome.ANSWERED, (address,))
    assert Counter(sub.asked) == {"same": 1, seen[:16]: 1, result.content: 1}
    assert next(event.text for event in events if isinstance(event, Returned)) == session.recall(address) == seen
    assert f"{address} came out otherwise" in json.dumps(list(root.requests[0].messages))
    last = next(page for page, _ in reversed(session.contents.pages()) if page.kind is Kind.RESULT)
    assert [session.branches.open("b2").contents.text(page) for _, page in last.cites] == [result.content.upper()]
    check_all(session)


def test_only_the_same_question_goes_on(tmp_path: Path) -> None:
    session, sub = session_of(), Answering(tmp_path / "log")
    with pytest.raises(SpecError, match="nothing was asked"):
        go_on(session, Scripted(), sub)
    cut(session, cell(LOOK), sub=sub)
    events = [*session.ledger.events()]
    for text in (TEXT + "!", {"a": TEXT}):
        with pytest.raises(SpecError, match="not the text"):
            go_on(session, Scripted(), sub, text)
    with pytest.raises(SpecError, match="not the text"):
        resume(session, Scripted(), past=session)
    assert [*session.ledger.events()] == events
    session.append({"role": "user", "content": "and now to something else"})
    with pytest.raises(SpecError, match="something else"):
        go_on(session, Scripted(), sub)
    assert sub.asked == ["first"]


def test_what_was_forgotten_is_not_made_again(tmp_path: Path) -> None:
    session, sub = session_of(), Answering(tmp_path / "log")
    cut(session, cell(LOOK), sub=sub)
    session.branches.open("b1").forget("p2")
    with pytest.raises(Forgotten):
        go_on(session, Scripted(), sub)
    assert sub.asked == ["first"]


@pytest.mark.parametrize("tools", [True, False])
def test_a_run_can_be_cut_off_often(tools: bool, tmp_path: Path) -> None:
    codes = [LOOK, "half = llm_query_batched(lines[:5])", "replies = half + llm_query_batched(lines[5:])", TELL]
    session, sub = session_of(), Answering(tmp_path / "log")
    script = [cell(code) if tools else f"So:\n```repl\n{code}\n```" for code in codes]
    cut(session, "hm", sub=sub, tools=tools)
    for reply in script[:-1]:
        with pytest.raises(Unavailable):
            go_on(session, Scripted([reply, Unavailable("gone")]), sub, tools=tools)
    result = go_on(session, Scripted(script[-1:]), sub, tools=tools)
    assert (result.outcome, result.content, result.steps) == (AnswerOutcome.ANSWERED, ANSWER, 5)
    assert Counter(sub.asked) == Counter(["first", *TEXT.splitlines()])
    check_all(session)
    assert replay(session, session_of("again"), TEXT).content == ANSWER


def test_the_past_is_as_it_was(tmp_path: Path) -> None:
    store = kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4", embedder=None)
    past, session = store.session("past"), store.session("a")
    past.append({"role": "user", "content": "the parser drops the last line"})
    code = "seen = [len(memory.pages('past')), len(memory.sessions())]"
    cut(session, cell(code), past=store)
    past.append({"role": "user", "content": "the parser again"})
    with pytest.raises(SpecError, match="read the past"):
        resume(session, Scripted(), TEXT)
    root = Scripted([cell("answer['content'] = [*seen, len(memory.pages('past')), len(memory.pages('a'))]" + READY)])
    result = resume(session, root, TEXT, past=store)
    assert (result.content, result.differing) == ([1, 1, 2, 0], ())


# Two programs


class Between(Mapping[str, str]):
    """A text; something happens before it is read."""

    def __init__(self, happens: Callable[[], Any]) -> None:
        self.happens = happens

    def __getitem__(self, name: str) -> str:
        self.happens()
        return TEXT

    def __iter__(self) -> Iterator[str]:
        return iter(["text"])

    def __len__(self) -> int:
        return 1


def test_of_two_programs_that_go_on_at_once_one_is_refused(tmp_path: Path) -> None:
    sub, final = Answering(tmp_path / "log"), cell('answer["content"] = 1' + READY)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        cut(first.session("a"), cell('print(llm_query("first"))'), sub=sub, text={"text": TEXT})
        other = Between(lambda: go_on(second.session("a"), Scripted([final]), sub, {"text": TEXT}))
        root = Scripted([final])
        with pytest.raises(StoreStale, match="another program went on with the run in 'a'"):
            go_on(first.session("a"), root, sub, other)
        assert not root.requests
        check_all(second.session("a"))
    assert sub.asked == ["first"]


def test_a_run_that_another_program_has_taken_up_ends(tmp_path: Path) -> None:
    class Slow(Answering):
        """Before it answers the last prompt, another program goes on with the run."""

        def stream(self, request: Request) -> Iterator[Reply]:
            if request.messages[-1]["content"] == "2":
                with opened(tmp_path) as second:
                    result = go_on(second.session("a"), Scripted([cell('answer["content"] = got' + READY)]), other)
                    assert result.content == list("0123")
            yield from super().stream(request)

    other, slow = Answering(tmp_path / "other"), Slow(tmp_path / "log")
    with opened(tmp_path) as first:
        session = first.session("a")
        code = "got = [llm_query(str(n)) for n in range(4)]"
        root = Scripted([cell(code), cell(code)])
        with pytest.raises(StoreStale, match="another program went on"):
            RecursiveModel(root, session, sub=slow, retry=AT_ONCE).ask("what?", TEXT)
        assert root.left == 1
    with opened(tmp_path) as store:
        assert go_on(store.session("a"), Scripted(), Scripted()).content == list("0123")
        check_all(store.session("a"))


@pytest.mark.parametrize(("number", "dies_in"), each_value([1, 2, 5], ["send", "sub-call"]))
def test_functions_of_the_caller_are_not_called_again_after_a_kill(tmp_path: Path, dies_in: str, number: int) -> None:
    """Only one that was killed itself, before it returned, is."""
    log, dies = tmp_path / "sent", True

    def send(text: str) -> int:
        """Send a text."""
        with log.open("a") as file:
            file.write(f"{text}\n")
        sent = log.read_text().splitlines()
        if dies and dies_in == "send" and len(sent) == number:
            die()
        return len(text)

    script = [
        cell("got = []\nfor n in range(3):\n    got.append(send(f'one {n}'))\n    llm_query(f'a {n}')\nprint(got)"),
        cell("for n in range(3):\n    got.append(send(f'three {n}'))\n    llm_query(f'b {n}')\nprint(got)"),
        cell('answer["content"] = got' + READY),
    ]
    asked = Answering(tmp_path / "asked", dies=lambda asked: dies_in == "sub-call" and len(asked) == number)
    killed(lambda: begin(tmp_path, Scripted(script), asked, functions={"send": send}))
    dies = False
    session = opened(tmp_path).session("a")
    replied = sum(page.kind is Kind.CALL for page, _ in session.contents.pages())
    result = go_on(session, Scripted(script[replied:]), Answering(tmp_path / "again"), functions={"send": send})
    assert (result.outcome, result.content, result.differing) == (AnswerOutcome.ANSWERED, [5] * 3 + [7] * 3, ())
    times = Counter(log.read_text().splitlines())
    assert len(times) == 6
    assert sorted(times.values()) == ([1] * 5 + [2] if dies_in == "send" else [1] * 6)
    check_all(session)
