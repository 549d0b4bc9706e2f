"""`ask` from the shell, and `eval recursion`: what they do is tested with the recursive model itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.terminal import kilburn
from kilburn.agents.sandbox import open_sandbox
from kilburn.errors import SandboxRefused

CODE = '```repl\nanswer["content"] = sorted(context) if isinstance(context, dict) else len(context)\nanswer["ready"] = True\n```'


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox() -> None:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "asked.db"


def model(*replies: str) -> str:
    return f"scripted({list(replies)!r})"


def test_an_answer_and_the_same_answer_again(tmp_path: Path, db: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 1234)
    said = kilburn("ask", text, "--question", "how long?", "--model", model(CODE), "--db", db, "--session", "s")
    assert (said.status, said.out) == (0, "1234\n"), said.err
    assert "answered: 1 step, 0 sub-calls" in said.err
    again = kilburn("ask", text, "--replay", "--db", db, "--session", "s", "--json").json
    assert (again["outcome"], again["content"], again["sandbox"] != "") == ("answered", 1234, True)
    text.write_text("other")
    assert kilburn("ask", text, "--replay", "--db", db, "--session", "s").status == 2
    assert kilburn("show", "s", "--db", db).status == 0


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, db: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 1234)
    words = ("ask", text, "--db", db, "--session", "s")
    first = '```repl\ngot = llm_query("one")\n```'
    sub = ("--sub-model", model("two"))
    said = kilburn(*words, "--question", "how long?", "--model", model(first), *sub, "--calls", 4)
    assert said.status != 0
    assert "go on with --resume" in said.err
    last = '```repl\nprint(llm_query_batched(["a", "b"]))\nanswer["content"] = got\nanswer["ready"] = True\n```'
    text.write_text("other")
    assert kilburn(*words, "--resume", "--model", model(last)).status == 2
    text.write_text("x" * 1234)
    assert kilburn(*words, "--resume", "--question", "how wide?", "--model", model(last)).status == 2
    said = kilburn(
        *words, "--resume", "--question", "how long?", "--model", model(last), "--sub-model", model("three"), "--parallel", 1
    )
    assert (said.status, said.out) == (0, "two\n"), said.err
    assert "partial: 2 steps, 2 sub-calls" in said.err
    assert "missing: b: the limit of calls is reached" in said.err
    assert kilburn(*words, "--resume", "--model", model()).out == "two\n"
    assert kilburn("fsck", "--db", db).status == 0


def test_two_that_go_on_with_one_run_at_once(tmp_path: Path, db: Path) -> None:
    """One of them answers. The other one has the answer, too, or says in plain words that it went on elsewhere."""
    text = tmp_path / "text.txt"
    text.write_text("x" * 1234)
    words = ["ask", str(text), "--db", str(db), "--session", "s", "--sub-model", model(*"abcdef")]
    assert kilburn(*words, "--question", "how long?", "--model", model('```repl\ngot = llm_query("one")\n```')).status == 1
    slow = '```repl\nimport time\nfor n in range(3):\n    print(llm_query(f"q{n}"))\n    time.sleep(0.1)\n```'
    again = [*words, "--resume", "--json", "--model", model(slow, CODE)]
    both = [
        subprocess.Popen([sys.executable, "-m", "kilburn", *again], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    answered = 0
    for one in both:
        out, err = one.communicate(timeout=600)
        if one.returncode == 0:
            answered += 1
            assert json.loads(out)["content"] == 1234
            continue
        said = json.loads(err.decode().splitlines()[-1])["error"]
        assert (one.returncode, out, said["type"]) == (1, b"", "StoreStale")
        assert "another program went on with the run in 's'" in said["message"]
        assert "wait for its answer" in said["message"] + said["advice"]
        assert b"Traceback" not in err
    assert answered
    assert kilburn(*words, "--resume", "--model", model()).out == "1234\n"
    assert kilburn("fsck", "--db", db).status == 0


def test_folders_and_several_files(tmp_path: Path, db: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    words = ("ask", tmp_path / "a", tmp_path / "b", "--question", "which?", "--model", model(CODE), "--db", db)
    assert kilburn(*words).out == '["a.txt","b.txt"]\n'


def test_the_past(tmp_path: Path, db: Path) -> None:
    code = '```repl\nanswer["content"] = [one["name"] for one in memory.sessions()]\nanswer["ready"] = True\n```'
    kilburn("chat", "monday", "--model", "echo", "--db", db)
    said = kilburn("ask", "--past", "--question", "which?", "--model", model(code), "--db", db)
    assert said.out == '["monday"]\n', said.err


def test_no_answer_is_status_1(tmp_path: Path, db: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    said = kilburn("ask", text, "--question", "?", "--model", model(CODE), "--db", db, "--steps", 0)
    assert (said.status, said.out) == (1, "")
    assert "nothing, the limit of steps was reached" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ("--question", "?", "--model", "echo"),
        ("no-such-file", "--question", "?", "--model", "echo"),
        (".", "--question", "?"),
        (".", "--model", "echo"),
        (".", "--replay", "--session", "none"),
        (".", "--resume", "--session", "none", "--model", "echo"),
        (".", "--resume", "--replay", "--model", "echo"),
        (".", "--resume"),
        (".", "--question", "?", "--model", "echo", "--sandbox", "none"),
        (".", "--question", "?", "--model", "no_such_model"),
    ],
)
def test_arguments_that_cannot_be_used(words: tuple[str, ...], db: Path) -> None:
    said = kilburn("ask", *words, "--db", db)
    assert said.status == 2
    assert said.err.startswith("kilburn: ")


def test_the_measurement_fits_the_screen() -> None:
    words = ("eval", "recursion", "--tokens", 1500, "--judged", 12)
    said = kilburn(*words)
    assert said.status == 0, said.err
    assert max(map(len, said.out.splitlines())) <= 120
    rows = kilburn(*words, "--json").json["rows"]
    assert {row["system"] for row in rows} == {"depth 0", "depth 1", "depth 2", "truncate", "search"}
    assert kilburn("eval", "recursion", "--system", "depth 9").status == 2
