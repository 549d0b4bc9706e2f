"""The end of a program while libraries compute in its threads: its exit status is its own, and nothing is lost.

Each program here is a real child, and comes to its end while a thread is inside ONNX Runtime or llama.cpp.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kilburn
from kilburn import native
from kilburn.errors import Unavailable
from kilburn.models import weights
from kilburn.search.vectors import Vectors

MINUTES = 600.0
"""A child that hangs is ended after so many seconds."""
MESSAGES = 300

RUNTIME = """
import threading
import numpy as np, onnx, onnxruntime
from onnx import TensorProto, helper, numpy_helper

WIDE, LAYERS = 512, 20


class Runtime:
    '''Vectors by ONNX Runtime: so many products of matrices a text, without weights to fetch.'''

    name, dimensions = "runtime", WIDE

    def __init__(self, runs=1):
        left = helper.make_tensor_value_info("t0", TensorProto.FLOAT, [WIDE, WIDE])
        right = numpy_helper.from_array(np.eye(WIDE, dtype=np.float32), "right")
        nodes = [helper.make_node("MatMul", [f"t{at}", "right"], [f"t{at + 1}"]) for at in range(LAYERS)]
        last = helper.make_tensor_value_info(f"t{LAYERS}", TensorProto.FLOAT, [WIDE, WIDE])
        graph = helper.make_graph(nodes, "products", [left], [last], [right])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.runs, self.begun = runs, threading.Event()

    def embed(self, texts):
        self.begun.set()
        for _ in range(self.runs if len(texts) > 1 else 1):
            self.session.run(None, {"t0": np.ones((WIDE, WIDE), np.float32)})
        return np.tile(np.eye(1, WIDE, dtype=np.float32), (len(texts), 1))
"""

ENDS = """
import os, signal, sys

def end(how):
    if how == "sys.exit(3)":
        sys.exit(3)
    if how == "an exception":
        raise ValueError("of the program itself")
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
"""
STATUS = {"the last line": 0, "sys.exit(3)": 3, "an exception": 1, "Ctrl-C": -signal.SIGINT}

LEFT_OPEN = (
    RUNTIME
    + ENDS
    + f"""
import kilburn

path, how, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
embedder = Runtime(runs)
# A full window searches, too.
store = kilburn.open(path, window=100_000 if how == "no search" else 4000, embedder=embedder)
session = store.session("s")
for number in range({MESSAGES}):
    session.append({{"role": "user", "content": f"message number {{number}}"}})
if how == "no search":
    assert not embedder.begun.is_set()
else:
    store.search("number seven")
    for _ in range(2):  # on a busy machine the thread in the background makes few at a time, with pauses
        embedder.begun.clear()
        embedder.begun.wait()  # it is inside now
    if how == "closed":
        store.close()
    end("sys.exit(3)" if how == "closed" else how)
"""
)


@pytest.fixture
def busy() -> Iterator[None]:
    """A machine that has other work: more of it than processors."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A child's end. A shell says of Ctrl-C 130; here it is the signal, which Python raises again against itself."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=MINUTES)


def check_whole(path: str) -> int:
    """Everything that was acknowledged is there, and what has no vector yet gets one; returns how many had none."""
    with kilburn.open(path, embedder=None) as store:
        session = store.session("s")
        assert [session.recall(f"p{number}") for number in range(1, MESSAGES + 1)] == [
            f"message number {n}" for n in range(MESSAGES)
        ]
        before = len(list(store.backend.vectors.read("runtime")))
        left = len(store.backend.vectors.unembedded("runtime", 10 * MESSAGES))
        assert before + left >= MESSAGES
        made = Vectors(store.backend, _Same()).catch_up()
        assert made == left
        assert len(list(store.backend.vectors.read("runtime"))) == before + left
    return left


