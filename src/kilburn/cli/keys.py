"""`keys`: manages the keys of a gateway. A key is shown once, when it is created; the keys file contains only its hash."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from typer import Option

from kilburn.backends.places import canonical_name, is_url
from kilburn.cli.commands import command_group
from kilburn.cli.screen import Columns, show, show_records
from kilburn.cli.shell import Json, Tenant
from kilburn.gateway.keys import Key, Link, add_key, read_keys, revoke_key
from kilburn.terminal import age, line, say

keys = command_group("keys")

File = Annotated[
    str, Option("--keys", metavar="FILE", envvar="KILBURN_KEYS", help="The file of the keys, or the URL of their database.")
]
FILE = "keys.json"


@keys.command("add")
def add(
    note: str = "",
    file: File = FILE,
    tenant: Tenant = None,
    user: str = "",
    memory: Annotated[int, Option(min=0)] = 0,
    learn: bool = False,
    upstream: str = "",
    rate: Annotated[int, Option(min=0)] = 0,
    link: Link = Link.AUTO,
    figures: bool = False,
    looks: bool = False,
    json: Json = False,
) -> None:
    """Create a key, and show it once. A running gateway accepts it at once.

    Example:

        kilburn keys add "ana's laptop" --tenant acme --user ana

    Args:
        note [NOTE]: A note for the list of keys, such as the owner or purpose.
        user NAME: Create the key for this person; by default for an application.
        memory TOKENS: Add up to this many tokens of memory to each prompt; 0 for none.
        learn: Learn facts from the messages.
        upstream VARIABLE: Take the provider's key from this environment variable; by default, the client sends its own.
        rate N: Allow this many requests per minute; 0 for the gateway's limit.
        link: Link sessions that a client compacted; auto: if the gateway knows whose sessions they are.
        figures: Let the key read the metrics of all tenants, and nothing else.
        looks: Let the key read sessions and the dashboard, and change nothing.
    """
    key = Key(
        tenant=tenant or "default",
        user=user,
        note=line(note),
        memory=memory,
        learn=learn,
        upstream=upstream,
        rate=rate,
        link=link,
        figures=figures,
        looks=looks,
    )
    added, secret = add_key(file, key)
    place = canonical_name(file) if is_url(file) else file
    if not json:
        say(f"key {added.name} opens tenant {added.tenant}; it is shown only now, and {place} contains its hash")
    show({"key": secret, **_row(added)}, secret, json=json)


@keys.command("list")
def list_keys(file: File = FILE, json: Json = False) -> None:
    """List the names and rights of the keys. The keys themselves are not stored.

    Example:

        kilburn keys list
    """
    columns: Columns = {key: key for key in ("name", "tenant", "user", "note")}
    show_records(list(map(_row, read_keys(file))), {**columns, "options": _options, "state": _state}, json=json)


@keys.command("revoke")
def revoke(name: str, file: File = FILE, json: Json = False) -> None:
    """Revoke a key. A running gateway refuses it from the next request on; with keys in a database, within 2 seconds.

    Example:

        kilburn keys revoke 3f9a01bc

    Args:
        name NAME: The name of the key: the 8 digits after `kilburn-`.
    """
    key = revoke_key(file, name)
    show(_row(key), f"key {key.name} of tenant {key.tenant} is revoked", json=json)


def _row(key: Key) -> dict[str, Any]:
    """Return a key without its digest."""
    return {name: getattr(key, name) for name in msgspec.structs.asdict(key) if name != "digest"}


def _options(row: dict[str, Any]) -> str:
    parts = [f"{name} {row[name]}" for name in ("memory", "upstream", "rate") if row[name]]
    parts += [f"link {row['link']}"] if row["link"] != Link.AUTO else []
    return ", ".join([*parts, *(name for name in ("learn", "figures", "looks") if row[name])])


def _state(row: dict[str, Any]) -> str:
    time_now = time.time()
    return f"revoked {age(row['revoked'], time_now)} ago" if row["revoked"] else f"valid, {age(row['created'], time_now)} old"
