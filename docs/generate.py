"""Write docs/reference/ from the code: modules from their docstrings and signatures, verbs from the command line itself.

    python docs/generate.py            write the pages, and docs/design/surface.txt
    python docs/generate.py --check    write nothing; say how surface.txt differs from the code, exit 1 if it does

The pages are not in the repository. docs/design/surface.txt is: the signatures of the public names, which is what users are
promised. Public is what a module names in its `__all__`; few modules have one. A change of the list is a change for users, so it
is seen in every review.

An example under a verb is the first console line of a handwritten page that uses it, if possible one
that the tests run, so that an example that stops working fails there. It refuses to hold prose of its own.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Container, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import typer.main
from typer.core import TyperGroup

import kilburn
from kilburn.cli.shell import load
from kilburn.submodules import exports

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
SURFACE = ROOT / "docs" / "design" / "surface.txt"
NOTE = "<!-- Written by docs/generate.py from the code; edit the code, then run `python3 run.py reference`. -->\n\n"
BESIDE = {"kilburn_kv": ("kilburn_kv", "torch"), "kilburn_lab": ("kilburn_lab",)}
"""The packages beside the product, with what has to be installed to import their modules."""
ABSENT = tuple(name for name, needs in BESIDE.items() if any(find_spec(package) is None for package in needs))
SECTION = re.compile(r"^(Args|Arguments|Raises|Returns|Yields|Attributes):\s*(.*)$")
ITEM = re.compile(r"^( {4}|\t)([\w.*, `]+?):\s+(.*)$")


def markdown(text: str) -> str:
    """A docstring as Markdown: its `Args:` and `Raises:` become lists, the rest stays as it is."""
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        opened = SECTION.match(line)
        if opened:
            section = opened[1]
            out += ["", f"**{section}.** {opened[2]}".rstrip(), ""]
        elif section and line.startswith("    "):
            item = ITEM.match(line) if not line.startswith("     ") else None
            out.append(
                f"- `{item[2]}`: {item[3]}"
                if item
                else f"  {line.strip()}"
                if out and out[-1].startswith(("- ", "  "))
                else line.strip()
            )
        else:
            section = section if not line.strip() else ""
            out.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


class Written(str):
    """An annotation as it stands in the source: without the quotes that a string has."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def as_written(found: inspect.Signature) -> inspect.Signature:
    """A signature whose annotations print as they are written."""

    def plain(annotation: object) -> object:
        return Written(annotation) if isinstance(annotation, str) else annotation

    parameters = [item.replace(annotation=plain(item.annotation)) for item in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=plain(found.return_annotation))


