"""Restore a store in PostgreSQL as it was at a moment, and forget again in it what was forgotten since.

A server of its own archives its write-ahead log. A base backup is made; then somebody's number is forgotten, and a program goes
wrong. The base backup and the archive give back the database of the moment before. So the number is back, too, and the list of
what is forgotten, which was kept elsewhere, says that it has to go. It needs the extra `postgres-server`.

    python lab/recipes/restore_to_a_moment.py

docs/howto/run-on-postgres.md shows what it prints.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

import psycopg

import kilburn
from kilburn.backends.postgres.server import OwnServer
from kilburn.cli import main as run_kilburn


def opened(server: OwnServer) -> kilburn.Store:
    """The store on a server."""
    return kilburn.open(server.url, window=4000, policy="fifo", tokenizer="chars/4", embedder=None)


def found(store: kilburn.Store) -> str:
    """What a search for the number finds."""
    return f"{len(store.search('telephone'))} found"


def last(store: kilburn.Store) -> str:
    """The last message, in words."""
    return f'the last message is "{store.session("ana").render()[-1]["content"]}"'


def work(server: OwnServer, base: Path, listed: Path) -> str:
    """What happens on the first server; returns the moment to go back to."""
    with opened(server) as store, psycopg.connect(server.url, autocommit=True) as sql:
        session = store.session("ana")
        number = session.append({"role": "user", "content": "My telephone is 555-0177."})
        server.do("pg_basebackup", "-h", str(server.folder), "-U", "postgres", "-c", "fast", "-D", str(base))
        session.append({"role": "assistant", "content": "Noted."})
        moment = str(sql.execute("SELECT now()").fetchone()[0])

        receipt = store.forget(session="ana", address=number)
        print(f"backup made, then the number forgotten: {found(store)}")
        print(*(f"not reached: {place}" for place in receipt.unreached if "archive" in place))
        printed("forget", "--list", str(listed), "--db", server.url)

        session.append({"role": "assistant", "content": "%%%%"})
        print(f"a program goes wrong: {last(store)}")

        # The server archives a file when it is full, or when it is told to go on in the next one.
        file = sql.execute("SELECT pg_walfile_name(pg_switch_wal())").fetchone()[0]
        wait(server, "SELECT coalesce(last_archived_wal, '') >= %s FROM pg_stat_archiver", file)
    return moment


def wait(server: OwnServer, question: str, *values: str) -> None:
    """Wait until the server says yes."""
    with psycopg.connect(server.url, autocommit=True) as sql:
        for _ in range(600):
            if sql.execute(question, values).fetchone()[0]:
                return
            time.sleep(0.1)
    raise SystemExit(f"it never came to this: {question}")


def printed(*words: str) -> str:
    """What a command of Kilburn prints."""
    out = TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(out):
        assert run_kilburn(list(words)) == 0
    return out.buffer.getvalue().decode()


def main(folder: Path) -> None:
    """Go through all of it."""
    base, archive, listed = folder / "base", folder / "archive", folder / "forgotten.json"
    for each in (base, archive):
        each.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(each, "nobody")
    first = OwnServer(folder / "first", ["archive_mode=on", f"archive_command='test ! -f {archive}/%f && cp %p {archive}/%f'"])
    first.start()
    try:
        moment = work(first, base, listed)
    finally:
        first.stop("immediate")

    # The base backup becomes the new server's folder, and this file says that it is to be recovered.
    (folder / "second").mkdir()
    base.rename(folder / "second" / "data")
    (folder / "second" / "data" / "recovery.signal").touch()
    second = OwnServer(
        folder / "second",
        [
            f"restore_command='cp {archive}/%f %p'",
            f"recovery_target_time='{moment}'",
            "recovery_target_action=promote",
        ],
    )
    second.start()
    try:
        # It can be read before that.
        wait(second, "SELECT NOT pg_is_in_recovery()")
        with opened(second) as store:
            print(f"restored to the moment before: {last(store)}")
            print(f"the number that was forgotten is back: {found(store)}")
        print(f"kilburn forget --again {listed.name}")
        said = printed("forget", "--again", str(listed), "--yes", "--db", second.url)
        print(*(line for line in said.splitlines() if line.startswith("forgotten")))
        with opened(second) as store:
            print(f"the number is forgotten again: {found(store)}")
    finally:
        second.stop("immediate")


if __name__ == "__main__":
    # The path of a server's socket is short, and whoever runs the server enters it.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as where:
        Path(where).chmod(0o711)
        main(Path(where))
