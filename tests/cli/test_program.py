"""The program around the verbs: help, version, exit status, errors of one line, options that are inherited."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main
from typer import Option
from typer.core import TyperGroup

import kilburn as package
from cli.terminal import kilburn, program
from kilburn.cli.commands import PANELS, Application
from kilburn.cli.options import command_function
from kilburn.cli.shell import Json, load
from startup import modules_of_command


def verbs() -> list[str]:
    found: list[str] = []

    def walk(prefix: str, command: object) -> None:
        if isinstance(command, TyperGroup):
            for name, inner in sorted(command.commands.items()):
                walk(f"{prefix} {name}".strip(), inner)
        else:
            found.append(prefix)

    walk("", load())
    return found


def test_version_says_which() -> None:
    assert kilburn("--version").out == f"kilburn {package.__version__}\n"


@pytest.mark.parametrize("verb", verbs())
def test_help_shows_an_example_of_each_verb(verb: str) -> None:
    said = kilburn(*verb.split(), "--help")
    assert said.status == 0
    assert re.search(rf"^ +kilburn {verb}\b", said.out, re.MULTILINE)
    assert "Usage: kilburn " + verb in said.out
    assert not re.search(r"\{[a-z]|\[\[", said.out.partition("\n\n")[0]), "each argument has a name for people, in one bracket"


HEAVY = {"anthropic", "asyncio", "http", "matplotlib", "numpy", "openai", "pydantic", "rich", "ssl", "xllamacpp"}


@pytest.mark.parametrize(
    ("words", "most", "absent"),
    [
        (["--version"], 175, {"kilburn.kernel", "msgspec"}),
        (["--help"], 225, {"kilburn.kernel", "msgspec"}),
        (["ps", "--db", "DB"], 350, {"kilburn.cli.serve", "importlib.metadata"}),
        (["ps", "--help"], 345, {"kilburn.cli.serve", "importlib.metadata"}),
        (["export", "--help"], 345, {"kilburn.cli.serve", "importlib.metadata"}),
        (["keys", "list", "--help"], 285, {"kilburn.kernel.kernel", "importlib.metadata"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_little(db: Path, words: list[str], most: int, absent: set[str]) -> None:
    """A little more modules than now, and none that is large: how long a start takes is a benchmark's question."""
    modules = modules_of_command([str(db) if word == "DB" else word for word in words])
    assert "kilburn.cli.commands" in modules
    assert not (HEAVY | absent) & set(modules)
    assert len(modules) <= most


def test_a_command_that_is_mistyped_is_named() -> None:
    said = kilburn("serch")
    assert said.status == 2
    assert "No such command 'serch'. Did you mean 'search'" in said.err
    error = json.loads(kilburn("reciepts", "--json").err)["error"]
    assert error["message"] == "No such command 'reciepts'. Did you mean 'receipts'?"


def test_help_shows_the_commands_and_the_options_in_panels() -> None:
    said = kilburn("--help").out
    for panel, rows in PANELS.items():
        section = re.search(rf"^{panel}:\n(.*?)(?=^\S|\Z)", said, re.MULTILINE | re.DOTALL)
        assert section is not None
        assert re.findall(r"^  (\S+)  +[A-Z].*\.$", section[1], re.MULTILINE) == list(rows)
    assert max(map(len, said.splitlines())) <= 80
    usual, _, advanced = kilburn("serve", "--help").out.partition("\nAdvanced:\n")
    assert "--upstream" in usual
    assert "--drain" not in usual
    assert "--drain" in advanced
    assert "--upstream" not in advanced


@pytest.mark.parametrize("words", [("nonsense",), ("ps", "--nonsense"), ("recall", "light"), ("replay",)])
def test_wrong_usage_exits_2(words: tuple[str, ...]) -> None:
    said = kilburn(*words)
    assert said.status == 2
    assert "Usage: kilburn" in said.err
    assert said.out == ""


