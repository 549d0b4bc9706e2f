"""`kilburn.open(embedder=...)`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kilburn
from kilburn.errors import SpecError, Unavailable
from waiting import until


def test_what_is_stored_is_embedded_in_the_background_and_found_by_meaning(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, embedder="hashing(64)") as store:
        session = store.session("one")
        session.append({"role": "user", "content": "The gardener planted tulips."})
        assert [found.text for found in store.search("tulips and gardeners")] == ["The gardener planted tulips."]
        assert store.backend.vectors.embedders() == ["hashing(64)"]
        session.append({"role": "user", "content": "Nobody searches for this."})
        until(lambda: not store.backend.vectors.unembedded("hashing(64)", 1))
    assert "kilburn-vectors" not in {thread.name for thread in threading.enumerate()}
    with kilburn.open(path) as store:
        assert store.vectors is not None, "what made the store's vectors goes on"
    with kilburn.open(path, embedder=None) as store:
        assert store.vectors is None


def test_without_weights_auto_is_words_alone_and_a_name_is_an_error(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db")) as store:
        assert store.vectors is None
    with pytest.raises(Unavailable, match="models pull minilm"):
        kilburn.open(str(tmp_path / "a.db"), embedder="minilm")
    for wrong in ("nothing", "hashing(1)", "remote()", 7):
        with pytest.raises(SpecError):
            kilburn.open(str(tmp_path / "a.db"), embedder=wrong)
    with pytest.raises(SpecError):
        kilburn.open(str(tmp_path / "a.db"), embedder="os:path", foreign=False)
