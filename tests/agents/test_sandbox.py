"""The sandboxes: what code can do in them, what it cannot, and how a cell ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import rounds
from kilburn.errors import MissingExtra, NoValue, SandboxError, SandboxRefused, SpecError
from kilburn.recursion.sandbox import DEFAULT_ORDER, MAX_CALL_BYTES, Bounds, Callbacks, Cell, CellOutcome, Sandbox, open_sandbox
from kilburn.recursion.sandboxes import lockdown
from kilburn.recursion.sandboxes.cpython import Cpython
from waiting import until

BOUNDS = Bounds(seconds=30, memory=64 << 20, output=1000)
SHORT = 0.5
"""Seconds for a cell that does not stop. Cells that are to end well have those of `BOUNDS`, however busy the machine is."""
FEW_SECONDS = Bounds(seconds=2, memory=64 << 20, output=1000)
"""Where Monty is to stop a cell: it looks at the bound of the sandbox, and not at the seconds of one cell."""
SANDBOXES = ["cpython", "cpython without landlock", "cpython without namespace", "cpython without both", "monty"]
CANARY = "canary-5af1"
received: list[Any] = []


def ask(prompt: str, times: int = 1) -> str:
    received.append(prompt)
    if prompt == "fail":
        raise ValueError("no such thing")
    return prompt.upper() * times


def echo(value: Any) -> Any:
    received.append(value)
    return value


def cancel() -> None:
    raise KeyboardInterrupt


def open_any(name: str, bounds: Bounds = BOUNDS, **given: Any) -> Sandbox:
    """One of SANDBOXES; where this machine cannot have it, the test is skipped and says why."""
    given = {"calls": {"ask": ask, "echo": echo, "cancel": cancel}, "variables": {}, "files": {}} | given
    try:
        if " without " not in name:
            return open_sandbox(name, bounds=bounds, **given)
        layer = name.rpartition(" ")[2]
        without = lockdown.LAYERS if layer == "both" else (layer,)
        return Cpython(bounds=bounds, without=without, **given | {"calls": Callbacks(given["calls"])})
    except (SandboxRefused, MissingExtra) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "text.txt"
    path.write_bytes("häuser\n".encode() * 1000 + b"\xff")
    return path


@pytest.fixture(scope="module", params=["cpython", "monty"])
def sandbox(request: pytest.FixtureRequest, text: Path) -> Iterator[Sandbox]:
    with open_any(request.param, variables={"known": [1, 2]}, files={"text": text}) as made:
        yield made


@pytest.fixture(scope="module")
def full() -> Iterator[Sandbox]:
    """Full Python."""
    with open_any("cpython") as made:
        yield made


@pytest.fixture(scope="module", params=SANDBOXES)
def each(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Every sandbox, and the default one with layers left out."""
    with open_any(request.param) as made:
        yield made


def printed(sandbox: Sandbox, code: str) -> str:
    cell = sandbox.run(code)
    assert (cell.outcome, cell.error) == (CellOutcome.OK, "")
    return cell.output.strip()


def test_variables_stay_from_cell_to_cell(sandbox: Sandbox) -> None:
    sandbox.run("n = sum(known)")
    assert printed(sandbox, "print(n)") == "3"
    assert sandbox.get("n") == 3


def test_a_file_is_a_string(sandbox: Sandbox) -> None:
    assert printed(sandbox, "print(len(text), text[:6], text[-1] == chr(0xfffd))") == "7001 häuser True"


@pytest.mark.parametrize("name", ["cpython", "monty"])
def test_bytes_are_a_string_that_is_in_no_folder(name: str, text: Path) -> None:
    data = text.read_bytes() * 100
    with open_any(name, FEW_SECONDS, files={"text": data, "none": b""}) as made:
        for _ in range(2):
            assert printed(made, "print(len(text), text[:6], text[-1] == '\\ufffd', none == '')") == "700100 häuser True True"
            made.run("while True: pass", total=SHORT)  # it is started again


