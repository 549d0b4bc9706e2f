"""A database of an older Kilburn is read as it is, and brought up to date by who first opens it for writing."""

from __future__ import annotations

import psycopg
import pytest

from kilburn.backends.postgres import schema
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreVersion
from kilburn.testing.stores import batch_of, start

UNDONE = """
ALTER TABLE kilburn.posting RENAME TO packed;
ALTER INDEX kilburn.posting_pkey RENAME TO packed_pkey;
CREATE TABLE kilburn.posting(
    tenant bigint NOT NULL, word bytea NOT NULL, entry bigint NOT NULL, PRIMARY KEY(tenant, word, entry)
);
INSERT INTO kilburn.posting
    SELECT tenant, word, (block << 12) | (get_byte(lows, at) << 7) | (get_byte(lows, at + 1) & 127)
    FROM kilburn.packed, generate_series(0, length(lows) - 2, 2) AS at;
DROP TABLE kilburn.packed;
ALTER TABLE kilburn.posting ENABLE ROW LEVEL SECURITY;
ALTER TABLE kilburn.posting FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON kilburn.posting
    USING (tenant = (SELECT nullif(current_setting('kilburn.tenant', true), '')::bigint));
GRANT SELECT, INSERT, UPDATE, DELETE ON kilburn.posting TO kilburn_rows;
DROP FUNCTION kilburn.take;
DROP TABLE kilburn.wiped, kilburn.key, kilburn.allowance, kilburn.running, kilburn.setting, kilburn.stray;
DROP TRIGGER content_gone ON kilburn.content;
DROP TRIGGER content_warm ON kilburn.content;
DROP FUNCTION kilburn.leave_object;
DROP INDEX kilburn.content_cold;
UPDATE kilburn.version SET number = 1;
"""
"""Takes back all migrations but the first."""


def test_a_database_without_settings_gets_them(url: str) -> None:
    with Postgres(url) as backend:
        backend.commit(start(backend), batch_of(0, {1: "kept from before"}))
    with psycopg.connect(url) as connection:
        connection.execute(UNDONE)
    with Postgres(url, readonly=True) as reader:
        assert reader.settings() == {}
        assert reader.cold() == {}
        assert reader.scrub() == []
        assert reader.unreached() == ()
        assert [hit.page for hit in reader.search("before")] == [1]
        assert [[hit.page for hit in hits] for hits in reader.newest(1, [("kept before", "from")])] == [[1]]
        assert reader.findings() == []
    with Postgres(url) as backend:
        assert backend.findings() == []
        backend.keep_setting("one", "1")
        assert [hit.page for hit in backend.search("before")] == [1]
        assert backend.settings() == {"one": "1"}
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT number FROM kilburn.version").fetchone() == (len(schema.MIGRATIONS),)


def test_a_newer_one_is_refused(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE kilburn.version SET number = 77")
    for readonly in (False, True):
        with pytest.raises(StoreVersion, match="format 77"):
            Postgres(url, readonly=readonly)


def test_a_damaged_setting_is_left_out(url: str) -> None:
    with Postgres(url) as backend:
        backend.keep_setting("one", "1")
        backend.keep_setting("two", "2")
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE kilburn.setting SET value = 'x' WHERE name = 'one'")
        assert backend.settings() == {"two": "2"}
