"""The glossary holds: one entry a term, names that the code has, and words that the pages do not use."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "design" / "glossary.md"
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path != GLOSSARY and path.parent.name != "reference"]
FENCE = re.compile(r"^ *```.*?^ *```[ ]*$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^\*\*[^\n]*?[:.] ", re.MULTILINE)
"""An entry's head: bold terms, and in brackets the name in the code and where the term is from."""


def heads() -> list[str]:
    return [match[0] for match in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))]


def names_of(tree: ast.AST) -> set[str]:
    """`Class`, `function` and `Class.member` of a module."""
    found = set()
    for node in ast.walk(tree):
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
    sources = [path for place in ("src", "kv/src", "lab/src") for path in (ROOT / place).rglob("*.py")]
    there = set().union(*(names_of(ast.parse(path.read_text(encoding="utf-8"))) for path in sources))
    named = {name for head in heads() for name in re.findall(r"`([^`]+)`", head)}
    assert len(named) > 30
    assert named <= there, f"rename these in docs/design/glossary.md: {sorted(named - there)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert len(unwanted()) > 5
    used = [word for word in unwanted() if re.search(rf"\b{word}\b", prose, re.IGNORECASE)]
    assert not used, "docs/design/glossary.md has other words for these"
