"""`models`: which weights there are, and bringing them to this machine. It refuses to load one."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kilburn.cli.screen import progress, table
from kilburn.cli.shell import Json, app, emit
from kilburn.models import weights

__all__ = ["list_models", "models", "pull"]

models = typer.Typer(help="Model files: which are known, which are here.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models, name="models")


@models.command("list")
def list_models(json: Json = False) -> None:
    """List the models that have a name, and the files that are on this machine.

    Example:

        kilburn models list --json
    """
    here = weights.present()
    rows = [
        {
            "name": item.name,
            "bytes": item.bytes,
            "here": item.name in here,
            "path": str(here[item.name]) if item.name in here else None,
            "licence": item.licence,
            "source": item.source,
            "notes": item.notes,
        }
        for item in weights.catalogue()
    ]
    known = {row["name"] for row in rows}
    for name, path in here.items():
        if name not in known:
            size = os.path.getsize(path)
            rows.append(
                {
                    "name": name,
                    "bytes": size,
                    "here": True,
                    "path": str(path),
                    "licence": None,
                    "source": "Hugging Face",
                    "notes": "",
                }
            )
    if json:
        emit(rows)
        return
    heads = ("name", "MB", "here", "licence", "notes")
    table(
        heads,
        (
            (
                str(row["name"]),
                f"{int(str(row['bytes'])) / 1e6:,.0f}",
                "yes" if row["here"] else "no",
                str(row["licence"] or "-"),
                str(row["notes"]),
            )
            for row in rows
        ),
        numbers=("MB",),
    )


@models.command("pull")
def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A known name, hf:OWNER/REPO/FILE, or the path of a GGUF file.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Bring a model to this machine: verified by hash, kept in the cache, continued where it broke off.

    Example:

        kilburn models pull smollm2
    """
    with progress(name, unit="bytes") as done:
        path = weights.pull(name, progress=lambda what, have, total: done(have, total or None))
    if json:
        emit({"name": name, "path": str(path), "bytes": path.stat().st_size})
        return
    print(path)
