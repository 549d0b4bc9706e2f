"""What an inside that lies, dies or is spoiled does to us: bounds that it cannot move, typed outcomes, a next cell that works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effort import each_value, rounds
from kilburn.errors import KilburnError, MissingExtra, NoValue, SandboxError, SandboxRefused, SpecError
from kilburn.recursion.sandbox import MAX_CALL_BYTES, Bounds, CellOutcome, Sandbox, open_sandbox
from waiting import MINUTES, until

BOTH = ["cpython", "monty"]
LINK = "import json, os\nlink = call.__closure__[-1].cell_contents\n"
FRAME = "text = json.dumps({'type': 'call', 'name': 'call', 'arguments': '[[], {}]'}).encode()\n"
FRAME += "frame = len(text).to_bytes(4, 'big') + text\n"


def open_any(name: str, call: Callable[..., Any] = lambda: None, **given: Any) -> Sandbox:
    try:
        return open_sandbox(name, calls={"call": call}, **given)
    except (SandboxRefused, MissingExtra) as error:
        pytest.skip(str(error))


def works(sandbox: Sandbox) -> bool:
    """Return whether the next cell works. On a busy machine a cell may take too long, however little it does: then one more."""
    cells = (sandbox.run("print(len('abc'), repr(1))") for _ in range(5))
    return next((cell.output == "3 1\n" for cell in cells if cell.outcome is not CellOutcome.TIMEOUT), False)


def children() -> list[int]:
    """The programs that this one started."""
    return [int(one) for each in Path("/proc/self/task").iterdir() for one in (each / "children").read_text().split()]


def rests(process: int) -> bool:
    """Whether a program is stopped or has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except (FileNotFoundError, ProcessLookupError):
        return True


# Time, and the number of calls.


def test_a_call_before_the_last_one_is_answered_ends_the_sandbox() -> None:
    made = list[int]()
    with open_any("cpython", lambda: made.append(1)) as sandbox:
        cell = sandbox.run(LINK + FRAME + "os.write(link.link, frame * 64)\nwhile True: pass")
        assert (cell.outcome, cell.lost) == (CellOutcome.KILLED, True)
        assert len(made) <= 1
        assert works(sandbox)


def test_calls_that_are_not_waited_for_do_not_move_the_end() -> None:
    made = list[int]()
    code = (
        "while True:\n    try:\n        while True:\n            os.write(link.link, frame)\n            os.read(link.link, 17)\n"
    )
    code += "    except BaseException: pass"
    with open_any("cpython", lambda: made.append(1), bounds=Bounds(seconds=1, calls=5)) as sandbox:
        cell = sandbox.run(LINK + FRAME + code)
        assert cell.outcome in (CellOutcome.KILLED, CellOutcome.TIMEOUT)
        assert len(made) <= 5
        assert works(sandbox)


@pytest.mark.parametrize("name", BOTH)
def test_a_cell_has_so_many_calls_and_the_next_one_as_many(name: str) -> None:
    made = list[int]()
    code = "done = 0\ntry:\n    for _ in range(9):\n        call()\n        done += 1\n"
    code += "except RuntimeError as error:\n    print(done, error)"
    with open_any(name, lambda: made.append(1), bounds=Bounds(calls=5)) as sandbox:
        for _ in range(2):
            assert sandbox.run(code).output == "5 no more than 5 calls in one cell\n"
        assert sandbox.get("done") == 5
    assert len(made) == 10


def test_what_code_computes_while_a_function_of_ours_runs_is_its_own_time() -> None:
    """It sends a call, computes for longer than it may, and only then looks for the answer."""
    others = {*children()}

    def call() -> None:
        (pid,) = {*children()} - others
        until(lambda: time.clock_gettime((~pid << 3) | 2) > 1.2)

    code = "import time\nos.write(link.link, frame)\nwhile time.process_time() < 1.5: pass\nlink.receive()\nprint('on')"
    with open_any("cpython", call, bounds=Bounds(seconds=1)) as sandbox:
        cell = sandbox.run(LINK + FRAME + code)
        assert (cell.outcome, cell.output) == (CellOutcome.TIMEOUT, "")
        assert works(sandbox)


