"""`mcp`: serves sessions, memory and documents to an assistant over the Model Context Protocol."""

from __future__ import annotations

import logging
import os
from secrets import token_urlsafe
from typing import Annotated

from typer import Option

from kilburn.backend import check_name
from kilburn.cli.access import writing
from kilburn.cli.memories import RefuseSecrets, User, secrets_mode
from kilburn.cli.serve import ended_by_signals
from kilburn.cli.shell import Db, Tenant, app
from kilburn.memory.quota import Quota
from kilburn.terminal import say


@app.command()
def mcp(
    user: User = "",
    http: bool = False,
    port: Annotated[int, Option(min=0, max=65535)] = 8765,
    in_force: bool = False,
    quota_facts: Annotated[int, Option(min=0)] = 10_000,
    secrets: RefuseSecrets = None,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Serve one user's sessions, memory and documents over the Model Context Protocol.

    Over HTTP, a client needs a token: that in $KILBURN_MCP_TOKEN, or a new one, which is printed on standard error.

    Example:

        kilburn mcp --user ana --db agent.db

    Args:
        http: Listen on 127.0.0.1 instead of standard input and output.
        port: Listen at this port, with --http; 0 for any free port.
        in_force: Put facts of the model in force at once; by default they wait for `memories accept`.
        quota_facts --quota FACTS: Store at most this many facts.
    """
    screening = secrets_mode(secrets)
    if user:
        check_name(user, "user")
    from kilburn import mcp as protocol  # needs an extra

    # The SDK would log the contents of requests.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    logging.getLogger("mcp").propagate = False
    with writing(db or "agent.db", tenant, meaning=True) as store:
        server = protocol.server(store, user, in_force=in_force, secrets=screening, quota=Quota(facts=quota_facts))
        if not http:
            protocol.talk(server)
            return
        with protocol.listen(port) as listener:
            configured = os.environ.get("KILBURN_MCP_TOKEN", "")
            token = configured or token_urlsafe(24)
            http_server = protocol.over_http(server, token, listener)
            with ended_by_signals(http_server):
                say(f"http://127.0.0.1:{listener.getsockname()[1]}{protocol.PATH}")
                if not configured:
                    say(f"Authorization: Bearer {token}")
                http_server.run(sockets=[listener])
