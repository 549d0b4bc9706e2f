"""Every array that a client can send: memory and steps grow with the body, and no faster, and the gateway lives on.

The gateway is a process of its own, with a bound on its address space. Its memory is the kernel's highest count while it
answers, above what it had before; its steps are Python's own. Each array is sent in three sizes, a factor of four apart.

All sizes, to 2 MB: `PYTHONPATH=src:tests python tests/doors/test_arrays.py --largest 2000000`; `--only WORD` for some arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from doors.stub import PATHS, Answer, Seen, answer_of, refusal, whole
from doors.stub import serving as provider
from doors.visit import Broken, Json, check, folder_of_memory, visit
from effort import rounds

PER_BYTE = 60
"""Bytes of memory that a byte of a body may take."""
CONSTANT = 48 << 20
"""Bytes that any request may take: caches, arenas, threads."""
FACTOR = 4
STEEPER = 2.2
"""Four times the body may take so many times four times the steps."""
CONSTANT_STEPS = 100_000
SPACE = 6 << 30


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


TEXT = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# Where an array stands: the dialect's path, the body around it ("HERE"), and what it is made of ("#" becomes a number).
CHAT: dict[str, tuple[Any, Any]] = {
    "messages of numbers": ({"messages": "HERE"}, 1),
    "messages of null": ({"messages": "HERE"}, None),
    "messages of {}": ({"messages": "HERE"}, {}),
    "messages of []": ({"messages": "HERE"}, []),
    "messages of text": ({"messages": "HERE"}, "x"),
    "messages": ({"messages": "HERE"}, user("a")),
    "messages with numbers": ({"messages": "HERE"}, user("a #")),
    "messages of both": ({"messages": "HERE"}, ({"role": "assistant", "content": "b #"}, user("a #"))),
    "messages of system": ({"messages": "HERE"}, {"role": "system", "content": "a"}),
    "parts": ({"messages": [user("HERE")]}, TEXT),
    "parts of numbers": ({"messages": [user("HERE")]}, 1),
    "parts of {}": ({"messages": [user("HERE")]}, {}),
    "parts with numbers": ({"messages": [user("HERE")]}, {"type": "text", "text": "a #"}),
    "parts of the system": ({"messages": [{"role": "system", "content": "HERE"}, user("a")]}, TEXT),
    "images": ({"messages": [user("HERE")]}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    "parts of an old message": ({"messages": [user("HERE"), {"role": "assistant", "content": "b"}, user("c")]}, TEXT),
    "calls": ({"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": "HERE"}, user("c")]}, CALL),
    "calls of numbers": ({"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": "HERE"}, user("c")]}, 1),
    "calls with ids": (
        {"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": "HERE"}, user("c")]},
        CALL | {"id": "#"},
    ),
    "parts of a result": (
        {
            "messages": [
                user("a"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "HERE"},
            ]
        },
        TEXT,
    ),
    "reasoning details": (
        {"messages": [user("a"), {"role": "assistant", "content": "b", "reasoning_details": "HERE"}, user("c")]},
        {},
    ),
    "annotations": ({"messages": [user("a"), {"role": "assistant", "content": "b", "annotations": "HERE"}, user("c")]}, {}),
    "an unknown field of a message": ({"messages": [user("a") | {"x": "HERE"}]}, []),
    "tools": ({"messages": [user("a")], "tools": "HERE"}, TOOL),
    "tools of numbers": ({"messages": [user("a")], "tools": "HERE"}, 1),
    "functions": ({"messages": [user("a")], "functions": "HERE"}, {"name": "f"}),
    "stop": ({"messages": [user("a")], "stop": "HERE"}, "x"),
    "modalities": ({"messages": [user("a")], "modalities": "HERE"}, 1),
    "enum of a schema": (
        {"messages": [user("a")], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": "HERE"}}}]},
        1,
    ),
    "an unknown field": ({"messages": [user("a")], "x": "HERE"}, {}),
    "an unknown field of lists": ({"messages": [user("a")], "x": "HERE"}, [[]]),
    "keys of the body": ({"messages": [user("a")], "...": "KEYS"}, 1),
    "keys of logit_bias": ({"messages": [user("a")], "logit_bias": {"...": "KEYS"}}, 1),
    "keys of metadata": ({"messages": [user("a")], "metadata": {"...": "KEYS"}}, "x"),
    "keys of a message": ({"messages": [user("a") | {"...": "KEYS"}]}, 1),
    "lists in lists": ({"messages": [user("a")], "x": "DEEP"}, None),
    "one long text": ({"messages": [user("LONG")]}, None),
    "one long word": ({"messages": [user("WORD")]}, None),
    "lines": ({"messages": [user("LINES")]}, None),
    "escapes": ({"messages": [user("ESCAPES")]}, None),
    "text no JSON": ("HERE", None),
}
MESSAGES: dict[str, tuple[Any, Any]] = {
    "messages of numbers": ({"messages": "HERE"}, 1),
    "messages": ({"messages": "HERE"}, user("a")),
    "messages of both": ({"messages": "HERE"}, (user("a #"), {"role": "assistant", "content": "b #"})),
    "blocks": ({"messages": [user("HERE")]}, TEXT),
    "blocks of an old message": ({"messages": [user("HERE"), {"role": "assistant", "content": "b"}, user("c")]}, TEXT),
    "blocks of numbers": ({"messages": [user("HERE")]}, 1),
    "marks": ({"messages": [user("HERE")]}, TEXT | {"cache_control": {"type": "ephemeral"}}),
    "system": ({"messages": [user("a")], "system": "HERE"}, TEXT),
    "tools": ({"messages": [user("a")], "tools": "HERE"}, {"name": "f", "input_schema": {}}),
    "thinking": (
        {"messages": [user("a"), {"role": "assistant", "content": "HERE"}, user("c")]},
        {"type": "thinking", "thinking": "a", "signature": "s"},
    ),
    "calls": (
        {"messages": [user("a"), {"role": "assistant", "content": "HERE"}, user("c")]},
        {"type": "tool_use", "id": "#", "name": "f", "input": {}},
    ),
    "results": ({"messages": [user("HERE")]}, {"type": "tool_result", "tool_use_id": "#"}),
    "documents": (
        {"messages": [user("HERE")]},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
    ),
    "content of a document": (
        {"messages": [user([{"type": "document", "source": {"type": "content", "content": "HERE"}}])]},
        TEXT,
    ),
    "citations": ({"messages": [user("a"), {"role": "assistant", "content": [TEXT | {"citations": "HERE"}]}, user("c")]}, {}),
    "stop_sequences": ({"messages": [user("a")], "stop_sequences": "HERE"}, "x"),
    "mcp_servers": ({"messages": [user("a")], "mcp_servers": "HERE"}, {}),
    "edits": ({"messages": [user("a")], "context_management": {"edits": "HERE"}}, {}),
    "input of a call": (
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": "HERE"}}]},
                user("c"),
            ]
        },
        {},
    ),
}
RESPONSES: dict[str, tuple[Any, Any]] = {
    "items of numbers": ({"input": "HERE"}, 1),
    "items of {}": ({"input": "HERE"}, {}),
    "items": ({"input": "HERE"}, user("a")),
    "items of both": ({"input": "HERE"}, (user("a #"), {"role": "assistant", "content": "b #"})),
    "parts": ({"input": [user("HERE")]}, {"type": "input_text", "text": "a"}),
    "parts of an old item": (
        {"input": [user("HERE"), {"role": "assistant", "content": "b"}, user("c")]},
        {"type": "input_text", "text": "a"},
    ),
    "reasoning": ({"input": "HERE"}, {"type": "reasoning", "id": "rs_#", "summary": []}),
    "summary": (
        {
            "input": [
                user("a"),
                {"type": "reasoning", "id": "rs_1", "summary": "HERE"},
                {"role": "assistant", "content": "b"},
                user("c"),
            ]
        },
        TEXT,
    ),
    "calls": ({"input": "HERE"}, {"type": "function_call", "call_id": "c#", "name": "f", "arguments": "{}"}),
    "calls with outputs": (
        {"input": "HERE"},
        (
            {"type": "function_call", "call_id": "c#", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c#", "output": "a"},
        ),
    ),
    "outputs": ({"input": "HERE"}, {"type": "function_call_output", "call_id": "c", "output": "a"}),
    "output of a call": (
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "HERE"},
            ]
        },
        {"type": "input_text", "text": "a"},
    ),
    "item references": ({"input": "HERE"}, {"type": "item_reference", "id": "msg_#"}),
    "unknown items": ({"input": "HERE"}, {"type": "x"}),
    "annotations": (
        {
            "input": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a", "annotations": "HERE"}],
                },
                user("c"),
            ]
        },
        {},
    ),
    "tools": ({"input": "a", "tools": "HERE"}, {"type": "function", "name": "f"}),
    "tools of a namespace": ({"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": "HERE"}]}, {}),
    "include": ({"input": "a", "include": "HERE"}, "x"),
    "variables": ({"input": "a", "prompt": {"id": "p", "variables": {"...": "KEYS"}}}, 1),
}
OTHER: dict[str, tuple[str, Any, Any]] = {
    "embeddings of texts": ("/v1/embeddings", {"model": "m", "input": "HERE"}, "a"),
    "embeddings of numbers": ("/v1/embeddings", {"model": "m", "input": "HERE"}, 1),
    "embeddings of lists": ("/v1/embeddings", {"model": "m", "input": "HERE"}, [1]),
    "counted messages": ("/v1/messages/count_tokens", {"model": "m", "messages": "HERE"}, user("a")),
}
CASES: dict[str, tuple[str, Any, Any]] = {
    f"chat {name}": (PATHS["chat"], {"model": "m"} | body if isinstance(body, dict) else body, unit)
    for name, (body, unit) in CHAT.items()
}
CASES |= {
    f"messages {name}": (PATHS["messages"], {"model": "m", "max_tokens": 9} | body, unit)
    for name, (body, unit) in MESSAGES.items()
}
CASES |= {f"responses {name}": (PATHS["responses"], {"model": "m"} | body, unit) for name, (body, unit) in RESPONSES.items()}
CASES |= OTHER


QUICK = (
    "chat messages of numbers",
    "chat messages of both",
    "chat parts",
    "chat parts of an old message",
    "chat calls with ids",
    "chat tools of numbers",
    "chat keys of the body",
    "chat lists in lists",
    "chat escapes",
    "messages blocks",
    "messages results",
    "messages citations",
    "responses items of numbers",
    "responses parts",
    "responses reasoning",
    "responses calls with outputs",
    "embeddings of numbers",
)


def filled(around: Any, unit: Any, size: int) -> bytes:
    """A body of about so many bytes."""
    head = json.dumps(around)
    units = [json.dumps(one, separators=(",", ":")) for one in (unit if isinstance(unit, tuple) else (unit,))]

    def listed() -> Iterator[str]:
        made = number = 0
        while made < size:
            piece = ",".join(one.replace("#", f"{number:07d}") for one in units)
            made += len(piece) + 1
            number += 1
            yield piece

    for word, make in (
        ('"HERE"', lambda: f"[{','.join(listed())}]"),
        ('"...": "KEYS"', lambda: ",".join(f'"{number:07d}":{units[0]}' for number in range(size // (11 + len(units[0]))))),
        ('"DEEP"', lambda: "[" * (size // 2) + "]" * (size // 2)),
        ('"LONG"', lambda: json.dumps("the river and the mill " * (size // 23))),
        ('"WORD"', lambda: json.dumps("a" * size)),
        ('"LINES"', lambda: json.dumps("a\n" * (size // 3))),
        ('"ESCAPES"', lambda: '"' + "\\ud83d\\ude00" * (size // 12) + '"'),
    ):
        if word in head:
            return head.replace(word, make()).encode()
    return b"[" * size


@dataclass
class Counted:
    """The gateway's process."""

    url: str
    process: subprocess.Popen[str]

    def figure(self, name: str) -> int:
        """A figure of its memory, in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
        raise AssertionError(f"the gateway is gone: {self.process.poll()}")

    def settle(self) -> None:
        """What it does not use goes back to the machine, and the highest count begins again."""
        self.asked("settle")
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def steps(self) -> int:
        return self.asked("count")

    def asked(self, word: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def lives(self) -> bool:
        return self.process.poll() is None


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))


@contextmanager
def counted(far: str, window: int = 32_000) -> Iterator[Counted]:
    folder = folder_of_memory()
    words = [sys.executable, str(Path(__file__).with_name("counted.py")), str(folder / "doors.db"), far, str(window)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path), MALLOC_ARENA_MAX="2")
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=bounded
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "the gateway does not start"
        yield Counted(url, process)
        with suppress(BrokenPipeError):  # it may have ended in a test
            process.stdin.close()
        process.wait()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def answer(seen: Seen) -> Answer:
    if not seen.form:
        return Answer([b'{"object": "list", "data": [], "input_tokens": 1}'])
    try:
        return answer_of(seen.form, whole(seen.form, [("M", "Noted.")]), False)
    except ValueError:
        return refusal(seen.form, "no JSON")


class Gateways:
    """One before each kind of provider; one that has ended is started again."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._stub = self._opened.enter_context(provider(answer))
        self._started: dict[str, Counted] = {}

    def __enter__(self) -> Gateways:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def of(self, form: str) -> Counted:
        far = self._stub.url if form == "messages" else f"{self._stub.url}/v1"
        if far not in self._started or not self._started[far].lives():
            self._started[far] = self._opened.enter_context(counted(far))
        return self._started[far]


