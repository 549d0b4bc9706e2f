"""Mishaps: what happens to a session between two looks at it, each a function of the session.

A mishap acts as a user, another thread or another process would. The session judges what it left.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import kilburn
from kilburn.errors import KernelError, KilburnError, PinsExceedWindow
from kilburn.page import address_of
from torture.foes import Struck
from torture.odd import CARELESS, ODD
from torture.oracle import Turn, look
from torture.session import NAME, Mishap, Session, told
from torture.talk import Talk
from torture.turns import take_turns

__all__ = ["MISHAPS"]


def say(session: Session) -> None:
    """An ordinary turn."""
    session.attempt(session.talk.next(session.book.open_calls()))


def strike(session: Session) -> None:
    """Something raises at some count of tokens within an append: at any effect of the kernel."""
    error = session.rng.choice([Struck(), Struck(), MemoryError("struck")])
    turn = session.talk.next(session.book.open_calls())

    def call() -> str:
        session.counter.arm(session.rng.choice([1, 2, 3, 5, 8, 20, 50, 150]), error)
        try:
            return session.session.append(*turn.messages)
        except MemoryError:
            raise Struck from None
        finally:
            session.counter.left = 0

    session.attempt(turn, call)


def interrupt(session: Session) -> None:
    """Ctrl-C while a policy waits for its model."""
    main = threading.main_thread()
    if threading.current_thread() is not main:
        return say(session)

    def act() -> None:
        frame = sys._current_frames().get(main.ident or 0)
        while frame is not None and "/kilburn/kernel/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            over.set()
        else:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

    over = session.await_answer(session.rng.choice([1, 1, 2, 3]), act)
    turn = session.talk.next(session.book.open_calls())

    def call() -> str:
        try:
            return session.session.append(*turn.messages)
        finally:
            over.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        session.attempt(turn, call)
    finally:
        signal.signal(signal.SIGINT, before)
        session.liar.hook = None
    return None


def cancel(session: Session) -> None:
    """A task that appends is cancelled at one of its awaits."""
    import asyncio  # every command would be slower to start

    turn, which = session.talk.next(session.book.open_calls()), session.rng.choice([1, 1, 2, 3])

    async def appended() -> str:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(session.session.aappend(*turn.messages))
        over = session.await_answer(which, lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await task
        except asyncio.CancelledError:
            raise Struck from None
        finally:
            over.set()

    try:
        session.attempt(turn, lambda: asyncio.run(appended()))
    finally:
        session.liar.hook = None


def cross(session: Session) -> None:
    """While a policy waits for its model, others look, and another thread appends."""
    mine, other = session.talk.next(session.book.open_calls()), session.talk.plain("user")

    def act() -> None:
        session.liar.hook = None
        session.suffer(lambda: session.admit(other))
        over.set()

    over = session.await_answer(session.rng.choice([1, 1, 2]), act)
    try:
        session.admit(mine)
    finally:
        over.set()
        session.liar.hook = None


def other_writer(session: Session) -> None:
    """Another process of the system appends to the session; then this one does."""
    turn = session.talk.plain("user")
    said = session.onlooker.append(session.path, NAME, session.window, "summarize", turn.messages)
    if said.startswith("p"):
        session.found(session.book.admit(said, turn))
    elif "PinsExceedWindow" not in said:
        session.found([f"refused: another writer's append raises {said}"])
    stale = session.talk.plain("user")
    session.attempt(stale)


def other_dies(session: Session) -> None:
    """Another process of the system appends, and is killed where its policy asks a model."""
    turn = session.talk.plain("assistant")
    said = session.onlooker.append(session.path, NAME, session.window, "summarize", turn.messages, die=True)
    if said.startswith("p"):
        session.found(session.book.admit(said, turn))
    session.store.close()
    session.open()


def threads(session: Session) -> None:
    """Several threads append, render, recall, pin and forget at once, while another process looks on."""
    session.onlooker.start_watching(session.path, NAME, session.window)
    works = [_work(session, random.Random(f"{session.seed}-{at}"), f"t{session.talk.made}-{at}") for at in range(3)]
    raised = take_turns(works, session.rng.randrange(2**30), session.rng.choice([0.02, 0.1, 0.3]))
    session.found(map(told, raised))
    session.found(session.onlooker.stop_watching().faults)


def _work(session: Session, rng: random.Random, name: str) -> Callable[[], None]:
    talk, opened, book = Talk(rng, session.form, name, session.window // 3), session.session, session.book

    def work() -> None:
        for _ in range(5):
            turn = talk.plain(rng.choice(["user", "assistant"]))
            try:
                address = opened.append(*turn.messages)
            except PinsExceedWindow:
                continue
            session.found(book.admit(address, turn))
            if opened.recall(address) != turn.texts[0]:
                session.found([f"recall: {address} is not what was given, beside other threads"])
            session.found(look(opened, session.window).faults)
            opened.contents.pages()
            what = rng.random()
            if what < 0.2:
                opened.forget(address)
                book.forgotten.add(int(address[1:]))
            elif what < 0.4 and len(turn.texts[0]) < session.window // 10:
                try:
                    opened.pin(address)
                except PinsExceedWindow:
                    continue
                opened.unpin(address)

    return work


def odd(session: Session) -> None:
    """An odd value somewhere; the session is the same afterwards."""
    acts = {**ODD, **CARELESS}
    name = session.rng.choice(list(acts))
    session.after = f"odd: {name}"
    before = session.session.contents.messages()
    session.shrunk = session.shrunk or name.startswith("observe")
    try:
        made = acts[name](session.session)
    except KilburnError:
        return
    except (TypeError, AttributeError, ValueError):
        if name not in CARELESS:
            raise
        return
    if name.startswith("append") and isinstance(made, str):
        # Odd, and yet a message: it has to come back like any other.
        first, last = made[1:].split("-p") if "-" in made else (made[1:], made[1:])
        more = session.session.contents.messages()[len(before) :]
        texts: list[Any] = [str(session.session.recall(f"p{at}")) for at in range(int(first), int(last) + 1)]
        session.found(session.book.admit(made, Turn(messages=more, texts=texts)))


def mark(session: Session) -> None:
    """Pin, unpin, rate, forget, recall, search, idle: what a person or an agent does besides."""
    single, opened = session.book.single(), session.session
    if not single:
        return
    page = session.rng.choice(single)
    address, text = address_of(page), session.book.admitted[page].texts[0]
    verb = session.rng.choice(["pin", "unpin", "rate", "forget", "recall", "search", "idle"])
    session.after = f"{verb} {address}"
    if verb == "pin" and len(text) > session.window // 10:
        verb = "rate"
    try:
        if verb == "search":
            opened.search(text[:60])
        elif verb == "idle":
            opened.edits.idle()
        elif verb == "recall":
            session.found([] if opened.recall(address) == text else [f"recall: {address} is not what was given"])
        else:
            getattr(opened, verb)(address)
        if verb == "forget":
            session.book.forgotten.add(page)
    except PinsExceedWindow:
        # Only what has to come back into the window may find no room there.
        if verb != "pin":
            raise


def resize(session: Session) -> None:
    """Another budget; the old one stays where it does not fit."""
    window = session.rng.choice([1, 40, 300, 900, 1500, 3000, 9000])
    try:
        session.session.edits.resize(kilburn.Budget(window))
    except KernelError:
        return
    session.window = session.talk.size = window
    session.shrunk = True
    if window < 300:
        # Nothing is to be said at such a size; what it shows was right, or is told below.
        session.check(outside=True)
        session.session.edits.resize(kilburn.Budget(3000))
        session.window = session.talk.size = 3000


def small_reader(session: Session) -> None:
    """A reader with half the window: what it renders is within that, or it says why not."""
    seen = session.onlooker.look(session.path, NAME, max(1, session.window // 2))
    session.found(f"{fault} (readonly, half the window)" for fault in seen.faults)


def reopen(session: Session) -> None:
    """Close and open again."""
    session.reopen()


MISHAPS: tuple[tuple[int, Mishap], ...] = (
    (20, say),
    (10, strike),
    (8, interrupt),
    (8, cancel),
    (8, cross),
    (3, other_writer),
    (3, other_dies),
    (3, threads),
    (10, odd),
    (10, mark),
    (3, resize),
    (3, reopen),
    (2, small_reader),
)
"""How often, and what."""
