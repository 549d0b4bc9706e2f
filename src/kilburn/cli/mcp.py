"""`mcp`: sessions, memory and documents for an assistant that speaks the Model Context Protocol."""

from __future__ import annotations

import logging
import os
import secrets as chance
from typing import Annotated

from typer import Option

from kilburn.backend import check_name
from kilburn.cli.access import writing
from kilburn.cli.memories import Look, User, secrets_of
from kilburn.cli.serve import ended_by_signals
from kilburn.cli.shell import Db, Tenant, app
from kilburn.memory.retention import Quota
from kilburn.terminal import say


@app.command()
def mcp(
    user: User = "",
    http: Annotated[bool, Option("--http", help="Listen on 127.0.0.1 instead of standard input and output.")] = False,
    port: Annotated[int, Option(min=0, max=65535, help="With --http: where; 0 for a free port.")] = 8765,
    in_force: Annotated[
        bool, Option("--in-force", help="What the model remembers is true at once; else it waits for `memories accept`.")
    ] = False,
    quota_facts: Annotated[int, Option("--quota", metavar="FACTS", min=0, help="Facts that the memory may hold.")] = 10_000,
    secrets: Look = None,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Serve one user's sessions, memory and documents over the Model Context Protocol.

    Over HTTP a client needs a token: that of $KILBURN_MCP_TOKEN, or else a new one, which is shown on standard error.

    Example:

        kilburn mcp --user ana --db agent.db
    """
    looked = secrets_of(secrets)
    if user:
        check_name(user, "user")
    from kilburn import mcp as door  # it needs an extra

    # The SDK logs what clients send.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    logging.getLogger("mcp").propagate = False
    with writing(db or "agent.db", tenant, meaning=True) as store:
        served = door.server(store, user, in_force=in_force, secrets=looked, quota=Quota(facts=quota_facts))
        if not http:
            door.talk(served)
            return
        with door.listen(port) as listener:
            configured = os.environ.get("KILBURN_MCP_TOKEN", "")
            token = configured or chance.token_urlsafe(24)
            answering = door.over_http(served, token, listener)
            with ended_by_signals(answering):
                say(f"http://127.0.0.1:{listener.getsockname()[1]}{door.PATH}")
                if not configured:
                    say(f"Authorization: Bearer {token}")
                answering.run(sockets=[listener])
