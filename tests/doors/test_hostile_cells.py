"""Hostile cells: whatever code does in a sandbox, its cell ends typed and bounded, and the next cell works.

Endless loops, calls without waiting for their results, half messages, replaced builtins, suicides, prompts of 9 MB, batches,
values that no message carries; in each sandbox, and below a recursive model. The function that the code calls rests a while in
each call, so that the bound on a cell's time bounds how often it can be called: that is counted, and no clock is read.

A long run: `PYTHONPATH=src:tests python tests/doors/test_hostile_cells.py --trials 200 --seed 1`.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import kilburn
from doors.visit import Broken, Json, Trial, check, find_broken, folder_of_memory, format_broken, run
from effort import rounds
from kilburn.agents.loop import Limits
from kilburn.errors import KilburnError
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply
from kilburn.models.scripted import Scripted
from kilburn.recursion.inquiry import AnswerOutcome
from kilburn.recursion.rlm import RecursiveModel
from kilburn.recursion.sandbox import Bounds, Cell, CellOutcome, Sandbox, open_sandbox

REST = 0.05
"""Seconds that each call takes at least."""
SECONDS = 1.5
TOTAL = 2 * SECONDS
MOST = int(TOTAL / REST) + 2
"""Calls of one cell, at most: those that its seconds in all have room for. Where a bound says how many, it says so many."""

LINK = """
import json as _j, os as _o, struct as _s, sys as _y
_f = _y._getframe()
while "link" not in _f.f_locals:
    _f = _f.f_back
_link = _f.f_locals["link"]
def _frame(value):
    raw = value if isinstance(value, bytes) else _j.dumps(value).encode()
    return _s.pack(">I", len(raw)) + raw