def test_full_python_shows_the_value_of_a_last_expression(full: Sandbox) -> None:
    assert printed(full, "word = 'x'\nword * 3") == "'xxx'"
    assert printed(full, "None") == ""


def test_full_python_has_classes_generators_and_modules(full: Sandbox) -> None:
    code = """
import dataclasses, re, statistics, datetime
@dataclasses.dataclass
class Item(object):
    name: str
def numbers():
    yield from [1, 2, 6]
print(Item("a"), re.findall(r"\\d", "a1b2"), statistics.mean(numbers()), datetime.datetime.strptime("2026-11-23", "%Y-%m-%d").day)
"""
    assert printed(full, code) == "Item(name='a') ['1', '2'] 3 23"


def test_sets_have_the_same_order_in_each_run() -> None:
    found = set()
    for _ in range(3):
        with open_any("cpython") as made:
            found.add(printed(made, "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"))
    assert len(found) == 1


def test_code_calls_functions_of_ours(sandbox: Sandbox) -> None:
    assert printed(sandbox, "print(ask('a', times=2))") == "AA"


def test_an_error_of_ours_is_an_exception_inside(sandbox: Sandbox) -> None:
    assert printed(sandbox, "try:\n    ask('fail')\nexcept ValueError as error:\n    print(error)") == "no such thing"
    cell = sandbox.run("ask('fail')")
    assert cell.outcome is CellOutcome.ERROR
    assert "ValueError: no such thing" in cell.error


@pytest.mark.parametrize("code", ["ask()", "ask('a', 1, 2)", "ask(1)", "ask('a', times='b')", "ask('a', other=1)"])
def test_arguments_are_checked(sandbox: Sandbox, code: str) -> None:
    received.clear()
    cell = sandbox.run(code)
    assert "TypeError" in cell.error
    assert received == []


def test_a_redefined_function_is_there_again_in_the_next_cell(sandbox: Sandbox) -> None:
    assert sandbox.run("ask = None\nask('a')").outcome is CellOutcome.ERROR
    assert printed(sandbox, "print(ask('a'))") == "A"


def test_what_is_not_there_has_no_value(sandbox: Sandbox) -> None:
    sandbox.run("answer = 1")
    assert sandbox.get("answer") == 1
    sandbox.run("answer = {1, 2}")
    for name in ("nothing", "answer", "no name", "'", "ask"):
        with pytest.raises(NoValue):
            sandbox.get(name)


def test_a_deleted_variable_has_no_value(full: Sandbox) -> None:
    full.run("answer = 1\ndel answer")
    with pytest.raises(NoValue, match="answer"):
        full.get("answer")


@pytest.mark.parametrize("code", ["1 +", "x = (", "\0", "\ud800", "def f(:", "x = 'a", "if 1:"])
def test_what_is_no_python_is_an_error(sandbox: Sandbox, code: str) -> None:
    assert sandbox.run(code).outcome is CellOutcome.ERROR


def test_a_traceback_has_the_lines_of_the_code_only(full: Sandbox) -> None:
    error = full.run("def f():\n    return 1 / 0\nf()").error
    assert "return 1 / 0" in error
    assert "ZeroDivisionError" in error.splitlines()[-1]
    assert "interpreter.py" not in error


@pytest.mark.parametrize("code", ["import sys\nsys.exit(1)", "raise KeyboardInterrupt", "raise BaseException('x')"])
def test_what_ends_programs_ends_only_the_cell(full: Sandbox, code: str) -> None:
    full.run("kept = 1")
    assert full.run(code).outcome is CellOutcome.ERROR
    assert full.get("kept") == 1


def test_an_exception_that_cannot_be_shown_ends_only_the_cell(full: Sandbox) -> None:
    assert full.run("class E(Exception):\n    def __str__(self): raise self\nraise E").outcome is CellOutcome.ERROR


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=rounds(30, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON)
def test_values_cross_in_both_directions(sandbox: Sandbox, value: Any) -> None:
    cell = sandbox.run(f"import json\nvalue = echo(json.loads({json.dumps(json.dumps(value))}))")
    assert cell.outcome is CellOutcome.OK, cell.error
    assert sandbox.get("value") == value


