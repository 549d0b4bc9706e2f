from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn
from kilburn.errors import InvalidMessage
from kilburn.wire.trajectory import HeadMessage, Step, Trajectory, trajectory_messages
from kilburn_lab.evals.references import references
from kilburn_lab.evals.trajectories import read, synthetic, trajectory_of


def written(folder: Path, lines: list[bytes], *, packed: bool = False) -> Path:
    file = folder / "runs.jsonl"
    data = b"\n".join(lines)
    file.write_bytes(gzip.compress(data) if packed else data)
    return file


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_written_is_read(tmp_path: Path, packed: bool) -> None:
    runs = list(synthetic(3, seed=1))
    assert list(read(written(tmp_path, [msgspec.json.encode(run) for run in runs], packed=packed))) == runs


def test_every_form_of_a_run_is_read_and_measured(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I look."}]
    steps = {"head": [{"role": "user", "content": "x"}], "steps": [{"thought": "Look.", "action": "ls", "observation": "a.py"}]}
    forms: dict[str, tuple[list[object], list[str]]] = {
        "talk.jsonl": (list(talk), ["talk"]),
        "runs.jsonl": ([{"messages": talk}, {"messages": talk, "id": "b"}], ["runs:1", "b"]),
        "steps.jsonl": ([steps | {"id": "s"}, steps | {"id": "s"}, *talk, steps], ["s", "s#2", "steps", "steps:5"]),
    }
    for name, (lines, ids) in forms.items():
        (tmp_path / name).write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        assert {run.id for run in read(tmp_path / name)} == set(ids)
    measured = kilburn("lab", "paging", "--data", tmp_path, "--policy", "fifo", "--window", 500, "--json")
    assert measured.json["runs"] == sum(len(ids) for _, ids in forms.values())


@pytest.mark.parametrize(
    "bad", [b"{", b"[]", b'{"id": 1, "head": [], "steps": []}', b'{"id": "a", "head": []}', b"\xff", b"[" * 5000]
)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes) -> None:
    good = msgspec.json.encode(Trajectory("a", (), ()))
    with pytest.raises(InvalidMessage, match=":3: "):
        list(read(written(tmp_path, [good, b"", bad])))


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    whole = written(tmp_path, [msgspec.json.encode(run) for run in synthetic(20, seed=1)], packed=True)
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(InvalidMessage, match="broken gzip"):
        list(read(whole))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="nowhere"):
        list(read(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InvalidMessage, match="below"):
        list(read(tmp_path))


def test_made_up_runs_follow_the_seed_and_hold_references() -> None:
    assert list(synthetic(4, seed=7)) == list(synthetic(4, seed=7))
    assert list(synthetic(4, seed=7)) != list(synthetic(4, seed=8))
    runs = list(synthetic(20, seed=7))
    assert sum(len(references(run)) for run in runs) > len(runs)


def test_fields_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    line = {"id": "a", "head": [{"role": "user", "content": "x", "more": 1}], "steps": [], "score": 3}
    assert next(read(written(tmp_path, [json.dumps(line).encode()]))).head[0].content == "x"


HEAD = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "The parser drops a line."}]
RUN = Trajectory(
    "r",
    (HeadMessage("system", "You fix bugs."), HeadMessage("user", "The parser drops a line.")),
    (Step("Look.", "ls -F\n", "parser.py"), Step("", "cat parser.py", ""), Step("I give up.", "", "")),
)


def test_messages_are_told_as_steps() -> None:
    call = {"name": "edit", "arguments": '{"path": "a.py", "lines": [1, 2]}'}
    shell = {"name": "bash", "arguments": '{"command": "ls"}'}
    odd = {"name": "say", "arguments": "not JSON"}
    calls = [{"id": str(number), "type": "function", "function": one} for number, one in enumerate((call, shell, odd))]
    told = [
        *HEAD,
        {"role": "assistant", "content": "I edit.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": str(number), "content": f"done {number}"} for number in (1, 0, 2)),
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "It works."},
        {"role": "user", "content": "Are you sure?"},
        {"role": "user", "content": "Please look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "9", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "9", "content": "yes"}, {"type": "text", "text": "Thanks."}],
        },
    ]
    assert trajectory_of("r", told).head == RUN.head
    assert trajectory_of("r", told).steps == (
        Step("I edit.", "edit a.py [1,2]", "done 0"),
        Step("", "ls", "done 1"),
        Step("", "say not JSON", "done 2"),
        Step("", "", "And now?", user=True),
        Step("", "It works.", "Are you sure?"),
        Step("", "", "Please look.", user=True),
        Step("", "look", "yes"),
        Step("", "", "Thanks.", user=True),
    )


def test_steps_told_as_messages_are_the_same_steps() -> None:
    run = Trajectory("r", RUN.head, (*RUN.steps[:2], Step("", "", "Go on.", user=True), Step("More.", "ls", "x")))
    assert trajectory_of("r", trajectory_messages(run)) == run


def test_a_result_without_its_call_is_no_step() -> None:
    with pytest.raises(InvalidMessage, match="r: message 2: a result whose call 'c9' is not before it"):
        trajectory_of("r", [HEAD[0], {"role": "tool", "tool_call_id": "c9", "content": "x"}])
    with pytest.raises(InvalidMessage, match="r: message 1: "):
        trajectory_of("r", [{"role": "wizard", "content": "x"}])
