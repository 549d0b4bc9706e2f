"""Files and exports that the last Kilburn of format 4 wrote: opened, converted, and the same as before."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import apsw
import pytest

import kilburn
from backends.format4.make import snapshot
from cli.terminal import kilburn as run_cli

HERE = Path(__file__).parent / "format4"


@pytest.fixture
def wanted() -> dict[str, Any]:
    return json.loads(gzip.decompress((HERE / "wanted.json.gz").read_bytes()))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    path.write_bytes(gzip.decompress((HERE / "store.db.gz").read_bytes()))
    return path


def test_an_older_file_is_read_as_it_is(store: Path, wanted: dict[str, Any]) -> None:
    before = store.read_bytes()
    assert json.loads(json.dumps(snapshot(str(store)))) == wanted
    assert run_cli("fsck", "--db", str(store)).status == 0
    assert store.read_bytes() == before


def test_an_older_file_is_converted_when_it_is_written(store: Path, wanted: dict[str, Any]) -> None:
    with kilburn.open(str(store), window=700, policy="hybrid", tokenizer="chars/4") as opened:
        assert "work" in [info.name for info in opened.sessions()]
    assert json.loads(json.dumps(snapshot(str(store)))) == wanted
    found = run_cli("fsck", "--db", str(store))
    assert (found.status, "all is well" in found.out + found.err) == (0, True)
    spliced = apsw.Connection(str(store)).execute("SELECT count(*) FROM content WHERE codec = 2").fetchall()
    assert spliced[0][0] > 0, "no excerpt was stored as pieces"


def test_work_goes_on_in_a_converted_file(store: Path) -> None:
    with kilburn.open(str(store), window=700, policy="hybrid", tokenizer="chars/4") as opened:
        work = opened.session("work")
        call = {"id": "c5", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        with pytest.raises(kilburn.KilburnError, match="used before"):
            work.append({"role": "assistant", "content": None, "tool_calls": [call]})
        work.append({"role": "user", "content": "go on"})
        gone = work.forget("p5")
        assert "p5" in gone
        assert work.branches.open("b1").window.at(5) == "dropped"
    assert run_cli("fsck", "--db", str(store)).status == 0


def test_an_older_export_is_imported(tmp_path: Path, wanted: dict[str, Any]) -> None:
    export, made = tmp_path / "export.jsonl", tmp_path / "made.db"
    export.write_bytes(gzip.decompress((HERE / "export.jsonl.gz").read_bytes()))
    assert run_cli("import", str(export), "--db", str(made)).status == 0
    with kilburn.open(str(made)) as opened:
        assert opened.session("talk").messages() == wanted["talk"]["messages"]