def check_array(
    gateways: Gateways, name: str, largest: int, tell: Callable[[str], None] = lambda _: None, sizes: int = 3
) -> None:
    """Send one array in growing sizes; raise Broken at the first that takes too much."""
    path, around, unit = CASES[name]
    form = next((form for form, known in PATHS.items() if known == path), "messages" if "messages" in path else "chat")
    gateway = gateways.of(form)
    plain = filled(CASES[f"{form} {'items' if form == 'responses' else 'messages'}"][1], user("hello #"), 100)
    for _ in range(3):
        assert visit(gateway.url, PATHS[form], plain).status == 200
    before = 0
    for step in range(sizes):
        body = filled(around, unit, largest // FACTOR ** (sizes - 1 - step))
        gateway.settle()
        rested, begun = gateway.figure("VmRSS"), gateway.steps()
        try:
            got = visit(gateway.url, path, body)
        except OSError as error:
            raise Broken(
                f"{name}: the gateway answers", f"{len(body)} bytes: {error!r}, and it is {gateway.process.poll()}"
            ) from error
        taken, steps = gateway.figure("VmHWM") - rested, gateway.steps() - begun
        shown = f"{len(body):,} bytes: status {got.status}, {taken / len(body):.0f} bytes of memory a byte, "
        shown += f"{steps / len(body):.2f} steps a byte"
        tell(f"{name}: {shown}")
        check(got.status < 500 or got.status == 503, f"{name}: served, or refused with 4xx: {got.words}", shown)
        check(taken <= PER_BYTE * len(body) + CONSTANT, f"{name}: memory is linear in the body", shown)
        check(
            not before or steps <= STEEPER * FACTOR * before + CONSTANT_STEPS,
            f"{name}: steps are linear in the body",
            f"{shown}; {before} before",
        )
        before = steps
        check(visit(gateway.url, PATHS[form], plain).status == 200, f"{name}: the gateway lives on", shown)


@pytest.fixture(scope="module")
def gateways() -> Iterator[Gateways]:
    with Gateways() as opened:
        yield opened


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's counts of memory are Linux's")
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_an_array_takes_memory_and_steps_in_proportion(gateways: Gateways, name: str) -> None:
    check_array(gateways, name, rounds(100_000, 256_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--largest", type=int, default=2_000_000, help="bytes of the largest body")
    parser.add_argument("--only", default="", help="arrays whose name has this")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    failed = 0
    tell: Callable[[str], None] = (lambda _: None) if options.quiet else lambda line: print("   ", line, flush=True)
    with Gateways() as gateways:
        for name in CASES:
            if options.only in name:
                try:
                    check_array(gateways, name, options.largest, tell)
                except Broken as broken:
                    failed += 1
                    print(f"{broken}", flush=True)
    print(f"{failed} promises broken")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
