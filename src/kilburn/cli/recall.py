"""Getting text back: `recall` by address, exact to the byte; `search` by words.

A recall or search from the shell is not one of the agent's: nothing is recorded.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from kilburn.cli.access import reading, session
from kilburn.cli.screen import age, count
from kilburn.cli.session import Session
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import SpecError
from kilburn.terminal import emit, line, tell

__all__ = ["recall", "search"]


@app.command()
def recall(
    name: Session,
    address: Annotated[str, typer.Argument(help="p17, a range p17-p42, or f3.", show_default=False)],
    raw: Annotated[bool, typer.Option("--raw", help="The exact bytes on a terminal too, escapes included.")] = False,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Write the exact text at an address to standard output, and nothing else.

    On a terminal, escapes and control characters are made visible; a pipe and a file get every byte.

    Example:

        kilburn recall session-1 p17 > page.txt
    """
    with reading(db, tenant) as store:
        found = session(store, name).recall(address)
    if json:
        pages = [
            {"address": page.address, "kind": str(page.kind), "role": str(page.role), "digest": page.digest, "text": text}
            for page, text in zip(found.pages, found.parts, strict=True)
        ]
        emit({"session": name, "address": address, "text": str(found), "pages": pages})
        return
    if sys.stdout.isatty() and not raw:
        tell(found, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(found.encode("utf-8"))
    sys.stdout.buffer.flush()


@app.command()
def search(
    query: Annotated[str, typer.Argument(help="Words to look for.", show_default=False)],
    name: Annotated[str | None, typer.Option("--session", metavar="NAME", help="Only in this session.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that all hits together may take.")] = 1000,
    limit: Annotated[int, typer.Option(min=1, help="Hits at most.")] = 20,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Find passages by their words, best first, within a token budget.

    Example:

        kilburn search "connection refused" --session session-1
    """
    if not query.strip():
        raise SpecError("an empty query", advice="give words to look for")
    with reading(db, tenant) as store:
        hits = session(store, name).search(query, tokens, limit) if name else store.search(query, tokens, limit)
    if json:
        emit({"query": query, "hits": [msgspec.structs.asdict(hit) for hit in hits]})
        return
    for hit in hits:
        origin = f"{hit.origin}, {_ago(hit.age)}, {hit.where}, {count(hit.tokens)} tokens"
        tell(line(f"{hit.session} {hit.address}  {origin}, score {hit.score:.2f}"))
        tell("    " + hit.text.strip().replace("\n", "\n    "))
    if not hits:
        tell("nothing found")


def _ago(seconds: float) -> str:
    return f"{age(0.0, seconds)} ago"
