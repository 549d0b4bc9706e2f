"""Questions about a tree of sources, with exact answers, which `ast` extracts after the work is done.

Equal files and seeds give equal questions. The answers are quoted from the sources, byte for byte.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from kilburn.demo.library import read_lines

KINDS = ("signature", "method", "constant", "line", "place")
FILES = 5
"""Files that are read for each requested question."""

_DEFINITION = re.compile(r"\s*(?:class|def|async def) (\w+)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class LibraryQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer.

    Args:
        kind: one of `KINDS`.
        question: the question in English.
        expected: the exact answer.
        evidence: the source line with the answer. A reader of this line can answer the question.
        where: file and line, for the report.
    """

    kind: str
    question: str
    expected: str
    evidence: str
    where: str


def questions(
    root: Path, files: Mapping[str, int], *, number: int, seed: int, searched: Iterable[str] = ()
) -> list[LibraryQuestion]:
    """Return `number` questions, the kinds in turn, from files that were read up to a given line.

    There are fewer questions if the sources do not contain enough facts.

    Args:
        searched: files that were searched for definitions, even if they were not read. A name that two files define has two
            right answers, so there is no question about it.
    """
    chance = random.Random(seed)
    sources = {path: read_lines(root / path)[: files[path]] for path in sorted(files)}
    outlines = sources | {path: read_lines(root / path) for path in searched}
    defined = Counter(name[1] for lines in outlines.values() for line in lines if (name := _DEFINITION.match(line)))
    by_kind: dict[str, list[LibraryQuestion]] = {kind: [] for kind in KINDS}
    for path in chance.sample(list(sources), min(len(sources), number * FILES)):
        for question in _of_file(path, sources[path], defined, chance):
            by_kind[question.kind].append(question)
    for kind in KINDS:
        chance.shuffle(by_kind[kind])
    return [question for turn in zip_longest(*by_kind.values()) for question in turn if question][:number]


def _of_file(path: str, lines: Sequence[str], defined: Mapping[str, int], chance: random.Random) -> Iterator[LibraryQuestion]:
    tree = _parsed("\n".join(lines))
    if tree is None:
        return  # some files of a library are broken on purpose

    def ask(kind: str, question: str, expected: str, at: int) -> LibraryQuestion:
        return LibraryQuestion(kind=kind, question=question, expected=expected, evidence=lines[at - 1], where=f"{path}:{at}")

    names = Counter(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | Function))
    for node in _once(tree.body, names):
        noun = "class" if isinstance(node, ast.ClassDef) else "function"
        if defined[node.name] == 1 and len(node.name) > 3:
            yield ask("place", f"Which file defines the {noun} `{node.name}`?", path, node.lineno)
        if isinstance(node, Function) and (header := _header(node, lines)):
            yield ask("signature", f"What is the exact signature of the function `{node.name}` in {path}?", header, node.lineno)
        if isinstance(node, ast.ClassDef):
            methods = Counter(member.name for member in ast.walk(node) if isinstance(member, Function))
            for member in _once(node.body, methods):
                if isinstance(member, Function) and len(member.args.args) > 1 and (header := _header(member, lines)):
                    text = f"What is the exact signature of the method `{member.name}` of the class `{node.name}` in {path}?"
                    yield ask("method", text, header, member.lineno)
    assigned = Counter(match[0] for line in lines if (match := re.match(r"\s*\w+ =", line)))
    for at, line in enumerate(lines, start=1):
        name, _, value = line.partition(" = ")
        if assigned[f"{name} ="] == 1 and name.isidentifier() and not name.startswith("_") and _is_literal(value):
            yield ask("constant", f"What is the value of the constant `{name}` in {path}?", value, at)
    if telling := [at for at, line in enumerate(lines, start=1) if len(line.strip()) >= 20 and line.isprintable()]:
        at = chance.choice(telling)
        yield ask("line", f"What does line {at} of {path} say, exactly?", lines[at - 1], at)


def _once(nodes: Iterable[ast.stmt], names: Mapping[str, int]) -> Iterator[ast.ClassDef | Function]:
    """Yield the definitions among statements whose name is unique."""
    return (node for node in nodes if isinstance(node, ast.ClassDef | Function) and names[node.name] == 1)


def _header(node: Function, lines: Sequence[str]) -> str:
    """Return the source from `def` up to the colon; "" if more than a line end follows the colon."""
    text = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]).strip()
    return text[:-1] if text.endswith(":") and _parsed(f"{text} pass") else ""


def _is_literal(value: str) -> bool:
    """Return whether an expression is a literal worth asking for, on one line and without a comment."""
    try:
        return "#" not in value and len(value) <= 200 and ast.literal_eval(value) not in (None, (), [], {}, "")
    except (SyntaxError, ValueError):
        return False


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(f"{source}\n")
    except (SyntaxError, ValueError):
        return None