def test_a_value_that_json_cannot_carry_is_refused_at_the_start() -> None:
    for value in (float("nan"), {1}, "\ud800", b"x"):
        with pytest.raises(SpecError):
            open_sandbox("cpython", variables={"x": value})


@pytest.mark.parametrize("name", ["a b", "class", "", "1a", "x;y"])
def test_a_name_that_is_none_is_refused(name: str, text: Path) -> None:
    for arguments in ({"variables": {name: 1}}, {"files": {name: text}}, {"calls": {name: ask}}):
        with pytest.raises(SpecError):
            open_sandbox("cpython", **arguments)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(SpecError):
            open_sandbox("cpython", files={"text": path})


@pytest.mark.parametrize("given", [{"seconds": 0}, {"seconds": float("nan")}, {"memory": 0}, {"output": -1}, {"output": 1 << 21}])
def test_bounds_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Bounds(**given)


def test_a_sandbox_that_is_not_known_is_refused() -> None:
    for name in ("docker", "lockdown", "interpreter", "os:Path", "../x"):
        with pytest.raises(SpecError):
            open_sandbox(name)


def test_auto_opens_one() -> None:
    try:
        made = open_sandbox()
    except SandboxRefused as refused:
        pytest.skip(str(refused))
    with made:
        assert made.name in DEFAULT_ORDER
        assert made.run("print(1)").output == "1\n"


def test_a_closed_sandbox_says_so(sandbox: Sandbox) -> None:
    made = open_any(sandbox.name)
    made.close()
    made.close()
    for use in (made.run, made.get):
        with pytest.raises(SandboxError, match="closed"):
            use("x")


def test_a_bound_of_no_output(sandbox: Sandbox) -> None:
    with open_any(sandbox.name, Bounds(output=0)) as made:
        cell = made.run("print('abc')\n1 / 0")
        assert (cell.output, cell.cut, cell.error, cell.outcome) == ("", 4, "", CellOutcome.ERROR)


def test_the_time_of_our_functions_does_not_count() -> None:
    with open_any("cpython", Bounds(seconds=1), calls={"wait": lambda: time.sleep(1.5)}) as made:
        cell = made.run("wait()\nprint('on')")
    assert (cell.outcome, cell.output) == (CellOutcome.OK, "on\n")
    assert cell.seconds >= 1.5


def test_a_cell_inside_a_cell_is_refused() -> None:
    made: list[Sandbox] = []
    made.append(open_any("cpython", calls={"again": lambda: made[0].run("1").output}))
    with made[0]:
        assert "SandboxError" in made[0].run("again()").error
        assert made[0].run("1").outcome is CellOutcome.OK


def test_a_second_thread_is_refused(sandbox: Sandbox) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go.wait(600)

    with open_any(sandbox.name, calls={"wait": wait}) as made:
        cells: list[Cell] = []
        other = threading.Thread(target=lambda: cells.append(made.run("wait()\nprint(1)")))
        other.start()
        inside.wait(600)
        with pytest.raises(SandboxError, match="runs a cell already"):
            made.run("1")
        go.set()
        other.join()
    assert cells[0].output == "1\n"


def test_a_cancellation_reaches_us_and_the_next_cell_starts_anew(sandbox: Sandbox) -> None:
    with open_any(sandbox.name) as made:
        made.run("kept = 1")
        with pytest.raises(KeyboardInterrupt):
            made.run("while True:\n    try:\n        cancel()\n    except BaseException:\n        pass")
        assert made.run("print(1)").outcome is CellOutcome.OK
        if made.name == "cpython":
            assert "NameError" in made.run("kept").error


def test_closing_while_a_cell_runs_ends_it() -> None:
    made = open_any("cpython", Bounds(seconds=30))
    threading.Timer(0.3, made.close).start()
    with pytest.raises(SandboxError):
        made.run("while True: pass")


# How a cell ends.