@pytest.mark.parametrize("name", BOTH)
def test_a_cell_ends_in_all_however_long_functions_of_ours_take(name: str) -> None:
    made = list[int]()

    def call() -> None:
        made.append(1)
        begun = time.monotonic()
        until(lambda: time.monotonic() - begun > 0.3)

    with open_any(name, call) as sandbox:
        cell = sandbox.run("call()\nwhile True: call()", total=0.2)
        assert cell.outcome is CellOutcome.TIMEOUT
        assert works(sandbox)
    # A busy machine may take all the time before the first call.
    assert len(made) <= 1


def test_what_asks_the_host_for_names_without_end_is_stopped() -> None:
    """Monty's own clock stands still while it asks."""
    with open_any("monty", bounds=Bounds(seconds=0.5)) as sandbox:
        cells = list[Any]()
        code = "while True:\n    try:\n        nothing\n    except NameError:\n        pass"
        other = threading.Thread(target=lambda: cells.append(sandbox.run(code)), daemon=True)
        other.start()
        other.join(MINUTES)
        assert cells
        assert (cells[0].outcome, cells[0].lost) == (CellOutcome.TIMEOUT, True)
        assert works(sandbox)


def test_what_get_runs_makes_no_calls() -> None:
    made = list[int]()
    with open_any("cpython", lambda: made.append(1)) as sandbox:
        sandbox.run("class D(dict):\n    def items(self):\n        call()\n        return [('a', 1)]\nx = D(a=1)")
        with pytest.raises(NoValue, match="calls"):
            sandbox.get("x")
    assert made == []


# Frames that lie.

