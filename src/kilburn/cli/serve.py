"""`serve`: the gateway. An agent uses the store by changing its base URL.

With `--workers`, this process starts several copies of itself; see `kilburn.gateway.workers`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType
from typing import IO, Annotated, Any

import msgspec
from typer import Exit, Option

from kilburn.backends.gateways import open_keys
from kilburn.backends.places import is_url, open_backend, shown
from kilburn.cli.access import Options
from kilburn.cli.model_loading import load_model
from kilburn.cli.options import ADVANCED
from kilburn.cli.shell import Db, Tenant, app
from kilburn.errors import KilburnError, MissingExtra, SpecError, StoreUnavailable
from kilburn.gateway.access import LOOPBACK
from kilburn.gateway.keys import Keys
from kilburn.gateway.limits import check_listening, parse_limits
from kilburn.gateway.logs import Log
from kilburn.gateway.problems import has_openai_api
from kilburn.model import takes_tools
from kilburn.prices import find_prices
from kilburn.search.choice import usual_embedder
from kilburn.terminal import say
from kilburn.tokens.choice import counter_for
from kilburn.tokens.media import FILE_TOKENS

RETRY_DELAY = 0.5
"""Seconds between two attempts to reach a database."""

MAX_WORKERS = 64
"""Processes of one gateway."""

BOUNDS = (
    "rate=600 (requests per minute of a key; without keys there is none), messages=100000 (of a history), "
    "held=67108864 (bytes of a tenant's sessions in memory), body=67108864 and bodies=1073741824 (bytes of a request, and of "
    "all requests in a worker), upload=1073741824 (bytes of a file that passes through), values=500000 and depth=128 (of a "
    "request's JSON), per_key=256 (concurrent requests), repeat=600 (seconds that a request waits "
    "for an equal one that is being answered; 0: it gets 409 at once), running=512 and connections=2048 (concurrent, in each "
    "worker), headers=100, header_bytes=32768, patience=20 (seconds to wait for headers, for a body, and for a reader), "
    "pace=16384 (bytes per second of a body)"
)

EACH_CREDENTIAL = (
    "each provider key that clients send is a user of its own, with its own sessions and memory; "
    "if the key changes, as a subscription's token does, give --one-user"
)
"""The rule about users without keys and without `--one-user`."""


class ServeOptions(Options, frozen=True, kw_only=True):
    """The options of `serve`.

    Args:
        upstream URL: Forward requests to this API: "https://api.openai.com/v1", "https://api.anthropic.com" ...
        model SPEC: Answer requests with this model: "smollm2", "local('x.gguf')", "chat('gpt-5')" ...
        host ADDRESS: Listen at this address.
        port PORT: Listen at this port; 0 for any free port.
        window TOKENS: Keep prompts within this many tokens, or within the model's own window.
        policy SPEC: Let this policy manage the window. The default here is cost, with which a large window costs least per right
            answer; the library, whose windows are smaller, has hybrid.
        keys FILE: Require a key of clients. The keys are in this file or database; see `kilburn keys add`.
        memory TOKENS: Learn facts, and add up to this many tokens of them to each question; 0 for none. With --keys, each key
            has its own number.
        one_user: Treat all clients as one user, without --keys. By default each provider key that a client sends is a user.
        dashboard: Show the sessions at /dashboard, to people who sign in with a key.

    Advanced:
        allow_host NAME: Accept requests for this host name, too; may be repeated.
        allow_origin ORIGIN: Accept requests of web pages of this origin; may be repeated.
        memory_tools auto|on|off: Offer the model the tools recall and search_memory. auto: until it refuses tools; then the
            gateway searches for the words of the user.
        link auto|on|off: Link a session to the earlier one that a client compacted. auto: if the gateway knows whose sessions
            they are.
        file_tokens N: Count this many tokens for a file that a request names by an id or a URL, until the provider reports the
            real number.
        prices NAME: Compute the savings by this price table: hosted, automatic or local; by default the one that fits.
        log FILE: Write a line of JSON for each request to this file; "-" for standard error.
        contents --log-contents: Write the texts of requests to the log, too.
        fail closed|open: Refuse a request that the gateway cannot read or store, for example on a full disk, or pass it on
            unread.
        background --background/--no-background: Learn, embed and expire sessions in this process when it is idle. Otherwise
            `kilburn worker` does that.
        workers N: Serve with this many processes; SIGHUP replaces them one by one. The limits running, bodies and connections
            hold for each of them.
        drain SECONDS: Wait this long for running requests when the gateway stops.
        wait SECONDS: Wait this long at the start for a database that is unreachable.
    """

    upstream: str | None = None
    model: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535)] = 8000
    window: Annotated[int, Option(min=1000)] = 32_000
    policy: str = "cost"
    keys: Annotated[str | None, Option(envvar="KILBURN_KEYS")] = None
    memory: Annotated[int, Option(min=0)] = 0
    one_user: bool = False
    dashboard: bool = False
    allow_host: list[str] | None = None
    allow_origin: list[str] | None = None
    memory_tools: str = "auto"
    link: str = "auto"
    file_tokens: Annotated[int, Option(min=0)] = FILE_TOKENS
    limit: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=N", rich_help_panel=ADVANCED, help=f"Limit what clients use; may be repeated. The defaults: {BOUNDS}."
        ),
    ] = None
    prices: str | None = None
    log: str = "-"
    contents: bool = False
    fail: str = "closed"
    background: bool = True
    workers: Annotated[int, Option(min=1, max=MAX_WORKERS)] = 1
    drain: Annotated[float, Option(min=0.0)] = 60.0
    wait: Annotated[float, Option(min=0.0)] = 60.0
    db: Db = None
    tenant: Tenant = None

    @property
    def store(self) -> str:
        """Return the path or URL of the store."""
        return self.db or "agent.db"


class _WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent sends to a new worker.

    Args:
        folder: holds lock files that coordinate the workers.
        word: the token of the dashboard's forms if nobody signs in.
    """

    options: ServeOptions
    folder: str
    word: str


