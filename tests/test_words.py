"""The glossary holds: one entry a term, names that the code has, and words that neither the pages nor the code use."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "design" / "glossary.md"
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path != GLOSSARY and path.parent.name != "reference"]
FENCE = re.compile(r"^ *```.*?^ *```[ ]*$", re.MULTILINE | re.DOTALL)
SOURCES = sorted(path for place in ("src", "kv/src", "lab/src") for path in (ROOT / place).rglob("*.py"))
BY_SPEC = {"Fifo"}
"""Classes that a spec names, so that each is called as its file: a policy, and an order of agents."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

ENTRY = re.compile(r"^\*\*[^\n]*?[:.] ", re.MULTILINE)
"""An entry's head: bold terms, and in brackets the name in the code and where the term is from."""


def heads() -> list[str]:
    return [match[0] for match in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))]


@cache
def sources() -> list[tuple[Path, set[str], list[str], list[str]]]:
    """For each source its names, what it says to people, and its public classes: parsed once, as that takes most of the time."""
    rows = []
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        classes = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        rows.append((path, names_of(nodes), said_by(nodes), classes))
    return rows


def names_of(nodes: list[ast.AST]) -> set[str]:
    """`Class`, `function` and `Class.member` of a module."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found.add(f"{node.name}.{member.name}")
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    found.add(f"{node.name}.{member.target.id}")
                elif isinstance(member, ast.Assign):
                    found |= {f"{node.name}.{target.id}" for target in member.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@cache
def unwanted() -> list[str]:
    """The first column of the table of words that we do not use, what is said of exceptions left out."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("| not | say |\n|---|---|\n")[2]
    cells = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    return [word.strip() for cell in cells if ", except " not in cell for word in cell.split(",")]


def test_each_term_has_one_entry() -> None:
    terms = Counter(term for head in heads() for term in re.findall(r"\*\*(.+?)\*\*", head))
    assert len(terms) > 60
    assert not [term for term, times in terms.items() if times > 1]


def test_a_name_of_the_glossary_is_in_the_code() -> None:
    there = set().union(*(names for _, names, _, _ in sources()))
    named = {name for head in heads() for name in re.findall(r"`([^`]+)`", head)}
    assert len(named) > 30
    assert named <= there, f"rename these in docs/design/glossary.md: {sorted(named - there)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert len(unwanted()) > 5
    used = [word for word in unwanted() if re.search(rf"\b{word}\b", prose, re.IGNORECASE)]
    assert not used, "docs/design/glossary.md has other words for these"


def said_by(nodes: list[ast.AST]) -> list[str]:
    """What a module says to people: docstrings, messages of errors; and its names, as words."""
    said = []
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said.append(re.sub(r"`[^`]*`", "", node.value.value))
        elif isinstance(node, ast.Raise):
            strings = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            said.append(" | ".join(strings))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said.append(node.name)
        elif isinstance(node, ast.arg):
            said.append(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            said.append(node.id if isinstance(node, ast.Name) else node.attr)
    return [each if " " in each else " ".join(WORD.findall(each)) for each in said]


def test_the_code_uses_the_words_of_the_glossary() -> None:
    """The filter of a sandbox is about the operating system's calls, and says so."""
    pattern = re.compile(rf"\b(?:{'|'.join(unwanted())})\b", re.IGNORECASE)
    used = {(path.name, word.lower()) for path, _, said, _ in sources() for text in said for word in pattern.findall(text)}
    assert not used - {("lockdown.py", "system call")}, "the glossary has other words for these"


def test_no_two_classes_have_the_same_name() -> None:
    """A reader who meets a name finds one class. Private ones are their file's."""
    names = Counter(name for _, _, _, classes in sources() for name in classes)
    assert len(names) > 500
    assert {name for name, times in names.items() if times > 1} == BY_SPEC