"""
EVERYWHERE = (
    "while True:\n    pass",
    "while True:\n    ask('x')",
    "while True:\n    try:\n        ask('x')\n    except Exception:\n        pass",
    "for n in range(100000):\n    batch(['x'] * 3)",
    "ask('x' * 9_000_000)",
    "batch(['x' * 9_000_000] * 3)",
    "batch(['x'] * 100000)",
    "batch(['x' * 100000] * 200)",
    "ask('x' * 200_000_000)",
    "ask(5)",
    "ask()",
    "ask('a', 'b', c=1)",
    "ask(None)",
    "ask(ask)",
    "big = 10 ** 5000\nany_of(big)",
    "deep = []\nfor n in range(100000):\n    deep = [deep]\nany_of(deep)",
    "wide = {str(n): n for n in range(300000)}\nany_of(wide)",
    "any_of(float('nan'))\nany_of(float('inf'))",
    "any_of({1: 2, None: 3})",
    "any_of([1, (2, 3), {4}, b'5'])",
    "loop = []\nloop.append(loop)\nany_of(loop)",
    "raising('x')",
    "def f(n):\n    return f(n + 1)\nf(0)",
    "x = 'x'\nwhile True:\n    x = x + x",
    "x = []\nwhile True:\n    x.append('x' * 1000000)",
    "x = [0] * 10 ** 10",
    "x = 'x' * 10 ** 11",
    "while True:\n    print('x' * 1000)",
    "print('x' * 10 ** 8)",
    "print('\\ud800')",
    "x = '\\ud800'\nask(x)",
    "print('\\x00' * 10)",
    "x = 7 ** 10 ** 8",
    "x = sum(range(10 ** 12))",
    "x = max(range(10 ** 11))",
    "x = sorted(str(n) for n in range(10 ** 9))",
    "x = f'{1:1000000000}'",
    "x = ('a' * 30000).replace('a', 'b' * 30000)",
    "x = '(' * 100000 + ')' * 100000\neval(x)",
    "(" * 3000 + ")" * 3000,
    "x = 1" + "+1" * 100000,
    "def",
    "raise",
    "raise ValueError('x' * 10 ** 7)",
    "1 / 0",
    "assert False, 'x'",
    "ask = None\nbatch = None\nany_of = None",
    "print = None",
    "x = " + "[" * 150 + "]" * 150,
    "\x00",
    "while True: x = 1; y = [x] * 100; del y",
    "import os\nos.system('true')",
    "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
)
FULL = (
    LINK + "one = _frame({'type': 'call', 'name': 'ask', 'arguments': {'prompt': 'x'}})\n_o.write(_link, one * 2000)\nwhile 1: 1",
    LINK + "for n in range(3000):\n    _o.write(_link, _frame({'type': 'call', 'name': 'ask', 'arguments': {'prompt': 'x'}}))",
    LINK + "for n in range(3000):\n    _o.write(_link, _frame({'type': 'call', 'name': 'ask', 'arguments': [['x'], {}]}))",
    LINK + "for n in range(3000):\n    _o.write(_link, _frame({'type': 'call', 'name': 'nobody', 'arguments': {}}))",
    LINK + "_o.write(_link, _s.pack('>I', 100))",
    LINK + "_o.write(_link, _s.pack('>I', 100))\nwhile True: pass",
    LINK + "_o.write(_link, _s.pack('>I', 100) + b'{')\nimport time\ntime.sleep(1000)",
    LINK + "_o.write(_link, _s.pack('<I', 100))",
    LINK + "_o.write(_link, b'\\xff' * 4)\nwhile True: pass",
    LINK + "_o.write(_link, b'\\xff' * 70000)",
    LINK + "_o.write(_link, b'\\x00')",
    LINK + "_o.write(_link, _frame(b''))",
    LINK + "_o.write(_link, _frame(b'[' * 100000))",
    LINK + '_o.write(_link, _frame(b\'{"type": "ended"}\'))',
    LINK + "_o.write(_link, _frame({'type': 'ended', 'outcome': 'ok', 'error': '', 'output': 'lie', 'cut': 0}))",
    LINK + "one = _frame({'type': 'ended', 'outcome': 'ok', 'error': '', 'output': 'lie', 'cut': 0})\n_o.write(_link, one * 50)",
    LINK + "_o.write(_link, _frame({'type': 'value', 'value': 5}))",
    LINK + "_o.close(_link)",
    LINK + "_o.close(_link)\nwhile True: pass",
    LINK + "_o.read(_link, 100)",
    LINK + "_o.set_blocking(_link, False)",
    LINK + "_o.dup2(1, _link)",
    "import builtins\nbuiltins.exec = lambda *a, **k: None\n1 / 0",
    "import builtins\nbuiltins.exec = None\nraise ValueError",
    "import builtins\nbuiltins.exec = lambda *a, **k: None",
    "import builtins\nbuiltins.compile = None",
    "import builtins\nbuiltins.len = builtins.isinstance = builtins.type = None",
    "import builtins\nbuiltins.BaseException = builtins.Exception = int",
    "import builtins\nbuiltins.print = None\n1 / 0",
    "import builtins\nbuiltins.__dict__.clear()",
    "import builtins\nbuiltins.__import__ = None",
    "import builtins\nbuiltins.getattr = lambda *a: 5\n1 / 0",
    "import json\njson.dumps = json.loads = None",
    "import json\njson.JSONEncoder.default = json.JSONEncoder.encode = json.JSONEncoder.iterencode = None",
    "import ast\nast.parse = None",
    "import sys\nsys.stdout = None",
    "import sys\nsys.stdout.close()\nsys.stderr = 5",
    "import sys\nsys.modules.clear()",
    "import sys\nsys.exit()",
    "raise SystemExit(3)",
    "raise KeyboardInterrupt",
    "import sys\nsys.addaudithook(lambda *a: 1 / 0)",
    "import sys\nsys.settrace(lambda *a: 1 / 0)",
    "import sys\nsys.setprofile(lambda *a: 1 / 0)",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f():\n    f()\nf()",
    "import sys\nsys.setrecursionlimit(20)",
    "import sys\nsys._getframe(1).f_globals.clear()",
    "import sys\nsys._getframe(4).f_globals['Interpreter'].send = sys._getframe(4).f_globals['Interpreter'].receive = None",
    "import sys\nsys._getframe(4).f_globals['dumps'] = lambda *a: b'{}'",
    "import os\nos._exit(0)",
    "import os\nos.abort()",
    "import os\nos.kill(os.getpid(), 9)",
    "import os\nos.fork()",
    "import os\nfor n in range(100):\n    try:\n        os.close(n)\n    except OSError:\n        pass",
    "import signal\nfor n in range(1, 32):\n    if n not in (9, 19):\n        signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "import signal, os\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "import ctypes\nctypes.string_at(0)",
    "import gc\nfor one in gc.get_objects():\n    if type(one) is dict: one.clear()",
    "import gc\nfor one in gc.get_objects():\n    if type(one) is list: one.append(one)",
    "import threading\nthreading.Thread(target=print).start()",
    "import atexit\ndef f():\n    while True: pass\natexit.register(f)\nraise SystemExit",
    "import time\ntime.sleep(1000)",
    "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
    "while True:\n    try:\n        ask('x')\n    except BaseException:\n        pass",
    "def f():\n    try:\n        f()\n    finally:\n        f()\nf()",
    "class X:\n    def __repr__(self):\n        while True: pass\nX()",
    "class X(Exception):\n    def __str__(self):\n        while True: pass\nraise X",
    "class X(BaseException):\n    def __str__(self):\n        raise self\nraise X",
    "class X:\n    def __del__(self):\n        while True: pass\nx = X()\nx = None",
    "class X(str):\n    def encode(self, *a):\n        while True: pass\nask(X('x'))",
    "class X(type):\n    def __instancecheck__(self, o):\n        while 1: 1\nclass Y(BaseException, metaclass=X): 1\nraise Y",
    "def f():\n    while True:\n        yield ask('x')\nlist(f())",
    "x = yield_ = (lambda: [ask('x') for n in range(10 ** 6)])()",
    "import itertools\nlist(itertools.product(range(100), repeat=9))",
    "import decimal\ndecimal.Decimal(7) ** decimal.Decimal(10 ** 7)",
    "import warnings\nwarnings.simplefilter('error')",
    "globals().clear()",
    "__builtins__ = {}",
    "del __builtins__, ask",
)
RECURSIVE = (
    "while True:\n    llm_query('x')",
    "llm_query('x' * 9_000_000)",
    "llm_query_batched(['x' * 9_000_000] * 2)",
    "llm_query_batched(['x'] * 5000)",
    "llm_query_batched(['x' * 100_000] * 120)",
    "for n in range(200):\n    llm_query_batched(['x'] * 50)",
    "llm_query()",
    "llm_query(5)",
    "llm_query_batched('x')",
    "llm_query_batched([])",
    "llm_query_batched([None, 5])",
    "answer = None",
    "answer['content'] = answer\nanswer['ready'] = True",
    "answer = {'ready': True}",
    "answer['ready'] = 'yes'",
    "answer['content'] = 10 ** 6000\nanswer['ready'] = True",
    "answer['content'] = float('nan')\nanswer['ready'] = True",
    "context = None",
    "llm_query = None\nanswer = 5",
    "while True:\n    try:\n        llm_query('x')\n    except Exception:\n        pass",
)


def bounds_of(rng: random.Random) -> Bounds:
    """Bounds of time in all, or of calls."""
    known = [name for name in ("total", "calls") if hasattr(Bounds, name)]
    given: Json = {"total": TOTAL, "calls": MOST}
    chosen = {name: given[name] for name in rng.sample(known, min(len(known), 1))}
    return Bounds(seconds=SECONDS, memory=256 << 20, **chosen)


class Callee:
    """What the code may call; it counts."""

    def __init__(self) -> None:
        self.calls = 0

    def rest(self) -> None:
        self.calls += 1
        if self.calls <= MOST:
            time.sleep(REST)

    def functions(self) -> dict[str, Callable[..., Any]]:
        def ask(prompt: str) -> str:
            self.rest()
            return prompt[:10]

        def batch(prompts: list[str]) -> list[str]:
            self.rest()
            return [prompt[:10] for prompt in prompts]

        def any_of(value: Any) -> int:
            self.rest()
            return len(repr(value))

        def raising(prompt: str) -> str:
            self.rest()
            raise ValueError(prompt * 100)

        return {"ask": ask, "batch": batch, "any_of": any_of, "raising": raising}


def cells(rng: random.Random, name: str) -> list[str]:
    known = EVERYWHERE + (FULL if name == "cpython" else ())
    return [rng.choice(known) for _ in range(rng.randrange(1, 4))]


def ran(sandbox: Sandbox, code: str, what: str, shown: Any) -> Cell:
    try:
        cell = sandbox.run(code)
    except Exception as error:
        raise Broken(f"{what} raises nothing: {type(error).__name__}", json.dumps(shown, default=repr) + f" {error!r}") from error
    check(isinstance(cell.outcome, CellOutcome), f"{what} ends typed", shown)
    return cell


def trial(rng: random.Random, *, name: str) -> None:
    """Hostile cells one after the other; behind each, a plain one."""
    callee = Callee()
    done: list[Any] = []
    with open_sandbox(name, calls=callee.functions(), variables={"given": [1, 2]}, bounds=bounds_of(rng)) as sandbox:
        for code in cells(rng, name):
            callee.calls = 0
            shown = {"sandbox": name, "before": [words[-200:] for words, _ in done], "cell": code.removeprefix(LINK)[:300]}
            cell = ran(sandbox, code, "a hostile cell", shown)
            check(callee.calls <= MOST, "calls of one cell are bounded by its seconds", shown | {"calls": callee.calls})
            check(len(cell.output) <= 20_000 and len(cell.error) <= 20_000, "output and error are bounded", shown)
            done.append((code, cell.outcome))
            callee.calls = 0
            after = ran(sandbox, "kept = 6 * 7", "the next cell", shown)
            told = {"outcome": cell.outcome, "lost": cell.lost, "next": [after.outcome, after.error[-300:]]}
            check(after.outcome == CellOutcome.OK, "the next cell works", shown | told)
            check(callee.calls == 0, "no call comes after its cell", shown | {"calls": callee.calls})
            try:
                value = sandbox.get("kept")
            except KilburnError as error:
                value = repr(error)
            except Exception as error:
                raise Broken(
                    f"get raises what is typed: {type(error).__name__}", json.dumps(shown | told) + repr(error)
                ) from error
            check(value == 42, "the next cell's variable is there", shown | told | {"value": value})
            called = ran(sandbox, "heard = ask('river')", "a call in the cell after", shown)
            check(
                called.outcome == CellOutcome.OK and callee.calls == 1,
                "the next cells can call",
                shown | told | {"error": called.error[-300:]},
            )


class Sub:
    """Answers sub-calls, and counts."""

    name, form, context, tokenizer = "sub", "chat", None, "chars/4"

    def __init__(self) -> None:
        self.calls = 0

    def stream(self, _: Any) -> Iterator[Reply]:
        self.calls += 1
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="yes"),)))


def repl(code: str) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text=json.dumps({"code": code}), call="c", name="repl"),))


def recursive(rng: random.Random, *, name: str) -> None:
    """A root that writes hostile cells, then a plain one that answers; and the same run again from its pages."""
    known = (*RECURSIVE, *RECURSIVE, *EVERYWHERE, *(FULL if name == "cpython" else ()))
    hostile = [rng.choice(known) for _ in range(3)]
    last = "answer['content'] = 42\nanswer['ready'] = True"
    sub, most = Sub(), 40
    shown: Json = {"sandbox": name, "cells": [code.removeprefix(LINK)[:200] for code in hostile]}
    folder = folder_of_memory()
    try:
        with kilburn.open(str(folder / "run.db"), window=6000, tokenizer="chars/4", policy="hybrid") as store:
            limits: Json = {"limits": Limits(steps=8), "calls": most}
            if hasattr(Limits, "calls"):
                given: Json = {"steps": 8, "calls": most}
                limits = {"limits": Limits(**given)}
            root = Scripted([repl(code) for code in (*hostile, *[last] * 8)])
            agent = RecursiveModel(root, store.session("run"), sub=sub, sandbox=name, bounds=bounds_of(rng), **limits)
            try:
                result = agent.ask("What is six times seven?", "A text with six and seven.", kind=Any)
            except Exception as error:
                raise Broken(f"a run ends with an outcome: {type(error).__name__}", json.dumps(shown) + repr(error)) from error
            check(isinstance(result.outcome, AnswerOutcome), "a run ends typed", shown)
            check(sub.calls <= most + 4, "sub-calls are bounded", shown | {"calls": sub.calls})
            ready = any("'ready'" in code for code in hostile)
            shown |= {
                "outcome": result.outcome,
                "limit": result.limit,
                "content": repr(result.content)[:100],
                "steps": result.steps,
            }
            check(ready or result.content == 42, "the cell behind hostile ones answers", shown)
            for request in root.requests:
                size = sum(len(str(message.get("content") or "")) for message in request.messages) // 4
                check(size <= 6000, "no prompt of the root is over the window", shown | {"size": size})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def hostile_cells(one: Callable[..., None], name: str) -> Iterator[Trial]:
    yield partial(one, name=name)


FUZZERS: dict[str, Callable[[], Any]] = {
    f"{name}{'-recursive' if one is recursive else ''}": partial(hostile_cells, one, name)
    for name in ("cpython", "monty")
    for one in (trial, recursive)
}


@pytest.mark.parametrize("name", FUZZERS)
def test_hostile_cells_end_and_the_next_one_works(name: str) -> None:
    with FUZZERS[name]() as trial:
        broken = find_broken(trial, trials=rounds(2, 6))
    assert not broken, format_broken(broken)


if __name__ == "__main__":
    run(FUZZERS, __doc__ or "")
