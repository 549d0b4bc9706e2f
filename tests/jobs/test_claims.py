"""Claims: one worker has a job, a dead one not for long, and what fails rests longer each time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreReadOnly, Unavailable
from kilburn.jobs.claims import FAILED, MAX_PAUSE, JobName, kept, named, pause_after, renewing, take, try_again

JOB = JobName("learn", 7)


class Timed(Sqlite):
    """A store whose clock a test sets."""

    time = 1000.0

    def now(self) -> float:
        """What the test says."""
        return self.time


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Timed]:
    with Timed(tmp_path / "a.db") as made:
        yield made


def test_one_has_it_until_it_is_done(backend: Timed) -> None:
    first = take(backend, JOB)
    assert first is not None
    assert take(backend, JOB) is None
    assert take(backend, JobName("learn", 8)) is not None
    first.done()
    assert JOB not in kept(backend)
    assert take(backend, JOB) is not None


def test_of_many_at_once_one_has_it(backend: Timed) -> None:
    had: list[object] = []
    threads = [threading.Thread(target=lambda: had.append(take(backend, JOB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([claim for claim in had if claim is not None]) == 1


def test_a_claim_that_ran_out_is_lost_and_changes_nothing_more(backend: Timed) -> None:
    slow = take(backend, JOB, lease=60.0)
    assert slow is not None
    assert slow.renew()
    backend.time += 61.0
    other = take(backend, JOB, lease=60.0)
    assert other is not None
    assert not slow.renew()
    assert slow.lost
    for late in (slow.done, slow.give_back, lambda: slow.failed("late")):
        late()
        assert kept(backend)[JOB].holder
    assert other.renew()
    other.done()
    assert kept(backend) == {}


def test_what_fails_rests_longer_each_time_and_is_never_lost(backend: Timed) -> None:
    pauses = []
    for tries in range(1, FAILED + 4):
        claim = take(backend, JOB)
        assert claim is not None
        assert claim.tries == tries
        claim.failed("Unavailable")
        entry = kept(backend)[JOB]
        assert (entry.tries, entry.error, entry.holder) == (tries, "Unavailable", "")
        pauses.append(entry.until - backend.time)
        assert take(backend, JOB) is None
        backend.time = entry.until
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1], pause_after(10**6)) == (10.0, MAX_PAUSE, MAX_PAUSE)


def test_what_kills_its_workers_rests_too(backend: Timed) -> None:
    for _ in range(2):
        assert take(backend, JOB, lease=60.0) is not None
        backend.time += 61.0
    assert take(backend, JOB, lease=60.0) is None
    assert kept(backend)[JOB].error == "its worker was killed"
    backend.time += 10.0
    again = take(backend, JOB)
    assert again is not None
    assert again.tries == 3


def test_what_is_given_back_is_as_it_was(backend: Timed) -> None:
    claim = take(backend, JOB)
    assert claim is not None
    claim.give_back()
    assert kept(backend) == {}
    failed = take(backend, JOB)
    assert failed is not None
    failed.failed("Unavailable")
    backend.time += 10.0
    claim = take(backend, JOB)
    assert claim is not None
    claim.give_back()
    assert (kept(backend)[JOB].tries, kept(backend)[JOB].error) == (1, "Unavailable")
    assert take(backend, JOB) is not None


def test_what_failed_may_be_tried_at_once(backend: Timed) -> None:
    at_work, failed = take(backend, JobName("embed")), take(backend, JOB)
    assert at_work is not None
    assert failed is not None
    failed.failed("Unavailable")
    assert try_again(backend) == 1
    again = take(backend, JOB)
    assert again is not None
    assert again.tries == 2
    assert take(backend, JobName("embed")) is None


def test_what_another_version_wrote_is_taken_over(backend: Timed) -> None:
    backend.settings.put(JOB.name, "{nothing that is known}")
    backend.settings.put("job of another kind", "x")
    assert list(kept(backend)) == [JOB]
    assert take(backend, JOB) is not None


def test_a_claim_is_renewed_while_it_lasts(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "b.db") as backend:
        claim = take(backend, JOB, lease=0.3)
        assert claim is not None
        first = kept(backend)[JOB].until
        with renewing(claim):
            while kept(backend)[JOB].until == first:
                threading.Event().wait(0.01)
        claim.done()
        assert kept(backend) == {}


def test_a_store_that_is_only_read_gives_no_claim(backend: Timed) -> None:
    with Sqlite(backend.path, readonly=True) as reader, pytest.raises(StoreReadOnly):
        take(reader, JOB)


def test_an_error_is_named_without_its_words() -> None:
    assert named(ValueError("the secret is heliotrope")) == "ValueError"
    assert named(Unavailable("heliotrope", advice="start it")) == "Unavailable: start it"
