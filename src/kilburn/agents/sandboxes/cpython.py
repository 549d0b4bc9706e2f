"""Full Python in an operating-system process of its own, which gave up the rest of the machine. Linux on x86-64.

What comes over its connection is never trusted: a message that is too long, malformed or out of place ends the process.
"""

from __future__ import annotations

import math
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

from kilburn.agents.sandbox import Bounds, Callbacks, Cell, CellOutcome, Sandbox, open_file, plain, value_of
from kilburn.errors import SandboxError, SandboxRefused

if sys.platform == "linux":
    import resource

__all__ = ["Cpython"]

INSIDE = Path(__file__).parent
BOOT = (
    "import sys; sys.path.insert(0, {folder!r}); import interpreter, lockdown; "
    "lockdown.watch(0); interpreter.main({link}, lockdown.lock)"
)
MESSAGE = 16 * 1024 * 1024
"""Bytes of one message from inside, at most."""
ARGUMENTS = MESSAGE // 2 - 4096
"""Bytes of the JSON within a message: quotes take two bytes there."""
START = 60.0
"""Seconds until the process must be ready."""
GRACE = 0.5
"""Seconds between telling a cell to stop, which keeps its variables, and killing the process."""


class Ready(msgspec.Struct, tag="ready"):
    lacks: list[str]


class Refused(msgspec.Struct, tag="refused"):
    why: str


class Call(msgspec.Struct, tag="call"):
    name: str
    arguments: str


class Ended(msgspec.Struct, tag="ended"):
    outcome: CellOutcome
    error: str
    output: str
    cut: Annotated[int, msgspec.Meta(ge=0)]


class Value(msgspec.Struct, tag="value"):
    value: str | None = None
    why: str = ""


Message = Ready | Refused | Call | Ended | Value
DECODER = msgspec.json.Decoder(Message)


Reply = TypeVar("Reply", Ended, Value)


class Stopped(Exception):
    """The process inside is of no more use, and why."""

    def __init__(self, outcome: CellOutcome, why: str) -> None:
        self.outcome, self.why = outcome, why
        super().__init__(why)


