"""A chat asks on the terminal before a call that needs a yes; without a terminal the answer is no."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from kilburn.agents.access import Confirmation, Consent, Question
from kilburn.cli.chat import confirm


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
    question = Question(
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
        assert confirm(Question(session="s", tool="send", arguments="{}", why="x", seconds=60.0)) is False
    finally:
        sys.stdin = before