LIES = {
    "a header without its body": "os.write(link.link, b'\\0\\0\\1\\0')",
    "a header without its body, and no end": "os.write(link.link, b'\\0\\0\\1\\0')\nwhile True: pass",
    "half a header": "os.write(link.link, b'\\0\\0')\nwhile True: pass",
    "half a message, and sleep": "import time\nos.write(link.link, frame[:9])\ntime.sleep(1000)",
    "an empty message": "os.write(link.link, bytes(4))",
    "the largest length": "os.write(link.link, b'\\xff' * 4)",
    "the last message again": "link.send({**link.get('x'), 'number': 0})",
    "two ends": "for _ in range(2): link.send({**link.run('1'), 'number': 1})\nos._exit(0)",
    "an end, then a call": "link.send({**link.run('1'), 'number': 1})\nos.write(link.link, frame)\nos._exit(0)",
    "silence": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "no reading": "while True: os.write(link.link, frame)",
    "its own end": "os._exit(7)",
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_cell_and_the_next_one_works(name: str) -> None:
    with open_any("cpython") as sandbox:
        cell = sandbox.run(LINK + FRAME + LIES[name], total=0.5)
        if cell.outcome is not CellOutcome.OK:  # it ended as it said, and what comes after that is no part of it
            assert cell.outcome is CellOutcome.TIMEOUT or (cell.outcome, cell.lost) == (CellOutcome.KILLED, True)
        elif not works(sandbox):
            assert sandbox.started == 1
        assert works(sandbox)


@pytest.mark.parametrize("code", ["os.close(link.link)", "os.dup2(0, link.link)", "os.kill(os.getpid(), 19)", "os.fork()"])
def test_it_cannot_close_its_end_stop_itself_or_fork(code: str) -> None:
    with open_any("cpython") as sandbox:
        assert "PermissionError" in sandbox.run(LINK + code).error
        assert works(sandbox)


LIAR = """
import random, time
chance = random.Random({seed})
def of(kind):
    given = chance.choice(['[[], {{}}]', '[]', 'x'])
    if kind == "call": return json.dumps({{"type": "call", "name": "call", "arguments": given}})
    if kind == "ended": return json.dumps({{"type": "ended", "outcome": "ok", "error": "", "output": "", "cut": 0, "number": 1}})
    if kind == "value": return json.dumps({{"type": "value", "value": "1", "number": chance.randint(0, 3)}})
    return chance.choice(['[', '{{"type": 1}}', 'null', '', '"' * 99, '{{"type": "ready", "lacks": []}}'])
frames = []
for _ in range(chance.randint(1, 6)):
    text = of(chance.choice(["call", "call", "ended", "value", "odd"])).encode()
    length = chance.choice([len(text)] * 6 + [len(text) + chance.randint(-9, 9), 0, 1 << 31, chance.getrandbits(32)])
    frames.append(min(max(length, 0), (1 << 32) - 1).to_bytes(4, "big") + text)
if chance.random() < 0.3: frames += chance.sample(frames, 1)
if chance.random() < 0.3: chance.shuffle(frames)
if chance.random() < 0.3: frames.append(chance.randbytes(chance.randint(1, 99)))
sent = b"".join(frames)
if chance.random() < 0.3: sent = sent[:chance.randint(0, len(sent))]
while sent:
    at = chance.choice([1, 3, 4, 5, len(sent)])
    os.write(link.link, sent[:at])
    sent = sent[at:]
    if chance.random() < 0.2: time.sleep(0.01)
end = chance.choice(["normal", "read", "spin", "exit", "refuse"])
if end == "read":
    os.read(link.link, 1000)
elif end == "spin":
    while True: pass
elif end == "exit":
    os._exit(3)
elif end == "refuse":
    while True:
        try:
            while True: pass
        except BaseException: pass
"""


def test_no_lie_hangs_escapes_or_raises_what_is_not_typed() -> None:
    """A fuzzer of frames. More lies: KILBURN_LIES=2000."""
    seen, made = Counter[str](), list[int]()
    many = int(os.environ.get("KILBURN_LIES", rounds(15, 40)))

    def lie() -> None:
        with open_any("cpython", lambda: made.append(1), bounds=Bounds(seconds=0.2, calls=20)) as sandbox:
            for seed in range(many):
                before = len(made)
                try:
                    seen[sandbox.run(LINK + LIAR.format(seed=seed)).outcome] += 1
                    sandbox.get("chance")
                except KilburnError as error:
                    seen[type(error).__name__] += 1
                except BaseException as error:
                    seen[f"untyped: {error!r}, seed {seed}"] += 1
                    raise
                assert len(made) - before <= 20
                # What was sent too early may spoil the next use, and never the one after it.
                assert any(works(sandbox) for _ in range(2)), seed
        seen["done"] += 1

    other = threading.Thread(target=lie, daemon=True)
    other.start()
    other.join(MINUTES)
    assert seen["done"] == 1, seen
    print(dict(seen), len(made), "calls")


# What a cell leaves behind.

SPOILED = {
    "exec": "exec = None",
    "print": "print = None",
    "repr": "repr = len = 5",
    "its builtins": "__builtins__ = {}",
    "the builtins": "import builtins\nbuiltins.exec = builtins.len = builtins.isinstance = builtins.type = None",
    "standard output": "import sys\nsys.stdout = sys.stderr = None",
    "how values are shown": "import sys\nsys.displayhook = None",
    "a signal's handler": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)",
    "json": "import json\njson.dumps = json.loads = None",
    "the inside of json": "import json\njson.encoder.JSONEncoder.encode = json.decoder.JSONDecoder.decode = None",
    "the modules": "import sys\nsys.modules.clear()",
    "our functions": "del call",
    "the code of our functions": "call.__code__ = (lambda *a, **k: 1/0).__code__",
    "every name": "globals().clear()",
    "a trace": "import sys\nsys.settrace(lambda *a: 1 / 0)",
    "a profile": "import sys\nsys.setprofile(lambda *a: 1 / 0)",
    "an audit hook": "import sys\nsys.addaudithook(lambda *a: 1 / 0)",
    "the depth": "import sys\nsys.setrecursionlimit(12)",
    "the parser": "import ast\nast.parse = compile = None",
    "the lines": "import linecache\nlinecache.cache = None",
    "tracebacks": "import traceback\ntraceback.TracebackException = None",
    "the connection": "import os\nos.read = os.write = None",
    "its input": "import io\nio.StringIO = None",
    "the memory": "kept = []\nwhile True: kept.append(bytearray(1000))",
    "the memory, in large pieces": "kept = []\nwhile True: kept.append('x' * 999_999)",
}