class Cpython(Sandbox):
    """See `open_sandbox`.

    Args:
        without: layers to leave out (`lockdown.LAYERS`), for tests of what remains.

    Raises:
        SandboxRefused: no Linux on x86-64, or a kernel without seccomp.
    """

    name = "cpython"

    def __init__(
        self,
        *,
        calls: Callbacks,
        variables: Mapping[str, Any],
        files: Mapping[str, Path | bytes],
        bounds: Bounds,
        without: tuple[str, ...] = (),
    ) -> None:
        if sys.platform != "linux" or platform.machine() != "x86_64" or not sys.executable:
            raise SandboxRefused(f"it runs on Linux on x86-64, this is {sys.platform} on {platform.machine()}")
        self._without = without
        self._process: subprocess.Popen[bytes] | None = None
        super().__init__(calls=calls, variables=variables, files=files, bounds=bounds)

    def _alive(self) -> bool:
        return self._process is not None

    def _run(self, code: str) -> Cell:
        try:
            ended = self._converse({"run": plain(code)}, Ended)
        except Stopped as stopped:
            return Cell(output="", error=f"{stopped.why}; the variables are lost", outcome=stopped.outcome, lost=True)
        # Within the bounds, whatever the inside says.
        most = self.bounds.output
        error = ended.error[-most:] if most else ""
        if ended.outcome is CellOutcome.TIMEOUT:
            error = f"stopped after {self.bounds.seconds:g} s; the variables are kept\n{error}"
        beyond = max(0, len(ended.output) - most)
        return Cell(output=ended.output[:most], cut=ended.cut + beyond, error=error, outcome=ended.outcome)

    def _get(self, name: str) -> str:
        try:
            found = self._converse({"get": plain(name)}, Value)
        except Stopped as stopped:
            raise ValueError(f"{stopped.why}; the variables are lost") from stopped
        if found.value is None:
            raise ValueError(found.why[:1000])
        return found.value

    def _begin(self) -> None:
        with ExitStack() as opened:
            files = {name: opened.enter_context(_open(source)).fileno() for name, source in self.files.items()}
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            self._link, self._read_so_far = ours, bytearray()
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", "-c", BOOT.format(folder=str(INSIDE), link=theirs.fileno())],
                # The kernel kills the process when this pipe's other end closes; nothing is read from it.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The order of sets is the same in each run, so that a run can be repeated.
                env={"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                cwd="/",
                pass_fds=[theirs.fileno(), *files.values()],
                start_new_session=True,
            )
        hello = {
            "calls": list(self.calls.functions),
            "variables": self.variables,
            "files": files,
            "memory": self.bounds.memory,
            "output": self.bounds.output,
            "most": ARGUMENTS,
            "without": self._without,
        }
        self._limit = time.monotonic() + START
        try:
            self._send(hello)
            ready = self._receive()
        except (Stopped, TimeoutError) as error:
            self._end()
            raise SandboxRefused(f"the process inside did not start: {error or 'it took too long'}") from error
        if not isinstance(ready, Ready):
            self._end()
            raise SandboxRefused(
                f"this kernel does not filter system calls: {ready.why if isinstance(ready, Refused) else ready}"
            )
        self.lacks = tuple(ready.lacks)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()
        self._link.close()

    def _converse(self, request: dict[str, str], kind: type[Reply]) -> Reply:
        """Send a request and serve the calls of the code until its reply comes."""
        self._limit = time.monotonic() + self.bounds.seconds
        told = False
        self._allow_processor()
        try:
            self._send(request)
            while True:
                try:
                    message = self._receive()
                except TimeoutError:
                    if told:
                        raise
                    told = True
                    self._limit = time.monotonic() + GRACE
                    self._running().send_signal(signal.SIGINT)
                    continue
                if isinstance(message, kind):
                    return message
                if not isinstance(message, Call):
                    raise Stopped(CellOutcome.KILLED, "the code broke the protocol")
                begun = time.monotonic()
                answer = self._answer(message)
                self._limit += time.monotonic() - begun
                self._send(answer)
        except TimeoutError:
            self._end()
            raise Stopped(CellOutcome.TIMEOUT, f"killed after {self.bounds.seconds:g} s") from None
        except Stopped:
            self._end()
            raise

    def _allow_processor(self) -> None:
        """The kernel ends the process by itself if it computes for longer, whatever happens to this program."""
        process = self._running()
        with suppress(OSError):
            used = time.clock_gettime((~process.pid << 3) | 2)  # the processor time of another process
            soft = math.ceil(used + self.bounds.seconds + GRACE) + 1
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise SandboxError("this sandbox was closed while it ran a cell")
        return self._process

    def _answer(self, call: Call) -> dict[str, Any]:
        """Run a function of ours for the code inside; what goes wrong is an exception there."""
        try:
            args, kwargs = msgspec.convert(value_of(call.arguments), tuple[list[Any], dict[str, Any]])
            answer = {"result": self.calls(call.name, args, kwargs)}
            msgspec.json.encode(answer)
        except Exception as error:  # noqa: BLE001 - it is the code's to handle
            return {"raised": [type(error).__name__, plain(str(error))]}
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        data = msgspec.json.encode(message)
        try:
            self._link.settimeout(max(self._limit - time.monotonic(), 0.001))
            self._link.sendall(len(data).to_bytes(4, "big") + data)
        except TimeoutError:
            raise
        except OSError:
            raise self._why() from None

    def _receive(self) -> Message:
        length = int.from_bytes(self._read(4), "big")
        if length > MESSAGE:
            raise Stopped(CellOutcome.KILLED, "the code broke the protocol")
        try:
            message: Message = DECODER.decode(self._read(length))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise Stopped(CellOutcome.KILLED, "the code broke the protocol") from None
        return message

    def _read(self, length: int) -> bytes:
        while len(self._read_so_far) < length:
            self._link.settimeout(max(self._limit - time.monotonic(), 0.001))
            try:
                piece = self._link.recv(min(length - len(self._read_so_far), 1 << 18))
            except TimeoutError:
                raise
            except OSError:
                raise self._why() from None
            if not piece:
                raise self._why()
            self._read_so_far += piece
        found = bytes(self._read_so_far)
        self._read_so_far.clear()
        return found

    def _why(self) -> Stopped:
        """Why the connection ended."""
        process = self._running()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        code = process.poll()
        if code == -signal.SIGXCPU:
            return Stopped(CellOutcome.TIMEOUT, "killed after its processor time")
        how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        return Stopped(CellOutcome.KILLED, f"the process inside ended ({how})")


def _open(source: Path | bytes) -> BinaryIO:
    """A file to read; one for bytes has no name, and is in no folder."""
    if isinstance(source, Path):
        return open_file(source)
    if sys.platform != "linux":
        raise SandboxRefused(f"it runs on Linux, this is {sys.platform}")
    file = os.fdopen(os.memfd_create("kilburn"), "w+b")
    try:
        file.write(source)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
