"""A chat answers with its defaults, also when the window is full. It asks on the terminal before a call that needs a yes; without
a terminal the answer is no."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest

from cli.terminal import kilburn, program
from kilburn import open as open_store
from kilburn.agents.access import CallQuestion, Confirmation, Consent
from kilburn.cli.chat import confirm
from kilburn.cli.model_loading import CONNECT
from kilburn.testing.upstream import Refusal, Upstream, serving


@contextmanager
def terminal(early: str = "") -> Iterator[int]:
    """A terminal as standard input; yields the other end, to type at."""
    ours, theirs = pty.openpty()
    tty.setcbreak(theirs)
    os.write(ours, early.encode())
    before = sys.stdin
    with open(theirs, encoding="utf-8") as sys.stdin:
        try:
            yield ours
        finally:
            sys.stdin = before
            os.close(ours)


class Watched(io.StringIO):
    """Standard error that knows when the question was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def flush(self) -> None:
        if "Do it?" in self.getvalue():
            self.asked.set()


def answered(typed: str, early: str = "", seconds: float = 60.0) -> tuple[Consent, str]:
    question = CallQuestion(
        session="s", tool="send", arguments='{"text": "\x1b[2Jhello"}', why="it cannot be undone", seconds=seconds
    )
    said = Watched()

    def type_it() -> None:
        assert said.asked.wait(600)
        if typed:
            os.write(ours, typed.encode())

    with terminal(early) as ours, redirect_stderr(said):
        typing = threading.Thread(target=type_it)
        typing.start()
        asking = Confirmation(confirm)
        found = asking.ask(question)
        typing.join()
        assert question.over.is_set()
        assert asking.thread is not None
        asking.thread.join(600)
    return found, said.getvalue()


@pytest.mark.parametrize(
    ("typed", "consent"), [("y\n", "yes"), ("YES\n", "yes"), ("n\n", "no"), ("\n", "no"), ("yesterday\n", "no")]
)
def test_the_terminal_is_asked(typed: str, consent: str) -> None:
    found, said = answered(typed)
    assert found == consent
    assert said == 'send {"text": "\\x1b[2Jhello"}\nit cannot be undone. Do it? [y/N, 60 s]\n', "as text, without its escapes"


def test_what_was_typed_before_the_question_is_no_answer() -> None:
    assert answered("n\n", early="y\n")[0] is Consent.NO


def test_no_answer_in_time_is_a_no_and_the_question_leaves_the_terminal() -> None:
    assert answered("", seconds=0.05)[0] is Consent.TIMEOUT


def test_without_a_terminal_the_answer_is_no() -> None:
    before, sys.stdin = sys.stdin, io.StringIO("y\n")
    try:
        assert confirm(CallQuestion(session="s", tool="send", arguments="{}", why="x", seconds=60.0)) is False
    finally:
        sys.stdin = before


NOTICE = "takes no tools: Kilburn searches evicted pages for the words of each line"
SMALL = f"smollm2 answers, a model of 135 million parameters that cannot follow a conversation. For a better one, {CONNECT}\n"


def test_without_a_model_the_server_of_this_machine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream(otherwise="Noted.")
    before, sys.stdin = sys.stdin, io.StringIO("hello\n")
    try:
        with serving(upstream) as url:
            monkeypatch.setenv("KILBURN_MODEL_SERVERS", f"{url}/v1")
            done = kilburn("chat", "--no-learn", "--db", tmp_path / "agent.db")
    finally:
        sys.stdin = before
    assert (done.status, done.out) == (0, "Noted.\n"), done.err
    assert done.err == f"scripted answers, because the server at {url}/v1 has it; choose another model with --model\n"
    assert [sent.body["model"] for sent in upstream.prompts] == ["scripted"]


def test_without_any_model_smollm2_is_named_and_what_to_do(tmp_path: Path) -> None:
    done = kilburn("chat", "--db", tmp_path / "agent.db")
    assert done.status == 1, "it is not here, and there is no package index"
    assert done.err.startswith(SMALL)


@pytest.mark.slow
def test_with_its_defaults_it_answers(weights: Path, tmp_path: Path) -> None:
    done = program("chat", folder=tmp_path, given=b"hello\nWhat is 2+2?\n", seconds=600)
    assert done.status == 0, done.err
    assert done.err == f"{SMALL}smollm2 {NOTICE}\n", "said once"
    shown = program("show", "chat", "--json", folder=tmp_path)
    assert [row["role"] for row in shown.json["pages"]] == ["user", "assistant"] * 2


