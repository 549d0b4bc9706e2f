"""Full Python in a process of its own, which gave up access to the rest of the machine. Linux on x86-64.

Its messages are never trusted: a message that is too long, malformed or out of order ends the process.
"""

from __future__ import annotations

import math
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

from kilburn.errors import SandboxError, SandboxRefused
from kilburn.recursion.sandbox import MAX_CALL_BYTES, Cell, CellOutcome, Sandbox, SandboxStopped, open_file, plain

if sys.platform == "linux":
    import resource


INSIDE = Path(__file__).parent
BOOT = (
    "import sys; sys.path.insert(0, {folder!r}); import interpreter, lockdown; "
    "lockdown.watch(0); interpreter.main({link}, lockdown.lock)"
)
MAX_MESSAGE_BYTES = 2 * MAX_CALL_BYTES + 4096
"""Bytes of one message from inside at most: it has JSON within JSON, where quotes take two bytes."""
START_SECONDS = 60.0
"""Seconds until the process must be ready."""
GRACE_SECONDS = 0.5
"""Seconds between interrupting a cell, which keeps its variables, and killing the process."""


class _Ready(msgspec.Struct, tag="ready"):
    lacks: list[str]


class _Refused(msgspec.Struct, tag="refused"):
    why: str


class _Call(msgspec.Struct, tag="call"):
    name: str
    arguments: str


class _Ended(msgspec.Struct, tag="ended"):
    outcome: CellOutcome
    error: str
    output: str
    cut: Annotated[int, msgspec.Meta(ge=0)]
    number: int
    again: list[str] = []
    spoiled: bool = False


class _Value(msgspec.Struct, tag="value"):
    number: int
    value: str | None = None
    why: str = ""


_Message = _Ready | _Refused | _Call | _Ended | _Value
_DECODER = msgspec.json.Decoder(_Message)


Reply = TypeVar("Reply", _Ended, _Value)


