"""The migration of 40 files by branches, in a real Git repository, through a provider that fails inside a branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.errors import Unavailable
from kilburn.model import Request
from kilburn.testing import check_laws
from migration import TASK, Mover, Repository, agent_for


class Failing:
    """A mover whose provider fails at some of its calls."""

    def __init__(self, at: set[int]) -> None:
        self.mover, self.at, self.asked = Mover(branches=True), at, 0

    def __call__(self, request: Request) -> Any:
        self.asked += 1
        return Unavailable("the provider is down") if self.asked in self.at else self.mover(request)


@pytest.mark.slow
def test_forty_files_are_migrated_by_branches_through_crashes(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "work", files=40, lines=12)
    path, window = str(tmp_path / "a.db"), 8000
    script = Failing({5, 77, 200})
    for text in (TASK, None, None):
        with kilburn.open(path, window=window, policy="hybrid", tokenizer="chars/4") as store:
            session = store.session("main")
            with pytest.raises(Unavailable):
                agent_for(repository, session, "history", script).run(text)
    with kilburn.open(path, window=window, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("main")
        assert agent_for(repository, session, "history", script).run().text == "It is done."
        assert (repository.moved(), repository.right()) == (40, 40)
        assert len(session.branches.children()) == 40, "a crash begins no branch twice"
        assert session.stats().peak < 5000
        # What a branch read is in no prompt of the main line, and can be read.
        assert not any("notes on module" in str(message) for message in session.render())
        assert session.search("notes on module mod_07")[0].session == "main/b8"
        check_laws(session)