@pytest.mark.parametrize(("name", "how"), each_value(list(SPOILED), ["failed", "failed", "failed", "ended well"]))
def test_a_cell_does_not_spoil_the_next(name: str, how: str) -> None:
    own = name in ("exec", "print", "repr")
    if how == "ended well" and own:
        pytest.skip("what a cell that ended well calls by a name of Python's is its own")
    called = list[int]()
    with open_any("cpython", lambda: called.append(1), bounds=Bounds(memory=64 << 20)) as sandbox:
        cell = sandbox.run(SPOILED[name] + ("\n1 / 0" if how == "failed" else ""))
        next_one = sandbox.run("print(len('abc'), repr(1))\ncall()\nexec('print(2)')\n1 / 0")
        assert (next_one.outcome, next_one.output) == (CellOutcome.ERROR, "3 1\n2\n"), (cell, next_one)
        assert "ZeroDivisionError" in next_one.error
        assert len(called) == 1


@pytest.mark.parametrize("name", BOTH)
def test_names_of_python_are_its_own_again_after_a_cell_that_failed(name: str) -> None:
    with open_any(name) as sandbox:
        sandbox.run("sum = 7")
        cell = sandbox.run("sum = 8\nprint = len = list = repr = None\n1 / 0")
        assert cell.outcome is CellOutcome.ERROR
        assert sandbox.run("print(sum, len('abc'), list('a'), repr(1))").output == "7 3 ['a'] 1\n"


@pytest.mark.parametrize("name", BOTH)
def test_a_full_memory_does_not_stop_every_later_cell(name: str) -> None:
    with open_any(name, bounds=Bounds(memory=32 << 20)) as sandbox:
        assert sandbox.run("kept = []\nwhile True: kept.append('x' * 1000 + str(len(kept)))").outcome is CellOutcome.MEMORY
        assert works(sandbox) or works(sandbox)


@pytest.mark.parametrize("name", BOTH)
def test_setup_is_run_at_each_start(name: str) -> None:
    with open_any(name, variables={"n": 2}, setup="m = n * 3", bounds=Bounds(seconds=1)) as sandbox:
        assert (sandbox.started, sandbox.get("m")) == (1, 6)
        sandbox.run("m = 0\n" + ("import os\nos._exit(1)" if name == "cpython" else "while True: pass"))
        assert (sandbox.get("m"), sandbox.started) == (6, 2)
    with pytest.raises(SpecError, match="set up"):
        open_any(name, setup="1 / 0")


# A dead inside.


SIGNALS = [signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP]
MOMENTS = ["in a call", "between cells", "in get"]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("how", "when"), each_value(SIGNALS, MOMENTS))
def test_an_inside_that_dies_or_stops_is_a_typed_outcome(name: str, how: signal.Signals, when: str) -> None:
    others = {*children()}

    def end() -> None:
        (inside,) = {*children()} - others
        os.kill(inside, how)
        until(lambda: rests(inside))

    with open_any(name, end, bounds=Bounds(seconds=0.5)) as sandbox:
        sandbox.run("kept = 1")
        if when == "in a call":
            assert sandbox.run("call()\nprint('on')").lost
        else:
            end()
            if when == "in get":
                with pytest.raises(NoValue, match="lost"):
                    sandbox.get("kept")
            else:
                assert sandbox.run("print('on')").lost
        assert works(sandbox)
        assert sandbox.started == 2


