"""`ask` from the shell: what it does is tested with the recursive model itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import kilburn, program
from kilburn.errors import SandboxRefused
from kilburn.recursion.sandbox import open_sandbox
from kilburn.testing.upstream import Refusal, Sent, Upstream, calling, serving

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
    assert "continue it with --resume" in said.err
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


def test_a_text_from_standard_input(tmp_path: Path) -> None:
    code = '```repl\nanswer["content"] = [type(context).__name__, len(context), context[:3], context[-3:]]'
    code += '\nanswer["ready"] = True\n```'
    words = ("ask", "-", "--question", "?", "--model", model(code), "--db", "a.db")
    large = b"abc" + b"x" * 3_000_000 + "zwölf".encode() + b"\xff"
    said = program(*words, folder=tmp_path, given=large)
    assert (said.status, said.json) == (0, ["str", 3_000_009, "abc", "lf\ufffd"]), said.err
    again = program("ask", "-", "--replay", "--db", "a.db", folder=tmp_path, given=large)
    assert again.json == said.json, again.err
    assert "not the text" in program("ask", "-", "--replay", "--db", "a.db", folder=tmp_path, given=b"other").err


def test_standard_input_stands_beside_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("of a file")
    code = '```repl\nanswer["content"] = context\nanswer["ready"] = True\n```'
    said = program("ask", "a.txt", "-", "--question", "?", "--model", model(code), folder=tmp_path, given=b"of a pipe")
    assert said.json == {"-": "of a pipe", "a.txt": "of a file"}, said.err


@pytest.mark.parametrize(("files", "word"), [(("-",), "is empty"), (("-", "-"), "named twice")])
def test_a_standard_input_that_gives_nothing(tmp_path: Path, files: tuple[str, ...], word: str) -> None:
    said = program("ask", *files, "--question", "?", "--model", model(CODE), folder=tmp_path)
    assert (said.status, said.out) == (2, "")
    assert word in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "agent.db").exists()


@pytest.mark.parametrize(
    ("opens", "word"), [("<&-", "is closed"), ("</dev/zero", "more than"), ("0>out", "standard input: Bad file descriptor")]
)
def test_a_standard_input_that_is_none(tmp_path: Path, opens: str, word: str) -> None:
    command = f'exec "$0" -m kilburn ask - --question "?" --model "$1" {opens}'
    done = subprocess.run(["sh", "-c", command, sys.executable, model(CODE)], cwd=tmp_path, capture_output=True, check=False)
    said = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b""), said
    assert word in said
    assert "Traceback" not in said


def test_a_terminal_is_not_waited_for(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        words = [sys.executable, "-m", "kilburn", "ask", "-", "--question", "?", "--model", model(CODE)]
        done = subprocess.run(words, cwd=tmp_path, stdin=theirs, capture_output=True, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert b"standard input is a terminal" in done.stderr


def test_limits_are_there_and_can_be_left_out(tmp_path: Path, db: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    loop = "```repl\nn = 0\nfor i in range(20):\n    try:\n        llm_query(str(i))\n        n += 1\n"
    loop += "    except Exception:\n        pass\n"
    answer = loop + 'answer["content"] = n\nanswer["ready"] = True\n```'
    words = ("ask", text, "--question", "?", "--model", model(answer), "--sub-model", "echo", "--db", db)
    assert kilburn(*words, "--session", "usual").out == "20\n"
    limited = kilburn(*words, "--session", "few", "--calls", 10)
    assert limited.out == "8\n"
    assert "missing: 8: the limit of calls is reached (and 11 more)" in limited.err
    assert kilburn(*words, "--session", "none", "--no-limits").out == "20\n"
    assert kilburn(*words, "--session", "one", "--no-limits", "--calls", 10).out == "8\n"
    said = kilburn(*words, "--session", "mad", "--seconds", "nan")
    assert said.status == 2
    assert "seconds" in said.err
    shown = " ".join(kilburn("ask", "--help").out.split())
    for most in ("10,000", "20,000,000", "21,600"):
        assert most in shown


def test_a_run_that_a_limit_ended_goes_on_when_it_is_higher(tmp_path: Path, db: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 12)
    words = ("ask", text, "--db", db)
    assert kilburn(*words, "--question", "?", "--model", model(CODE), "--steps", 0).status == 1
    assert kilburn(*words, "--resume", "--model", model(CODE)).status == 1
    said = kilburn(*words, "--resume", "--model", model(CODE), "--steps", 5)
    assert (said.status, said.out) == (0, "12\n"), said.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--model", "echo"), "there is no question: give --question TEXT"),
        (("--question", "?"), "there is no model that writes the code: set OPENAI_API_KEY"),
        (("--resume",), "there is no model that writes the code: set OPENAI_API_KEY"),
        (("--question", "?", "--model", "none"), "there is no model that writes the code: set OPENAI_API_KEY"),
        (("--question", "?", "--model", "smollm2"), "smollm2 has 135 million parameters, too few to write code: set OPENAI"),
    ],
)
def test_an_error_says_what_is_missing(words: tuple[str, ...], what: str, db: Path) -> None:
    said = kilburn("ask", ".", *words, "--db", db)
    assert said.status == 2
    assert said.err.startswith(f"kilburn: {what}")
    assert not db.exists()


@pytest.mark.parametrize("refuses", [True, False])
def test_without_a_model_the_server_of_this_machine_writes_the_code_with_tools_or_without(
    refuses: bool, tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(sent: Sent) -> Any:
        if sent.body.get("tools") and refuses:
            return Refusal(words="registry.ollama.ai/library/gemma:2b does not support tools")
        return CODE if refuses else calling(("repl", {"code": CODE.removeprefix("```repl\n").removesuffix("\n```")}))

    text = tmp_path / "text.txt"
    text.write_text("x" * 1234)
    upstream = Upstream(otherwise=reply)
    with serving(upstream) as url:
        monkeypatch.setenv("KILBURN_MODEL_SERVERS", f"{url}/v1")
        said = kilburn("ask", text, "--question", "how long?", "--db", db)
    assert (said.status, said.out) == (0, "1234\n"), said.err
    assert said.err.startswith(f"scripted answers, because the server at {url}/v1 has it; choose another model with --model\n")
    assert [sent.status for sent in upstream.prompts] == ([400, 200] if refuses else [200])


def test_a_file_with_a_small_model_is_refused_too(weights: Path, tmp_path: Path) -> None:
    small = tmp_path / "other.gguf"
    small.symlink_to(weights)
    said = kilburn("ask", ".", "--question", "?", "--model", small)
    assert said.status == 2
    assert "other has 135 million parameters, too few to write code" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ("--question", "?", "--model", "echo"),
        ("no-such-file", "--question", "?", "--model", "echo"),
        ("/dev/zero", "--question", "?", "--model", "echo"),
        (".", "--replay", "--session", "none"),
        (".", "--resume", "--session", "none", "--model", "echo"),
        (".", "--resume", "--replay", "--model", "echo"),
        (".", "--question", "?", "--model", "echo", "--sandbox", "none"),
        (".", "--question", "?", "--model", "no_such_model"),
    ],
)
def test_arguments_that_cannot_be_used(words: tuple[str, ...], db: Path) -> None:
    said = kilburn("ask", *words, "--db", db)
    assert said.status == 2
    assert said.err.startswith("kilburn: ")
