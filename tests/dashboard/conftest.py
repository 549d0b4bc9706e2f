"""A store that many tests look at, and the application over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard.made import agents, make
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.errors import SandboxRefused
from kilburn.recursion.sandbox import open_sandbox


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `dashboard.made`; nobody writes to it."""
    return make(tmp_path_factory.mktemp("dashboard") / "agent.db")


@pytest.fixture
def app(made: Path) -> Iterator[Any]:
    with Sqlite(made, readonly=True) as backend:
        yield build(backend)


@pytest.fixture(scope="session")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `dashboard.made.agents`; nobody writes to it. Skipped where code has no sandbox."""
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))
    return agents(tmp_path_factory.mktemp("agents") / "agent.db")