@pytest.mark.parametrize("name", SANDBOXES)
def test_an_endless_cell_is_stopped(name: str) -> None:
    with open_any(name, FEW_SECONDS) as made:
        made.run("kept = 1")
        cell = made.run("while True:\n    pass", total=SHORT)
        assert cell.outcome is CellOutcome.TIMEOUT
        assert cell.seconds >= SHORT
        assert cell.lost == (name == "monty")
        assert made.run("print(1)").output == "1\n"
        if not cell.lost:
            assert made.get("kept") == 1


@pytest.mark.parametrize(
    "code",
    [
        "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
        "10 ** 10 ** 9 % 7",
        "ask.__closure__[-1].cell_contents.running = False\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import time\ntime.sleep(1000)",
        "class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    ],
)
def test_a_cell_that_will_not_stop_is_stopped(code: str) -> None:
    with open_any("cpython") as made:
        cell = made.run(code, total=SHORT)
        assert cell.outcome in (CellOutcome.TIMEOUT, CellOutcome.MEMORY)
        assert made.run("print(1)").output == "1\n"


def test_after_a_kill_the_first_variables_are_there_again(text: Path) -> None:
    with open_any("cpython", variables={"known": 1}, files={"text": text}) as made:
        made.run("known = other = 2")
        cell = made.run("import os\nos._exit(0)")
        assert (cell.outcome, cell.lost) == (CellOutcome.KILLED, True)
        assert "lost" in cell.error
        assert printed(made, "print(known, len(text))") == "1 7001"
        assert "NameError" in made.run("other").error


@pytest.mark.parametrize("code", ["x = 'a' * (10 ** 9)", "x = [0]\nwhile True:\n    x = x + x"])
def test_memory_has_a_bound(each: Sandbox, code: str) -> None:
    each.run("kept = 1")
    cell = each.run(code)
    assert cell.outcome is CellOutcome.MEMORY
    assert each.get("kept") == 1


def test_a_deep_recursion_ends_the_cell(full: Sandbox) -> None:
    cell = full.run("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return repr(f) and f(n + 1)\nmax([1], key=f)")
    assert cell.outcome is not CellOutcome.OK
    assert full.run("print(1)").output == "1\n"


def test_a_flood_of_output_is_counted(each: Sandbox) -> None:
    lines = 1000 if each.name == "cpython" else 100  # a gigabyte, or what a slow machine prints through a library in time
    cell = each.run(f"line = 'x' * 999_999\nfor i in range({lines}):\n    print(line)")
    assert (cell.outcome, len(cell.output), cell.cut) == (CellOutcome.OK, 1000, lines * 10**6 - 1000)


@pytest.mark.parametrize("name", ["cpython", "monty"])
def test_a_flood_of_short_lines_is_stopped_and_counted(name: str) -> None:
    with open_any(name, FEW_SECONDS) as made:
        cell = made.run("while True:\n    print('x')")
    assert (cell.outcome, len(cell.output)) == (CellOutcome.TIMEOUT, 1000)
    assert cell.cut > 0


# What code cannot reach. Each of these prints ESCAPED in a Python without a sandbox.

ESCAPES = {
    "reads a file": "print('ESCAPED' if open({secret!r}).read() else '')",
    "reads a file by another way": "import os\nprint('ESCAPED' if os.read(os.open({secret!r}, os.O_RDONLY), 9) else '')",
    "reads a link": "print('ESCAPED' if open({link!r}).read() else '')",
    "makes a link": "import os\nos.symlink({secret!r}, {new!r})\nprint('ESCAPED')",
    "writes a file": "open({new!r}, 'w').write('x')\nprint('ESCAPED')",
    "removes a file": "import os\nos.rename({link!r}, {new!r})\nprint('ESCAPED')",
    "lists a folder": "import os\nprint('ESCAPED' if os.listdir('/') else '')",
    "asks for a file's size": "import os\nprint('ESCAPED' if os.stat({secret!r}).st_size else '')",
    "reads the environment": "import os\nprint('ESCAPED' if os.environ.get('KILBURN_CANARY') else '')",
    "asks libc for the environment": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
        "print('ESCAPED' if libc.getenv(b'KILBURN_CANARY') else '')"
    ),
    "reads its own environment": "print('ESCAPED' if b'canary' in open('/proc/self/environ', 'rb').read() else '')",
    "reads our environment": "print('ESCAPED' if b'canary' in open('/proc/{pid}/environ', 'rb').read() else '')",
    "reads our memory": "print('ESCAPED' if open('/proc/{pid}/mem', 'rb') else '')",
    "reads our memory by a call": (
        "import ctypes, struct\nlibc = ctypes.CDLL(None)\nroom = ctypes.create_string_buffer(8)\n"
        "ours = struct.pack('QQ', ctypes.addressof(room), 8)\ntheirs = struct.pack('QQ', {address}, 8)\n"
        "print('ESCAPED' if libc.process_vm_readv({pid}, ours, 1, theirs, 1, 0) > 0 else '')"
    ),
    "connects": "import _socket\n_socket.socket().connect(('127.0.0.1', {port}))\nprint('ESCAPED')",
    "connects by a file": ("import _socket\n_socket.socket(_socket.AF_UNIX).connect('\\0kilburn-{port}')\nprint('ESCAPED')"),
    "looks a name up": "import _socket\nprint('ESCAPED' if _socket.getaddrinfo('localhost', 1) else '')",
    "forks": "import os\nos.fork() or os._exit(0)\nprint('ESCAPED')",
    "starts a shell": "import os\nos.system('echo ESCAPED')",
    "becomes a program": "import os\nos.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "spawns a program": "import os\nos.posix_spawn('/bin/true', ['true'], {{}})\nprint('ESCAPED')",
    "runs a program": "import subprocess\nprint(subprocess.check_output(['echo', 'ESCAPED']).decode())",
    "starts a program by libc": "import ctypes\nprint('ESCAPED' if ctypes.CDLL(None).system(b'true') == 0 else '')",
    "starts a thread": "import _thread, time\n_thread.start_new_thread(time.sleep, (0,))\nprint('ESCAPED')",
    "signals us": "import os\nos.kill({pid}, 0)\nprint('ESCAPED')",
    "signals its group": "import os\nos.killpg(os.getpgid({pid}), 0)\nprint('ESCAPED')",
    "makes memory executable": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_long\n"
        "print('ESCAPED' if libc.mmap(None, 4096, 7, 0x22, -1, 0) != -1 else '')"
    ),
    "raises its own limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))\nprint('ESCAPED')"
    ),
    "ignores signals": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ESCAPED')",
    "loads a module": "import sqlite3\nprint('ESCAPED')",
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What there would be to reach: a file, a link to it, two servers, a process with a secret in its environment."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text(CANARY)
    (folder / "link").symlink_to(folder / "secret")
    held = ctypes.create_string_buffer(b"canary!!")
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        port = server.getsockname()[1]
        local.bind(f"\0kilburn-{port}")
        local.listen(64)
        yield {
            "folder": folder,
            "secret": str(folder / "secret"),
            "link": str(folder / "link"),
            "new": str(folder / "new"),
            "port": port,
            "pid": os.getpid(),
            "address": ctypes.addressof(held),
        }
        del held


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CANARY", CANARY)


