"""Libraries that compute outside the interpreter, and the end of a program.

A program that ends while one of its threads is inside a library such as ONNX Runtime or llama.cpp is ended by a signal,
whatever its own exit status is: the library is taken down under the thread. So there is one rule for every thread,
whoever started it: it enters such a library through `inside`, in small steps. When the program ends, nobody enters any
more, and who is inside is waited for. All other threads of the package are daemons, and are left where they are.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, finalize

import msgspec

from kilburn.errors import Unavailable

PATIENCE = 120.0
"""Seconds for which the end of a program waits at most for one step of a library."""
HURRY = 5.0
"""The same after a Ctrl-C."""


class _Visit(msgspec.Struct, eq=False):
    """A thread inside a library: for how many seconds it is waited for, and what makes it leave sooner."""

    thread: int
    patience: float
    leave: Callable[[], object] | None


class _Gate:
    """Who is inside. `ender` is the thread that ends the program, once one does."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.visits: list[_Visit] = []
        self.ender: int | None = None

    def enter(self, visit: _Visit) -> None:
        with self.changed:
            if self.ender not in (None, visit.thread):
                raise Unavailable("the program is ending", advice="do it before")
            self.visits.append(visit)

    def left(self, visit: _Visit) -> None:
        with self.changed:
            self.visits.remove(visit)
            self.changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more, and make those who are inside leave."""
        with self.changed:
            self.ender = me = threading.get_ident()
            other_visits = [visit for visit in self.visits if visit.thread != me]
        for visit in other_visits:
            if visit.leave is not None:
                visit.leave()

    def wait(self, timeout: float) -> None:
        """Wait until every visit has ended: for the patience of each, and at most `timeout` seconds."""
        began = time.monotonic()
        with self.changed:
            while remaining := [visit for visit in self.visits if visit.thread != self.ender]:
                seconds = began + min(timeout, max(visit.patience for visit in remaining)) - time.monotonic()
                if seconds <= 0:
                    return
                self.changed.wait(seconds)


_gate = _Gate()
_loaded: set[str] = set()
_resources: WeakKeyDictionary[Any, Callable[[Any], object] | None] = WeakKeyDictionary()


def load(name: str) -> Any:
    """A module, imported as one step.

    Raises:
        ModuleNotFoundError: it is not installed. Unavailable: the program is ending.
    """
    with inside():
        module = import_module(name)
        _loaded.add(name)
    # The last that registers is called first: before what the library itself does at the end.
    atexit.unregister(_end)
    atexit.register(_end)
    return module


@contextmanager
def inside(leave: Callable[[], object] | None = None, *, patience: float = PATIENCE) -> Iterator[None]:
    """One step inside a library: the end of the program waits for it.

    Args:
        leave: called by the thread that ends the program, to make this step shorter.
        patience: seconds for which the end waits at most.

    Raises:
        Unavailable: the program is ending.
    """
    gate, visit = _gate, _Visit(threading.get_ident(), patience, leave)
    gate.enter(visit)
    try:
        yield
    finally:
        gate.left(visit)


def ending() -> bool:
    """Whether the program is ending, and this thread is not the one that ends it: it should do no more."""
    return _gate.ender not in (None, threading.get_ident())


def keep(resource: Any, free: Callable[[Any], object] | None = None) -> None:
    """Register an object of a library with its own threads for its whole life.

    When the program ends, `free` is called with it, before the library's own end. A child of a fork has none of these
    threads, and would wait for them for ever if it took the object down: it never does.
    """
    with _gate.changed:
        late = _gate.ender is not None
        _resources[resource] = free
    if late and free is not None:
        free(resource)


def _end() -> None:
    patience = PATIENCE
    while True:
        try:
            _gate.shut()
            for resource, free in list(_resources.items()):
                if free is not None:
                    free(resource)
            _gate.wait(patience)
            return
        except KeyboardInterrupt:
            # The exit status is that of the program. Another Ctrl-C must not make a crash of it.
            patience = HURRY


def _begin_anew() -> None:
    """Reset the state in the child of a fork, which has only one thread. The child never frees objects of the libraries."""
    global _gate
    _gate = _Gate()
    orphans = list(_resources)
    _resources.clear()
    if not _loaded:
        return
    import ctypes

    for orphan in orphans:
        # Modules are emptied at the end: only a reference that nobody holds stays.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(orphan))
    program = ctypes.CDLL(None)
    if hasattr(program, "on_exit"):
        # After the interpreter, and before the libraries' own ends, which wait for threads.
        program.on_exit(program._exit, None)


# What `finalize` does at the end is registered with the first of them, and must come after.
finalize(_Gate(), int)
atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def give_memory_back() -> bool:
    """Give the system back what this process has freed, where the C library can do that; returns whether anything was.

    Texts of all lengths come and go in many threads, which have heaps of their own. What is free between others stays with the
    process, more and more of it, until the library is told.
    """
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` that bounds the number of heaps."""

MAX_HEAPS = 2


def limit_heaps() -> bool:
    """Bound the number of heaps from which threads that are started later allocate, where the C library can do that; return
    whether it can.

    glibc gives up to eight heaps to each processor, so that threads do not wait for one another. Threads of Python wait for the
    interpreter anyway, and each heap keeps free memory of its own.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_ARENA_MAX, MAX_HEAPS))
