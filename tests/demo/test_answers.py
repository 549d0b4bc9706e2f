"""Answers come from memory alone: with the sources gone, and through two verbs."""

from __future__ import annotations

import ast
import inspect
import shutil
from pathlib import Path

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.demo import answers
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.library import Library
from kilburn.demo.questions import questions


def explored(session: kilburn.Session, root: Path) -> dict[str, int]:
    """Let the explorer work through a tree; what it read."""
    library = Library(root)
    Agent(Explorer(), library.tools(), session, limits=Limits(steps=None, reply=0)).run(TASK)
    return library.covered


def test_answers_are_exact_when_the_sources_are_gone(tree: Path, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="lru") as store:
        session = store.session("s")
        asked = questions(tree, explored(session, tree), number=60, seed=7)
        shutil.rmtree(tree)
        given = [answer(question.question, session).text for question in asked]
    assert len(asked) == 60
    assert given == [question.expected for question in asked]


def test_the_answerer_imports_nothing_that_reaches_a_file() -> None:
    tree = ast.parse(inspect.getsource(answers))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"kilburn.demo.explorer", "kilburn.search.found"}
    assert imported <= {"__future__", "ast", "re", "typing", "collections.abc"} | own
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "exec", "eval", "__import__", "__builtins__", "Session"}


def test_the_answerer_uses_two_verbs() -> None:
    assert [name for name in vars(answers.Searchable) if not name.startswith("_")] == ["search", "recall"]


def test_what_was_never_read_is_not_answered(tree: Path, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="lru") as store:
        session = store.session("s")
        explored(session, tree)
        for question in (
            "Which file defines the class `NoSuchThing`?",
            "What does line 3 of nowhere/at_all.py say, exactly?",
            "What does line 100000 of textwrap.py say, exactly?",
            "What is the exact signature of the function `nothing` in textwrap.py?",
            "What is the exact signature of the method `nothing` of the class `TextWrapper` in textwrap.py?",
            "How are you?",
        ):
            assert answer(question, session).text == ""


def test_an_answer_beside_the_passage_that_a_search_shows_is_found() -> None:
    """A long page has several passages that match, and the search shows one or a few of them."""
    names = [f"{name}Optional{kind}" for name in ("Boolean", "Number", "Text") for kind in ("Action", "Error", "Formatter")]
    outline = [f"options.py {number}: class {name}(Optional):" for number, name in enumerate(names * 4, start=10)]
    page = "\n".join([". matches 1-37 of 37", "options.py 9: OPTIONAL = '?'", *outline])
    with kilburn.open(":memory:", window=4000, policy="lru", embedder=None) as store:
        session = store.session("s")
        session.append({"role": "user", "content": page})
        assert "OPTIONAL" not in "".join(hit.text for hit in session.search("options.py OPTIONAL ="))
        assert answer("What is the value of the constant `OPTIONAL` in options.py?", session) == ("'?'", "p1")


TRICKY = '''\
"""Text that looks like code: def shown(a): ..."""
LIMIT = 'a = b: c'
COMMENTED = 'a # b'  # not a comment: the first one
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


def wanted(first, /, *rest, call=lambda x: x, **more):
    return first


def short(first): return first
'''


def test_signatures_and_constants_are_cut_exactly(tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    (root / "tricky.py").write_text(TRICKY, encoding="utf-8")
    with kilburn.open(":memory:", window=4000, policy="lru") as store:
        session = store.session("s")
        covered = explored(session, root)
        asked = {question.question: question.expected for question in questions(root, covered, number=50, seed=1)}
        given = {text: answer(text, session).text for text in asked}
    assert given == asked
    assert asked["What is the value of the constant `LIMIT` in tricky.py?"] == "'a = b: c'"
    assert not [text for text in asked if "`COMMENTED`" in text or "signature of the function `short`" in text]
    assert asked["What is the exact signature of the function `wanted` in tricky.py?"] == (
        "def wanted(first, /, *rest, call=lambda x: x, **more)"
    )
    method = asked["What is the exact signature of the method `method` of the class `Outer` in tricky.py?"]
    assert method.startswith("def method(\n        self,\n")
    assert method.endswith(') -> "dict[str, int]"')