@pytest.mark.parametrize("escape", ESCAPES)
def test_code_cannot_reach_the_machine(each: Sandbox, outside: dict[str, Any], escape: str) -> None:
    before = sorted(outside["folder"].iterdir())
    cell = each.run(ESCAPES[escape].format(**outside))
    assert "ESCAPED" not in cell.output
    assert CANARY not in cell.output + cell.error
    assert sorted(outside["folder"].iterdir()) == before


@pytest.mark.usefixtures("canary")
def test_a_sandbox_opened_with_a_secret_in_the_environment_does_not_have_it(sandbox: Sandbox, outside: dict[str, Any]) -> None:
    with open_any(sandbox.name) as made:
        for escape in (each for each in ESCAPES if "environment" in each):
            assert "ESCAPED" not in made.run(ESCAPES[escape].format(**outside)).output
        assert CANARY not in made.run("import os\nprint(dict(os.environ))").output


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize(
    "escape", sorted(set(ESCAPES) - {"reads our environment", "reads our memory", "reads our memory by a call"})
)
def test_each_escape_works_without_a_sandbox(outside: dict[str, Any], escape: str) -> None:
    """The control: a snippet that never works would prove nothing."""
    code = "import sys\n" + ESCAPES[escape].format(**outside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if (new := Path(outside["new"])).is_symlink() and escape == "removes a file":
        new.rename(outside["link"])
    new.unlink(missing_ok=True)
    assert "ESCAPED" in done.stdout, done.stderr


def test_the_filter_refuses_every_other_system_call(each: Sandbox) -> None:
    if each.name != "cpython":
        pytest.skip("its code makes no system calls")
    # The kernel filters neither of the last two, and ends a process that calls them from outside of a probe.
    known = sorted({*lockdown.ALLOWED.values(), *lockdown.NOT_EXECUTABLE.values(), 335, 336})
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
through = []
for number in range(600):
    for call in (number, number | 0x40000000):
        if call not in {known}:
            ctypes.set_errno(0)
            if libc.syscall(ctypes.c_long(call), *[ctypes.c_long(0)] * 6) != -1 or ctypes.get_errno() != 1:
                through.append(call)
print(through)
"""
    assert printed(each, code) == "[]"


@pytest.mark.parametrize("call", ["mmap(None, 4096, 4", "mmap(None, 4096, 5", "mprotect(0, 4096, 4", "mprotect(0, 4096, 7"])
def test_no_memory_becomes_executable(full: Sandbox, call: str) -> None:
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.{call}, 0x22, -1, 0)\nprint(ctypes.get_errno())"
    assert printed(full, code) == "1"


def test_the_dangerous_system_calls_are_not_among_the_allowed() -> None:
    dangerous = {"open", "openat", "socket", "connect", "sendmsg", "fork", "vfork", "clone", "execve", "kill", "ptrace", "prctl"}
    dangerous |= {"dup2", "fcntl", "ioctl", "close", "setrlimit", "prlimit64", "rt_sigaction", "rt_sigprocmask", "io_uring_setup"}
    assert not dangerous & {*lockdown.ALLOWED, *lockdown.NOT_EXECUTABLE}


REFUSING = """
import ctypes, struct
from kilburn.recursion.sandbox import open_sandbox
from kilburn.recursion.sandboxes.lockdown import ALLOW, EQUAL, LOAD, REFUSE, RETURN
from kilburn.errors import SandboxRefused
lines = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, 157), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)), 0, 0) == 0
try:
    open_sandbox("cpython")
