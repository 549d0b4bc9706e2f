"""`dashboard`: the store in a browser, for reading unless changes are asked for; or one file of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kilburn.backends.places import open_backend, shown
from kilburn.cli.access import existing
from kilburn.cli.serve import ended_by_signals, listener_at
from kilburn.cli.shell import Db, Force, Tenant, app
from kilburn.dashboard.changes import OwnHands, Visit, fresh_word
from kilburn.errors import MissingExtra, SpecError
from kilburn.gateway.access import LOOPBACK
from kilburn.gateway.limits import is_loopback
from kilburn.terminal import say, tell

PATIENCE = 5
"""Seconds that open pages have when the dashboard ends."""


@app.command()
def dashboard(
    name: Annotated[str | None, Argument(metavar="SESSION", help="With --export: only this session.", show_default=False)] = None,
    host: Annotated[str, Option(help="The address to listen at, of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8765,
    allow_host: Annotated[
        list[str] | None, Option(metavar="NAME", help="A name by which a browser may call it; may be repeated.")
    ] = None,
    export: Annotated[Path | None, Option(metavar="FILE.html", help="Write one file that needs nothing else, and end.")] = None,
    redact: Annotated[bool, Option("--redact/--contents", help="With --export: leave out what pages say, or show it.")] = True,
    write: Annotated[
        bool, Option("--write", help="Changes by hand too: compact, take back, keep, let go, accept and reject facts.")
    ] = False,
    force: Force = False,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Show sessions in a browser: what left each window, why, at which price, and how to get it back. The store is only read.

    It listens on this machine alone, and has no keys: whoever may call this machine's ports may read the store, and with --write
    change it.

    Examples:

        kilburn dashboard

        kilburn dashboard --write

        kilburn dashboard session-1 --export session-1.html
    """
    application, exporting = _loaded()
    if write and export is not None:
        raise SpecError("--write with --export", advice="a file changes nothing; leave --write out")
    if name is not None and export is None:
        raise SpecError("a session without --export", advice="open the dashboard and choose it there, or give --export FILE.html")
    path = existing(db)
    if export is not None:
        with closing(open_backend(path, tenant=tenant or "default", readonly=True)) as backend:
            size = exporting.write(backend, export, name, redact=redact, force=force)
        tell(f"{export}: {size:,} bytes, {'without what pages say' if redact else 'with what pages say'}")
        return
    if not is_loopback(host):
        raise SpecError(
            f"{host} can be reached from outside, and the dashboard has no keys",
            advice="listen on 127.0.0.1, and reach it through ssh -L 8765:127.0.0.1:8765",
        )
    import uvicorn

    with closing(open_backend(path, tenant=tenant or "default", readonly=True)) as backend, listener_at(host, port) as listener:
        server: uvicorn.Server
        served = application.build(
            backend,
            hosts=(*LOOPBACK, host, *(allow_host or ())),
            ending=lambda: server.should_exit,
            visit=Visit(fresh_word(), OwnHands(path, tenant or "default")) if write else None,
        )
        config = uvicorn.Config(
            served,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=PATIENCE,
        )
        server = uvicorn.Server(config)
        place = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        but = " but changes by hand" if write else ""
        with ended_by_signals(server):
            say(f"{place}/ shows {shown(path)}; nothing is written{but}; Ctrl-C ends it")
            server.run(sockets=[listener])


def _loaded() -> tuple[Any, Any]:
    """The modules that need the extra: the application, and the export."""
    try:
        import uvicorn  # noqa: F401 -- whether it is there
    except ModuleNotFoundError as error:
        raise MissingExtra("uvicorn", "dashboard") from error
    from kilburn.dashboard import app, export

    return app, export
