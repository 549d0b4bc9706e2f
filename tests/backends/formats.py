"""Takes back what the newest format added, so that a file is one of an older format."""

from __future__ import annotations

import apsw


def take_back_format_8(db: apsw.Connection) -> None:
    db.execute("DROP TRIGGER content_gone; DROP TRIGGER content_warm; DROP TABLE stray; DROP TABLE setting")
    db.execute("PRAGMA user_version = 7")


def take_back_format_7(db: apsw.Connection) -> None:
    take_back_format_8(db)
    db.execute("PRAGMA user_version = 6")


def take_back_format_6(db: apsw.Connection) -> None:
    take_back_format_7(db)
    db.execute("DROP TRIGGER page_forgotten; DROP TABLE history; PRAGMA user_version = 5")


def take_back_format_5(db: apsw.Connection) -> None:
    take_back_format_6(db)
    db.execute(
        "DROP TRIGGER erasure_done; DROP TABLE mention; DROP TABLE checkpoint; DROP INDEX event_note; DROP INDEX page_call"
    )
    db.execute("ALTER TABLE page DROP COLUMN call; PRAGMA user_version = 4")
