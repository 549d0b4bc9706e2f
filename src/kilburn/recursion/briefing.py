"""Texts for the root of a recursive model: its task, the functions for its code, and the output of a cell; and the code in its
prose."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from kilburn.agents.tool import Tool, text_spec
from kilburn.event import encodable
from kilburn.recursion.sandbox import MAX_CALL_BYTES, Cell

FENCE = re.compile(r"^```(?:repl|python|py)[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

_PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text("utf-8"))


MEMORY = _PROMPTS["memory"]

MAX_DESCRIPTION_CHARS = 600
"""Characters of the signature and description of a function at most."""

REPL = text_spec(
    "repl",
    "Run Python code. It returns what the code printed, cut where it is long.",
    code="Python; print what you want to see",
)


def instructions(depth: int, functions: Iterable[Tool], *, past: bool = False) -> str:
    """Return the system prompt of a root.

    Args:
        depth: nesting depth of runs from here.
        functions: functions of the caller. past: whether the code may read the past.
    """
    ours = "".join(f"  - {_describe(tool)}\n" for tool in functions)
    calls = _PROMPTS["calls"].replace("<MB>", str(MAX_CALL_BYTES // 10**6)) * (depth > 0) + _PROMPTS["runs"] * (depth > 1)
    return _PROMPTS["system"].format(calls=calls + _PROMPTS["ours"] * bool(ours) + ours + _PROMPTS["past"] * past)


def fenced_code(text: str) -> str:
    """Return the code in the fenced blocks of a reply in prose; "" if there are none."""
    return "\n".join(FENCE.findall(text))


def _describe(tool: Tool) -> str:
    """Describe a function for the model: its signature and what it does."""
    signature = str(inspect.signature(tool.function)).replace("'", "")
    about = " ".join((tool.function.__doc__ or "").split())
    return encodable(f"{tool.name}{signature}" + (f": {about}" if about else ""))[:MAX_DESCRIPTION_CHARS]


def cell_lines(cell: Cell) -> Iterator[str]:
    """Yield the lines that the model sees of a cell's output."""
    if cell.output:
        yield cell.output.rstrip("\n")
    if cell.cut:
        yield f"[{cell.cut:,} more characters were not kept: print less]"
    if cell.error:
        yield cell.error.rstrip("\n")
    if not (cell.output or cell.error):
        yield "[nothing was printed]"