def test_a_worker_whose_stack_overflows_is_a_typed_outcome() -> None:
    with open_any("monty") as sandbox:
        cell = sandbox.run("eval('1+' * 1000000 + '1')")
        assert (cell.outcome, cell.lost) == (CellOutcome.KILLED, True)
        assert works(sandbox)


@pytest.mark.parametrize("name", BOTH)
def test_a_result_that_is_too_large_is_an_exception_inside(name: str) -> None:
    bounds = Bounds(memory=16 << 20)
    with open_any(name, lambda: "x" * (17 << 20), bounds=bounds) as sandbox:
        cell = sandbox.run("try:\n    call()\nexcept ValueError as error:\n    print(error)")
        assert "ask for less" in cell.output
        assert works(sandbox)


def test_a_result_that_there_is_no_room_for_leaves_the_connection_whole() -> None:
    with open_any("cpython", lambda: "x" * (30 << 20), bounds=Bounds(memory=32 << 20)) as sandbox:
        assert sandbox.run("kept = 1\ncall()").outcome is CellOutcome.MEMORY
        assert sandbox.get("kept") == 1


@pytest.mark.parametrize("name", BOTH)
def test_a_sandbox_is_of_the_program_that_opened_it(name: str) -> None:
    """One that is forked neither uses it nor ends it, and is refused where it would wait for ever."""
    with open_any(name) as sandbox:
        child = os.fork()
        if not child:
            status = 9
            try:
                for use in (sandbox.run, sandbox.get):
                    with pytest.raises(SandboxError, match="forked"):
                        use("x")
                sandbox.close()
                if name == "monty":
                    with pytest.raises(SandboxRefused, match="forked"):
                        open_sandbox("monty")
                    with open_sandbox() as other:
                        assert other.name == "cpython"
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert works(sandbox)


# Eight megabytes a call.


@pytest.mark.parametrize("name", BOTH)
def test_a_list_that_is_too_large_for_one_call_goes_in_several(name: str) -> None:
    taken = list[list[int]]()

    def call(prefix: str, items: list[str]) -> list[str]:
        taken.append([len(item) for item in items])
        return [prefix + item[:3] for item in items]

    code = f"items = [str(n) * ({MAX_CALL_BYTES} // 3) for n in range(8)] + ['', 'last']\n"
    with open_any(name, call, batched=["call"], bounds=Bounds(memory=1 << 30)) as sandbox:
        for arguments in ("'>', items", "prefix='>', items=items"):
            taken.clear()
            cell = sandbox.run(code + f"print(call({arguments}))")
            expected = [f">{n}{n}{n}" for n in range(8)] + [">", ">las"]
            assert cell.output.strip() == str(expected), cell.error
            assert len(taken) > 3
            assert all(sum(sizes) < MAX_CALL_BYTES for sizes in taken)
        taken.clear()
        cell = sandbox.run(f"call('', ['a', 'x' * {MAX_CALL_BYTES}])")
        assert "item 1 of items takes 8,000,004 bytes" in cell.error
        assert taken == []
        assert sandbox.run("print(call('', []), call('', ['abc']))").output == "[] ['abc']\n"


@pytest.mark.parametrize("name", BOTH)
def test_what_is_too_large_for_a_call_says_how_much_may_be(name: str) -> None:
    with open_any(name, len, bounds=Bounds(memory=1 << 30)) as sandbox:
        assert sandbox.run(f"print(call('x' * ({MAX_CALL_BYTES} - 100)))").output == f"{MAX_CALL_BYTES - 100}\n"
        assert "more than 8,000,000" in sandbox.run(f"call('x' * {MAX_CALL_BYTES})").error