class _Same:
    """The vectors of `Runtime`, without it."""

    name, dimensions = "runtime", 512

    def embed(self, texts: list[str]) -> object:
        import numpy as np

        return np.tile(np.eye(1, 512, dtype=np.float32), (len(texts), 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", STATUS)
def test_a_store_that_is_left_open_while_the_embedder_works(tmp_path: Path, busy: None, how: str) -> None:
    for number in range(3):
        path = str(tmp_path / f"{number}.db")
        done = run(LEFT_OPEN, path, how, "1")
        assert done.returncode == STATUS[how], done.stderr
        assert ("Traceback" in done.stderr) == (how in ("an exception", "Ctrl-C"))
        assert 0 < check_whole(path) < MESSAGES


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit(3)", "closed"])
def test_a_batch_of_any_length_is_waited_for(tmp_path: Path, how: str) -> None:
    """Not for five seconds: the library was taken down under the thread then."""
    done = run(LEFT_OPEN, str(tmp_path / "a.db"), how, "100")
    assert (done.returncode, done.stderr) == (3, "")
    check_whole(str(tmp_path / "a.db"))


def test_a_program_that_never_searches_pays_nothing(tmp_path: Path) -> None:
    done = run(LEFT_OPEN, str(tmp_path / "a.db"), "no search", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert check_whole(str(tmp_path / "a.db")) == MESSAGES


DEFAULT = """
import sys
import kilburn

store = kilburn.open(sys.argv[1], window=100_000)
assert store.vectors is not None and store.vectors.embedder.name.startswith("minilm")
session = store.session("s")
for number in range(300):
    session.append({"role": "user", "content": f"message number {number}"})
if sys.argv[2] == "search":
    store.search("number seven")
    sys.exit(3)
print({"onnxruntime", "tokenizers"} & set(sys.modules))
"""


@pytest.mark.slow
@pytest.mark.model
def test_the_usual_embedder_is_loaded_by_a_search_only(tmp_path: Path) -> None:
    weights.pull("minilm")
    done = run(DEFAULT, str(tmp_path / "a.db"), "no search")
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
    done = run(DEFAULT, str(tmp_path / "b.db"), "search")
    assert (done.returncode, done.stderr) == (3, "")


FORKED = (
    RUNTIME
    + """
import os, sys
import kilburn

kilburn.native.load("onnxruntime")
embedder = Runtime()
store = kilburn.open(sys.argv[1], window=4000, embedder=embedder)
session = store.session("s")
for number in range(300):
    session.append({"role": "user", "content": f"message number {number}"})
store.search("number seven")
embedder.begun.clear()
embedder.begun.wait()
child = os.fork()
if not child:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.exit(3)
"""
)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere the C library cannot end a child before its libraries"
)
def test_a_child_of_a_fork_has_a_status_of_its_own(tmp_path: Path) -> None:
    """ONNX Runtime waits for threads in a child that has none."""
    done = run(FORKED, str(tmp_path / "a.db"))
    assert (done.returncode, done.stdout) == (3, "5\n"), done.stderr
    check_whole(str(tmp_path / "a.db"))


DECODES = (
    """
import threading
from kilburn.answering import answerer
from kilburn.effect import Ask
from kilburn.model import Request
from kilburn.models.local import Local
"""
    + ENDS
    + """
model = Local(sys.argv[1], context=2048)
said = threading.Event()

def ask():
    for _ in model.stream(Request(messages=[{"role": "user", "content": "Tell a long story."}], max_tokens=1500)):
        said.set()

def quiet(*_):
    pass

threading.excepthook = quiet
threading.Thread(target=ask, daemon=True).start()
said.wait()
end(sys.argv[2])
"""
)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("how", STATUS)
def test_a_reply_that_a_model_in_the_program_decodes(how: str) -> None:
    done = run(DECODES, str(weights.pull("smollm2")), how)
    assert done.returncode == STATUS[how], done.stderr


SLOW_MODEL = """
import sys, threading
import kilburn
from kilburn.effect import Ask
from kilburn.answering import answerer

class Model:
    name, form, context, tokenizer = "hangs", "chat", None, "chars/4"
    elsewhere = sys.argv[1] == "elsewhere"
    asked = threading.Event()

    def stream(self, request):
        self.asked.set()
        while not self.elsewhere:
            yield kilburn.model.Delta("a")
        threading.Event().wait()

threading.Thread(target=answerer(Model()), args=(Ask(prompt="well?"),), daemon=True).start()
Model.asked.wait()
sys.exit(3)
"""


@pytest.mark.parametrize("where", ["elsewhere", "here"])
def test_a_question_in_the_background_is_given_up(where: str) -> None:
    done = run(SLOW_MODEL, where)
    assert (done.returncode, done.stderr) == (3, "")


AT_THE_END = """
import atexit, threading
from kilburn import native

entered, wanted, out = threading.Event(), threading.Event(), []

def step():
    with native.inside(wanted.set):
        entered.set()
        wanted.wait()
        out.append("left")
    try:
        native.inside().__enter__()
    except native.Unavailable:
        out.append("refused")
    done.set()

done = threading.Event()
class Held:
    pass
held = Held()
native.keep(held, lambda one: out.append("freed"))
# Called after what native does at the end, for it came before.
atexit.unregister(native._end)
@atexit.register
def last():
    with native.inside():
        done.wait()
        print(*out, native.ending())
atexit.register(native._end)
threading.Thread(target=step, daemon=True).start()
entered.wait()
"""


def test_who_is_inside_is_asked_to_leave_and_nobody_enters_any_more() -> None:
    done = run(AT_THE_END)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "False", "the thread that ends the program may still do all"
    assert sorted(done.stdout.split()[:-1]) == ["freed", "left", "refused"]


def test_inside_is_left_by_an_exception_too() -> None:
    def fail() -> None:
        with native.inside():
            assert len(native._gate.visits) == 1
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert native._gate.visits == []
    assert not native.ending()
    assert native.load("json").dumps(1) == "1"
    with pytest.raises(ModuleNotFoundError):
        native.load("no_such_module_at_all")


def test_a_gate_that_is_shut_waits_no_longer_than_patience() -> None:
    gate = native._Gate()
    stuck = native._Visit(0, 0.0, None)
    gate.enter(stuck)
    gate.shut()
    gate.wait(native.PATIENCE)
    assert gate.visits == [stuck]
    refused: list[Exception] = []

    def enter() -> None:
        try:
            gate.enter(native._Visit(threading.get_ident(), 0.0, None))
        except Unavailable as error:
            refused.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(refused) == 1


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_what_is_free_between_others_goes_back_to_the_system() -> None:
    code = """
from kilburn.native import give_memory_back
def own():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
kept = [b"x" * (60_000 + number) for number in range(2000)][::40]
before = own()
give_memory_back()
print(before - own())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    # Of 120 MB a fortieth is kept, in small parts everywhere.
    assert int(done.stdout) > 60_000


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
@pytest.mark.parametrize("limits", [True, False])
def test_threads_share_few_heaps(limits: bool) -> None:
    code = f"""
import ctypes, sys, threading
from kilburn.native import limit_heaps
if {limits}:
    assert limit_heaps()
# All allocate at the same time, outside of the interpreter's lock.
together = threading.Barrier(8)
program = ctypes.CDLL(None)
program.malloc.restype = program.fdopen.restype = ctypes.c_void_p
def allocate():
    together.wait()
    program.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(program.fdopen(1, b"w"))
program.malloc_info(0, file)
program.fflush(file)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout.count("<heap nr=") <= 2) == limits
