"""Questions about a tree of sources, with exact answers: made by `ast` after the work is done.

The same files and the same seed give the same questions. The answers are cut from the sources, byte
for byte. It refuses to look at what the agent remembers.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kilburn.demo.workshop import lines_of

__all__ = ["KINDS", "Question", "questions"]

KINDS = ("signature", "method", "constant", "line", "place")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    Args:
        kind: one of `KINDS`.
        text: what is asked, as a person would.
        answer: the exact answer.
        evidence: the source line that carries it; whoever still has this line could know.
        where: file and line, for the report.
    """

    kind: str
    text: str
    answer: str
    evidence: str
    where: str


Function = ast.FunctionDef | ast.AsyncFunctionDef


def questions(root: Path, files: Mapping[str, int], *, number: int, seed: int) -> list[Question]:
    """`number` questions, the kinds in turn, from files of which all lines up to a given one were read.

    Returns fewer where the sources do not hold enough to ask about.
    """
    trees = {path: tree for path in sorted(files) if (tree := _parsed(lines_of(root / path)[: files[path]])) is not None}
    chance = random.Random(seed)
    names = Counter(name for tree in trees.values() for name in _definitions(tree))
    found: dict[str, list[Question]] = {kind: [] for kind in KINDS}
    for path, tree in trees.items():
        lines = lines_of(root / path)[: files[path]]
        for question in _of_file(path, tree, lines, names):
            found[question.kind].append(question)
        if telling := [at for at, line in enumerate(lines, start=1) if len(line.strip()) >= 20 and line.isprintable()]:
            found["line"].append(_line(path, chance.choice(telling), lines))
    for kind in KINDS:
        chance.shuffle(found[kind])
    chosen: list[Question] = []
    while len(chosen) < number and any(found.values()):
        for kind in KINDS:
            if found[kind] and len(chosen) < number:
                chosen.append(found[kind].pop())
    return chosen


def _parsed(lines: Sequence[str]) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.parse("\n".join(lines) + "\n")
    except (SyntaxError, ValueError):
        return None  # some files of a library are broken on purpose


def _definitions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name


def _of_file(path: str, tree: ast.Module, lines: Sequence[str], everywhere: Mapping[str, int]) -> Iterator[Question]:
    here = Counter(_definitions(tree))
    assigned = Counter(
        target.id
        for node in ast.walk(tree)
        for target in (node.targets if isinstance(node, ast.Assign) else [])
        if isinstance(target, ast.Name)
    )
    for node in tree.body:
        if isinstance(node, Function) and here[node.name] == 1:
            yield _signature(path, node, lines)
        if isinstance(node, ast.ClassDef | Function) and everywhere[node.name] == 1 and len(node.name) > 3:
            yield _place(path, node, lines)
        if isinstance(node, ast.ClassDef) and here[node.name] == 1:
            own = Counter(member.name for member in ast.walk(node) if isinstance(member, Function))
            for member in node.body:
                if isinstance(member, Function) and own[member.name] == 1 and len(member.args.args) > 1:
                    yield _signature(path, member, lines, node.name)
        if isinstance(node, ast.Assign) and (question := _constant(path, node, lines, assigned)) is not None:
            yield question


def _signature(path: str, node: Function, lines: Sequence[str], owner: str = "") -> Question:
    what = f"the method `{node.name}` of the class `{owner}`" if owner else f"the function `{node.name}`"
    answer = _header(node, lines)
    return Question(
        kind="method" if owner else "signature",
        text=f"What is the exact signature of {what} in {path}?",
        answer=answer,
        evidence=lines[node.lineno - 1],
        where=f"{path}:{node.lineno}",
    )


def _header(node: Function, lines: Sequence[str]) -> str:
    """The source from `def` up to the colon: the shortest that parses to the same signature."""
    source = "\n".join(lines[node.lineno - 1 : node.body[0].lineno])
    start = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    wanted = ast.dump(node.args), ast.dump(node.returns) if node.returns else ""
    at = source.find(":", start)
    while at >= 0:
        header = source[start:at]
        tree = _parsed([f"{header}: pass"])
        made = tree.body[0] if tree is not None else None
        if isinstance(made, Function) and (ast.dump(made.args), ast.dump(made.returns) if made.returns else "") == wanted:
            return header
        at = source.find(":", at + 1)
    raise AssertionError(f"no signature for {node.name} in its own source")


def _place(path: str, node: ast.ClassDef | Function, lines: Sequence[str]) -> Question:
    what = "class" if isinstance(node, ast.ClassDef) else "function"
    return Question(
        kind="place",
        text=f"Which file defines the {what} `{node.name}`?",
        answer=path,
        evidence=lines[node.lineno - 1],
        where=f"{path}:{node.lineno}",
    )


def _constant(path: str, node: ast.Assign, lines: Sequence[str], assigned: Mapping[str, int]) -> Question | None:
    target = node.targets[0]
    if (
        len(node.targets) != 1
        or not isinstance(target, ast.Name)
        or assigned[target.id] != 1
        or target.id.startswith("__")
        or target.id == "_"
    ):
        return None
    line = lines[node.lineno - 1]
    value = line.encode()[node.value.col_offset : node.value.end_col_offset].decode()
    if node.lineno != node.end_lineno or len(value) > 200 or ";" in line:
        return None
    if not isinstance(node.value, ast.Constant | ast.Tuple | ast.List):
        return None
    try:
        if ast.literal_eval(value) in (None, (), [], ""):
            return None
    except ValueError:
        return None
    return Question(
        kind="constant",
        text=f"What is the value of the constant `{target.id}` in {path}?",
        answer=value,
        evidence=line,
        where=f"{path}:{node.lineno}",
    )


def _line(path: str, number: int, lines: Sequence[str]) -> Question:
    text = lines[number - 1]
    return Question(
        kind="line", text=f"What does line {number} of {path} say, exactly?", answer=text, evidence=text, where=f"{path}:{number}"
    )
