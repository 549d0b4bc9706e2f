"""URLs of PostgreSQL: what is one, what is not, and that no message repeats a password."""

from __future__ import annotations

import traceback

import pytest

import kilburn
from cli.terminal import kilburn as run
from kilburn.backends.postgres.connection import CONNECTIONS, checked_url, split_connections
from kilburn.errors import SpecError


@pytest.mark.parametrize("url", ["postgresql://[", "postgresql://host/x?nonsense=1"])
def test_no_url_is_no_url(url: str) -> None:
    with pytest.raises(SpecError, match="write postgresql://"):
        kilburn.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2/x@host/db",
        "postgresql://me:4711/hunter2@host/db",
        "postgresql://me:1@hunter2@host/db",
        "postgresql://me:%hunter2@host/db",
        "postgresql://me:hun ter2@host/db",
        "postgresql://me:47/hunter2?x@host/db",
        "postgresql://host/db?hunter2=1",
    ],
)
def test_a_password_that_is_not_encoded_is_not_taken_for_something_else(url: str) -> None:
    with pytest.raises(SpecError, match="%40 for @") as caught:
        kilburn.open(url)
    said = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in said.replace(f'kilburn.open("{url}")', "")
    done = run("ps", "--db", url)
    assert (done.status, "hun" in done.out + done.err) == (2, False)


@pytest.mark.parametrize(
    "url", ["postgresql://", "postgresql://a@[::1]:5432,host:1/db", "postgresql://a:p%40%2F@h/db?options=-c%20a%3Db"]
)
def test_these_are_urls(url: str) -> None:
    assert "client_encoding" in checked_url(url)


def test_connections_are_ours_and_the_rest_is_libpqs() -> None:
    for given, kept, number in (
        ("postgresql://h/d", "postgresql://h/d", CONNECTIONS),
        ("postgresql://h/d?connections=3", "postgresql://h/d", 3),
        ("postgresql://h/d?a=1&connections=3&b=2", "postgresql://h/d?a=1&b=2", 3),
        ("postgresql://h/d?a=1", "postgresql://h/d?a=1", CONNECTIONS),
    ):
        assert split_connections(given) == (kept, number)
    for wrong in ("0", "-1", "x", "", "1e9", "100000"):
        with pytest.raises(SpecError):
            split_connections(f"postgresql://h/d?connections={wrong}")
