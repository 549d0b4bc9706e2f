"""The sandboxes: what code can do in them, what it cannot, and how a cell ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kilburn.agents.sandbox import Bounds, CellOutcome, Sandbox, open_sandbox
from kilburn.errors import NoValue, SandboxError


def ask(prompt: str, times: int = 1) -> str:
    if prompt == "fail":
        raise ValueError("no such thing")
    return prompt.upper() * times


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "text.txt"
    path.write_bytes("häuser\n".encode() * 1000 + b"\xff")
    return path


@pytest.fixture(scope="module")
def sandbox(text: Path) -> Iterator[Sandbox]:
    bounds = Bounds(seconds=1.0, memory=64 << 20, output=1000)
    with open_sandbox("cpython", calls={"ask": ask}, variables={"known": [1, 2]}, files={"text": text}, bounds=bounds) as made:
        yield made


def test_variables_stay_from_cell_to_cell(sandbox: Sandbox) -> None:
    assert sandbox.run("n = sum(known)").outcome is CellOutcome.OK
    assert sandbox.run("n").output == "3\n"
    assert sandbox.get("n") == 3


def test_a_file_is_a_string(sandbox: Sandbox) -> None:
    assert sandbox.run("print(len(text), text[:6], ascii(text[-1]))").output == "7001 häuser '\\ufffd'\n"


def test_code_calls_functions_of_ours(sandbox: Sandbox) -> None:
    assert sandbox.run("print(ask('a', times=2))").output == "AA\n"
    cell = sandbox.run("try:\n    ask('fail')\nexcept ValueError as error:\n    print(error)")
    assert (cell.outcome, cell.output) == (CellOutcome.OK, "no such thing\n")


def test_what_is_not_there_has_no_value(sandbox: Sandbox) -> None:
    with pytest.raises(NoValue, match="nothing"):
        sandbox.get("nothing")


def test_a_closed_sandbox_says_so(text: Path) -> None:
    made = open_sandbox("cpython")
    made.close()
    made.close()
    with pytest.raises(SandboxError, match="closed"):
        made.run("1")


def test_an_endless_cell_is_stopped_and_keeps_its_variables(sandbox: Sandbox) -> None:
    cell = sandbox.run("kept = 1\nwhile True:\n    kept += 1")
    assert (cell.outcome, cell.lost) == (CellOutcome.TIMEOUT, False)
    assert sandbox.get("kept") > 1