@pytest.mark.slow
def test_with_its_defaults_it_answers_when_the_window_is_full(weights: Path, tmp_path: Path) -> None:
    """The replies are short, because the machine has to make them; all else is as it comes."""
    filler = "The boats carry salt past the mill. " * 245
    lines = [f"The river Besra{number} ends in the lake of Tarn{number}. {filler}" for number in range(4)]
    given = "\n".join([*lines, "In which lake does the river Besra0 end?", ""]).encode()
    done = program("chat", "--reply", "8", folder=tmp_path, given=given, seconds=1800)
    assert done.status == 0, done.err
    assert done.err == f"{SMALL}smollm2 {NOTICE}\n"
    stats = program("stats", "chat", "--json", folder=tmp_path).json
    assert stats["prompts"] == 5
    assert stats["evictions"] + stats["folds"] > 0
    assert stats["overflow"] == 0
    assert stats["searches"] > 0


@pytest.mark.parametrize("spec", ["chat('m', base_url='{}/v1', api_key='none')", "messages('m', base_url='{}', api_key='none')"])
def test_an_endpoint_that_refuses_tools_answers_and_it_is_said_once(spec: str, tmp_path: Path) -> None:
    words = "registry.ollama.ai/library/gemma:2b does not support tools"
    upstream = Upstream(otherwise=lambda sent: Refusal(words=words) if sent.body.get("tools") else "Noted.")
    before, sys.stdin = sys.stdin, io.StringIO("hello\nand again\n" + "It carries sand. " * 900 + "\nstill there?\n")
    try:
        with serving(upstream) as url:
            options = ["--window", "4000", "--no-learn", "--db", tmp_path / "agent.db"]
            done = kilburn("chat", "--model", spec.format(url), *options)
    finally:
        sys.stdin = before
    assert done.status == 0, done.err
    assert done.out == "Noted.\n" * 4
    assert done.err == f"m {NOTICE}\n"
    assert [sent.status for sent in upstream.prompts] == [400, 200, 200, 200, 200]


def test_what_a_hosted_model_cannot_read_is_told_at_the_end_and_in_the_state(tmp_path: Path) -> None:
    upstream, db = Upstream(otherwise="Noted."), tmp_path / "agent.db"
    before, sys.stdin = sys.stdin, io.StringIO("I live in Porto.\n")
    try:
        with serving(upstream) as url:
            done = kilburn("chat", "--model", f"chat('m', base_url='{url}/v1', api_key='none')", "--db", db)
    finally:
        sys.stdin = before
    assert done.status == 0, done.err
    assert "nothing could be learned yet from p1-p2: rejected: no list of facts: no JSON of the form" in done.err
    rows = {row["policy"]: row for row in kilburn("memories", "state", "--json", "--db", db).json}
    assert rows["plain"]["outcome"] == "done"
    assert rows["facts"]["waiting"] == ["p1-p2"]
    told = kilburn("memories", "state", "--db", db).out
    assert "no JSON of the form" in told
    assert "1 exchange to be tried again" in told


def test_a_session_whose_pins_exceed_the_window_is_mended_in_a_chat(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with open_store(db, window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "user", "content": "go"})
        session.append({"role": "assistant", "content": "w" * 2000}, {"role": "assistant", "content": "v" * 2000})
        session.pin("p2-p3")
    assert kilburn("ps", "--db", db).status == 0
    assert kilburn("show", "a", "--db", db).status == 0
    words = ("chat", "a", "--db", db, "--model", "scripted(['one', 'two'])", "--window", 1000, "--reply", 50)
    said = program(*words, folder=tmp_path, given=b"hi\n/unpin p2\nhi\n/unpin p3\nhi\n")
    assert (said.status, said.out) == (0, "p2 is unpinned\np3 is unpinned\none\n")
    assert "unpin p2, p3, or open a window of" in said.err
    assert "Traceback" not in said.err
    assert kilburn("fsck", "--db", db).status == 0


def test_notes_stand_beside_each_line_and_what_is_known_may_be_left_out(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    assert kilburn("notes", "write", "core/human", "Ana drinks tea.", "--db", db).status == 0
    assert kilburn("remember", "The mill is by the river.", "--db", db).status == 0
    upstream = Upstream(otherwise=lambda sent: "Noted.")
    with serving(upstream) as url:
        words = ("chat", "--model", f"chat('m', base_url='{url}/v1', api_key='none')", "--window", 4000, "--no-learn", "--db", db)
        for more in (["--notes", "core"], ["--recall", 0]):
            before, sys.stdin = sys.stdin, io.StringIO("Where is the mill by the river?\n")
            try:
                assert kilburn(*words, *more).status == 0
            finally:
                sys.stdin = before
    first, second = (str(sent.body) for sent in upstream.prompts)
    assert "Ana drinks tea." in first
    assert "The mill is by the river." in first
    assert "The mill is by the river." not in second.replace("Where is the mill by the river?", "")
    assert kilburn("memories", "list", "--db", db).out.count("mill") == 1, "nothing was learned"
