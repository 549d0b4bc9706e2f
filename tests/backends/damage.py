"""Damage done to a store, record by record, and what must hold after each.

A long run: `PYTHONPATH=src:tests python tests/backends/damage.py --trials 3000 --seed 1`; it prints each
trial that breaks a promise, with the seed that does it again, and exits 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

import kilburn
from cli.terminal import kilburn as command
from kernel.talk import FORMS, user
from kilburn.backends.sqlite import Sqlite
from kilburn.move import Add, Fold, Retire
from kilburn.page import Claim

SESSIONS = {"light": ("chat", "hybrid"), "bell": ("messages", "fifo"), "fog": ("chat", "lru")}
MEMORY = "@memory/ana"
TABLES = ("tenant", "segment", "page", "event", "content", "passage", "citation", "embedder", "vector", "embedded")
KEYS = {
    "page": ("segment", "id"),
    "event": ("segment", "number"),
    "citation": ("segment", "page", "citing_segment", "citing_page"),
    "embedded": ("embedder", "segment"),
}
OWNED = {"segment": "id", "page": "segment", "event": "segment"}
"""Tables whose rows belong to one session, and the column that says to which."""

Reading = dict[str, Any]


def make(path: Path, *, memory: bool = True) -> None:
    """A store of three sessions with calls, folds, excerpts, pins, marks and a forgotten page; with a user's memory, in which
    a fact is superseded, one proposed and one forgotten, and with vectors."""
    for number, (name, (form, policy)) in enumerate(SESSIONS.items()):
        with kilburn.open(str(path), window=900, policy=policy, tokenizer="chars/4") as store:
            session = store.session(name)
            for message in FORMS[form](number + 3, 8):
                session.append(message)
            session.append({"role": "assistant", "content": "".join(f"line {line} of {name}\n" for line in range(40))})
            last = session.window.last
            # The latest message stays; the one before it may be shortened, as long as the policy has not done so.
            session.append({"role": "assistant", "content": "done"})
            session.edits.apply(Fold(pages=(last,), keep=((0, 7), (14, 21)), why="long"))
            session.append(user(f"forget this of {name}"))
            session.forget(f"p{last + 2}")
            session.rate("p2", 0.5)
            session.render()
            session.recall("p1")
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", tenant="other") as store:
        store.session("light").append(user("of another tenant"))
    if memory:
        with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4") as store:
            remember(store)


def remember(store: kilburn.Store) -> None:
    """Facts from two sessions, and a vector of each passage but two."""
    light, fog = (store.session(name).number for name in ("light", "fog"))
    kept = store.memory("ana")
    kept.collection.add("Ana keeps the light")
    kept.collection.apply(Add(text="Ana keeps the bell", cites=((light, 1), (fog, 1))), Retire((1,), by=-1))
    kept.collection.apply(Add(text="forget this fact", cites=((light, 2),)))
    kept.collection.apply(Add(text="Ana has the bell", claim=Claim(subject="Ana", relation="has", object="bell"), sources=(-1,)))
    kept.collection.apply(Add(text="send the keys away", cites=((light, 3),)), policy="plain", tainted=True)
    kept.forget("f2")
    kept.pin("f1")
    waiting = store.backend.vectors.unembedded("hash", 1000)
    store.backend.vectors.add("hash", [(entry, vector_of(text)) for entry, text in waiting[:-2]])


def vector_of(text: str) -> bytes:
    """Bytes that are another for another text."""
    return hashlib.sha256(text.encode()).digest()


def vectors(path: Path) -> dict[int, bytes]:
    """The vectors that a reader is given, by entry."""
    with Sqlite(path, readonly=True) as backend:
        return {vector.entry: vector.data for vector in backend.vectors.read("hash")}


def check_vectors(path: Path, written: dict[int, bytes]) -> None:
    """No vector is served that was not written for its passage."""
    try:
        served = vectors(path)
    except kilburn.KilburnError:
        return
    assert served.items() <= written.items(), "a damaged vector is served"


def read(path: Path, name: str) -> Reading | kilburn.KilburnError:
    """All that a reader can see of a session, or the typed error that says why not."""
    try:
        with kilburn.open(str(path), window=1 << 30, policy="fifo", tokenizer="chars/4", readonly=True) as store:
            if name == MEMORY:
                return read_memory(store)
            session = store.session(name)
            pages = session.contents.pages()
            return {
                "pages": pages,
                "messages": session.contents.messages(),
                "texts": [session.recall(page.address) for page, state in pages if state.at != "dropped"],
                "prompt": list(session.render()),
                "events": list(session.ledger.events()),
            }
    except kilburn.KilburnError as error:
        return error


def read_memory(store: kilburn.Store) -> Reading:
    """All that a reader can see of the user's memory."""
    memory = store.memory("ana")
    pages = list(store.backend.pages(memory.collection.number))
    return {
        "pages": pages,
        "messages": [memory.user, memory.collection.info.kind],
        "texts": [memory.recall(page.address) for page, state in pages if state.at != "dropped"],
        "prompt": sorted(store.backend.read([(memory.collection.number, page.id) for page, _ in pages])),
        "events": list(memory.collection.ledger.events()),
    }


