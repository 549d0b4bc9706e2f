"""`cold`: moves texts that nobody has read for long to a folder or an object store."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from typer import Option

from kilburn.cli.access import StorePlace
from kilburn.cli.commands import command_group
from kilburn.cli.moments import seconds
from kilburn.cli.screen import many, progress
from kilburn.errors import SpecError
from kilburn.jobs.ending import Coolness, cool
from kilburn.terminal import line, say

cold = command_group("cold")


@cold.command("set")
def set_place(where: StorePlace, place: str, key: str = "", versions: bool = False) -> None:
    """Set the place for this tenant's cold texts, and test it. No text moves yet.

    Example:

        kilburn cold set cold-texts --key cold.key

    Args:
        place PLACE: A folder, or s3://BUCKET/PATH and the like.
        key FILE: Encrypt with the key in this file; it is created if needed.
        versions: Accept a bucket that keeps deleted versions; a rule of the bucket must expire them.
    """
    from kilburn.backends.cold import new_place

    occupied = SpecError("the old place has cold texts", advice="bring them back first: `kilburn cold back`, then scrub")
    with where.writing() as store:
        backend = store.backend
        # Objects that are only waiting for deletion count, too, because nothing would delete them in the old place.
        if backend.contents.cold() or backend.contents.scrub():
            raise occupied
        cold_place = new_place(place, key, versions=versions)
        with backend.together():
            backend.settings.put("cold", msgspec.json.encode(cold_place).decode())
            # A concurrent move has finished by now, or it will use the new place.
            if backend.contents.cold():
                raise occupied
    encrypted = f", encrypted with the key in {cold_place.key}" if cold_place.key else ""
    where.show(msgspec.to_builtins(cold_place), line(f"cold texts go to {cold_place.url}{encrypted}"))


@cold.command("move")
def move(where: StorePlace, older: str = "30d", min_tokens: Annotated[int, Option(min=0)] = 100, dry: bool = False) -> None:
    """Move texts of sessions and documents that nobody has read for long to the cold place. They are read as before.

    Pages in the window of a session in use stay, and so do pinned pages, facts and notes. The file does not shrink, but reuses
    the space.

    Example:

        kilburn cold move --older-than 30d --dry-run

    Args:
        older --older-than TIME: Move texts that were not written or read for this long: 30d, 12h.
        min_tokens --least TOKENS: Move only texts of at least this many tokens.
        dry --dry-run: Show how many texts would move, and move none.
    """
    rule = Coolness(after=seconds(older, "--older-than"), least=min_tokens)
    with where.reading() if dry else where.writing() as store, progress("moving texts"):
        began = time.process_time()
        result = cool(store, rule, dry=dry)
        spent = time.process_time() - began
    summary = f"moved: {many(result.texts, 'text')}, {many(result.bytes, 'byte')}"
    where.show(
        {"dry": dry, "texts": result.texts, "bytes": None if dry else result.bytes, "seconds": round(spent, 3)},
        f"would move: {many(result.texts, 'text')} at most" if dry else summary,
    )
    if not (result.texts or dry or where.json):
        say(f"newer texts stay, and so do texts of fewer than {min_tokens} tokens, or of 200 bytes compressed")


@cold.command("back")
def back(where: StorePlace) -> None:
    """Bring all texts back from the cold place, and delete their objects.

    Example:

        kilburn cold back
    """
    with where.writing() as store, progress("bringing texts back"):
        result = store.backend.contents.warm()
    where.show(msgspec.to_builtins(result), f"brought back: {many(result.texts, 'text')}, {many(result.bytes, 'byte')}")


@cold.command("scrub")
def scrub(where: StorePlace, repair: bool = False) -> None:
    """Check every object of the cold place: it must be unchanged, and must not contain forgotten texts.

    The exit status is 1 if something is wrong.

    Example:

        kilburn cold scrub

    Args:
        repair: Delete objects that belong to no text.
    """
    with where.writing() as store, progress("reading cold texts"):
        findings = store.backend.contents.scrub(repair=repair)
        texts = len(store.backend.contents.cold())
    verdict = f"{many(texts, 'cold text')}: {many(len(findings), 'finding') if findings else 'all is well'}"
    where.show({"texts": texts, "findings": list(findings)}, [*map(line, findings), verdict])
    if findings:
        raise typer.Exit(1)
