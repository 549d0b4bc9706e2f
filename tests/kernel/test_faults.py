"""A whole session on a disk that fails: what `append` acknowledged is there, exactly, and the laws hold (E4)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from effort import rounds
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import StoreError
from kilburn.testing.faults import FaultVFS
from kilburn.testing.laws import check_laws
from kilburn.testing.policies import trace

RUNS = rounds(60, 120)
POLICIES = ("hybrid", "lru", "summarize", "chain(preprocess, mask, fifo)")


def opened(path: str, policy: str, vfs: FaultVFS | None) -> Store:
    return Store(Sqlite(path, vfs=vfs.name if vfs else None), Budget(400), policy, tokenizer="chars/4")


def stream(path: str, policy: str, vfs: FaultVFS, operation: int, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Stream messages until the disk fails; how many were acknowledged, and how many were tried."""
    acknowledged = tried = 0
    store = opened(path, policy, vfs)
    try:
        session = store.session("s")
        vfs.arm(operation)
        for message in messages:
            tried += 1
            session.append(message)
            acknowledged += 1
            session.render()
    except StoreError:
        check_what_is_known(store, messages[:acknowledged])
    finally:
        vfs.break_down()
        with suppress(StoreError):
            store.close()
        vfs.lose_power()
        vfs.unregister()
    return acknowledged, tried


def check_what_is_known(store: Store, acknowledged: list[dict[str, Any]]) -> None:
    """After an error the session in memory is what it was before."""
    session = store.session("s")
    assert session.window.turn == len(acknowledged)
    assert session.prompts.use <= session.prompts.capacity


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    failures = 0
    for seed in range(RUNS):
        path = str(tmp_path / f"{seed}.db")
        policy = POLICIES[seed % len(POLICIES)]
        messages = list(trace(seed, steps=6))
        vfs = FaultVFS(f"session{seed}", seed=seed, broken=seed % 2 == 0)
        acknowledged, tried = stream(path, policy, vfs, 1 + seed * 3 % 150, messages)
        failures += acknowledged < len(messages)
        with opened(path, policy, None) as store:
            session = store.session("s")
            kept = session.contents.messages()
            assert kept == messages[: len(kept)], "what is there is what was appended, in order"
            assert acknowledged <= len(kept) <= tried, "all that was acknowledged, and nothing that was never tried"
            check_laws(session, kept)
            session.append({"role": "user", "content": "going on after the crash"})
            check_laws(session)
    assert failures > RUNS // 2, "the disk did fail"