def test_what_is_batched_is_a_function_with_a_list() -> None:
    for batched in (["nothing"], ["call"]):
        with pytest.raises(SpecError, match="list"):
            open_sandbox(calls={"call": lambda: None}, batched=batched)


# Machines on which it cannot start.

HERE = """
import ctypes, errno, os, resource, struct, sys
from kilburn.recursion.sandbox import open_sandbox
from kilburn.recursion.sandboxes.lockdown import ALLOW, EQUAL, LOAD, RETURN
from kilburn.errors import KilburnError

def forbid(code, *numbers):
    lines = [(LOAD, 0, 0, 0)]
    for number in numbers:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, 0x00050000 | code)]
    lines.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(program)), 0, 0) == 0

{lacking}
for name in ("cpython", "monty", "auto"):
    try:
        with open_sandbox(name) as made:
            print(name, "opens", made.name, made.run("print(6)").output.strip(), "; ".join(made.lacks))
    except KilburnError as error:
        print(name, "refuses", error)
"""
LACKING = {
    "no fork": ("forbid(errno.EAGAIN, 56, 57, 58, 435)", "nothing"),
    "no memory to fork": ("forbid(errno.ENOMEM, 56, 57, 58, 435)", "nothing"),
    "no exec": ("forbid(errno.EACCES, 59, 322)", "nothing"),
    "no local sockets": ("forbid(errno.EPERM, 53)", "nothing"),
    "no open files": (
        "for name in ('cpython', 'monty'): open_sandbox(name).close()\n"
        "most = len(os.listdir('/proc/self/fd')) + 1\nresource.setrlimit(resource.RLIMIT_NOFILE, (most, most))",
        "nothing",
    ),
    "no filter of system calls": ("forbid(errno.EINVAL, 157)", "monty"),
    "no rights to give up": ("forbid(errno.EPERM, 126)", "monty"),
    "no limits": ("forbid(errno.EPERM, 160, 302)", "monty"),
    "no Python": ("sys.executable = '/nonexistent/python'", "monty"),
    "an empty name of Python": ("sys.executable = ''", "monty"),
    "a Python that is none": ("sys.executable = '/bin/true'", "monty"),
    "no worker": ("os.environ['MONTY_BIN'] = '/nonexistent'", "cpython"),
    "a worker that is none": ("os.environ['MONTY_BIN'] = '/bin/true'", "cpython"),
    "no wheel": ("sys.modules['pydantic_monty'] = None", "cpython"),
    "neither": ("sys.modules['pydantic_monty'] = None\nsys.executable = ''", "nothing"),
    "a low limit of memory": ("resource.setrlimit(resource.RLIMIT_AS, (800 << 20, 800 << 20))", "cpython"),
}


COMMON = ("no fork", "no filter of system calls", "no Python", "no worker", "no wheel", "neither")
"""One machine of each kind; the others take the same paths."""


@pytest.mark.parametrize("name", [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in LACKING])
def test_where_one_cannot_start_it_says_so_and_auto_takes_the_other(name: str) -> None:
    for each in BOTH:
        open_any(each).close()
    lacking, opens = LACKING[name]
    done = subprocess.run([sys.executable, "-c", HERE.replace("{lacking}", lacking)], capture_output=True, text=True, check=False)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert [*told] == ["cpython", "monty", "auto"], done.stderr
    for each in BOTH:
        assert told[each].startswith(f"opens {each} 6" if opens == each or name == "a low limit of memory" else "refuses "), told
    if opens == "nothing":
        assert told["auto"].startswith("refuses ")
        assert "cpython: " in told["auto"]
        assert "monty: " in told["auto"]
    else:
        assert told["auto"].startswith(f"opens {opens} 6")
        assert ("it is not cpython: " in told["auto"]) == (opens == "monty")
