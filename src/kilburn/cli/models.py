"""`models`: lists and downloads model files."""

from __future__ import annotations

import os
from typing import Any

from kilburn.cli.commands import command_group
from kilburn.cli.screen import Columns, progress, show, show_records
from kilburn.cli.shell import Json
from kilburn.models import weights

models = command_group("models")


@models.command("list")
def list_models(json: Json = False) -> None:
    """List the models of the catalogue, and the model files on this machine.

    Example:

        kilburn models list --json
    """
    columns: Columns = {
        "name": "name",
        "MB": lambda row: row["bytes"] // 10**6,
        "here": lambda row: "yes" if row["here"] else "no",
        "licence": "licence",
        "notes": "notes",
    }
    show_records(_files(), columns, json=json)


def _files() -> list[dict[str, Any]]:
    """Return a row for each model: those of the catalogue, then other files in the cache."""
    paths = weights.present()
    rows: list[dict[str, Any]] = []
    for item in weights.catalogue():
        path = paths.pop(item.name, None)
        row = {"name": item.name, "bytes": item.bytes, "here": path is not None, "path": str(path) if path else None}
        rows.append({**row, "licence": item.licence, "source": item.source, "notes": item.notes})
    for name, path in paths.items():
        row = {"name": name, "bytes": os.path.getsize(path), "here": True, "path": str(path)}
        rows.append({**row, "licence": None, "source": "Hugging Face", "notes": ""})
    return rows


@models.command("pull")
def pull(name: str, json: Json = False) -> None:
    """Download a model to the cache, and verify its hash. An interrupted download continues.

    Example:

        kilburn models pull smollm2

    Args:
        name NAME: A name of the catalogue, hf:OWNER/REPO/FILE, or the path of a GGUF file.
    """
    with progress(name, unit="bytes") as report:
        path = weights.pull(name, progress=lambda file, have, total: report(have, total or None))
    show({"name": name, "path": str(path), "bytes": path.stat().st_size}, str(path), json=json)