class Cpython(Sandbox):
    """See `open_sandbox`.

    Args:
        without: layers to leave out (`lockdown.LAYERS`), for tests of the others.
        options: arguments of `Sandbox`.

    Raises:
        SandboxRefused: no Linux on x86-64, or a kernel without seccomp.
    """

    name = "cpython"

    def __init__(self, *, without: tuple[str, ...] = (), **options: Any) -> None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise SandboxRefused(f"it runs on Linux on x86-64, this is {sys.platform} on {platform.machine()}")
        self._without = without
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        super().__init__(**options)

    def _alive(self) -> bool:
        return self._process is not None

    def _run(self, code: str, total: float) -> Cell:
        try:
            ended = self._converse({"run": plain(code)}, _Ended, total)
        except SandboxStopped as stopped:
            return Cell(output="", error=f"{stopped.why}; the variables are lost", outcome=stopped.outcome, lost=True)
        # The bounds are enforced here, whatever the inside sends.
        max_chars, outcome, notes = self.bounds.output, ended.outcome, list[str]()
        if ended.again:
            notes.append(f"[Python's own again, because the cell failed: {', '.join(ended.again)[:200]}]")
        if ended.spoiled:
            self._end()
            outcome = CellOutcome.KILLED if outcome is CellOutcome.OK else outcome
            notes.append("[the cell left a Python in which no code runs; the variables are lost]")
        error = (ended.error + "\n".join(notes))[-max_chars:] if max_chars else ""
        if outcome is CellOutcome.TIMEOUT:
            fate = "lost" if ended.spoiled else "kept"
            error = f"stopped after {min(self.bounds.seconds, total):g} s; the variables are {fate}\n{error}"
        beyond = max(0, len(ended.output) - max_chars)
        return Cell(output=ended.output[:max_chars], cut=ended.cut + beyond, error=error, outcome=outcome, lost=ended.spoiled)

    def _get(self, name: str) -> str:
        try:
            reply = self._converse({"get": plain(name)}, _Value, self.bounds.seconds)
        except SandboxStopped as stopped:
            raise ValueError(f"{stopped.why}; the variables are lost") from stopped
        if reply.value is None:
            raise ValueError(reply.why[:1000])
        return reply.value

    def _begin(self) -> None:
        try:
            self._spawn()
            ready = self._receive()
        except (SandboxStopped, TimeoutError) as error:
            self._end()
            raise SandboxRefused(f"the process inside did not start: {error or 'it took too long'}") from error
        except OSError as error:
            self._end()
            advice = "look at its limits of processes, memory and open files, and at sys.executable"
            raise SandboxRefused(f"this machine starts no process for it: {error}", advice=advice) from error
        if not isinstance(ready, _Ready):
            self._end()
            raise SandboxRefused(f"the process inside did not start: {ready.why if isinstance(ready, _Refused) else ready}")
        self.lacks = tuple(ready.lacks)

    def _spawn(self) -> None:
        """Start the process, and send it what the sandbox was opened with."""
        if not sys.executable:
            raise SandboxRefused("there is no Python to start", advice="set sys.executable to one of this version")
        with ExitStack() as opened:
            files = {name: opened.enter_context(_open(source)).fileno() for name, source in self.files.items()}
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            self._link, self._arrived = ours, bytearray()
            # Until there is a process, nothing else closes it.
            with ExitStack() as failed:
                failed.callback(ours.close)
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-s", "-P", "-B", "-c", BOOT.format(folder=str(INSIDE), link=theirs.fileno())],
                    # The kernel kills the process when this pipe's other end closes; nothing is read from it.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # The order of sets is the same in each run, so that a run can be replayed.
                    env={"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    cwd="/",
                    pass_fds=[theirs.fileno(), *files.values()],
                    start_new_session=True,
                )
                failed.pop_all()
        hello = {
            "calls": {name: self.calls.lists.get(name) for name in self.calls.functions},
            "variables": self.variables,
            "files": files,
            "memory": self.bounds.memory,
            "output": self.bounds.output,
            "most": MAX_CALL_BYTES,
            "without": self._without,
        }
        self._limit = self._last = time.monotonic() + START_SECONDS
        self._send(msgspec.json.encode(hello))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()
        self._link.close()

    def _converse(self, request: dict[str, Any], kind: type[Reply], total: float) -> Reply:
        """Send a request and serve the calls of the code until its reply comes.

        `_limit` is the end of the code's own time, and moves while a callback runs; `_last` is the end of its total time.
        """
        self._limit = time.monotonic() + self.bounds.seconds
        self._last = time.monotonic() + total
        self._number += 1
        is_stopping, calls = False, 0
        self._allow_processor()
        try:
            self._quiet()
            self._send(msgspec.json.encode({**request, "number": self._number}))
            while True:
                try:
                    message = self._receive()
                except TimeoutError:
                    if is_stopping:
                        raise
                    is_stopping = True
                    self._limit = self._last = time.monotonic() + GRACE_SECONDS
                    self._running().send_signal(signal.SIGINT)
                    continue
                if isinstance(message, kind) and message.number == self._number:
                    return message
                if not isinstance(message, _Call):
                    raise SandboxStopped(CellOutcome.KILLED, "the code broke the protocol")
                calls += 1
                if is_stopping or calls > self.bounds.calls or kind is not _Ended:
                    answer = _refused(is_stopping, self.bounds.calls if kind is _Ended else 0)
                else:
                    began, computed = time.monotonic(), self._computed()
                    answer = self._answer(message.name, message.arguments)
                    # Processor time that the code takes during a callback counts as its own.
                    self._limit += max(0.0, time.monotonic() - began - (self._computed() - computed))
                self._quiet()
                self._send(answer)
        except TimeoutError:
            self._end()
            raise SandboxStopped(CellOutcome.TIMEOUT, f"killed after {min(self.bounds.seconds, total):g} s") from None
        except SandboxStopped:
            self._end()
            raise

    def _quiet(self) -> None:
        """Check that nothing arrived unasked: the code waits for one answer before its next call.

        Raises:
            SandboxStopped: something arrived, or the process ended.
        """
        try:
            come = self._arrived or (select.select([self._link], [], [], 0)[0] and self._link.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            raise self._why() from None
        if come == b"":
            raise self._why()
        if come:
            raise SandboxStopped(CellOutcome.KILLED, "the code broke the protocol")

    def _computed(self) -> float:
        """Return the processor time of the process inside, in seconds."""
        try:
            return time.clock_gettime((~self._running().pid << 3) | 2)  # the processor time of another process
        except OSError:
            return 0.0

    def _allow_processor(self) -> None:
        """Limit the processor time of the process by the kernel, so that it ends even if this program does not act."""
        soft = math.ceil(self._computed() + self.bounds.seconds + GRACE_SECONDS) + 1
        with suppress(OSError):
            resource.prlimit(self._running().pid, resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise SandboxError("this sandbox was closed while it ran a cell")
        return self._process

    def _left(self) -> float:
        """Return the seconds until the time is over."""
        seconds = min(self._limit, self._last) - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    def _send(self, data: bytes) -> None:
        try:
            self._link.settimeout(self._left())
            self._link.sendall(len(data).to_bytes(4, "big") + data)
        except TimeoutError:
            raise
        except OSError:
            raise self._why() from None

    def _receive(self) -> _Message:
        """Return the next message. One that time runs out for is read on from where it was."""
        self._read(4)
        length = int.from_bytes(self._arrived[:4], "big")
        if length > MAX_MESSAGE_BYTES:
            raise SandboxStopped(CellOutcome.KILLED, "the code broke the protocol")
        self._read(4 + length)
        try:
            message: _Message = _DECODER.decode(memoryview(self._arrived)[4:])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise SandboxStopped(CellOutcome.KILLED, "the code broke the protocol") from None
        self._arrived = bytearray()
        return message

    def _read(self, length: int) -> None:
        """Receive until so many bytes of a message have arrived."""
        while len(self._arrived) < length:
            try:
                self._link.settimeout(self._left())
                piece = self._link.recv(min(length - len(self._arrived), 1 << 18))
            except TimeoutError:
                raise
            except OSError:
                raise self._why() from None
            if not piece:
                raise self._why()
            self._arrived += piece

    def _why(self) -> SandboxStopped:
        """Return why the connection ended."""
        process = self._running()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        code = process.poll()
        if code is None:
            return SandboxStopped(CellOutcome.KILLED, "the process inside closed the connection")
        if code == -signal.SIGXCPU:
            return SandboxStopped(CellOutcome.TIMEOUT, "killed after its processor time")
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return SandboxStopped(CellOutcome.KILLED, f"the process inside ended ({how})")


def _refused(is_stopping: bool, max_calls: int) -> bytes:
    """Return the answer to a call that is not made."""
    why = (
        ["TimeoutError", "the time of this cell is over"]
        if is_stopping
        else ["RuntimeError", f"no more than {max_calls:,} calls in one cell"]
    )
    return msgspec.json.encode({"raised": why})


def _open(source: Path | bytes) -> BinaryIO:
    """Open a file to read; one for bytes has no name and is in no folder."""
    if isinstance(source, Path):
        return open_file(source)
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise SandboxRefused(
            f"this Python hands no bytes over in memory on {sys.platform}", advice="use a CPython of glibc on Linux"
        )
    file = os.fdopen(os.memfd_create("kilburn"), "w+b")
    try:
        file.write(source)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