def test_missing_store_is_one_line_and_makes_none(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.db"
    for words in (("ps",), ("show", "a"), ("recall", "a", "p1"), ("search", "a"), ("export",), ("fsck",), ("forget", "a", "p1")):
        said = kilburn(*words, "--db", path)
        assert (said.status, said.out) == (2, "")
        assert said.err.count("\n") == 1
        assert "no store" in said.err
        assert "--db" in said.err
        assert not path.exists()


def test_store_is_named_before_or_behind_the_verb_or_by_the_environment(db: Path, tmp_path: Path) -> None:
    behind = kilburn("ps", "--db", db, "--json").json
    assert kilburn("--db", db, "ps", "--json").json == behind
    assert program("ps", "--json", folder=tmp_path, KILBURN_DB=str(db)).json == behind
    assert program("ps", "--json", folder=db.parent).json == behind


def test_tenants_are_partitions(db: Path) -> None:
    assert kilburn("ps", "--db", db, "--tenant", "other", "--json").json == []
    said = kilburn("--tenant", "other", "recall", "light", "p1", "--db", db)
    assert (said.status, said.out) == (2, "")


def test_errors_have_a_traceback_only_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.db"
    assert "Traceback" not in program("ps", "--db", path, folder=tmp_path).err
    assert "Traceback" in program("--debug", "ps", "--db", path, folder=tmp_path).err
    assert "Traceback" in program("ps", "--db", path, folder=tmp_path, KILBURN_DEBUG="1").err


@pytest.mark.parametrize("content", [b"", b"this is no database, though it is long enough to hold a header " * 40])
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agent.db"
    path.write_bytes(content)
    said = kilburn("ps", "--db", path)
    assert said.status == 1
    assert said.err.count("\n") == 1
    assert path.read_bytes() == content


def test_a_reader_that_goes_away_is_met_in_silence(db: Path) -> None:
    command = f"{sys.executable} -m kilburn export --db {db} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_interruption_exits_130(db: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "kilburn", "chat", "--db", str(db), "--model", "echo", "--policy", "fifo"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what runs in its background with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"/stats\n/help\n")
        running.stdin.flush()
        assert running.stdout.readline()  # it listens by now, however busy the machine is
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=600)
    assert running.returncode == 130
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1] == "kilburn: interrupted"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_said_or_borne_and_nothing_crashes(tmp_path: Path, closed: str) -> None:
    command = f"'{sys.executable}' -m kilburn policies {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if closed.startswith(">") else 0)
    assert ("standard output is closed" in done.stderr) == (closed == ">&-")