@app.command()
def serve(options: ServeOptions) -> None:
    """Serve the APIs of OpenAI and Anthropic. Clients' messages become sessions, and prompts stay within the window.

    Without --upstream and --model, the local model smollm2 answers. Its file, 98 MB, is downloaded once.

    Examples:

        kilburn serve --upstream https://api.openai.com/v1

        kilburn serve --upstream https://api.anthropic.com --window 60000

        kilburn serve --upstream https://api.openai.com/v1 --workers 4
    """
    gateway = _gateway()
    check_listening(options.host, options.keys)
    settings = _settings(gateway, options)
    _wait_for_databases(options)
    if options.keys is not None:
        _warn_without_keys(options.keys)
    if options.workers == 1:
        _serve_alone(gateway, settings, options)
    elif status := _serve_with_workers(gateway, settings, options):
        raise Exit(status)


def _wait_for_databases(options: ServeOptions) -> None:
    """Wait until the databases of the store and of the keys are reachable, up to `--wait` seconds.

    Raises:
        StoreUnavailable: a database is unreachable. StoreError: a database cannot be opened.
    """
    steps: list[Callable[[], Any]] = []
    if is_url(options.store) and options.fail == "closed":
        steps.append(lambda: open_backend(options.store, tenant=options.tenant or "default"))
    if options.keys is not None and is_url(options.keys):
        steps.append(partial(open_keys, options.keys))
    deadline, reported = time.monotonic() + options.wait, False
    while steps:
        try:
            steps[-1]().close()
            steps.pop()
        except StoreUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            if not reported:
                say(f"waiting for the database, up to {options.wait:g} s (--wait): {error}")
            reported = True
            time.sleep(RETRY_DELAY)


def _warn_without_keys(place: str) -> None:
    """Report that no key is valid. This is no error, as a running gateway accepts a key that is added later."""
    with closing(Keys(place)) as keys:
        if problem := keys.problem():
            say(problem)


SAME_SETTINGS = ("policy", "keys", "one_user", "memory", "memory_tools", "link", "file_tokens", "contents", "fail", "background")
"""Options that the gateway's settings have under the same names."""


def _settings(gateway: Any, options: ServeOptions) -> Any:
    upstream, model = options.upstream, _model(options.upstream, options.model)
    price_table = "local" if upstream is None else "automatic" if has_openai_api(upstream) else "hosted"
    return gateway.Settings(
        db=options.store,
        tenant=options.tenant or "default",
        upstream=upstream,
        model=model,
        window=options.window if model is None else min(options.window, model.context or options.window),
        hosts=(*LOOPBACK, options.host, *(options.allow_host or ())),
        origins=tuple(options.allow_origin or ()),
        limits=parse_limits(options.limit or [], keyed=options.keys is not None),
        prices=find_prices(options.prices or price_table),
        log=Log(open_log(options.log)),
        tokenizer="auto" if model is None else counter_for(model.tokenizer),
        **{name: getattr(options, name) for name in SAME_SETTINGS},
    )


def _gateway() -> Any:
    """Import the gateway, which needs an extra."""
    try:
        import uvicorn  # noqa: F401 -- checks that it is installed
    except ModuleNotFoundError as error:
        raise MissingExtra("uvicorn", "serve") from error
    from kilburn.gateway import app

    return app


def _model(upstream: str | None, spec: str | None) -> Any:
    """Load the model that answers; None if an upstream does."""
    if upstream is not None and spec is not None:
        raise SpecError("an upstream and a model", advice="give one of --upstream and --model")
    if upstream is not None:
        return None
    model = load_model(spec or "smollm2")
    if model is None:
        raise SpecError("a gateway needs a model that answers", advice="give --upstream URL or --model SPEC")
    return model


