"""One session under torture, judged after each mishap.

Everything is reached as a user reaches it: a file, `append`, `aappend`, `render`, `recall`, other threads, other processes.
What must hold: raised means not admitted, returned means admitted and durable, and whoever looks, at whatever moment,
sees a prompt within the window and a transcript of what was acknowledged.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

import kilburn
from kilburn.errors import KilburnError, PinsExceedWindow, StoreStale
from kilburn.kernel.resolve import resolve
from kilburn.models.scripted import Scripted
from torture.foes import Brittle, Liar, Struck, Torn
from torture.onlooker import Onlooker
from torture.oracle import Book, Look, Turn, look
from torture.talk import Talk

__all__ = ["NAME", "Mishap", "Session", "Violation", "told"]

NAME = "tortured"
PATIENCE = 60.0
"""Seconds after which what should have come is taken to hang."""


class Violation(msgspec.Struct, frozen=True):
    """A promise that did not hold: which, in which session, after which mishap."""

    kind: str
    seed: int
    policy: str
    after: str
    detail: str


class Session:
    """A session in a file of its own.

    Args:
        folder: an empty one, for the file.
        spec: of the policy under which it begins.
        onlooker: the other process.
    """

    def __init__(self, folder: Path, seed: int, spec: str, onlooker: Onlooker) -> None:
        self.seed, self.spec, self.onlooker = seed, spec, onlooker
        self.rng = random.Random(f"{seed}-{spec}")
        self.path, self.window = str(folder / "agent.db"), self.rng.choice([900, 1500, 3000, 9000])
        self.book, self.liar, self.counter = Book(), Liar(seed), Brittle()
        self.form = self.rng.choice(["chat", "chat", "messages"])
        self.talk = Talk(self.rng, self.form, f"s{seed}", self.window)
        self.violations: list[Violation] = []
        self.after = "opening"
        self.missed = False
        """Whether the mishap needed a question to a model, and none came: a policy asks when its window is full."""
        self.shrunk = False
        """Whether another budget, or a report of usage that is not written yet, may show another prompt elsewhere."""
        self.open()

    def open(self) -> None:
        """Open the store, with the same policy, perhaps torn in another share of its plans."""
        share = self.rng.choice([0.0, 0.1, 0.3])
        self.policy = Torn(resolve("policies", self.spec), self.seed, share)
        model = Scripted([self.liar] * 20_000)
        self.store = kilburn.open(self.path, window=self.window, policy=self.policy, tokenizer=self.counter, model=model)
        self.session = self.store.session(NAME)
        self.opened = self.window

    def again(self) -> None:
        """Take the session up where another writer left it; it has the store's budget then."""
        self.session = self.store.session(NAME)
        self.window = self.talk.size = self.opened

    def run(self, mishaps: Sequence[tuple[int, Mishap]], steps: int) -> list[Violation]:
        """Torture it for so many steps, or until a promise breaks; returns what broke.

        Args:
            mishaps: how often each comes, and what it does.
        """
        try:
            self.suffer(lambda: self.attempt(self.talk.first()))
            for _ in range(steps):
                if self.violations:
                    break
                (mishap,) = self.rng.choices([each for _, each in mishaps], [share for share, _ in mishaps])
                self.after = mishap.__name__
                for _ in range(5):
                    self.missed = False
                    self.suffer(lambda mishap=mishap: mishap(self))  # type: ignore[misc]
                    self.suffer(self.check)
                    if self.violations or not self.missed:
                        break
            if not self.violations:
                self.after = "the end"
                self.found(self.book.unreadable(self.session))
                self.suffer(self.reopen)
        finally:
            self.liar.hook = None
            self.suffer(self.store.close)
        if not self.violations:
            self._fsck()
        return self.violations

    def suffer(self, act: Callable[[], None]) -> None:
        """Do it; an error that nobody expects here is a promise broken: it has no type that a caller could know."""
        try:
            act()
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            self.found([told(error)])

    def found(self, faults: Iterable[str]) -> None:
        """Note what is wrong, each as `kind: detail`."""
        for fault in faults:
            kind, _, detail = fault.partition(": ")
            self.violations.append(Violation(kind, self.seed, self.spec, self.after, detail[:300]))

    def check(self, *, outside: bool = False) -> None:
        """Everything that must hold between two calls, seen from here and, at times, from outside."""
        seen = look(self.session, self.window)
        self.judge(seen)
        if self.policy.unbounded:
            self.found(["endless: every effect of a policy that never ends was answered"])
        if outside or self.rng.random() < 0.2:
            other = self.onlooker.look(self.path, NAME, self.window)
            self.judge(other)
            if not other.error and not self.shrunk and other.prompt != seen.prompt:
                self.found(["reader: it renders another prompt than the writer"])

    def judge(self, seen: Look) -> None:
        """Hold what somebody saw against the rules and the book."""
        if seen.error:
            self.found([f"unreadable: {seen.error}"])
            return
        self.found(seen.faults)
        self.found(self.book.faults(seen.messages))

    def attempt(self, turn: Turn, call: Callable[[], str] | None = None, *, again: bool = True) -> None:
        """Append a turn; whatever happens, it is in the transcript whole and once, or not at all."""
        before = len(self.session.contents.pages())
        try:
            address = (call or (lambda: self.session.append(*turn.messages)))()
        except (Struck, KeyboardInterrupt):
            pass
        except KilburnError as error:
            # Where pins or a tiny budget leave no room the refusal is right.
            if not isinstance(error, PinsExceedWindow | StoreStale):
                self.found([f"refused: an ordinary append raises {type(error).__name__}: {error}"])
            if isinstance(error, StoreStale):
                self.again()
                before = len(self.session.contents.pages())
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            self.found([told(error)])
        else:
            self.found(self.book.admit(address, turn))
            return
        originals = len(self.session.contents.pages())
        if originals != before:
            self.found([f"pages: {originals - before} more after an append that raised"])
        self.check(outside=True)
        if again and not self.violations:
            self.attempt(turn, again=False)

    def await_answer(self, which: int, act: Callable[[], object]) -> threading.Event:
        """At the so many-th question from now on, look from outside, then `act`; the model is silent until the event is set.

        Only where the policy waits for the answer: what is asked in the background has no call that could be struck.
        """
        over, first, self.missed = threading.Event(), self.liar.asked, True

        def hook(asked: int) -> None:
            if asked == first + which and not over.is_set():
                self.missed = False
                self._beside()
                act()
                over.wait(PATIENCE)

        self.liar.hook = None if self.spec.startswith("comem") else hook
        return over

    def admit(self, turn: Turn) -> None:
        """Append a turn and note it; pins may leave no room for it."""
        try:
            address = self.session.append(*turn.messages)
        except PinsExceedWindow:
            return
        self.found(self.book.admit(address, turn))

    def _beside(self) -> None:
        """What others see while a policy waits: the state before, within the window."""
        at, self.after = self.after, f"{self.after}, while the model is asked"
        seen: list[Look] = []
        looking = threading.Thread(target=lambda: seen.append(look(self.session, self.window)), daemon=True)
        looking.start()
        looking.join(PATIENCE)
        if seen:
            self.judge(seen[0])
        else:
            self.found(["blocked: nobody can read while a policy waits for its model"])
        self.judge(self.onlooker.look(self.path, NAME, self.window))
        self.after = at

    def reopen(self) -> None:
        """Close and open again: the transcript is the same, and so is the prompt."""
        before = look(self.session, self.window)
        self.store.close()
        self.open()
        after = look(self.session, self.window)
        if before.messages != after.messages:
            self.found(["reopened: the transcript is another one"])
        if before.prompt != after.prompt and not self.shrunk:
            self.found(["reopened: the prompt is another one"])
        self.shrunk = False
        self.judge(after)

    def _fsck(self) -> None:
        self.after = "fsck"
        words = [sys.executable, "-m", "kilburn", "fsck", "--db", self.path]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode:
            self.found([f"fsck: {(done.stdout + done.stderr)[-300:]}"])


def told(error: BaseException) -> str:
    """An error's class, words, and where it came from."""
    kind = "refused" if isinstance(error, KilburnError) else "untyped"
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    where = f" ({Path(last.filename).name}:{last.lineno})" if last is not None else ""
    return f"{kind}: {type(error).__name__}: {error}{where}"


Mishap = Callable[[Session], None]
