"""The anchor of a store in PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kilburn.backend import Batch
from kilburn.backends.anchor import Anchor
from kilburn.backends.places import canonical_name
from kilburn.errors import StoreCorrupt
from kilburn.event import Act, Event


def test_a_database_that_is_older_than_its_anchor_is_refused(url: str, tmp_path: Path) -> None:
    file = tmp_path / "anchor"
    file.touch()
    for text in ("one", "two"):
        with kilburn.open(url, tokenizer="chars/4", embedder=None, anchor=file) as store:
            store.session("s").append([{"role": "user", "content": text}])
            store.memory("ana").remember(text)
            number = store.session("s").number
            assert Anchor(str(file), canonical_name(url), "default").findings(store.backend) == []
    # As if one more had been committed, and a backup been restored.
    event = Event(number=1000, act=Act.NOTE, time=1.0)
    Anchor(str(file), canonical_name(url), "default").note(number, Batch(head=999, events=[event]))
    with pytest.raises(StoreCorrupt, match=r"'s' has \d+ events, and the anchor has 1000"):
        kilburn.open(url, tokenizer="chars/4", embedder=None, anchor=file)