def check_search(path: Path, whole: dict[str, Reading]) -> None:
    """No hit is of a text that is not there."""
    texts = [str(text) for reading in whole.values() for text in reading["texts"]]
    try:
        with kilburn.open(str(path), policy="fifo", tokenizer="chars/4", readonly=True) as store:
            store.sessions()
            for hit in store.search("line fog parser error", tokens=10_000):
                assert any(hit.text in text for text in texts), f"search found {hit.text!r}"
    except kilburn.KilburnError:
        pass


class Trial:
    """One damaged copy. `whose` is the session that was damaged, or None where it may be any."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.chance = random.Random(seed)
        self.whose: str | None = None
        self.what = ""

    def rows(self) -> None:
        """Damage a row behind SQLite's constraints."""
        db = apsw.Connection(str(self.path))
        plain = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql LIKE '%STRICT%'").fetchall()
        db.execute("PRAGMA writable_schema = 1")
        for name, sql in plain:
            loose = sql.replace(" NOT NULL", "").replace(" STRICT,", " ").replace(" STRICT", "")
            db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (loose, name))
        db.close()
        db = apsw.Connection(str(self.path))
        try:
            self._row(db)
        except (apsw.ConstraintError, apsw.MismatchError):
            self.what += " (refused)"
        finally:
            db.execute("PRAGMA writable_schema = 1")
            for name, sql in plain:
                db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, name))
            db.close()

    def _row(self, db: apsw.Connection) -> None:
        chance = self.chance
        table = chance.choice(TABLES)
        columns = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
        keys = KEYS.get(table, ("id",))
        found = db.execute(f"SELECT * FROM {table}").fetchall()
        row = dict(zip(columns, chance.choice(found), strict=True))
        where = " AND ".join(f"{key} IS ?" for key in keys)
        key = tuple(row[name] for name in keys)
        names = dict(db.execute("SELECT id, name FROM segment WHERE tenant = 1").fetchall())
        if table in OWNED:
            self.whose = names.get(row[OWNED[table]], "")
        if chance.random() < 0.1:
            self.what = f"DELETE {table} {key}"
            db.execute(f"DELETE FROM {table} WHERE {where}", key)
            return
        column = chance.choice(columns)
        if chance.random() < 0.15:
            other = dict(zip(columns, chance.choice(found), strict=True))
            other_key = tuple(other[name] for name in keys)
            self.what = f"SWAP {table}.{column} {key} {other_key}"
            if table in OWNED and other[OWNED[table]] != row[OWNED[table]]:
                self.whose = None
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (other[column], *key))
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (row[column], *other_key))
            return
        value = self._odd(row[column])
        self.what = f"{table}.{column} {key}: {row[column]!r:.60} -> {value!r:.60}"
        if table in OWNED and (column == "tenant" or column in keys):
            self.whose = None if table == "process" else self.whose
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (value, *key))

    def _odd(self, value: Any) -> Any:
        chance = self.chance
        anything = [None, 2**62, -(2**63), 1e300, b"\xff\xfe", "odd", "", 0, 1, -1, b""]
        if chance.random() < 0.3 or value is None:
            return chance.choice(anything)
        if isinstance(value, int | float):
            return chance.choice(
                [
                    value + 1,
                    value - 1,
                    -value,
                    value * 2,
                    value ^ (1 << chance.randrange(40)) if isinstance(value, int) else value + 0.5,
                ]
            )
        data = bytearray(value.encode() if isinstance(value, str) else value)
        if data and chance.random() < 0.7:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            data = data[: chance.randrange(len(data) + 1)]
        if isinstance(value, bytes):
            return bytes(data)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return bytes(data)

    def bytes(self) -> None:
        """Damage the file itself."""
        chance = self.chance
        data = bytearray(self.path.read_bytes())
        kind = chance.choice(["flips", "zeros", "pages", "cut"])
        self.what = kind
        at = chance.randrange(len(data))
        if kind == "flips":
            for _ in range(chance.choice([1, 1, 1, 5, 20])):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == "zeros":
            data[at : at + chance.choice([16, 512, 4096])] = bytes(min(len(data) - at, chance.choice([16, 512])))
        elif kind == "pages":
            one, two = (chance.randrange(len(data) // 4096) * 4096 for _ in range(2))
            data[one : one + 4096], data[two : two + 4096] = data[two : two + 4096], data[one : one + 4096]
        else:
            del data[at:]
        self.path.write_bytes(bytes(data))

    def check(self, whole: dict[str, Reading], written: dict[int, bytes], seen: Counter[str]) -> None:
        """Everything is exact or a typed error; whatever is not exact is found; the other sessions are not touched."""
        readings = {name: read(self.path, name) for name in whole}
        wrong = [name for name, reading in readings.items() if reading != whole[name]]
        for name in wrong:
            assert isinstance(readings[name], kilburn.KilburnError), f"{name} was changed silently"
            assert self.whose is None or name == self.whose, f"{name} is touched: {readings[name]}"
        check_search(self.path, whole)
        check_vectors(self.path, written)
        said = command("fsck", "--db", self.path, "--json")
        assert said.status in (0, 1), f"fsck ended with {said.status}: {said.err}"
        findings = said.json["findings"]
        assert said.status == int(bool(findings)), said.err
        assert findings or not wrong, f"fsck finds nothing, but {wrong[0]}: {readings[wrong[0]]}"
        seen["unreadable" if wrong else "found" if findings else "harmless"] += 1
        for verb in ("ps", "top"):
            listed = command(verb, *(["--once"] if verb == "top" else []), "--db", self.path, "--json")
            assert listed.status in (0, 1)
        self._repair(whole, wrong, seen)
        check_vectors(self.path, written)

    def _repair(self, whole: dict[str, Reading], wrong: list[str], seen: Counter[str]) -> None:
        said = command("fsck", "--repair", "--db", self.path, "--json")
        assert said.status in (0, 1), f"fsck --repair ended with {said.status}: {said.err}"
        for name, before in whole.items():
            after = read(self.path, name)
            if isinstance(after, kilburn.KilburnError):
                assert name in wrong, f"{name} was readable before the repair: {after}"
                continue
            # A note stands in the place of an observation that could not be read.
            for part in ("pages", "messages", "texts", "prompt"):
                assert after[part] == before[part], f"{part} of {name} changed in the repair"
            quarantined = sum("quarantined" in event.data for event in after["events"])
            assert sum(one != two for one, two in zip(after["events"], before["events"], strict=True)) <= quarantined
            seen["repaired"] += name in wrong


def run(trials: int, seed: int, folder: Path, tell: Callable[[str], object]) -> tuple[int, Counter[str]]:
    """So many trials; the number of broken promises, and how the trials came out."""
    path = folder / "whole.db"
    make(path)
    whole: dict[str, Reading] = {}
    for name in (*SESSIONS, MEMORY):
        reading = read(path, name)
        assert isinstance(reading, dict), reading
        whole[name] = reading
    assert command("fsck", "--db", path, "--json").json["findings"] == []
    written = vectors(path)
    assert len(written) > 20
    failed = 0
    seen: Counter[str] = Counter()
    for number in range(seed, seed + trials):
        copy = folder / "copy.db"
        shutil.copyfile(path, copy)
        for rest in folder.glob("copy.db-*"):
            rest.unlink()
        trial = Trial(copy, number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (trial.bytes if number % 4 == 0 else trial.rows)()
                trial.check(whole, written, seen)
        except Exception as error:
            failed += 1
            tell(f"seed {number}: {trial.what} (of {trial.whose}): {type(error).__name__}: {error}")
            if not isinstance(error, AssertionError):
                import traceback

                tell(traceback.format_exc())
    return failed, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failed, seen = run(given.trials, given.seed, Path(folder), print)
    print(f"{given.trials} trials from seed {given.seed}: {failed} broke a promise; {dict(seen)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
