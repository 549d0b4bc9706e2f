"""`recall` prints the exact text at an address; `search` finds passages by words and by meaning.

Recalls and searches from the command line are not the agent's, and are not recorded.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
from typer import Option

from kilburn.cli.access import StorePlace, session
from kilburn.cli.moments import moment, when
from kilburn.cli.screen import count
from kilburn.cli.shell import app
from kilburn.errors import SpecError
from kilburn.kernel.store import DOCUMENT, MEMORY, NOTES
from kilburn.search.found import Found
from kilburn.terminal import age, emit, line, tell


@app.command()
def recall(where: StorePlace, name: str, address: str, raw: bool = False) -> None:
    """Print the exact text at an address, and nothing else.

    On a terminal, escape sequences and control characters are made visible; a pipe and a file get every byte.

    Example:

        kilburn recall session-1 p17 > page.txt

        kilburn recall @document/manual/pump.md p1

    Args:
        name SESSION: A session, or @memory/USER or @document/NAME as in a hit of `search`.
        address ADDRESS: A page p17, a range p17-p42, or a fold f3.
        raw: Print the exact bytes on a terminal, too, escape sequences included.
    """
    with where.reading() as store:
        collection = next((info for info in store.collections() if info.name == name), None)
        recalled = (collection or session(store, name)).recall(address)
    if where.json:
        pages = [
            {"address": page.address, "kind": str(page.kind), "role": str(page.role), "digest": page.digest, "text": text}
            for page, text in zip(recalled.pages, recalled.parts, strict=True)
        ]
        emit({"session": name, "address": address, "text": str(recalled), "pages": pages})
        return
    if sys.stdout.isatty() and not raw:
        tell(recalled, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(recalled.encode("utf-8"))
    sys.stdout.buffer.flush()


@app.command()
def search(
    where: StorePlace,
    query: str,
    name: str | None = None,
    places: list[str] | None = None,
    user: str | None = None,
    at: str | None = None,
    tokens: Annotated[int, Option(min=1)] = 1000,
    limit: Annotated[int, Option(min=1)] = 20,
    explain: bool = False,
) -> None:
    """Search sessions, facts and documents for passages, best first, within a token budget. The best passages are printed even if
    they match poorly; see their scores.

    Examples:

        kilburn search "connection refused" --session session-1

        kilburn search "where does Ana live" --where facts --user ana --explain

    Args:
        query WORDS: The words to search for, or a question.
        name --session NAME: Search only this session.
        places --where PLACE: Search only here: sessions, facts, documents or all; may be repeated.
        user NAME: Search only what belongs to this user, or to all users.
        at WHEN: Search what was known and true at this time: 2026-05-17, or 30d ago.
        tokens: Print at most this many tokens of hits.
        limit: Print at most this many hits.
        explain: Print the terms of each score.
    """
    if not query.strip():
        raise SpecError("an empty query", advice="give words to search for")
    if name is not None and (places or user is not None or at is not None):
        raise SpecError("--session beside --where, --user or --at", advice="leave --session out, or the others")
    moment_at = moment(at, "--at", time.time())
    with where.reading(meaning=True) as store:
        if name is not None:
            hits = session(store, name).search(query, tokens, limit)
        else:
            hits = store.search(query, tokens, limit, where=places or "all", user=user, at=moment_at)
    lines = []
    for hit in hits:
        lines.append(line(f"{hit.session} {hit.address}  {_facts(hit)}"))
        lines.append("    " + hit.text.strip().replace("\n", "\n    "))
        if explain:
            terms = sorted(hit.why.items(), key=lambda term: -abs(term[1]))
            lines.append(line("    why: " + ", ".join(f"{term} {value:+.2f}" for term, value in terms)))
    where.show({"query": query, "hits": [msgspec.structs.asdict(hit) for hit in hits]}, lines or "nothing found")


def _facts(hit: Found) -> str:
    """Describe a hit in one line: its origin, age, place, validity, tokens and score."""
    parts = [hit.origin if hit.speaker is None else f"{hit.origin} {hit.speaker}", f"{age(0.0, hit.age)} ago"]
    if not hit.session.startswith((MEMORY, DOCUMENT, NOTES)):  # collections have no window, so their pages are always out
        parts.append(str(hit.where))
    if hit.until is not None:
        parts.append(f"until {when(hit.until)}")
    return ", ".join([*parts, f"{count(hit.tokens)} tokens", f"score {hit.score:.2f}"])
