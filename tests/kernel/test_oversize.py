"""Messages larger than the window are paged themselves: head, tail and handle stay, the whole is below."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kernel.talk import PIXEL, assistant, call_of, tool, user, weight
from kilburn.kernel.session import Session
from kilburn.testing.laws import check_laws
from kilburn.tokens.estimate import Characters
from kilburn.wire.validity import validate_chat, validate_messages


def opened(window: int = 1000, policy: str = "fifo") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def numbered(lines: int) -> str:
    return "\n".join(f"line {number} of {lines}" for number in range(lines))


@pytest.mark.parametrize("lines", [300, 3000])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_head_and_tail_stay(role: str, lines: int) -> None:
    session = opened()
    text = numbered(lines)
    session.append(user("the task"))
    if role == "tool":
        session.append(assistant(None, call_of("c")))
        session.append(tool("c", text))
    else:
        session.append({"role": role, "content": text})
    prompt = session.render()
    validate_chat(prompt)
    validate_messages(session.render("messages"))
    shown = json.dumps(prompt)
    assert weight(list(prompt)) <= 1000
    assert "line 0 of" in shown
    assert f"line {lines - 1} of" in shown
    address = f"p{session.window.last}"
    assert f"[{address}" in shown, "a handle says where the whole is"
    assert session.recall(address) == text


@pytest.mark.parametrize("policy", ["fifo", "lru", "summarize", "mask", "tiered", "importance", "preprocess"])
def test_one_giant_after_the_other(policy: str) -> None:
    session = opened(policy=policy)
    for number in range(5):
        session.append(assistant(None, call_of(f"c{number}")))
        session.append(tool(f"c{number}", f"giant {number}\n" + numbered(2000)))
        prompt = session.render()
        validate_chat(prompt)
        assert weight(list(prompt)) <= 1000
        assert f"giant {number}" in json.dumps(prompt), "the newest output is there, in part"
    assert all(session.recall(f"p{2 * number + 2}").startswith(f"giant {number}") for number in range(5))


def test_a_call_with_giant_arguments() -> None:
    session = opened()
    arguments = {"content": "y" * 100_000}
    session.append(user("go"), assistant(None, call_of("c", **arguments)))
    prompt = session.render()
    (call,) = prompt[1]["tool_calls"]
    json.loads(call["function"]["arguments"])
    assert weight(list(prompt)) <= 1000
    session.append(tool("c", "written"))
    validate_messages(session.render("messages"))
    assert json.loads(session.recall("p2")) == arguments


def test_calls_that_are_too_long_together() -> None:
    session = opened(4000)
    session.append(user("write five files"))
    session.append(assistant(None, *(call_of(f"c{number}", content="y" * 4000) for number in range(5))))
    assert weight(list(session.render())) <= 4000
    for number in range(5):
        session.append(tool(f"c{number}", "written"))
    validate_chat(session.render())
    assert json.loads(session.recall("p4"))["content"] == "y" * 4000


def test_an_image_larger_than_the_window_is_not_shown_as_text() -> None:
    session = opened(1000)
    session.append(user("look"))
    session.append(user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]))
    shown = json.dumps(session.render())
    assert PIXEL[:20] not in shown, "base64 is no text for a model"
    assert "p2" in shown
    assert session.recall("p2") == f"data:image/png;base64,{PIXEL}"


class Counting(Characters):
    """Knows how many characters it was shown."""

    shown = 0

    def count(self, text: str) -> int:
        self.shown += len(text)
        return super().count(text)


def resident_bytes(peak: bool = False) -> int:
    """What this session holds in memory, or held at most."""
    said = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(said.partition("VmHWM:" if peak else "VmRSS:")[2].split()[0])


def fifty_megabytes(path: str) -> None:
    """In a process of its own: the text is read by the counter once or twice, and in memory a few times at most."""
    text = "0123456789abcde\n" * (50 * 2**16)
    counter, before = Counting(), resident_bytes()
    with kilburn.open(path, window=8000, policy="fifo", tokenizer=counter) as store:
        session = store.session("a")
        session.append(user("read it"), assistant(None, call_of("c")))
        session.append(tool("c", text))
        assert weight(list(session.render())) <= 8000
        assert session.recall("p3") == text
    assert counter.shown <= 3 * len(text)
    assert resident_bytes(peak=True) - before <= 12 * len(text)


def test_fifty_megabytes(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from kernel.test_oversize import fifty_megabytes as b; b(sys.argv[2])"
    command = [sys.executable, "-c", code, tests, str(tmp_path / "a.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("window", [30, 60, 90])
def test_tiny_windows(window: int) -> None:
    session = opened(window)
    given: list[dict[str, Any]] = [user("go")]
    for number in range(10):
        given += [assistant("I read", call_of(f"c{number}")), tool(f"c{number}", numbered(100))]
    for message in given:
        session.append(message)
        assert weight(list(session.render())) <= window
        validate_chat(session.render())
    assert session.contents.messages() == given


def test_waiting_calls_of_several_messages_are_shortened() -> None:
    session = opened(300)
    session.append(user("go"))
    for number in range(3):
        session.append(assistant(None, call_of(f"c{number}", path="x" * 420)))
        assert session.render().tokens <= 300
    for number in range(3):
        session.append(tool(f"c{number}", "done"))
    check_laws(session)
