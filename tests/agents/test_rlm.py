"""Recursive models: answers, budgets, failures, the past, and running a run again from its pages."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kilburn
from effort import rounds
from kilburn.agents.access import Privilege, Rights
from kilburn.agents.loop import Limits, Returned
from kilburn.errors import Forgotten, KilburnError, MissingExtra, SandboxRefused, SpecError, Unavailable
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Reply, Request, Tokens
from kilburn.models.retry import Retry
from kilburn.page import Place
from kilburn.prices import Prices
from kilburn.recursion.inquiry import AnswerOutcome, SubCalled
from kilburn.recursion.rlm import RecursiveModel, replay, resume
from kilburn.recursion.sandbox import MAX_CALL_BYTES, Bounds, open_sandbox
from kilburn.testing import FakeClock, Scripted, check_laws
from kilburn.wire.validity import validate_chat

TEXT = "\n".join(f"{n}: {'odd' if n % 2 else 'even'}" for n in range(20))
AT_ONCE = Retry(attempts=3, sleep=lambda _: None)
READY = '\nanswer["ready"] = True'
ASK_ALL = 'replies = llm_query_batched(context.splitlines())\nanswer["content"] = replies' + READY


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox() -> None:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))


def open_one(sandbox: str) -> None:
    try:
        open_sandbox(sandbox).close()
    except (SandboxRefused, MissingExtra) as error:
        pytest.skip(str(error))


class Answering:
    """A model whose reply is a function of the prompt; it knows how many asked at the same time."""

    name, form, context, tokenizer = "answering", "chat", None, "chars/4"

    def __init__(self, answer: Callable[[str], str], usage: Tokens | None = None) -> None:
        self.answer, self.usage = answer, usage
        self.asked: list[str] = []
        self.most = self._now = 0
        self._lock = threading.Lock()

    def stream(self, request: Request) -> Iterator[Reply]:
        prompt = request.messages[-1]["content"]
        with self._lock:
            self.asked.append(prompt)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            text = self.answer(prompt)
        finally:
            with self._lock:
                self._now -= 1
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)), usage=self.usage)


def cell(code: str) -> Message:
    call = Part(kind=Kind.CALL, text=json.dumps({"code": code}), call="c", name="repl")
    return Message(role=Role.ASSISTANT, parts=(call,))


def opened(window: int = 4000) -> Store:
    return kilburn.open(":memory:", window=window, policy="fifo", tokenizer="chars/4", embedder=None)


def ask(*script: Any, text: Any = TEXT, sub: Any = None, session: Session | None = None, **options: Any) -> Any:
    session = session or opened().session("a")
    asking = {name: options.pop(name) for name in ("past", "kind", "watch") if name in options}
    agent = RecursiveModel(Scripted(script), session, sub=sub or Answering(str.upper), retry=AT_ONCE, **options)
    return agent.ask("what is it?", text, **asking)


def said(session: Session) -> str:
    return json.dumps(session.contents.messages())


def test_the_text_is_never_in_the_window() -> None:
    model = Scripted([cell("print(context[-50:][:9])"), cell('answer["content"] = len(context)' + READY)])
    session = opened().session("a")
    text = "the beginning\n" + "x" * 400_000 + "the very end"
    result = RecursiveModel(model, session).ask("how long is it?", text)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, len(text))
    for request in model.requests:
        validate_chat(request.messages)
        shown = json.dumps(list(request.messages))
        assert "the beginning" in shown
        assert "the very end" not in shown
        assert "how long is it?" in shown
        assert "400,026 characters, about 100,0" in shown
    assert result.resident < 1200
    assert session.recall(result.address) == str(len(text))
    check_laws(session)


def test_resident_tokens_do_not_grow_with_the_text() -> None:
    sizes = {ask(cell('answer["content"] = 1' + READY), text="word " * many).resident for many in (2_000, 20_000, 200_000)}
    assert max(sizes) - min(sizes) < 10


def test_outputs_are_cut_to_fit_the_window() -> None:
    session = opened(window=3000).session("a")
    result = ask(cell("print('y' * 1_000_000)"), cell('answer["content"] = 1' + READY), session=session)
    assert result.outcome is AnswerOutcome.ANSWERED
    assert result.resident < 3000
    assert "more characters were not kept" in said(session)


def test_sub_calls_are_pages_with_sources() -> None:
    store = opened()
    session = store.session("a")
    result = ask(cell(ASK_ALL + "\nprint(replies[3])"), session=session)
    assert result.content == [line.upper() for line in TEXT.splitlines()]
    assert result.calls == 20
    output = session.window.pages[session.window.last - 1]
    assert session.contents.text(output.id).startswith("3: ODD")
    assert len(output.cites) == 20
    calls = session.branches.open("b1")
    assert {segment for segment, _ in output.cites} == {calls.number}
    replies = [calls.window.pages[page] for _, page in output.cites]
    prompts = [calls.window.pages[reply.sources[0]] for reply in replies]
    assert sorted(calls.contents.text(page.id) for page in prompts) == sorted(TEXT.splitlines())
    assert {page.trust for page in (output, *replies, *prompts)} == {Trust.TOOL}
    code = next(page for page, _ in session.contents.pages() if page.kind is Kind.CALL)
    number, told = session.number, code.id - 1
    assert {page.cites for page in prompts} == {((number, code.id), (number, told))}
    assert session.recall(f"b1/{replies[0].address}") == calls.contents.text(replies[0].id)
    check_laws(session)
    check_laws(calls)


def test_forgetting_a_prompt_forgets_what_was_made_of_it() -> None:
    session = opened().session("a")
    result = ask(cell(ASK_ALL), session=session)
    session.branches.open("b1").forget("p2")
    with pytest.raises(Forgotten):
        session.recall(result.address)


def test_an_output_is_made_from_the_outputs_before() -> None:
    session = opened().session("a")
    ask(cell("print(len(context))"), cell('answer["content"] = 1' + READY), session=session)
    results = [page for page, _ in session.contents.pages() if page.kind is Kind.RESULT]
    assert results[1].sources == (results[1].answers, results[0].id)
    assert results[0].id in session.window.pages[results[1].answers].sources, "the code, too: the model had seen it"


def test_calls_run_side_by_side_and_not_too_many() -> None:
    gate = threading.Barrier(3, timeout=600)

    def wait(prompt: str) -> str:
        gate.wait()
        return prompt

    sub = Answering(wait)
    code = 'answer["content"] = llm_query_batched(context.splitlines()[:9])' + READY
    assert ask(cell(code), sub=sub, parallel=3).outcome is AnswerOutcome.ANSWERED
    assert sub.most == 3


def test_a_model_that_fails_every_third_time_is_asked_again() -> None:
    count = iter(range(1, 1000))

    def third(prompt: str) -> str:
        if next(count) % 3 == 0:
            raise Unavailable("no")
        return prompt.upper()

    sub = Answering(third)
    result = ask(cell(ASK_ALL), sub=sub, parallel=1)
    assert (result.outcome, result.missing) == (AnswerOutcome.ANSWERED, ())
    assert len(sub.asked) > 20


def failing(prompt: str) -> str:
    if int(prompt.partition(":")[0]) % 3 == 0:
        raise Unavailable("never for this one")
    return prompt.upper()


def test_what_is_missing_is_named() -> None:
    session = opened().session("a")
    result = ask(cell(ASK_ALL), sub=Answering(failing), session=session)
    assert result.outcome is AnswerOutcome.PARTIAL
    assert [reply is None for reply in result.content] == [n % 3 == 0 for n in range(20)]
    assert sorted(missing.prompt for missing in result.missing) == sorted(TEXT.splitlines()[::3])
    assert {missing.why for missing in result.missing} == {"Unavailable 3 times"}
    assert "13 sub-calls answered, 7 gave nothing" in said(session)


def test_a_single_call_that_fails_raises_in_the_code() -> None:
    code = "try:\n    llm_query(context.splitlines()[0])\nexcept Exception as error:\n    print('it said', error)"
    session = opened().session("a")
    heal = 'answer["content"] = "done"' + READY
    result = ask(cell(code), cell(heal), sub=Answering(failing), session=session)
    assert "it said" in said(session)
    assert "Unavailable 3 times" in said(session)
    assert result.outcome is AnswerOutcome.PARTIAL


def test_a_later_answer_heals() -> None:
    tries = iter(range(100))

    def first(prompt: str) -> str:
        if next(tries) < 3:
            raise Unavailable("not yet")
        return prompt

    again = 'answer["content"] = llm_query("same")' + READY
    result = ask(cell('llm_query_batched(["same"])'), cell(again), sub=Answering(first))
    assert (result.outcome, result.content, result.missing) == (AnswerOutcome.ANSWERED, "same", ())


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (Limits(steps=0), "steps"),
        (Limits(calls=0), "calls"),
        (Limits(tokens=0), "tokens"),
        (Limits(seconds=0), "seconds"),
        (Limits(money=0, prices=Prices(input=1.0)), "money"),
    ],
    ids=["steps", "calls", "tokens", "seconds", "money"],
)
def test_a_budget_of_zero_is_an_outcome(limits: Limits, limit: str) -> None:
    session = opened().session("a")
    model = Scripted([])
    result = RecursiveModel(model, session, limits=limits).ask("what?", TEXT)
    assert (result.outcome, result.limit, result.content) == (AnswerOutcome.NOTHING, limit, None)
    assert model.requests == []
    validate_chat(session.render())


def test_the_budget_holds_for_sub_calls_and_the_root_can_still_answer() -> None:
    sub = Answering(str.upper)
    result = ask(cell(ASK_ALL.replace(READY, "")), cell('answer["ready"] = True'), sub=sub, limits=Limits(calls=10), parallel=1)
    assert len(sub.asked) == 8
    assert result.outcome is AnswerOutcome.PARTIAL
    assert [(missing.why, missing.count) for missing in result.missing] == [("the limit of calls is reached", 12)]


def test_what_sub_calls_spend_is_counted() -> None:
    usage = Tokens(prompt=100, reply=10)
    limits = Limits(prices=Prices(input=1e6, output=0))
    result = ask(cell(ASK_ALL), sub=Answering(str.upper, usage), limits=limits)
    assert result.tokens >= 20 * 110
    assert result.money >= 20 * 100


def test_a_root_that_never_is_ready_is_told_to_answer() -> None:
    idle = cell("print('thinking')")
    final = cell('answer["content"] = 7' + READY)
    assert ask(idle, idle, idle, final, limits=Limits(steps=3)).outcome is AnswerOutcome.FORCED
    half = cell('answer["content"] = "half"')
    result = ask(*[half] * 9, limits=Limits(steps=3))
    assert (result.outcome, result.content, result.limit, result.steps) == (AnswerOutcome.UNREADY, "half", "steps", 3)
    result = ask(idle, "it is 7", "it is 7", limits=Limits(steps=1))
    assert (result.outcome, result.content, result.limit) == (AnswerOutcome.PROSE, "it is 7", "steps")
    session = opened().session("a")
    result = ask(*[idle] * 9, limits=Limits(steps=3), session=session)
    assert (result.outcome, result.content) == (AnswerOutcome.NOTHING, None)
    assert "The limit of steps is reached" in said(session)
    check_laws(session)


def test_prose_is_answered_with_a_reminder_and_taken_in_the_end() -> None:
    session = opened().session("a")
    result = ask("I think so", cell('answer["content"] = 1' + READY), session=session)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, 1)
    assert "Nothing is answered yet" in said(session)
    result = ask("it is", "it is, really", "forty-two")
    assert (result.outcome, result.content) == (AnswerOutcome.PROSE, "forty-two")


def test_a_fenced_block_is_a_cell_too() -> None:
    session = opened().session("a")
    model = Scripted(["Let me look.\n```repl\nprint(len(context))\n```", f'```python\nanswer["content"] = 1{READY}\n```'])
    result = RecursiveModel(model, session, tools=False).ask("?", TEXT)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, 1)
    assert model.requests[0].tools == ()
    output = next(
        page
        for page, _ in session.contents.pages()
        if page.role is Role.USER and session.contents.text(page.id).startswith(str(len(TEXT)))
    )
    assert output.trust is Trust.TOOL


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("del answer", "could not be read"),
        ("answer = {1, 2}", "could not be read"),
        ("answer = 42", "must be a dict"),
        ('answer = {"content": 1}', "must be a dict"),
        ('answer["ready"] = True', "is None"),
        ('answer["content"] = 1; answer["ready"] = "yes"', "must be True or False"),
        ('answer["content"] = "many"; answer["ready"] = True', "wrong type"),
        ('answer["content"] = object(); answer["ready"] = True', "could not be read"),
        ("llm_query = answer = None", "must be a dict"),
    ],
)
def test_an_answer_that_is_gone_or_wrong_is_an_error_to_act_on(code: str, word: str) -> None:
    session = opened().session("a")
    events: list[Any] = []
    right = 'answer["content"] = len(llm_query("ab"))' + READY
    result = ask(cell(code), cell(right), kind=int, session=session, watch=events.append)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, 2)
    assert word in next(event.text for event in events if isinstance(event, Returned))


def test_code_that_never_ends_is_stopped() -> None:
    bounds = Bounds(seconds=2, output=2000)
    session = opened().session("a")
    result = ask(cell("while True: pass"), cell('answer["content"] = len(context)' + READY), bounds=bounds, session=session)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, len(TEXT))


@pytest.mark.parametrize(("sandbox", "dies"), [("cpython", "import os\nos._exit(1)"), ("monty", "eval('1+' * 1000000 + '1')")])
def test_an_inside_that_dies_is_told_and_the_run_goes_on_also_again(sandbox: str, dies: str) -> None:
    """Its files are variables again, and a run that is gone on with meets it as it was."""
    open_one(sandbox)
    session, texts = opened().session("a"), {"one": "1", "two": "22"}
    result = cell('answer["content"] = len(context)' + READY)
    with pytest.raises(Unavailable):
        ask(cell("x = 1\n" + dies), cell("print(x)"), Unavailable("down"), text=texts, sandbox=sandbox, session=session)
    assert "your variables are gone" in said(session)
    assert "NameError" in said(session)
    again = resume(session, Scripted([result]), texts, sub=Answering(str.upper), sandbox=sandbox)
    assert (again.outcome, again.content, again.differing) == (AnswerOutcome.ANSWERED, 2, ())


@pytest.mark.parametrize("sandbox", ["cpython", "monty"])
def test_an_answer_that_kills_the_inside_is_told_with_the_loss(sandbox: str) -> None:
    open_one(sandbox)
    kills = "class D(dict):\n    def items(self):\n        import os\n        os._exit(1)\nanswer = D(content=1)"
    code = kills if sandbox == "cpython" else "answer = []\nfor _ in range(500): answer = [answer]"
    session = opened().session("a")
    last = cell('answer["content"] = len(context)' + READY)
    result = ask(cell(code), last, text={"one": "1", "two": "22"}, sandbox=sandbox, session=session)
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, 2)
    assert ("your variables are gone" in said(session)) == (sandbox == "cpython")


@pytest.mark.parametrize("sandbox", ["cpython", "monty"])
def test_prompts_that_are_too_large_together_are_asked_in_pieces(sandbox: str) -> None:
    open_one(sandbox)
    sub = Answering(lambda prompt: f"{prompt[0]} {len(prompt)}")
    code = f"prompts = [str(n) * {MAX_CALL_BYTES // 2} for n in range(4)]\n"
    code += 'answer["content"] = llm_query_batched(prompts)' + READY
    session = opened().session("a")
    result = ask(cell(f"llm_query('x' * {MAX_CALL_BYTES})"), cell(code), sub=sub, sandbox=sandbox, session=session)
    assert result.content == [f"{n} {MAX_CALL_BYTES // 2}" for n in range(4)]
    assert "8 MB at most" in session.contents.messages()[0]["content"]
    assert "more than 8,000,000" in said(session)


def test_the_seconds_that_the_run_has_left_end_a_cell() -> None:
    """The clock jumps while a sub-call runs; none begins after it, however often the code asks."""
    clock = FakeClock(tick=0.0)

    def slow(prompt: str) -> str:
        clock.advance(10_000)
        return prompt

    code = "done = 0\nwhile done < 50:\n    try:\n        llm_query(str(done))\n    except RuntimeError: pass\n    done += 1"
    sub = Answering(slow)
    result = ask(cell(code), sub=sub, limits=Limits(seconds=5000), clock=clock)
    assert (result.limit, len(sub.asked)) == ("seconds", 1)


def test_a_memory_that_code_replaced_is_there_again() -> None:
    store = opened()
    store.session("past").append({"role": "user", "content": "the parser"})
    last = cell('answer["content"] = memory.sessions()[0]["name"]' + READY)
    result = ask(cell("memory = None\n1 / 0"), last, past=store, text=None, session=store.session("a"))
    assert result.content == "past"


def test_hostile_arguments_are_errors_of_the_code() -> None:
    for call in ("llm_query(5)", "llm_query_batched('abc')", "llm_query()", "llm_query('a', 'b', c=1)"):
        code = f"try:\n    {call}\nexcept Exception as error:\n    answer['content'] = type(error).__name__" + READY
        assert ask(cell(code)).content == "TypeError"


def test_arguments_that_are_no_json_are_told_to_the_model() -> None:
    broken = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text='{"cod', call="c", name="repl"),))
    session = opened().session("a")
    assert ask(broken, cell('answer["content"] = 1' + READY), session=session).content == 1
    assert "error:" in said(session)


def test_depth_0_has_no_sub_calls() -> None:
    session = opened().session("a")
    code = "try:\n    llm_query('a')\nexcept NameError:\n    answer['content'] = 'none'" + READY
    sub = Answering(str.upper)
    assert ask(cell(code), depth=0, sub=sub, session=session).content == "none"
    assert sub.asked == []
    assert "llm_query" not in json.dumps(session.contents.messages()[0])


class Roots:
    """A root for runs within runs: the outermost hands over halves, the others count."""

    name, form, context, tokenizer = "roots", "chat", None, "chars/4"

    def stream(self, request: Request) -> Iterator[Reply]:
        below = any(message.get("content") == "count" for message in request.messages)
        code = (
            'answer["content"] = sum(r.endswith("ODD") for r in llm_query_batched(context.splitlines()))'
            if below
            else (
                "lines = context.splitlines()\nhalves = ['\\n'.join(lines[:10]), '\\n'.join(lines[10:])]\n"
                'answer["content"] = rlm_query_batched("count", halves)'
            )
        )
        yield Reply(message=cell(code + READY), finish="calls")


def test_runs_within_runs_are_charged_to_the_run_above() -> None:
    session = opened().session("a")
    agent = RecursiveModel(Roots(), session, sub=Answering(str.upper, Tokens(prompt=1000, reply=1)), depth=2)
    result = agent.ask("how many are odd in each half?", TEXT)
    assert (result.outcome, result.content, result.calls) == (AnswerOutcome.ANSWERED, [5, 5], 20)
    assert result.tokens > 20_000
    below = [session.branches.open("b1"), session.branches.open("b2")]
    assert [info.name for info, _ in session.branches.children()] == ["a/b1", "a/b2"]
    assert all(len(branch.branches.children()) == 1 for branch in below)
    output = next(page for page, _ in session.contents.pages() if page.kind is Kind.RESULT)
    assert len(output.cites) == 2
    for branch in below:
        check_laws(branch)


def test_a_limit_holds_for_all_runs_together() -> None:
    sub = Answering(str.upper)
    result = RecursiveModel(Roots(), opened().session("a"), sub=sub, depth=2, limits=Limits(calls=12), parallel=1).ask("?", TEXT)
    assert len(sub.asked) <= 10
    assert result.outcome is not AnswerOutcome.ANSWERED
    assert result.missing


def test_rlm_query_that_gives_nothing_raises_in_the_code() -> None:
    session = opened().session("a")
    script = [cell('rlm_query("q", context)'), "no", "no idea", "", cell('answer["content"] = 1' + READY)]
    result = ask(*script, depth=2, session=session)
    assert result.outcome is AnswerOutcome.PARTIAL
    assert "this piece gave no answer" in said(session)


def test_an_error_of_the_root_leaves_all_that_came_before() -> None:
    session = opened().session("a")
    with pytest.raises(Unavailable):
        ask(cell(ASK_ALL.replace(READY, "")), Unavailable("gone"), session=session)
    assert len(session.branches.open("b1").contents.messages()) == 41
    validate_chat(session.render())


def test_what_was_paid_for_before_an_interruption_is_kept() -> None:
    def stop(prompt: str) -> str:
        if prompt == "2":
            raise KeyboardInterrupt
        return prompt

    session = opened().session("a")
    with pytest.raises(KeyboardInterrupt):
        ask(cell("for n in range(5): llm_query(str(n))"), sub=Answering(stop), session=session)
    assert [message["content"] for message in session.branches.open("b1").contents.messages()][1:] == ["0", "0", "1", "1"]


# Running a run again


def again(session: Session, text: Any = TEXT, **options: Any) -> Any:
    return replay(session, opened().session("again"), text, **options)


def test_a_run_is_run_again_without_a_model() -> None:
    session = opened().session("a")
    first = ask(cell("print(len(context))"), cell(ASK_ALL), sub=Answering(failing), session=session)
    second = again(session)
    assert (second.outcome, second.content, second.calls) == (first.outcome, first.content, first.calls)
    assert sorted(second.missing, key=str) == sorted(first.missing, key=str)


def test_the_last_question_of_a_session_is_run_again() -> None:
    session = opened().session("a")
    ask(cell('answer["content"] = llm_query("x")' + READY), session=session, sub=Answering(lambda _: "one"))
    ask(cell('answer["content"] = llm_query("x")' + READY), session=session, sub=Answering(lambda _: "two"))
    assert again(session).content == "two"


def test_a_run_within_a_run_is_run_again() -> None:
    session = opened().session("a")
    RecursiveModel(Roots(), session, sub=Answering(str.upper), depth=2).ask("odd?", TEXT)
    assert again(session).content == [5, 5]


def test_prose_fences_and_force_are_run_again() -> None:
    session = opened().session("a")
    script = ["hm", "```repl\nx = 1\n```", cell("print(x)"), cell('answer["content"] = x' + READY)]
    first = ask(*script, session=session, limits=Limits(steps=3))
    assert first.outcome is AnswerOutcome.FORCED
    second = again(session, limits=Limits(steps=3))
    assert (second.outcome, second.content) == (first.outcome, 1)


def test_another_text_is_not_run_again() -> None:
    session = opened().session("a")
    ask(cell(ASK_ALL), session=session)
    with pytest.raises(SpecError, match="not the text"):
        again(session, TEXT + "!")
    with pytest.raises(SpecError, match="nothing was asked"):
        again(opened().session("new"))


# What the variable may be


def test_files_and_folders_are_a_dict(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("first\r\nline", newline="")
    (tmp_path / "sub" / "b.txt").write_bytes("zwölf".encode() + b"\xff")
    (tmp_path / ".hidden").write_text("secret")
    code = 'answer["content"] = context' + READY
    result = ask(cell(code), text=tmp_path)
    assert result.content == {"a.txt": "first\r\nline", "sub/b.txt": "zwölf\ufffd"}
    assert ask(cell(code), text=tmp_path / "a.txt").content == "first\r\nline"
    assert ask(cell(code), text=[tmp_path / "a.txt", tmp_path / "sub"]).content.keys() == {str(tmp_path / "a.txt"), "b.txt"}


def test_no_file_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    session = opened().session("a")
    for source in (tmp_path / "none", tmp_path, None):
        with pytest.raises(SpecError):
            ask(text=source, session=session)
    with pytest.raises(SpecError):
        ask(session=session, sandbox="none")
    assert session.contents.messages() == []


def test_the_past_is_read_by_code() -> None:
    store = opened()
    past = store.session("past")
    past.append(
        {"role": "user", "content": "the parser drops the last line"}, {"role": "assistant", "content": "a slice is wrong"}
    )
    session = store.session("a")
    code = (
        'hits = memory.search("parser")\npages = memory.pages("past")\n'
        'answer["content"] = [hits[0]["address"], [p["text"] for p in pages], len(memory.pages("past", first=2, last=2))]'
    )
    result = ask(cell(code + READY), text=None, past=store, session=session)
    assert result.content == ["p1", ["the parser drops the last line", "a slice is wrong"], 1]
    past.append({"role": "user", "content": "the parser again"})
    assert replay(session, opened().session("again"), past=store).content == result.content
    past.forget("p1")
    with pytest.raises(Forgotten):
        session.recall(result.address)


CANARY = "the zanzibar parser"
READS = ('memory.pages("past")[0]["text"]', 'memory.search("parser")[0]["text"]')


def kept(store: Store, folder: Path) -> list[str]:
    """What has the canary: addresses in the store, and files."""
    found = []
    for info in store.sessions():
        for page, state in store.session(info.name).contents.pages():
            if state.at is not Place.DROPPED and "zanzibar" in store.session(info.name).contents.text(page.id).lower():
                found.append(f"{info.name} {page.address}")
    store.close()
    return found + [file.name for file in folder.iterdir() if b"zanzibar" in file.read_bytes().lower()]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_the_code_read_is_a_source_of_all_that_came_of_it(tmp_path: Path, read: str, depth: int) -> None:
    below = 'print(context)\nsaid = llm_query(context)\nanswer["content"] = said' + READY
    last = "the root says zanzibar, too"
    code = {
        1: f"x = {read}\nprint(llm_query(x))",
        2: f"x = {read}\nprint(rlm_query('about ' + x, x))",
    }[depth]
    script = [cell(code), *([cell(below)] if depth == 2 else []), cell(f"# {last}\nprint(llm_query(x[::-1][::-1]))")]
    with kilburn.open(str(tmp_path / "a.db"), window=8000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        past = store.session("past")
        past.append({"role": "user", "content": CANARY}, {"role": "user", "content": "what stays"})
        session = store.session("a")
        result = ask(*script, cell('answer["content"] = x' + READY), text=None, past=store, session=session, depth=depth)
        assert result.content == CANARY
        again = replay(session, store.session("again"), past=store)
        assert again.content == CANARY
        past.forget("p1")
        assert kept(store, tmp_path) == []


def quoting(code: str, fenced: bool) -> Callable[[Request], Any]:
    """A reply that quotes the canary if the prompt shows it."""

    def reply(request: Request) -> Any:
        quoted = f"# I saw {CANARY}\n{code}" if "zanzibar" in str(request.messages) else code
        return f"Let me see.\n```repl\n{quoted}\n```" if fenced else cell(quoted)

    return reply


def scripts(dice: random.Random, depth: int, inner: bool = False) -> list[Any]:
    """Cells at random: they read, keep, ask, print and answer."""
    made: list[Any] = [cell("x = kept = context" if inner else "x = kept = 'nothing yet'")]
    for _ in range(dice.randrange(1, 5)):
        lines, below = list[str](), list[Any]()
        for _ in range(dice.randrange(1, 5)):
            steps = ["kept = x[:40] + '!'", "print(x)", "llm_query(x)", "print(llm_query_batched([kept, x]))", "x = x + kept"]
            steps += [f"x = {dice.choice(READS)}", "x = str(memory.pages('past'))"] if not inner else []
            steps += ["x = str(rlm_query('of ' + x[:30], x))"] if depth > 1 else []
            lines.append(dice.choice(steps))
            below += scripts(dice, depth - 1, inner=True) if "rlm_query(" in lines[-1] else []
        made += [quoting("\n".join(lines), dice.random() < 0.3), *below]
    return [*made, cell('answer["content"] = x + kept' + READY)]


@pytest.mark.parametrize("seed", range(rounds(6, 12)))
def test_nothing_of_what_was_read_is_left_whatever_the_code_does(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    depth = dice.choice([1, 2])
    with kilburn.open(str(tmp_path / "a.db"), window=dice.choice([1500, 8000]), policy=dice.choice(["fifo", "hybrid"]),
                      tokenizer="chars/4", embedder=None) as store:  # fmt: skip
        past = store.session("past")
        past.append({"role": "user", "content": CANARY}, {"role": "user", "content": "what stays of the parser"})
        session = store.session("a")
        with suppress(Unavailable):  # a cell failed, and the next replies were for others
            ask(*scripts(dice, depth), text=None, past=store, session=session, depth=depth, sub=Answering(lambda said: said))
        past.forget("p1")
        assert kept(store, tmp_path) == []


def test_what_was_read_stays_read_when_the_run_goes_on(tmp_path: Path) -> None:
    """The read stands in the branch of the first part, what is made of it in that of the second."""
    with kilburn.open(str(tmp_path / "a.db"), window=8000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        past = store.session("past")
        past.append({"role": "user", "content": CANARY})
        session = store.session("a")
        first = cell(f'x = {READS[0]}\nllm_query("first")\nllm_query(x)')
        with pytest.raises(KeyboardInterrupt):
            ask(first, text=None, past=store, session=session, sub=Answering(lambda asked: stopping(asked)))
        last = cell('print(llm_query(x + "!"))\nanswer["content"] = 1' + READY)
        result = resume(session, Scripted([last]), past=store, sub=Answering(str.upper))
        assert result.outcome is AnswerOutcome.ANSWERED
        past.forget("p1")
        assert kept(store, tmp_path) == []


def stopping(asked: str) -> str:
    if "zanzibar" in asked:
        raise KeyboardInterrupt
    return asked


def test_many_reads_and_calls_by_turns_cite_what_was_read_once() -> None:
    store = opened()
    past = store.session("past")
    for number in range(20):
        past.append({"role": "user", "content": f"page {number}"})
    session = store.session("a")
    code = "for n in range(1, 21):\n    memory.pages('past', n, n)\n    llm_query(str(n))\n"
    ask(cell(code + 'answer["content"] = 1' + READY), text=None, past=store, session=session)
    calls = session.branches.open("b1")
    assert max(len(page.sources) + len(page.cites) for page, _ in calls.contents.pages()) <= 4
    past.forget("p20")
    assert "3" in [calls.contents.text(page.id) for page, state in calls.contents.pages() if state.at is not Place.DROPPED]
    past.forget("p1")
    assert [page.id for page, state in calls.contents.pages() if state.at is not Place.DROPPED] == [1]


def test_the_past_of_another_store_is_not_cited_by_its_numbers() -> None:
    there, here = opened(), opened()
    there.session("past").append({"role": "user", "content": CANARY})
    here.session("mine").append({"role": "user", "content": "what I said"})
    session = here.session("a")
    result = ask(cell(f'answer["content"] = {READS[0]}' + READY), text=None, past=there, session=session)
    assert result.content == CANARY
    here.session("mine").forget("p1")
    assert session.recall(result.address) == CANARY


def test_a_page_that_is_forgotten_while_the_root_thinks_is_not_in_its_code() -> None:
    session = opened().session("a")
    session.append({"role": "user", "content": CANARY})

    def forget(_: Request) -> Message:
        session.forget("p1")
        return cell(f"print({CANARY!r})")

    with pytest.raises(Forgotten):
        ask(forget, session=session)
    assert "zanzibar" not in said(session)


def test_a_session_that_is_not_there_is_not_made() -> None:
    store = opened()
    code = "try:\n    memory.pages('nobody')\nexcept ValueError:\n    answer['content'] = len(memory.sessions())" + READY
    session = store.session("a")
    assert ask(cell(code), text=None, past=store, session=session).content == 0


def test_code_reads_the_sessions_that_the_rights_name_and_finds_no_other() -> None:
    store = opened()
    for name in ("work", "private"):
        store.session(name).append({"role": "user", "content": f"the parser of {name}"})
    code = (
        'found = [[one["name"] for one in memory.sessions()], [hit["session"] for hit in memory.search("parser")]]\n'
        "for name in ('work', 'private', 'nobody'):\n"
        "    try:\n        found.append(len(memory.pages(name)))\n"
        "    except ValueError as error:\n        found.append(str(error).replace(name, 'X'))\n"
        "answer['content'] = found"
    )
    named = Rights(privileges=(Privilege(sessions=("w*",)),))
    sessions, hits, work, private, nobody = ask(
        cell(code + READY), text=None, past=store, session=store.session("a"), rights=named
    ).content
    assert (sessions, hits, work) == (["work"], ["work"], 1)
    assert private == nobody, "it does not tell what exists"
    assert ask(cell(code + READY), text=None, past=store, session=store.session("a")).content[2:4] == [1, 1]


def test_what_the_run_itself_says_is_not_past() -> None:
    store = opened()
    session = store.session("a")
    session.append({"role": "user", "content": "the parser drops the last line"})
    code = (
        'llm_query("the parser")\nanswer["content"] = [[hit["address"] for hit in memory.search("parser")], '
        '[page["address"] for page in memory.pages("a")], [one["name"] for one in memory.sessions()]]'
    )
    for past in (store, session):
        assert ask(cell(code + READY), text=None, past=past, session=store.session("a")).content[0][0] == "p1"
    assert ask(cell(code + READY), text=None, past=store, session=store.session("b")).content[2] == ["a", "a/b1", "a/b2"]


def test_a_model_that_raises_anything_fails_its_calls_only() -> None:
    def foreign(prompt: str) -> str:
        if prompt.startswith("3:"):
            raise ZeroDivisionError
        return prompt

    result = ask(cell(ASK_ALL), sub=Answering(foreign))
    assert [missing.why for missing in result.missing] == ["ZeroDivisionError"]
    assert result.content[4] == "4: even"


def test_many_questions_in_one_session_pin_nothing_for_ever() -> None:
    session = opened().session("a")
    for _ in range(12):
        assert ask(cell('answer["content"] = 1' + READY), session=session).outcome is AnswerOutcome.ANSWERED
    assert len(session.window.pins) <= 2
    check_laws(session)


def test_the_past_and_folders_need_no_full_python(tmp_path: Path) -> None:
    pytest.importorskip("pydantic_monty")
    (tmp_path / "a.txt").write_text("abc")
    store = opened()
    store.session("past").append({"role": "user", "content": "the parser"})
    code = 'answer["content"] = [len(memory.pages("past")), context["a.txt"], llm_query("x")]' + READY
    result = ask(cell(code), text=tmp_path, past=store, session=store.session("a"), sandbox="monty")
    assert (result.sandbox, result.content) == ("monty", [1, "abc", "X"])
    assert result.lacks


def test_the_watch_is_told_of_sub_calls() -> None:
    events: list[Any] = []
    ask(cell(ASK_ALL), watch=events.append)
    assert [event for event in events if isinstance(event, SubCalled)][-1] == SubCalled(20, 0)


def test_numbers_that_mean_nothing() -> None:
    for options in ({"depth": -1}, {"parallel": 0}):
        with pytest.raises(KilburnError):
            RecursiveModel(Scripted([]), opened().session("a"), **options)  # type: ignore[arg-type]


def test_the_system_prompt_names_what_there_is() -> None:
    for depth, names in ((0, set()), (1, {"llm_query"}), (2, {"llm_query", "rlm_query"})):
        session = opened().session("a")
        ask(cell('answer["content"] = 1' + READY), depth=depth, session=session)
        assert set(re.findall(r"\b[lr]lm_query\b", session.contents.messages()[0]["content"])) == names
