from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn
from kilburn.errors import InvalidMessage
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.references import references
from kilburn_lab.evals.trajectories import read, synthetic


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
