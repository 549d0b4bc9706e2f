"""`dashboard`: shows a store in a browser, read-only unless --write is given, or exports it to one file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kilburn.backends.places import open_backend, shown
from kilburn.cli.access import existing
from kilburn.cli.serve import ended_by_signals, listener_at
from kilburn.cli.shell import Db, Force, Tenant, app
from kilburn.dashboard.changes import OwnHands, Visit, fresh_word
from kilburn.errors import MissingExtra, SpecError
from kilburn.gateway.access import LOOPBACK
from kilburn.gateway.limits import is_loopback
from kilburn.terminal import say, tell

SHUTDOWN_TIMEOUT = 5
"""Seconds to wait for open pages when the dashboard stops."""


@app.command()
def dashboard(
    name: str | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8765,
    allow_host: list[str] | None = None,
    export: Path | None = None,
    redact: bool = True,
    write: bool = False,
    force: Force = False,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Show sessions in a browser: what left each window, why, at which price, and how to get it back.

    Without --write, the store is only read.

    The dashboard listens only on this machine, and has no keys: anybody who can connect to this machine's ports can read the
    store, and with --write change it.

    Examples:

        kilburn dashboard

        kilburn dashboard --write

        kilburn dashboard session-1 --export session-1.html

    Args:
        name [SESSION]: Export only this session, with --export.
        host: Listen at this address of this machine.
        port: Listen at this port; 0 for any free port.
        allow_host NAME: Accept requests for this host name, too; may be repeated.
        export FILE.html: Write the dashboard to one self-contained file, and exit.
        redact --redact/--contents: Leave out the texts of pages, or include them, with --export.
        write: Allow changes: compact, undo, pin and evict pages, accept and reject facts.
    """
    app_module, export_module = _import_dashboard()
    if write and export is not None:
        raise SpecError("--write with --export", advice="a file changes nothing; leave --write out")
    if name is not None and export is None:
        raise SpecError("a session without --export", advice="open the dashboard and choose it there, or give --export FILE.html")
    path = existing(db)
    if export is not None:
        with closing(open_backend(path, tenant=tenant or "default", readonly=True)) as backend:
            size = export_module.write(backend, export, name, redact=redact, force=force)
        tell(f"{export}: {size:,} bytes, {'without the texts of pages' if redact else 'with the texts of pages'}")
        return
    if not is_loopback(host):
        raise SpecError(
            f"{host} can be reached from outside, and the dashboard has no keys",
            advice="listen at 127.0.0.1, and connect through ssh -L 8765:127.0.0.1:8765",
        )
    import uvicorn

    with closing(open_backend(path, tenant=tenant or "default", readonly=True)) as backend, listener_at(host, port) as listener:
        server: uvicorn.Server
        dashboard = app_module.build(
            backend,
            hosts=(*LOOPBACK, host, *(allow_host or ())),
            ending=lambda: server.should_exit,
            visit=Visit(fresh_word(), OwnHands(path, tenant or "default")) if write else None,
        )
        config = uvicorn.Config(
            dashboard,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        server = uvicorn.Server(config)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        exception = " except changes by hand" if write else ""
        with ended_by_signals(server):
            say(f"{url}/ shows {shown(path)}; nothing is written{exception}; Ctrl-C stops it")
            server.run(sockets=[listener])


def _import_dashboard() -> tuple[Any, Any]:
    """Import the modules that need the extra: the application, and the export."""
    try:
        import uvicorn  # noqa: F401 -- checks that it is installed
    except ModuleNotFoundError as error:
        raise MissingExtra("uvicorn", "dashboard") from error
    from kilburn.dashboard import app, export

    return app, export