except SandboxRefused as refused:
    print(refused)
"""
"""Forbids itself and its children to filter system calls, as an old kernel would."""


def test_without_a_filter_of_system_calls_it_refuses() -> None:
    open_any("cpython").close()
    done = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, check=False)
    assert "does not filter system calls" in done.stdout, done.stderr


def test_what_is_lacking_is_said() -> None:
    with open_any("cpython") as whole, open_any("cpython without both") as bare:
        assert len(bare.lacks) == len(lockdown.LAYERS)
        assert set(whole.lacks) <= set(bare.lacks)


@pytest.mark.parametrize(
    ("layer", "escape", "expected"),
    [
        ("_leave_files", "open({secret!r})", "PermissionError"),
        ("_leave_network", "import _socket; _socket.socket().connect(('127.0.0.1', {port}))", "OSError"),
        ("_drop_capabilities", "import os; os.chroot('/')", "PermissionError"),
    ],
)
def test_each_layer_holds_by_itself(outside: dict[str, Any], layer: str, escape: str, expected: str) -> None:
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(lockdown.__file__).parent)!r})
import lockdown
libc = ctypes.CDLL(None, use_errno=True)
lockdown._call(libc.prctl, 38, 1, 0, 0, 0)
if lockdown.{layer}(libc) is False:
    print("lacking")
else:
    try:
        {escape.format(**outside)}
    except {expected}:
        print("kept")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.stdout == "lacking\n":
        pytest.skip(f"this kernel has no {layer}")
    assert done.stdout == "kept\n", done.stderr


def test_a_fork_bomb_does_nothing(full: Sandbox) -> None:
    code = "import os\nrefused = 0\nfor _ in range(1000):\n    try: os.fork()\n    except PermissionError: refused += 1"
    assert full.run(code).outcome is CellOutcome.OK
    assert full.get("refused") == 1000


def gone(process: int) -> bool:
    """Whether an operating-system process has ended, or waits only to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends(process: int) -> bool:
    until(lambda: gone(process))
    return gone(process)


