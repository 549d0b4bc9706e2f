"""`cold`: texts that nobody has read for long, in a folder or an object store."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from kilburn.cli.access import StorePlace, stored
from kilburn.cli.commands import command_group
from kilburn.cli.moments import seconds
from kilburn.cli.screen import many, progress
from kilburn.errors import SpecError
from kilburn.kernel.ending import Coolness, cool
from kilburn.terminal import emit, line, say, tell

cold = command_group("cold")


@cold.command("set")
@stored
def set_place(
    place: Annotated[str, Argument(metavar="PLACE", help="A folder, or s3://BUCKET/PATH and the like.", show_default=False)],
    key: Annotated[
        str, Option("--key", metavar="FILE", help="Encrypt with the key in this file; it is made where there is none.")
    ] = "",
    versions: Annotated[
        bool, Option("--versions", help="Take a bucket that keeps versions of what is deleted; a rule of it lets them expire.")
    ] = False,
    *,
    where: StorePlace,
) -> None:
    """Set the place for this tenant's cold texts. The place is tried out. Nothing moves yet.

    Example:

        kilburn cold set cold-texts --key cold.key
    """
    from kilburn.backends.cold import new_place

    there = SpecError("there are cold texts already", advice="bring them back first: `kilburn cold back`, then scrub")
    with where.writing() as store:
        backend = store.backend
        # Also what is only to be deleted in the old place: nobody would find it there any more.
        if backend.contents.cold() or backend.contents.scrub():
            raise there
        made = new_place(place, key, versions=versions)
        with backend.together():
            backend.settings.put("cold", msgspec.json.encode(made).decode())
            # Whoever moves texts into the old place has done it by now, or will find the new one.
            if backend.contents.cold():
                raise there
    if where.json:
        emit(msgspec.to_builtins(made))
    else:
        tell(line(f"cold texts go to {made.url}{f', encrypted with the key in {made.key}' if made.key else ''}"))


@cold.command("move")
@stored
def move(
    older: Annotated[str, Option("--older-than", metavar="TIME", help="Neither made nor read for so long: 30d, 12h.")] = "30d",
    least: Annotated[int, Option("--least", metavar="TOKENS", min=0, help="A shorter text stays.")] = 100,
    dry: Annotated[bool, Option("--dry-run", help="Only say how many would move.")] = False,
    *,
    where: StorePlace,
) -> None:
    """Move texts that nobody has read for long to the cold place. They are texts of sessions and documents, and read as before.

    What is in the window of a session in use stays, and so do pinned pages, facts and notes. The file does not get smaller by
    this: the room is used again.

    Example:

        kilburn cold move --older-than 30d --dry-run
    """
    rule = Coolness(after=seconds(older, "--older-than"), least=least)
    with where.reading() if dry else where.writing() as store, progress("moving texts"):
        began = time.process_time()
        moved = cool(store, rule, dry=dry)
        spent = time.process_time() - began
    if where.json:
        emit({"dry": dry, "texts": moved.texts, "bytes": None if dry else moved.bytes, "seconds": round(spent, 3)})
    elif dry:
        tell(f"would move: {many(moved.texts, 'text')} at most")
    else:
        tell(f"moved: {many(moved.texts, 'text')}, {many(moved.bytes, 'byte')}")
        if not moved.texts:
            say(f"What was made or read since stays, and so do texts of fewer than {least} tokens, or of 200 bytes compressed.")


@cold.command("back")
@stored
def back(*, where: StorePlace) -> None:
    """Bring all texts back from the cold place, and delete their objects.

    Example:

        kilburn cold back
    """
    with where.writing() as store, progress("bringing texts back"):
        moved = store.backend.contents.warm()
    if where.json:
        emit(msgspec.to_builtins(moved))
    else:
        tell(f"brought back: {many(moved.texts, 'text')}, {many(moved.bytes, 'byte')}")


@cold.command("scrub")
@stored
def scrub(
    repair: Annotated[bool, Option("--repair", help="Delete the objects that belong to no text.")] = False,
    *,
    where: StorePlace,
) -> None:
    """Check every object of the cold place. Each must be what was written, and nothing that was forgotten may be left.

    Exit status 1 if something is wrong.

    Example:

        kilburn cold scrub
    """
    with where.writing() as store, progress("reading cold texts"):
        found = store.backend.contents.scrub(repair=repair)
        texts = len(store.backend.contents.cold())
    if where.json:
        emit({"texts": texts, "findings": list(found)})
    else:
        for finding in found:
            tell(line(finding))
        tell(f"{many(texts, 'cold text')}: {many(len(found), 'finding') if found else 'all is well'}")
    if found:
        raise typer.Exit(1)
