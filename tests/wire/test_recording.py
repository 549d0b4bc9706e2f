"""One reader for all recorded runs: the forms, told as messages and as steps, and what it says of what is none."""

from __future__ import annotations

import gzip
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.terminal import TALK, kilburn, program, write_jsonl
from kilburn.cli.archive import gather
from kilburn.errors import InvalidMessage, KilburnError
from kilburn.wire.recording import read_lines, read_runs
from kilburn.wire.trajectory import HeadMessage, Step, Trajectory, trajectory_messages

HEAD = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "The parser drops a line."}]
STEPS = [
    {"thought": "Look.", "action": "ls -F\n", "observation": "parser.py", "response": "Look.\n```\nls -F\n```", "state": "{}"},
    {"thought": "", "action": "cat parser.py", "observation": "", "execution_time": 0.1},
    {"thought": None, "action": None, "observation": None, "response": "I give up."},
]
RUN = Trajectory(
    "r",
    (HeadMessage("system", "You fix bugs."), HeadMessage("user", "The parser drops a line.")),
    (Step("Look.", "ls -F\n", "parser.py"), Step("", "cat parser.py", ""), Step("I give up.", "", "")),
)
DEMO = {"role": "user", "content": "Here is a demonstration", "is_demo": True}
HISTORY = [HEAD[0] | {"agent": "main"}, DEMO, {"role": "assistant", "content": "x", "is_demo": True}, HEAD[1]]
TRAJ = {"environment": "e", "trajectory": STEPS, "history": [*HISTORY, {"role": "assistant", "content": "Look."}], "info": {}}


WORDS = """
    role content messages steps trajectory history head id thought action observation is_demo kilburn session version created
    message state parts time tool_calls tool_call_id type text
"""
KEYS = st.sampled_from(WORDS.split())


def saved(path: Path, value: Any, indent: int | None = None) -> Path:
    text = json.dumps(value, indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(("name", "indent"), [("r.traj", None), ("r.traj.gz", 2), ("r.json", 2)])
def test_a_file_of_swe_agent_is_one_run(tmp_path: Path, name: str, indent: int | None) -> None:
    file = saved(tmp_path / name, TRAJ, indent)
    [run] = read_runs(file)
    assert run.name == "r"
    assert run.trajectory is not None
    assert (run.trajectory.head, run.trajectory.steps) == (RUN.head, RUN.steps)
    assert run.messages == trajectory_messages(RUN)
    assert [message["role"] for message in run.messages] == ["system", "user", *("assistant", "tool") * 2, "assistant"]
    said = kilburn("import", file, "--db", tmp_path / "agent.db", "--json")
    assert [(one["session"], one["pages"]) for one in said.json["sessions"]] == [("r", 8)]
    assert kilburn("replay", file, "--policy", "fifo", "--json").json["total"]["lost"] == 0


def test_every_command_takes_every_form(tmp_path: Path) -> None:
    """What `replay` reads, `import` reads too, as the same runs."""
    db = tmp_path / "agent.db"
    assert kilburn("import", write_jsonl(tmp_path / "talk.jsonl", TALK), "--db", db).status == 0
    assert kilburn("export", "--db", db, "--out", tmp_path / "export.jsonl").status == 0
    steps = {"head": HEAD, "steps": STEPS}
    forms = {
        "talk.jsonl": ["talk"],
        "export.jsonl": ["talk"],
        saved(tmp_path / "r.traj", TRAJ, 2).name: ["r"],
        write_jsonl(tmp_path / "runs.jsonl", [{"messages": TALK}, {"messages": TALK, "id": "b"}]).name: ["runs:1", "b"],
        write_jsonl(tmp_path / "steps.jsonl", [steps | {"id": "s"}, steps | {"id": "s"}, steps]).name: ["s", "s#2", "steps:3"],
        write_jsonl(tmp_path / "mixed.jsonl", [steps | {"id": "x"}, *TALK, steps | {"id": "y"}]).name: ["x", "mixed", "y"],
    }
    for name, runs in forms.items():
        file = tmp_path / name
        assert {run.name for run in read_runs(file)} == set(runs)
        made = kilburn("import", file, "--db", tmp_path / f"{name}.db", "--json")
        assert [one["session"] for one in made.json["sessions"]] == runs, made.err
        replayed = kilburn("replay", file, "--policy", "fifo", "--window", 500, "--json")
        assert replayed.status == 0, replayed.err
        assert len(replayed.json["runs"]) == len(runs)
    assert "--session" in kilburn("import", tmp_path / "runs.jsonl", "--session", "one", "--db", tmp_path / "one.db").err


def test_a_pipe_is_read_too(tmp_path: Path) -> None:
    text = "".join(json.dumps(message) + "\n" for message in TALK).encode()
    for sent in (text, gzip.compress(text)):
        said = program("replay", "/dev/stdin", "--policy", "fifo", "--json", folder=tmp_path, given=sent)
        assert said.json["total"]["messages"] == len(TALK)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"id": "a", "steps": [{"thought": 1}]}', "bad.jsonl:1: Expected `str | null`, got `int` - at `$.steps[0].thought`"),
        (b'{"id": "a", "steps": [{"tool": "x", "output": "y"}]}', r"bad.jsonl:1: steps[0] has no thought, action or observation"),
        (b'{"trajectory": [{"action": "ls"}, "x"]}', "bad.jsonl:1: Expected `object`, got `str`"),
        (b'{"trajectory": [], "history": [{"role": "user", "content": 7}]}', "bad.jsonl:1: a message of the head has a int"),
        (b'{"a": 1}', "bad.jsonl:1: neither a message nor a run; its keys are 'a'"),
        (b'[{"role": "user", "content": "x"}]', "jq -c '.[]'"),
        (b'{"role": "user",\n"content": "x"\n', "bad.jsonl:1: not JSON"),
        (b'{"role": "user", "content": "x"}\n{"role": "user",\n', "bad.jsonl:2: not JSON"),
        (b'{"messages": [1]}', "bad.jsonl:1: messages is no list of objects"),
        (b"{" * 100_000, "bad.jsonl:1: n"),
    ],
)
def test_what_is_no_run_is_said_alike_by_all(tmp_path: Path, content: bytes, says: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    with pytest.raises(InvalidMessage) as by_replay:
        list(read_runs(bad))
    with pytest.raises(InvalidMessage) as by_import:
        gather(read_lines(bad), "bad")
    assert by_replay.value.what == by_import.value.what
    assert says in str(by_import.value)
    assert by_import.value.advice


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(KEYS, JSON, min_size=1, max_size=4), min_size=1, max_size=3), st.sampled_from([None, 1]))
def test_whatever_stands_in_a_file_is_a_run_or_a_typed_error(values: list[dict[str, Any]], indent: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any.jsonl"
        file.write_text("\n".join(json.dumps(value, indent=indent) for value in values), encoding="utf-8")
        for reader in (read_runs, lambda path: gather(read_lines(path), "any")):
            with suppress(KilburnError):
                assert all(run is not None for run in reader(file))