@pytest.mark.parametrize(("name", "seconds"), [("cpython", 600), ("monty", 1)])
def test_the_inside_dies_with_the_program(name: str, seconds: float) -> None:
    """Monty's worker may go on until the bound of its cell."""
    code = f"""
from kilburn.recursion.sandbox import Bounds, open_sandbox
made = open_sandbox("{name}", calls={{"say": lambda: print("on", flush=True)}}, bounds=Bounds(seconds={seconds}))
made.run("say()\\nwhile True: pass")
"""
    with open_any(name), subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        inside = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        assert inside
        program.send_signal(signal.SIGKILL)
    assert all(ends(int(each)) for each in inside)


def test_nothing_is_left_open() -> None:
    open_any("cpython").close()
    before = len(os.listdir("/proc/self/fd"))
    for code in ("1", "import os\nos._exit(1)"):
        with open_any("cpython") as made:
            made.run(code)
    assert len(os.listdir("/proc/self/fd")) == before


# What code may say to us.

HOSTILE = {
    "not a number": "float('nan')",
    "infinite": "float('inf')",
    "huge": "'x' * (20 * 1024 * 1024)",
    "a set": "{1, 2}",
    "bytes": "b'x'",
    "a function": "len",
    "a huge integer": "10 ** 6000",
    "nested too deep": "deep",
    "within itself": "ring",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_argument_is_an_exception_inside(sandbox: Sandbox, name: str) -> None:
    received.clear()
    if sandbox.name == "monty" and name == "within itself":
        pytest.skip("it has its own text for what holds itself")
    code = "deep = []\nfor _ in range(100000):\n    deep = [deep]\nring = []\nring.append(ring)\n"
    code += f"try:\n    echo({HOSTILE[name]})\n    print('passed')\nexcept Exception as error:\n    print('refused')"
    assert printed(sandbox, code) == "refused"
    assert received == []


def test_how_deep_a_value_may_be(sandbox: Sandbox) -> None:
    sandbox.run("value = 1\nfor _ in range(99):\n    value = {'a': [value][0]}\nmore = [[value]]")
    assert sandbox.get("value") is not None
    with pytest.raises(NoValue, match="too deep"):
        sandbox.get("more")


LINK = "link = ask.__closure__[-1].cell_contents\n"
FORGED = {
    "garbage": "import os\nos.write(link.link, b'\\xff' * 4000)",
    "a length beyond the bound": "import os\nos.write(link.link, b'\\x7f\\xff\\xff\\xff')",
    "no JSON": "import os\nos.write(link.link, b'\\0\\0\\0\\3abc')",
    "an unknown message": "link.send({'type': 'exec', 'code': 'print(1)'})",
    "another's message": "link.send({'type': 'ready', 'lacks': []})",
    "a value that nobody asked for": "link.send({'type': 'value', 'value': '1', 'number': 1})",
    "a count below zero": "link.send({'type': 'ended', 'outcome': 'ok', 'error': '', 'output': '', 'cut': -1, 'number': 1})",
    "an unknown outcome": "link.send({'type': 'ended', 'outcome': 'fine', 'error': '', 'output': '', 'cut': 0, 'number': 1})",
    "nested JSON": "import os\ndeep = b'[' * 100000\nos.write(link.link, len(deep).to_bytes(4, 'big') + deep)",
    "half a message": "import os\nos.write(link.link, b'\\0\\1\\0\\0half')\nwhile True: pass",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_message_ends_the_sandbox(name: str) -> None:
    with open_any("cpython") as made:
        cell = made.run(LINK + FORGED[name], total=SHORT)
        assert cell.outcome in (CellOutcome.KILLED, CellOutcome.TIMEOUT)
        assert cell.lost
        assert made.run("print(1)").output == "1\n"


def test_a_forged_report_stays_within_the_bounds() -> None:
    with open_any("cpython") as made:
        report = "{'type': 'ended', 'outcome': 'ok', 'error': 'e' * 5000, 'output': 'o' * 5000, 'cut': 7, 'number': 1}"
        cell = made.run(LINK + f"link.send({report})")
    assert (len(cell.output), len(cell.error), cell.cut) == (1000, 1000, 4007)


@pytest.mark.parametrize("name", ["open", "__import__", "", "ask\0", "x" * 10**6])
def test_a_function_that_is_none_of_ours_is_not_called(full: Sandbox, name: str) -> None:
    code = (
        LINK + f"link.send({{'type': 'call', 'name': {name!r}, 'arguments': '[[], {{}}]'}})\nprint(link.receive()['raised'][0])"
    )
    assert printed(full, code) == "NameError"


@pytest.mark.parametrize(
    "arguments", ["", "{}", "[1, 2]", "[[], []]", "[[1e999], {}]", "[[NaN], {}]", "[" * 100_000, "[[], {}, 1]"]
)
def test_forged_arguments_are_an_exception_inside(full: Sandbox, arguments: str) -> None:
    received.clear()
    code = LINK + f"link.send({{'type': 'call', 'name': 'echo', 'arguments': {arguments!r}}})\nprint('raised' in link.receive())"
    assert printed(full, code) == "True"
    assert received == []


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=64))
def test_any_bytes_on_the_connection_end_in_a_typed_outcome(full: Sandbox, data: bytes) -> None:
    cell = full.run(LINK + f"import os\nos.write(link.link, {data!r})\nos._exit(0)")
    assert (cell.outcome, cell.lost) == (CellOutcome.KILLED, True)