def signature(thing: object) -> str:
    """What a call takes, as Python writes it, or nothing where that says nothing."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum | BaseException):
        return ""
    try:
        text = str(as_written(inspect.signature(thing)))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return "" if text in ("(*args, **kwargs)", "(*args: Any, **kwargs: Any) -> None") else re.sub(r" at 0x[0-9a-f]+", "", text)


def call(name: str, thing: object) -> str:
    """How a thing is called, as a block below its heading, so that the heading and its anchor stay short."""
    taken = signature(thing)
    return f"```python\n{name}{taken}\n```\n\n" if taken else ""


def methods(owner: type) -> Iterator[str]:
    """Lines on the public methods and properties that a class defines itself."""
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        doc = inspect.getdoc(value) if isinstance(value, property) or inspect.isroutine(value) else None
        if isinstance(value, property):
            yield f"#### `{name}`\n\n{markdown(doc or '')}\n"
        elif inspect.isfunction(value) or isinstance(value, classmethod | staticmethod):
            yield f"#### `{name}`\n\n{call(name, getattr(owner, name))}{markdown(doc or '')}\n"


def constant(thing: object) -> str:
    """A constant as it is written, the same in every run: sets in order, no addresses in memory."""
    if isinstance(thing, set | frozenset):
        return "{" + ", ".join(sorted(map(str, thing))) + "}"
    text = str(thing)
    return re.sub(r" at 0x[0-9a-f]+", "", text if len(text) <= 200 else text[:200] + " ...").replace("\n", " ")


def member(module: ModuleType, name: str) -> str:
    """A section on one exported name."""
    thing = getattr(module, name)
    home = getattr(thing, "__module__", module.__name__)
    if inspect.ismodule(thing):
        # Its text would hold where it is installed.
        return f"### `{name}`\n\nThe package `{thing.__name__}`.\n"
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return f"### `{name}`\n\n`{name} = {constant(thing)}`\n"
    if home != module.__name__ and home.startswith("kilburn"):
        return f"### `{name}`\n\n{summary(inspect.getdoc(thing))} Defined in `{home}`.\n"
    parts = [f"### `{name}`\n\n{call(name, thing)}{markdown(inspect.getdoc(thing) or '')}\n"]
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        parts.append("\n".join(f"- `{item.name}` = `{item.value!r}`" for item in thing) + "\n")
    elif isinstance(thing, type):
        parts += methods(thing)
    return "\n".join(parts)


def summary(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def module_section(name: str) -> str:
    """A section on one module: its docstring, then its exported names."""
    module = importlib.import_module(name)
    body = [f"## `{name}`\n\n{markdown(inspect.getdoc(module) or '')}\n"]
    body += [member(module, exported) for exported in exports().get(name, ())]
    return "\n".join(body)


FRAMEWORKS = {
    f"kilburn.adapters.{name}" for name in ("agents", "claude_agent", "langgraph", "langgraph_store", "llamaindex", "pydantic_ai")
}
"""Modules that need a framework which the checks do not install: docs/howto/adapters.md describes them."""


def exporting(prefix: str) -> list[str]:
    """The public modules of a package, the package itself first."""
    return sorted(name for name in exports() if f"{name}.".startswith(f"{prefix}.") and name not in FRAMEWORKS)


def examples() -> list[tuple[str, str]]:
    """(page, command) of every console line in the handwritten pages; those that the tests run come first."""
    run: list[tuple[str, str]] = []
    read: list[tuple[str, str]] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if REFERENCE in page.parents:
            continue
        text = page.read_text(encoding="utf-8")
        for note, block in re.findall(r"^```console([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
            (read if "no-run" in note else run).extend(
                (page.relative_to(ROOT).as_posix(), " ".join(line[2:].split("  #")[0].split())) for line in lines
            )
    return run + read


def verb_section(verb: str, command: typer.core.TyperCommand, shown: list[tuple[str, str]]) -> str:
    """A section on one verb: what it does, how it is called, an example, one that the tests run where there is one."""
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and not getattr(item, "hidden", False)]
    usage = " ".join(["kilburn", verb, *map(metavar, arguments)])
    parts = [
        f"## `kilburn {verb}`\n\n{markdown(inspect.cleandoc(command.help or ''))}\n",
        f"```text\n{usage}{' [OPTIONS]' if options else ''}\n```\n",
    ]
    lines = [f"- `{metavar(item)}`: {getattr(item, 'help', None) or 'see above'}" for item in arguments]
    lines += [option_line(item) for item in options if "--help" not in item.opts]
    if lines:
        parts.append("\n".join(lines) + "\n")
    for page, text in shown:
        if text == f"kilburn {verb}" or text.startswith(f"kilburn {verb} "):
            parts.append(f"From [{page}]({os.path.relpath(page, 'docs/reference')}):\n\n```text\n$ {text}\n```\n")
            break
    return "\n".join(parts)


def metavar(argument: object) -> str:
    """How an argument is written in the usage line."""
    name = str(getattr(argument, "metavar", None) or getattr(argument, "name", "")).upper().strip("[]")
    return name if getattr(argument, "required", True) else f"[{name}]"


def option_line(option: object) -> str:
    """One option: its spellings, what it means, its default where there is one."""
    opts = [*getattr(option, "opts", ()), *getattr(option, "secondary_opts", ())]
    default = getattr(option, "default", None)
    plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    text = " ".join((getattr(option, "help", None) or "").split())
    return "- " + ", ".join(f"`{name}`" for name in opts) + f": {text}" + (f" Default: `{default}`." if plain else "")


def command_line() -> str:
    """The page on the command line."""
    shown = examples()
    program = load()
    options = "\n".join(option_line(item) for item in program.params if "--help" not in item.opts)
    parts = [
        "# The command line\n\nEvery verb of `kilburn`, in the order of the alphabet. `kilburn VERB --help` says the same.\n",
        f"## Before any verb\n\n{options}\n",
    ]

    def walk(prefix: str, command: object) -> None:
        if isinstance(command, TyperGroup):
            for name, inner in sorted(command.commands.items()):
                walk(f"{prefix} {name}".strip(), inner)
        elif isinstance(command, typer.core.TyperCommand):
            parts.append(verb_section(prefix, command, shown))

    walk("", program)
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """The whole reference: file name -> text."""
    out = {"cli.md": command_line(), "kilburn.md": "# `kilburn`\n\n" + module_section("kilburn")}
    nouns = [
        name
        for name in exports()
        if re.fullmatch(r"kilburn\.\w+", name) and not hasattr(importlib.import_module(name), "__path__")
    ]
    out["nouns.md"] = "# The nouns\n\n" + "\n".join(module_section(name) for name in nouns)
    packages = sorted(info.name for info in pkgutil.iter_modules(kilburn.__path__) if info.ispkg and info.name != "cli")
    packages += BESIDE
    for name in packages:
        sections = [module_section(module) for module in exporting(dotted(name))]
        out[f"{name}.md"] = f"# `{dotted(name)}`\n\n" + (
            "\n".join(sections) or inspect.getdoc(importlib.import_module(dotted(name))) or ""
        )
    titles = ["kilburn", "cli", "nouns", *packages]
    about = {"cli": "Every verb of the command line.", "nouns": "The small data types and seams that everything else speaks."}
    lines = [
        f"- [{title}]({title}.md): {about.get(title) or summary(importlib.import_module(dotted(title)).__doc__)}"
        for title in titles
    ]
    out["index.md"] = "# Reference\n\nWritten from the code; what it says is what the installed version does.\n\n" + "\n".join(
        lines
    )
    return {name: NOTE + text.rstrip() + "\n" for name, text in sorted(out.items())}


def dotted(title: str) -> str:
    """The module of a page's title."""
    return title if title == "kilburn" or title in BESIDE else f"kilburn.{title}"


