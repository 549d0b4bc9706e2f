"""Every example in the documentation works: code blocks, command lines, the programs in examples/, links.

In a page, blocks run in order, in one folder that starts empty, sharing their names, with no
network:

- SmolLM2's weights are there, as after `kilburn models pull smollm2`, where a block names them.
- `python` runs; an `output` block after it is what it prints.
- `console` runs its lines that start with `$ ` and call `kilburn`, `cat` or `python lab/recipes/NAME.py`; what
  stands below a command is what it prints, and nothing there asks only for success. `# exits 2` behind a
  command states another exit status.
- A block whose fence says `file=NAME` is written to that file.
- `...` in expected output stands for anything, also for several lines where it stands alone.
- `no-run: REASON` on a fence leaves a block out, and the reason must be a sentence that says why. The `kilburn` commands of such
  blocks in how-to pages run in `test_commands.py`, with stand-ins.

Other languages are for reading. `sh` may not call `kilburn`: that is what `console` is for.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kilburn.cli import main
from kilburn.models.weights import pull

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "reference"]
BESIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kv/README.md", "lab/README.md", "lab/recipes/README.md"]
PAGES = [path for name in BESIDE if (path := ROOT / name).exists()] + WRITTEN
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FRAMEWORKS = {
    "agents_sdk_session.py": ("agents.run", "agents"),
    "claude_agent_hooks.py": ("claude_agent_sdk", "claude-agent"),
    "langgraph_agent.py": ("langchain.agents", "langgraph"),
    "llamaindex_memory.py": ("llama_index.core", "llamaindex"),
    "pydantic_ai_window.py": ("pydantic_ai", "pydantic-ai"),
    "spans_of_an_agent.py": ("opentelemetry.sdk", "otel"),
}
"""Examples that need a framework: the module to look for, and the extra that has it."""

READ_ONLY = {"text", "json", "jsonl", "toml", "sql", "yaml", "sh", "output"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
SECONDS = 120


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, what else the fence says, its text and the line it starts on."""

    language: str
    note: str
    text: str
    line: int

    @property
    def reason(self) -> str:
        return self.note.partition("no-run:")[2].strip()

    @property
    def skipped(self) -> bool:
        return "no-run" in self.note

    @property
    def file(self) -> str:
        found = re.search(r"\bfile=(\S+)", self.note)
        return found[1] if found else ""


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, note = match["info"].strip().partition(" ")
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append(Block(language, note.strip(), body, text.count("\n", 0, match.start()) + 1))
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def same(expected: str, printed: str) -> bool:
    """Whether what was printed is what the page shows.

    `...` stands for anything; trailing blanks do not count. Beside a `...` the width of blanks does not count either:
    a column grows with what a faster machine prints in it.
    """
    if "..." in expected:
        expected, printed = re.sub(" +", " ", expected), re.sub(" +", " ", printed)
    lines = [line.rstrip() for line in expected.strip("\n").splitlines()]
    pattern = ""
    for line in lines:
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*?".join(re.escape(piece) for piece in line.split("...")) + r"\n"
    clean = "".join(line.rstrip() + "\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, clean) is not None


def environment(home: Path) -> dict[str, str]:
    """A user who has nothing: an empty home, no network, a plain terminal."""
    nowhere = "http://127.0.0.1:9"
    return {
        "HOME": str(home),
        "PIP_NO_INDEX": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUTF8": "1",
        "KILBURN_QUIET": "1",
        "PYTHONWARNINGS": "error",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
    }


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a user who has nothing, in a folder that is empty but for a home."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "KILBURN_", "XDG_")):
            monkeypatch.delenv(name)
    for name, value in environment(tmp_path / ".home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".home").mkdir()
    return tmp_path


def commands_of(block: Block) -> Iterator[tuple[str, int, str]]:
    """(command, exit status, expected output) of a console block."""
    command, status, expected = "", 0, ""
    for line in block.text.replace("\\\n", " ").splitlines(keepends=True):
        if line.startswith("$ "):
            if command:
                yield command, status, expected
            command, _, remark = line[2:].partition("  # ")
            exits = re.search(r"exits (\d+)", remark)
            command, status, expected = command.strip(), int(exits[1]) if exits else 0, ""
        else:
            expected += line
    if command:
        yield command, status, expected


def run_command(words: list[str]) -> tuple[int, str]:
    """Run `kilburn` in this process, or `cat`; the exit status, and all that was printed."""
    if words[0] == "cat":
        return 0, "".join(Path(name).read_text(encoding="utf-8") for name in words[1:])
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True)
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main(words[1:])
    printed.seek(0)
    return status, printed.read()


def run_program(words: list[str]) -> tuple[int, str]:
    """Run a recipe as a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / words[0]), *words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


SERVER = re.compile(r"/tmp/(\w+\.pg)")
"""The folder of a server in a page."""


def run_console(block: Block, where: str) -> None:
    for command, status, expected in commands_of(block):
        words = shlex.split(command)
        recipe = words[0] == "python" and words[1].startswith("lab/recipes/")
        assert recipe or words[0] in ("kilburn", "cat"), f"{where}: only kilburn, cat and recipes run here, not {words[0]}"
        ended, printed = run_program(words[1:]) if recipe else run_command(words)
        assert ended == status, f"{where}: `{command}` exits {ended}, not {status}\n{printed}"
        if expected.strip():
            assert same(expected, printed), f"{where}: `{command}` prints\n{printed}\nand not\n{expected}"


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
    exec(code, names)


def check_blocks(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a page in this folder, and compare what they print."""
    with TemporaryDirectory(prefix="kl", dir="/tmp") as folder:
        # Another user may run a server there, and another run of the tests has a folder of its own.
        Path(folder).chmod(0o755)
        blocks = [replace(block, text=SERVER.sub(rf"{folder}/\1", block.text)) for block in blocks_of(page)]
        run_blocks([block for block in blocks if not block.skipped], page, capsys)


def run_blocks(blocks: list[Block], page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks:
        where = f"{name_of(page)}:{block.line}"
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_python(block, page, names)
            printed = capsys.readouterr().out
        elif block.language == "output":
            assert same(block.text, printed), f"{where}: the code above prints\n{printed}\nand not\n{block.text}"
        elif block.language == "console":
            run_console(block, where)
    for value in names.values():
        if hasattr(value, "close") and type(value).__module__.startswith("kilburn"):
            value.close()


def names(page: Path, pattern: str, *languages: str) -> bool:
    """Whether a block that runs has what matches a pattern."""
    blocks = [block for block in blocks_of(page) if block.language in languages and not block.skipped]
    return any(re.search(pattern, block.text) for block in blocks)


def names_a_model(page: Path) -> bool:
    return names(page, "smollm2", "python")


def needs_more(page: Path) -> bool:
    """Whether a block needs what the default run does without: the laboratory, the KV level, torch, a PostgreSQL."""
    return names(page, r"kilburn_lab|kilburn_kv|kilburn lab|lab/recipes|postgres start|import torch", "python", "console")


def rows(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, marks=[pytest.mark.slow] if needs_more(page) else [], id=name_of(page)) for page in pages]


@pytest.mark.parametrize("page", rows([page for page in PAGES if not names_a_model(page)]))
def test_blocks_run(page: Path, nobody: Path, capsys: pytest.CaptureFixture[str], offline: None) -> None:
    check_blocks(page, capsys)


@pytest.fixture(scope="session")
def weights() -> Path:
    """The folder of the weights, with SmolLM2 in it: fetched before the network is shut off."""
    return pull("smollm2").parent


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if names_a_model(page)], ids=name_of)
def test_blocks_with_a_model_run(
    page: Path, weights: Path, nobody: Path, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    models = nobody / ".home" / ".cache" / "kilburn" / "models"
    models.parent.mkdir(parents=True)
    models.symlink_to(weights)
    check_blocks(page, capsys)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences_are_known(page: Path) -> None:
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in READ_ONLY | {"python", "console"}, f"{where}: a block in {block.language or 'no language'!r}"
        assert not block.skipped or len(block.reason.split()) >= 4, f"{where}: no-run needs `no-run: REASON`, a sentence"
        calls = [line for line in block.text.splitlines() if re.match(r"(\$ )?kilburn ", line)]
        assert block.language != "sh" or not calls, f"{where}: {calls} belongs in a console block"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    dead = []
    for match in LINK.finditer(prose):
        target = match["target"].split("#")[0]
        if target and not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
            dead.append(target)
    assert not dead


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        waiting += [
            (page.parent / match["target"].split("#")[0]).resolve() for match in LINK.finditer(page.read_text(encoding="utf-8"))
        ]
    assert not [name_of(page) for page in WRITTEN if page.resolve() not in seen]


def test_the_promised_signatures_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + "run `python3 run.py reference`"


def promised_by(program: Path) -> str:
    """What an example's docstring says that it prints: the indented text after `It prints:`."""
    doc = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    _, found, promised = doc.partition("It prints:\n")
    assert found, f"{name_of(program)}: the docstring must say what `It prints:`"
    return textwrap.dedent(promised)


SDKS = {"wrapped_clients.py"}
"""Examples that import the SDKs of OpenAI and Anthropic, which takes seconds."""


@pytest.mark.parametrize(
    "program",
    [pytest.param(path, marks=[pytest.mark.slow] if path.name in SDKS else [], id=name_of(path)) for path in EXAMPLES],
)
def test_examples_run(program: Path, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program.name in FRAMEWORKS:
        module, extra = FRAMEWORKS[program.name]
        pytest.importorskip(module, reason=f"its framework is not installed: pip install '.[{extra}]' in the checkout")
        monkeypatch.delenv("PYTHONWARNINGS")  # frameworks warn of their own parts
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=nobody,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised = promised_by(program)
    assert same(promised, done.stdout), f"prints\n{done.stdout}\nand not\n{promised}"


@pytest.mark.parametrize(
    ("expected", "printed", "agrees"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("took ... s\n", "took 0.31 s\n", True),
        ("took ... s\n", "took 0.31 min\n", False),
        ("a\n", "a\nb\n", False),
        ("a ...\n", "a b\nc\n", False),
    ],
)
def test_comparison_of_output(expected: str, printed: str, agrees: bool) -> None:
    assert same(expected, printed) is agrees


def test_the_network_is_refused_while_blocks_run(offline: None) -> None:
    with pytest.raises(PermissionError, match="without a network"):
        socket.create_connection(("192.0.2.1", 9), timeout=1)
    with pytest.raises(PermissionError, match="without a network"):
        socket.getaddrinfo("kilburn.invalid", 80)
