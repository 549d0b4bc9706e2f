"""Answers come from memory alone: with the sources gone, and through two functions."""

from __future__ import annotations

import ast
import inspect
import shutil
from pathlib import Path

import pytest

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.demo import answers, memory, recollection
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.memory import OfProcess
from kilburn.demo.questions import questions
from kilburn.demo.workshop import Workshop


def explored(process: kilburn.Process, root: Path) -> dict[str, int]:
    """Let the explorer work through a tree; what it read."""
    workshop = Workshop(root)
    Agent(Explorer(errands=False), workshop.tools(), process, limits=Limits(steps=None, reply=0)).run(TASK)
    return workshop.covered


def test_answers_are_exact_when_the_sources_are_gone(tree: Path, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="lru") as store:
        process = store.process("s")
        asked = questions(tree, explored(process, tree), number=60, seed=7)
        shutil.rmtree(tree)
        given = [answer(question.text, OfProcess(process)).text for question in asked]
    assert len(asked) == 60
    assert given == [question.answer for question in asked]


@pytest.mark.parametrize("module", [answers, recollection])
def test_the_answerer_imports_nothing_that_reaches_a_file(module: object) -> None:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"kilburn.demo.memory", "kilburn.demo.recollection"}
    assert imported <= {"__future__", "re", "typing", "collections.abc"} | own
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "exec", "eval", "__import__", "__builtins__", "OfProcess"}


def test_the_memory_offers_two_functions() -> None:
    assert [name for name in vars(memory.Memory) if not name.startswith("_")] == ["recall", "search_memory"]


def test_what_was_never_read_is_not_answered(tree: Path, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="lru") as store:
        process = store.process("s")
        explored(process, tree)
        own = OfProcess(process)
        assert answer("Which file defines the class `NoSuchThing`?", own).text == ""
        assert answer("What does line 3 of nowhere/at_all.py say, exactly?", own).text == ""
        assert answer("What is the exact signature of the function `nothing` in textwrap.py?", own).text == ""
        assert answer("How are you?", own).text == ""


TRICKY = '''\
"""Text that looks like code: def shown(a): ..."""
LIMIT = 'a # b'  # not a comment: the first one
PLAIN_VALUE = (1, 2)


class Outer:
    def method(
        self,
        mark=":",  # a colon, and ( a bracket
        other={"key": [1, 2]},
    ) -> "dict[str, int]":
        return {}


class Other:
    async def method(self, value: int = 3) -> None: ...


def wanted(first, /, *rest, call=lambda x: x, **more): return first
'''


def test_signatures_and_constants_are_cut_exactly(tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    (root / "tricky.py").write_text(TRICKY, encoding="utf-8")
    with kilburn.open(":memory:", window=4000, policy="lru") as store:
        process = store.process("s")
        covered = explored(process, root)
        asked = {question.text: question.answer for question in questions(root, covered, number=50, seed=1)}
        given = {text: answer(text, OfProcess(process)).text for text in asked}
    assert given == asked
    assert asked["What is the value of the constant `LIMIT` in tricky.py?"] == "'a # b'"
    assert asked["What is the exact signature of the function `wanted` in tricky.py?"] == (
        "def wanted(first, /, *rest, call=lambda x: x, **more)"
    )
    method = asked["What is the exact signature of the method `method` of the class `Outer` in tricky.py?"]
    assert method.startswith("def method(\n        self,\n")
    assert method.endswith(') -> "dict[str, int]"')