def _serve_alone(gateway: Any, settings: Any, options: ServeOptions) -> None:
    import uvicorn

    dashboard = None
    if options.dashboard:
        from kilburn.dashboard.behind_keys import mounted

        dashboard = mounted(lambda: server.should_exit)
    server = uvicorn.Server(_config(gateway.build(settings, dashboard), settings, options))
    with listener_at(options.host, options.port) as listener, ended_by_signals(server):
        _announce(settings, options, listener)
        server.run(sockets=[listener])


def _config(application: Any, settings: Any, options: ServeOptions) -> Any:
    import uvicorn

    from kilburn.gateway.connection import uvicorn_options

    # uvicorn takes whole seconds; 0 would mean no limit.
    return uvicorn.Config(
        application,
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(options.drain)),
        **uvicorn_options(settings.limits),
    )


def _announce(settings: Any, options: ServeOptions, listener: socket.socket) -> None:
    host = options.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    say(f"{url}/v1 speaks OpenAI's API, {url} Anthropic's; the store is {shown(settings.db)}")
    if options.dashboard:
        say(f"{url}/dashboard shows the sessions{'' if settings.keys is None else ' to people who have a key'}")
    if settings.keys is None:
        say("all clients are one user (--one-user)" if settings.one_user else EACH_CREDENTIAL)
    if settings.model is not None and not takes_tools(settings.model):
        say(f"{settings.model.name} takes no tools: the gateway searches evicted pages for the words of the user")
    try:
        usual_embedder()
    except KilburnError as error:
        say(f"searches are by words only, not by meaning: {error.what}: {error.advice}")


def _serve_with_workers(gateway: Any, settings: Any, options: ServeOptions) -> int:
    """Serve with several processes, and return the exit status."""
    from kilburn.gateway.workers import Workers, worker_command

    if options.store == ":memory:":
        raise SpecError("several workers over a store in memory", advice="give a file or a URL with --db, or --workers 1")
    signing = None
    if options.dashboard:
        from kilburn.dashboard import behind_keys  # fails early if its extra is missing

        signing = behind_keys.shared_sign_ins(settings.keys)
    with listener_at(options.host, options.port) as listener, shared_folder() as folder:

        async def run() -> int:
            await gateway.check(settings)
            workers = Workers(
                listener,
                count=options.workers,
                command=worker_command(__name__, "work"),
                begin=_WorkerStart(options=options, folder=folder, word=secrets.token_urlsafe(32)),
                drain=options.drain,
                prices=settings.prices,
                signing=signing,
                notify=lambda: _announce(settings, options, listener),
            )
            return await workers.run()

        return asyncio.run(run())


@contextmanager
def shared_folder(place: str | None = None) -> Iterator[str]:
    """Create a folder for files that workers share. It must last as long as the gateway, which may be weeks.

    Args:
        place: the parent folder; by default that of temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="kilburn-", dir=place) as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # systemd-tmpfiles deletes files that were not accessed for ten days, except below a locked folder.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(descriptor)


def work(listening: int, line: int) -> int:
    """Run a worker process, and return its exit status.

    Args:
        listening: file descriptor of the listening socket. line: file descriptor of the socket to the parent.
    """
    try:
        gateway = _gateway()
        from kilburn.gateway.worker import Parent, WorkerServer, first_line

        parent_socket = socket.socket(fileno=line)
        message = first_line(parent_socket)
        start = msgspec.json.decode(message.body, type=_WorkerStart)
        settings, parent = _settings(gateway, start.options), Parent(parent_socket, start.folder, message.id)
        dashboard = None
        if start.options.dashboard:
            from kilburn.dashboard.behind_keys import mounted

            dashboard = mounted(lambda: server.should_exit, parent.sign, start.word)
        application = gateway.build(settings, dashboard, parent)
        server = WorkerServer(_config(application, settings, start.options), socket.socket(fileno=listening), parent)
        server.run()
    except (KilburnError, OSError) as error:
        say(str(error))
        return 1
    return 0


@contextmanager
def ended_by_signals(server: Any) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop a uvicorn server, even before it handles signals itself. Without this, Python would raise
    KeyboardInterrupt at an arbitrary place during the start.

    Raises:
        KeyboardInterrupt: at the end, after Ctrl-C.
    """
    signals: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        server.should_exit = True

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signals:
        signal.raise_signal(signals[0])


def listener_at(host: str, port: int) -> socket.socket:
    """Return a listening socket; a client that knows its address can connect at once.

    Raises:
        SpecError: the address cannot be used.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise SpecError(f"{host} port {port}: {why}", advice="give another --port or --host") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only for sockets that it binds itself
    return listener


def open_log(path: str) -> IO[str]:
    """Open a log: standard error, or a file that only its owner may read, for appending."""
    if path == "-":
        return sys.stderr
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a", encoding="utf-8")