def test_what_fits_the_bounds_fits_a_message() -> None:
    with open_any("cpython", Bounds(output=1_000_000)) as made:
        cell = made.run("print(chr(1) * 999_999)\nraise ValueError(chr(0x1f600) * 10**6)")
        assert (len(cell.output), len(cell.error), cell.outcome) == (10**6, 10**6, CellOutcome.ERROR)
        made.run(f"fits, more = chr(34) * ({MAX_CALL_BYTES} // 2 - 1), chr(34) * ({MAX_CALL_BYTES} // 2)")
        assert len(made.get("fits")) == MAX_CALL_BYTES // 2 - 1
        with pytest.raises(NoValue, match="more than"):
            made.get("more")


def test_code_that_goes_on_after_its_cell_is_ended_by_the_kernel() -> None:
    with open_any("cpython", Bounds(seconds=2)) as made:
        report = "{'type': 'ended', 'outcome': 'ok', 'error': '', 'output': str(os.getpid()), 'cut': 0, 'number': 1}"
        inside = int(made.run(f"{LINK}import os\nlink.send({report})\nlink.running = False\nwhile True: pass").output)
        assert ends(inside)
        assert made.run("1").outcome is CellOutcome.TIMEOUT
        assert made.run("print(1)").output == "1\n"


def test_lists_of_arguments_are_checked() -> None:
    def many(*words: str, **counts: int) -> int:
        return len(words) + sum(counts.values())

    with open_any("cpython", calls={"many": many, "any": lambda x: x}) as made:
        assert printed(made, "many('a', 'b', n=2)") == "4"
        assert "TypeError" in made.run("many('a', 1)").error
        assert "TypeError" in made.run("many(n='a')").error
        assert printed(made, "any([1, 'x', None])") == "[1, 'x', None]"