@pytest.mark.parametrize(
    "words",
    [
        *((*verb.split(), "--json", "--no-such-option") for verb in verbs()),
        ("--json", "ps"),
        ("ps", "--json", "--db"),
        ("recall", "light", "--json"),
        ("replay", "--json", "x.jsonl", "--window", "many"),
        ("keys", "nothing", "--json"),
        ("--json",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_object_for_a_program(words: tuple[str, ...]) -> None:
    said = kilburn(*words)
    assert (said.status, said.out) == (2, ""), said.err
    assert said.err.count("\n") == 1
    error = json.loads(said.err)["error"]
    assert list(error) == ["type", "boundary", "message", "advice", "status"]
    assert (error["boundary"], error["status"]) == ("command line", 2)
    assert error["message"]
    assert "--help" in error["advice"]


@pytest.mark.parametrize(
    ("words", "status", "type_", "boundary"),
    [
        (("show", "nobody"), 2, "SpecError", "resolve"),
        (("recall", "light", "p99"), 2, "UnknownAddress", "kernel"),
        (("recall", "light", "seventeen"), 2, "UnknownAddress", "kernel"),
        (("forget", "light", "p1"), 2, "SpecError", "resolve"),
        (("learn", "light", "--policy", "nothing"), 2, "SpecError", "resolve"),
        (("memories", "show", "p7"), 2, "SpecError", "resolve"),
        (("documents", "show", "x"), 2, "SpecError", "resolve"),
        (("documents", "add", "nowhere.txt"), 2, "SpecError", "resolve"),
        (("import", "nowhere.jsonl"), 2, "InvalidMessage", "wire"),
        (("search", " "), 2, "SpecError", "resolve"),
        (("ask", "x", "--question", "y", "--model", "nobody"), 2, "SpecError", "resolve"),
    ],
)
def test_an_error_is_one_object_for_a_program(db: Path, words: tuple[str, ...], status: int, type_: str, boundary: str) -> None:
    plain, said = kilburn(*words, "--db", db), kilburn(*words, "--db", db, "--json")
    assert (said.status, said.out) == (plain.status, "") == (status, "")
    error = json.loads(said.err.splitlines()[-1])["error"]
    assert (error["type"], error["boundary"], error["status"]) == (type_, boundary, status)
    assert " ".join(error["message"].split()) in plain.err
    assert error["advice"] in plain.err


def test_what_happens_later_is_one_object_too(db: Path, tmp_path: Path) -> None:
    """No store, a file and a folder that are none, and a name that no terminal shows."""
    (tmp_path / "other.db").write_text("this is no database, though it is long enough to hold a header " * 40)
    for words in (("ps", "--db", tmp_path / "none.db"), ("ps", "--db", tmp_path / "other.db"), ("ps", "--db", tmp_path)):
        said = kilburn(*words, "--json")
        assert said.out == ""
        assert json.loads(said.err)["error"]["status"] == said.status > 0
    said = kilburn("show", "a\x1b[31m\udcff\u202e", "--db", db, "--json")
    assert said.err.isascii()
    assert json.loads(said.err)["error"]["message"].startswith("no session ")


def test_a_value_that_looks_like_the_option_asks_for_nothing(db: Path) -> None:
    said = kilburn("search", "--db", db, "--session", "light", "--", "--json")
    assert (said.status, said.out) == (0, "nothing found\n")


@pytest.mark.parametrize(("fault", "status"), [(RuntimeError("no\nway"), 1), (KeyboardInterrupt(), 130), (typer.Abort(), 1)])
def test_a_fault_of_the_program_and_an_interruption_are_objects_too(fault: BaseException, status: int) -> None:
    commands = typer.Typer()

    @commands.command()
    def verb(json: Json = False) -> None:
        raise fault

    said = kilburn("--json", commands=commands, name="verb")
    assert (said.status, said.out) == (status, "")
    error = json.loads(said.err.splitlines()[-1])["error"]
    assert (error["type"], error["status"]) == (type(fault).__name__, status)
    assert error["message"]
    ours = type(fault) is RuntimeError
    assert ("Traceback" in said.err) == ours
    if ours:
        with pytest.raises(RuntimeError, match="no"):
            kilburn(commands=commands, name="verb")


def test_every_argument_and_option_has_a_help_text() -> None:
    program = load()
    for verb in verbs():
        command: Any = program
        for word in verb.split():
            command = command.commands[word]
        assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == [], verb


def test_options_are_described_in_the_docstring() -> None:
    commands = Application()

    @commands.command()
    def move(place: str, older: str = "30d", dry: bool = False, many: Annotated[int, Option(min=1)] = 2) -> None:
        """Move texts.

        Args:
            place PLACE: A folder, or a bucket
                with a path.
            older --older-than TIME: Move texts that were not read for this long.
            dry: Move nothing.

        Advanced:
            many N: Move this many.
        """
        typer.echo(f"{place} {older} {dry} {many}")

    said = kilburn("--help", commands=commands)
    assert "\n  Move texts.\n" in said.out
    assert "Args:" not in said.out
    assert re.search(r"PLACE .*A folder, or a bucket with a path\. +\[required\]", said.out)
    assert re.search(r"--older-than TIME +Move texts that were not read for this +long", " ".join(said.out.split()))
    assert "--no-dry" not in said.out
    assert re.search(r"^Advanced:\n +--many N ", said.out, re.MULTILINE)
    assert kilburn("there", "--older-than", "1d", "--dry", "--many", 3, commands=commands).out == "there 1d True 3\n"
    assert kilburn("there", "--many", 0, commands=commands).status == 2


def test_an_option_of_the_docstring_that_is_no_parameter_is_an_error() -> None:
    def move(place: str) -> None:
        """Move texts.

        Args:
            places PLACE: A folder.
        """

    with pytest.raises(TypeError, match="no parameter 'places'"):
        command_function(move)
