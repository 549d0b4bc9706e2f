"""Names of sessions and tenants: what is no name is refused where it is given, and nothing is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import SpecError

WRONG: list[Any] = [True, 0, 1, 1.5, None, b"a", ["a"], "", " \t\n", "a\ud800", "\udfff", "a\0b", "n" * 501]


@pytest.mark.parametrize("name", WRONG, ids=ascii)
def test_what_is_no_name_is_a_typed_error_and_makes_nothing(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "agent.db"
    with pytest.raises(SpecError, match="tenant"):
        kilburn.open(str(path), tenant=name)
    with pytest.raises(SpecError):
        Sqlite(":memory:", tenant=name)
    assert not path.exists()
    with kilburn.open(str(path), policy="fifo") as store:
        with pytest.raises(SpecError, match=r"session|name="):
            store.session(name)
        assert store.sessions() == []
        store.session("a").append({"role": "user", "content": "x"})


@pytest.mark.parametrize(
    "name", ["a", " a ", "n" * 500, "ä\u202e", "a\nb", "\x1b[31m", "'; DROP TABLE page; --", "../..", "\U0001f600"]
)
def test_any_other_text_is_a_name(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "agent.db")
    with kilburn.open(path, tenant=name, policy="fifo") as store:
        store.session(name).append({"role": "user", "content": name})
    with kilburn.open(path, tenant=name, policy="fifo", readonly=True) as store:
        assert [info.name for info in store.sessions()] == [name]
        assert store.session(name).recall("p1") == name
