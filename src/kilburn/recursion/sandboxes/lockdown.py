"""Gives up permanently what the code of a sandbox must not have. Linux on x86-64; runs inside, before that code.

The filter of system calls alone keeps the promises: after it the process can compute, allocate memory up to a limit, sleep,
and read and write its open descriptors. It cannot open, connect, start, signal or trace anything. Landlock, an
empty network namespace and dropped capabilities are second layers; missing ones are reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Iterator

LAYERS = ("landlock", "namespace")
"""Layers that a kernel may not have, and that tests leave out."""

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
CAPABILITIES_V3 = 0x20080522
AUDIT_ARCH_X86_64 = 0xC000003E
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
PROT_EXEC = 4

ALLOWED = {
    "read": 0,
    "write": 1,
    "munmap": 11,
    "brk": 12,
    "rt_sigreturn": 15,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "nanosleep": 35,
    "getpid": 39,
    "exit": 60,
    "gettimeofday": 96,
    "time": 201,
    "futex": 202,
    "restart_syscall": 219,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "getrandom": 318,
}
NOT_EXECUTABLE = {"mmap": 9, "mprotect": 10}
"""Allowed unless the memory would be executable."""


def watch(descriptor: int) -> None:
    """Make the kernel kill this process when the other end of a pipe closes, as it does when the program outside dies."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


def lock(memory: int, without: tuple[str, ...] = ()) -> list[str]:
    """Give everything up; return what the kernel did not offer, in words.

    Args:
        memory: bytes that may be allocated beyond the present use.
        without: layers to leave out.

    Raises:
        OSError: the kernel refuses a necessary step.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    lacks = []
    with _needed("there is no /proc that says how much memory is taken"), open("/proc/self/statm") as figures:
        used_bytes = int(figures.read().split()[0]) * resource.getpagesize()
    # The namespace comes first, because it needs capabilities, and the filter last, because it forbids the rest.
    if "namespace" in without or not _leave_network(libc):
        lacks.append("no network namespace of its own: the filter of system calls alone keeps the network out")
    with _needed("this kernel does not filter system calls"):
        _call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "landlock" in without or not _leave_files(libc):
        lacks.append("no Landlock: the filter of system calls alone keeps files out")
    with _needed("it cannot give up its rights"):
        _drop_capabilities(libc)
    for kind, limit in (
        (resource.RLIMIT_AS, used_bytes + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with _needed("it cannot limit itself"):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
    program = _filter()
    code = ctypes.create_string_buffer(program, len(program))
    filtering = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    with _needed("this kernel does not filter system calls"):
        _call(libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtering, 0, 0)
    return lacks


@contextlib.contextmanager
def _needed(reason: str) -> Iterator[None]:
    """Explain an error of the kernel."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{reason}: {error.strerror}") from error


def _call(function, *arguments) -> int:  # type: ignore[no-untyped-def]
    result = function(*[ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments])
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Return whether this process now has a network of its own with nothing in it."""
    for namespaces in (CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC, CLONE_NEWNET | CLONE_NEWIPC):
        if libc.unshare(namespaces) == 0:
            return True
    return False


def _leave_files(libc: ctypes.CDLL) -> bool:
    """Return whether Landlock now forbids every file, and what else its version (ABI) knows: TCP, signals, abstract sockets."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (13, 14, 15, 15, 16)[min(version, 5) - 1]
    rules = struct.pack("QQQ", (1 << rights) - 1, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    try:
        ruleset = _call(libc.syscall, LANDLOCK_CREATE_RULESET, rules, len(rules), 0)
        _call(libc.syscall, LANDLOCK_RESTRICT_SELF, ruleset, 0)
    except OSError:
        return False
    os.close(ruleset)
    return True


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    _call(libc.capset, struct.pack("Ii", CAPABILITIES_V3, 0), bytes(24))


def _filter() -> bytes:
    """Return the program that the kernel runs for each system call: EPERM for all but a few."""

    def line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    lines = [line(LOAD, 4), line(EQUAL, AUDIT_ARCH_X86_64, 1, 0), line(RETURN, KILL), line(LOAD, 0)]
    for number in ALLOWED.values():
        lines += [line(EQUAL, number, 0, 1), line(RETURN, ALLOW)]
    for number in NOT_EXECUTABLE.values():
        lines += [line(EQUAL, number, 0, 4), line(LOAD, 32), line(ANY_BIT, PROT_EXEC, 0, 1), line(RETURN, REFUSE)]
        lines += [line(RETURN, ALLOW)]
    return b"".join([*lines, line(RETURN, REFUSE)])
