"""Random forgettings over PostgreSQL, by users with and without rights, beside readers, locks and programs that are killed.

The judge reads the files of the database. A forgetting that the store calls done has left no byte there; one that could not be
done is in `kilburn.erasure`, and the receipt says so.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from effort import rounds
from kilburn.backend import Batch
from kilburn.backends.codec import digest_bytes
from kilburn.backends.postgres.erasing import WORDS
from kilburn.backends.postgres.parts import findings_in
from kilburn.backends.postgres.schema import MAINTAINS
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreError
from kilburn.testing.stores import batch_of, start

pytestmark = pytest.mark.slow

LETTERS = "ghjkmpqvwxz"
"""No stemmer shortens words of these."""

TENANTS = ("t0", "t1")
STEPS = 40
PATIENCE = 0.1


class Erasures:
    """A database with two tenants, and what was forgotten there."""

    def __init__(
        self, seed: int, server: OwnServer, urls: dict[str, str], operator: psycopg.Connection[Any], give_tables: LiteralString
    ) -> None:
        self.give_tables = give_tables
        self.chance = random.Random(seed)
        self.server, self.operator = server, operator
        self.urls = urls
        self.heads: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.pages: dict[str, dict[int, str]] = {tenant: {} for tenant in TENANTS}
        self.forgotten: dict[str, set[bytes]] = {tenant: set() for tenant in TENANTS}
        self.stores: dict[str, Postgres] = {}
        self.others = ExitStack()

    def store(self, tenant: str) -> Postgres:
        if tenant not in self.stores:
            user = self.chance.choice(["owner", "gateway", "gateway"])
            self.stores[tenant] = Postgres(self.urls[user], tenant=tenant, busy_timeout=PATIENCE)
        return self.stores[tenant]

    def append(self, tenant: str) -> None:
        store, first = self.store(tenant), len(self.pages[tenant]) + 1
        texts = {}
        for number in range(first, first + self.chance.randint(1, 4)):
            words = ["".join(self.chance.choices(LETTERS, k=12)) for _ in range(self.chance.choice([1, 5, 60]))]
            texts[number] = " ".join(words)
        store.commit(start(store), batch_of(self.heads[tenant], texts))
        self.heads[tenant] += 1
        self.pages[tenant] |= texts

    def forget(self, tenant: str) -> None:
        there = [number for number, text in self.pages[tenant].items() if text]
        if not there:
            return
        store, gone = self.store(tenant), self.chance.sample(there, self.chance.randint(1, min(3, len(there))))
        for number in gone:
            text = self.pages[tenant][number]
            self.forgotten[tenant].update(word.encode() for word in text.split())
            self.forgotten[tenant].add(digest_bytes(batch_of(0, {1: text}).pages[0].digest))
            self.pages[tenant][number] = ""
        if self.chance.random() < 0.2:
            # A program that is killed before it wipes.
            store.erasing().__enter__()
            store.commit(start(store), Batch(head=self.heads[tenant], erase=gone))
            self.stores.pop(tenant).close()
        else:
            store.commit(start(store), Batch(head=self.heads[tenant], erase=gone))

    def wipe(self, tenant: str) -> None:
        with suppress(StoreError):
            self.store(tenant).wipe()

    def close(self, tenant: str) -> None:
        if tenant in self.stores:
            self.stores.pop(tenant).close()

    def turn_rights(self, tenant: str) -> None:
        """All tables, none, or all but one may be vacuumed by the gateway's user."""
        self.others.close()
        how = self.chance.choice(["all", "none", "but one"])
        self.operator.execute("REASSIGN OWNED BY gateway TO postgres")
        if self.operator.info.server_version >= MAINTAINS:
            self.operator.execute("REVOKE MAINTAIN ON ALL TABLES IN SCHEMA kilburn FROM gateway")
        if how == "none":
            return
        if self.operator.info.server_version >= MAINTAINS and self.chance.random() < 0.5:
            self.operator.execute("GRANT MAINTAIN ON ALL TABLES IN SCHEMA kilburn TO gateway")
            undo = "REVOKE MAINTAIN ON {} FROM gateway"
        else:
            self.operator.execute(self.give_tables)
            undo = "ALTER TABLE {} OWNER TO postgres"
        if how == "but one":
            self.operator.execute(sql.SQL(undo).format(sql.Identifier("kilburn", self.chance.choice(WORDS))))

    def hinder(self, tenant: str) -> None:
        """Somebody reads older rows, or has locked a table."""
        other = self.others.enter_context(psycopg.connect(self.urls["owner"]))
        if self.chance.random() < 0.5:
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT 1")
        else:
            table = sql.Identifier("kilburn", self.chance.choice(WORDS))
            other.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(table))

    def let_go(self, tenant: str) -> None:
        self.others.close()

    def hide(self, tenant: str) -> None:
        """Warnings of the server are not sent to the gateway's user, or are again."""
        level = self.chance.choice(["error", "warning"])
        self.operator.execute(sql.SQL("ALTER ROLE gateway SET client_min_messages = {}").format(sql.Literal(level)))

    def files(self) -> bytes:
        """What the files of the database's tables and indexes have."""
        self.operator.execute("CHECKPOINT")
        ((oid,),) = self.operator.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchall()
        folder = self.server.data / "base" / str(oid)
        return b"\0".join(path.read_bytes() for path in folder.iterdir() if path.is_file())

    def check(self) -> None:
        pending = {
            name.decode()
            for (name,) in self.operator.execute(
                "SELECT name FROM kilburn.erasure JOIN kilburn.tenant ON tenant.id = erasure.tenant"
                " WHERE xid >= (SELECT before FROM kilburn.wiped)"
            )
        }
        files = self.files()
        for tenant in TENANTS:
            remaining = [data for data in self.forgotten[tenant] if data in files]
            assert tenant in pending or not remaining, f"{tenant}: {remaining[:3]!r} is left, and nothing says so"
        for tenant, store in self.stores.items():
            places = [place for place in store.contents.unreached() if "files of the server" in place]
            assert bool(places) == (tenant in pending), (tenant, places)

    def end(self) -> None:
        """Nobody is in the way any more, and the rights are there."""
        for tenant in TENANTS:
            self.close(tenant)
        self.others.close()
        self.operator.execute(self.give_tables)
        for tenant in TENANTS:
            with Postgres(self.urls["gateway"], tenant=tenant, busy_timeout=5.0) as store:
                self.stores = {tenant: store}
                self.check()
                open_rows = "SELECT count(*) FROM kilburn.erasure WHERE tenant = %s"
                assert self.operator.execute(open_rows, (store._number,)).fetchall() == [(0,)]
                assert findings_in(store) == []
                read = store.read((1, number) for number in self.pages[tenant])
                texts = store.contents.texts({page.digest for page, _ in read.values() if page.digest})
                for (_, number), (page, _) in read.items():
                    assert texts.get(page.digest, "") == self.pages[tenant][number]
            self.stores = {}


@pytest.mark.parametrize("seed", range(rounds(3, 12)))
def test_what_is_called_forgotten_is_in_no_file(
    seed: int, server: OwnServer, url: str, gateway: str, operator: psycopg.Connection[Any], give_tables: LiteralString
) -> None:
    made = Erasures(seed, server, {"owner": url, "gateway": gateway}, operator, give_tables)
    steps = [made.append, made.forget, made.forget, made.wipe, made.close, made.turn_rights, made.hinder, made.let_go, made.hide]
    try:
        for _ in range(STEPS):
            made.chance.choice([made.append, *steps])(made.chance.choice(TENANTS))
            made.check()
        made.end()
    finally:
        made.others.close()
        for store in made.stores.values():
            store.close()
