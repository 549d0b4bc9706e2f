"""A small library: a few real modules of the running interpreter, copied where a test may change them."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

MODULES = ("bisect.py", "shlex.py", "string.py", "textwrap.py", "json")


def copied(into: Path) -> Path:
    """The modules below a folder."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    into.mkdir(parents=True)
    for name in MODULES:
        if (stdlib / name).is_dir():
            shutil.copytree(stdlib / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(stdlib / name, into / name)
    return into


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of one test's own."""
    return copied(tmp_path / "library")


@pytest.fixture(scope="session")
def shared_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for tests that only read."""
    return copied(tmp_path_factory.mktemp("shared") / "library")
