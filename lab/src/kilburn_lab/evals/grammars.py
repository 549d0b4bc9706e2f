"""Facts that one line of a source file states, read by the parser of its language.

Python is read by `ast`, Java, C, Go and JavaScript by tree-sitter. A fact is the line of a definition, its base class, the name
of its last argument of three or more, or a value that it gives: the default of an argument, or what a constant is set to. Only
definitions that stand on one line are read, because a part of a file may begin and end anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kilburn.errors import SpecError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

LONGEST_LINE = 200
"""Characters of a line that is read."""

SHORTEST_FILE = 20
"""Lines of a file that sessions are made from."""

COMMON = {"None", "True", "False", "0", "1", "''", '""', "()", "[]", "{}", "true", "false", "null", "nil", "NULL", "undefined"}
"""Values that one would guess."""


class SourceFact(NamedTuple):
    """What a line states.

    Args:
        kind: "line", "base", "argument" or "default".
        asked: the question, in which `{path}` stands for the file.
        start, stop: where the answer stands in the line; of the kind "line" both are 0.
    """

    kind: str
    asked: str
    start: int = 0
    stop: int = 0


class SourceGrammar(NamedTuple):
    """How a language is read.

    Args:
        name: of the language. suffixes: of its files.
        facts: of a line without its number and indentation.
    """

    name: str
    suffixes: tuple[str, ...]
    facts: Callable[[str], Iterator[SourceFact]]


def grammar_of(path: str) -> SourceGrammar | None:
    """The grammar for a file, by its suffix; None if there is none."""
    suffix = Path(path).suffix
    return next((grammar for grammar in GRAMMARS if suffix in grammar.suffixes), None)


def shelves(folder: Path) -> dict[str, dict[str, str]]:
    """The sources in a folder and below: by language the texts by path, of files that are long enough to be read in parts.

    Raises:
        SpecError: there are none.
    """
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*")):
        grammar = grammar_of(path.name)
        if grammar is None or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.count("\n") >= SHORTEST_FILE:
            found.setdefault(grammar.name, {})[path.relative_to(folder).as_posix()] = text
    if not found:
        known = ", ".join(f"{grammar.name} ({', '.join(grammar.suffixes)})" for grammar in GRAMMARS)
        raise SpecError(f"{folder}: no sources of {SHORTEST_FILE} lines or more", advice=f"give a folder with some in {known}")
    return found


def definitions(path: str, text: str) -> Iterator[tuple[int, str]]:
    """The names that a source defines on one line, and the numbers of these lines, from 1."""
    grammar = grammar_of(path)
    for number, line in enumerate(text.split("\n"), start=1):
        shown = line.strip()
        for fact in grammar.facts(shown) if grammar is not None and 0 < len(shown) <= LONGEST_LINE else ():
            if fact.kind == "line":
                yield number, fact.asked.split("`")[1]


def _line(name: str) -> SourceFact:
    return SourceFact("line", f"On which line does the definition of `{name}` in {{path}} begin?")


def _base(name: str, start: int, stop: int) -> SourceFact:
    return SourceFact("base", f"What is the base class of `{name}` in {{path}}?", start, stop)


def _last(name: str, start: int, stop: int) -> SourceFact:
    return SourceFact("argument", f"What is the last argument of `{name}` in {{path}} called?", start, stop)


def _default(argument: str, name: str, start: int, stop: int) -> SourceFact:
    asked = f"What is the default value of the argument `{argument}` of `{name}` in {{path}}?"
    return SourceFact("default", asked, start, stop)


def _value(name: str, start: int, stop: int) -> SourceFact:
    return SourceFact("default", f"What is the value of `{name}` in {{path}}?", start, stop)


def _python(line: str) -> Iterator[SourceFact]:
    if not (line.startswith(("class ", "def ", "async def ")) and "(" in line and line.endswith(":")):
        return
    try:
        [node] = ast.parse(f"{line} pass").body
    except SyntaxError:
        return
    name = getattr(node, "name", "")
    yield _line(name)
    if isinstance(node, ast.ClassDef) and len(node.bases) == 1 and not node.keywords:
        base = node.bases[0]
        if ast.unparse(base) != "object":
            yield _base(name, base.col_offset, base.end_col_offset or 0)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (every := node.args.args + node.args.kwonlyargs):
        pairs = [*zip(every[::-1], node.args.defaults[::-1], strict=False)] if not node.args.kwonlyargs else []
        for argument, default in pairs:
            if ast.unparse(default) not in COMMON:
                yield _default(argument.arg, name, default.col_offset, default.end_col_offset or 0)
        if len(every) > 2 and node.args.kwarg is None:
            start = every[-1].col_offset
            yield _last(name, start, start + len(every[-1].arg))


_STATEMENTS = {"if", "for", "while", "switch", "catch", "with", "function", "return"}
"""What looks like a definition where it stands alone, and is none."""


class _Tree:
    """One line as a language's parser reads it, between other text that makes it whole."""

    def __init__(self, module: str, before: str, line: str, after: str) -> None:
        self.raw = f"{before}{line}{after}".encode()
        self.shift = len(before.encode())
        self.end = self.shift + len(line.encode())
        self.root = _parser(module).parse(self.raw).root_node

    @property
    def is_whole(self) -> bool:
        """Whether the parser takes it without an error."""
        return not self.root.has_error

    def text(self, node: Node) -> str:
        """The text of a node."""
        return self.raw[node.start_byte : node.end_byte].decode()

    def span(self, node: Node) -> tuple[int, int]:
        """Where a node stands in the line, in characters."""
        start = len(self.raw[self.shift : node.start_byte].decode())
        return start, start + len(self.text(node))

    def named(self, *types: str) -> Iterator[Node]:
        """The nodes of these types that begin in the line, outer ones first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.type in types and self.shift <= node.start_byte < self.end:
                yield node
            waiting += reversed(node.named_children)


@lru_cache(maxsize=8)
def _parser(module: str) -> Parser:
    from tree_sitter import Language, Parser

    return Parser(Language(import_module(module).language()))


def _closed(line: str) -> str:
    """What closes the block that a line opens, or gives a definition without one its body."""
    return "}" if line.endswith("{") else "{}" if line.endswith(")") else ""


def _child(node: Node, *fields: str) -> Node | None:
    """The child that is reached through these fields."""
    found: Node | None = node
    for field in fields:
        found = found.child_by_field_name(field) if found is not None else None
    return found


def _arguments(tree: _Tree, name: str, parameters: Node | None) -> Iterator[SourceFact]:
    """The last of three or more parameters, where all have names."""
    given = [_innermost(one) for one in parameters.named_children if one.type != "comment"] if parameters is not None else []
    if len(given) > 2 and (last := given[-1]) is not None and None not in given:
        yield _last(name, *tree.span(last))


def _innermost(parameter: Node) -> Node | None:
    """The name of a parameter: the identifier that its declarators end in."""
    if parameter.type == "identifier":
        return parameter
    for field in ("name", "declarator", "left"):
        names = parameter.children_by_field_name(field)
        if names:
            return _innermost(names[-1])
    if parameter.type in ("parenthesized_declarator", "rest_pattern", "spread_parameter", "variable_declarator"):
        return _innermost(parameter.named_children[-1]) if parameter.named_children else None
    return None


_LITERALS = {
    "decimal_floating_point_literal",
    "decimal_integer_literal",
    "float_literal",
    "hex_integer_literal",
    "int_literal",
    "interpreted_string_literal",
    "number",
    "number_literal",
    "string",
    "string_literal",
}


def _set_to(tree: _Tree, name: Node | None, value: Node | None) -> Iterator[SourceFact]:
    """A name that is given a literal value."""
    if value is not None and value.type == "expression_list" and value.named_child_count == 1:
        value = value.named_children[0]
    if name is None or value is None or value.type not in _LITERALS or tree.text(value) in COMMON:
        return
    yield _line(tree.text(name))
    yield _value(tree.text(name), *tree.span(value))


def _java(line: str) -> Iterator[SourceFact]:
    tree = _Tree("tree_sitter_java", "class X {\n", line, f"{_closed(line)}\n}}")
    if not tree.is_whole:
        return
    for node in tree.named("class_declaration", "interface_declaration", "enum_declaration", "record_declaration"):
        if (name := _child(node, "name")) is not None:
            yield _line(tree.text(name))
            heir = _child(node, "superclass")
            if heir is not None and heir.named_children:
                yield _base(tree.text(name), *tree.span(heir.named_children[0]))
    for node in tree.named("method_declaration", "constructor_declaration"):
        if (name := _child(node, "name")) is not None:
            yield _line(tree.text(name))
            yield from _arguments(tree, tree.text(name), _child(node, "parameters"))
    for node in tree.named("field_declaration"):
        yield from _set_to(tree, _child(node, "declarator", "name"), _child(node, "declarator", "value"))


def _c(line: str) -> Iterator[SourceFact]:
    if line.startswith("#"):
        yield from _c_constant(line)
        return
    ends = ";\n" if line.startswith(("struct", "union")) else "\n"
    tree = _Tree("tree_sitter_c", "", line, _closed(line) + ends)
    if not tree.is_whole:
        return
    for node in tree.named("function_declarator"):
        name = _child(node, "declarator")
        inner = node.parent is not None and node.parent.type == "parameter_declaration"
        if name is not None and name.type == "identifier" and not inner and tree.text(name) not in _STATEMENTS:
            yield _line(tree.text(name))
            yield from _arguments(tree, tree.text(name), _child(node, "parameters"))
    for node in tree.named("struct_specifier", "union_specifier"):
        if (name := _child(node, "name")) is not None and _child(node, "body") is not None:
            yield _line(tree.text(name))
    for node in tree.named("init_declarator"):
        yield from _set_to(tree, _innermost(node), _child(node, "value"))


def _c_constant(line: str) -> Iterator[SourceFact]:
    tree = _Tree("tree_sitter_c", "", line, "\n")
    for node in tree.named("preproc_def") if tree.is_whole else ():
        name, value = _child(node, "name"), _child(node, "value")
        given = tree.text(value).strip() if value is not None else ""
        if name is not None and value is not None and given and given not in COMMON:
            start, _ = tree.span(value)
            yield _line(tree.text(name))
            yield _value(tree.text(name), start, start + len(given))


def _go(line: str) -> Iterator[SourceFact]:
    tree = _Tree("tree_sitter_go", "", line, "}\n" if line.endswith("{") else "\n")
    if not tree.is_whole:
        return
    for node in tree.named("function_declaration", "method_declaration"):
        if (name := _child(node, "name")) is not None:
            yield _line(tree.text(name))
            yield from _go_arguments(tree, tree.text(name), _child(node, "parameters"))
    for node in tree.named("type_spec"):
        if (name := _child(node, "name")) is not None:
            yield _line(tree.text(name))
    for node in tree.named("const_spec", "var_spec"):
        names = node.children_by_field_name("name")
        yield from _set_to(tree, names[0] if len(names) == 1 else None, _child(node, "value"))


def _go_arguments(tree: _Tree, name: str, parameters: Node | None) -> Iterator[SourceFact]:
    """As `_arguments`; one declaration of Go may name several parameters."""
    given = [each for one in parameters.named_children for each in one.children_by_field_name("name")] if parameters else []
    if len(given) > 2:
        yield _last(name, *tree.span(given[-1]))


def _javascript(line: str) -> Iterator[SourceFact]:
    tree = _Tree("tree_sitter_javascript", "", line, f"{_closed(line)}\n")
    if not tree.is_whole:
        tree = _Tree("tree_sitter_javascript", "class X {\n", line, f"{_closed(line)}\n}}")
    if not tree.is_whole or not line.endswith(("{", ";")):
        return
    for node in tree.named("class_declaration"):
        if (name := _child(node, "name")) is not None:
            yield _line(tree.text(name))
            for heir in (child for child in node.named_children if child.type == "class_heritage"):
                yield _base(tree.text(name), *tree.span(heir.named_children[0]))
    for node in tree.named("function_declaration", "method_definition", "variable_declarator"):
        name, parameters = _child(node, "name"), _child(node, "parameters") or _child(node, "value", "parameters")
        if name is None or parameters is None or tree.text(name) in _STATEMENTS:
            continue
        yield _line(tree.text(name))
        yield from _arguments(tree, tree.text(name), parameters)
        for one in parameters.named_children:
            argument, default = _child(one, "left"), _child(one, "right")
            if argument is not None and default is not None and tree.text(default) not in COMMON:
                yield _default(tree.text(argument), tree.text(name), *tree.span(default))
    for node in tree.named("variable_declarator"):
        yield from _set_to(tree, _child(node, "name"), _child(node, "value"))


GRAMMARS = (
    SourceGrammar("Python", (".py",), _python),
    SourceGrammar("Java", (".java",), _java),
    SourceGrammar("C", (".c", ".h"), _c),
    SourceGrammar("Go", (".go",), _go),
    SourceGrammar("JavaScript", (".js", ".mjs", ".cjs"), _javascript),
)
"""All languages that are read."""