HEAD = """# What users are promised: the public modules with their names, and the public methods of their classes.
# Written by docs/generate.py from each module's __all__. A change here is a change for users.
# Every other module, and every other name, may change without notice.
"""


def surface() -> str:
    """A line for each public name, and for each public method of a public class. A name that stands in two modules is described
    in the first."""
    lines: list[str] = []
    seen: set[int] = set()
    public = sorted((module, names) for module, names in exports().items() if module.split(".")[0] not in ABSENT)
    ours = [(module, names) for module, names in public if module not in FRAMEWORKS]
    listed = {id(getattr(importlib.import_module(module), name)) for module, names in ours for name in names}
    for module, names in public:
        for name in names:
            address = f"{module}.{name}"
            thing = getattr(importlib.import_module(module), name) if module not in FRAMEWORKS else None
            described = inspect.isclass(thing) or inspect.isroutine(thing)
            if not described or id(thing) in seen:
                lines.append(address)
                continue
            seen.add(id(thing))
            lines += [f"{address}{signature(thing)}", *members(thing, listed)]
    return HEAD + "\n".join(lines) + "\n"


def members(thing: object, listed: Container[int]) -> Iterator[str]:
    """A line for each public method and property of a class; nothing for others, and for an enumeration."""
    if not inspect.isclass(thing) or issubclass(thing, enum.Enum):
        return
    # What it inherits from classes of ours that are not public counts as its own.
    bases = [each for each in thing.__mro__[1:] if each.__module__.startswith("kilburn") and id(each) not in listed]
    own = {name: value for each in (*reversed(bases), thing) for name, value in vars(each).items()}
    for name, value in sorted(own.items()):
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)):
            yield f"    .{name}{signature(getattr(thing, name))}"
        elif not name.startswith("_") and isinstance(value, property):
            yield f"    .{name}"


def main() -> int:
    """Write everything, or compare the surface."""
    now, before = surface(), SURFACE.read_text(encoding="utf-8") if SURFACE.exists() else ""
    if "--check" in sys.argv[1:]:
        # What is promised of a distribution that is not installed cannot be compared.
        absent = tuple(f"{name}." for name in ABSENT)
        entries = re.findall(r"^\S.*\n(?: .*\n)*", before, re.MULTILINE)
        before = "".join(entry for entry in entries if not (absent and entry.startswith(absent)))
        changed = difflib.unified_diff(before.splitlines(), now.splitlines(), "surface.txt", "the code", lineterm="", n=0)
        print("\n".join(changed) or "docs/design/surface.txt is as the code says")
        return int(now != before)
    SURFACE.write_text(now, encoding="utf-8")
    fresh = pages()
    REFERENCE.mkdir(exist_ok=True)
    for path in REFERENCE.glob("*.md"):
        if path.name not in fresh:
            path.unlink()
    for name, text in fresh.items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    print(f"{len(fresh)} pages in docs/reference/; docs/design/surface.txt {'is as it was' if now == before else 'has changed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
