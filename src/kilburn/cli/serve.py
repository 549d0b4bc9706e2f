"""`serve`: the gateway. Any agent gets the store by changing its base URL.

With `--workers` it is a parent that begins itself several times: see `kilburn.gateway.workers`.
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

from kilburn.backends.places import is_url, open_backend, shown
from kilburn.backends.together import open_keys
from kilburn.cli.access import fetched
from kilburn.cli.shell import Db, Tenant, app
from kilburn.errors import KilburnError, MissingExtra, SpecError, StoreUnavailable
from kilburn.gateway.access import LOOPBACK
from kilburn.gateway.keys import Keys
from kilburn.gateway.limits import check_listening, parse_limits
from kilburn.gateway.logs import Log
from kilburn.gateway.problems import has_openai_api
from kilburn.model import takes_tools
from kilburn.prices import prices_of
from kilburn.search.choice import usual_embedder
from kilburn.terminal import say
from kilburn.tokens.choice import counter_for
from kilburn.tokens.media import FILE_TOKENS

BETWEEN = 0.5
"""Seconds between two looks whether a database is there."""

MOST_WORKERS = 64
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

Advanced = partial(Option, rich_help_panel="Advanced")
"""An option that few people need in their first week."""


@app.command()
def serve(
    upstream: Annotated[
        str | None,
        Option(metavar="URL", help='The API that answers: "https://api.openai.com/v1", "https://api.anthropic.com" ...'),
    ] = None,
    model: Annotated[
        str | None,
        Option(metavar="SPEC", help='The model that answers instead: "smollm2", "local(\'x.gguf\')", "chat(\'gpt-5\')" ...'),
    ] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, metavar="PORT", help="The port to listen at; 0 for any free port.")] = 8000,
    window: Annotated[
        int, Option(min=1000, metavar="TOKENS", help="Size of the window in tokens, if the model's own window is not smaller.")
    ] = 32_000,
    policy: Annotated[
        str,
        Option(
            metavar="SPEC",
            help="The policy that manages the window. Here cost, since a large window costs least per right answer with it; the "
            "library, whose windows are smaller, has hybrid.",
        ),
    ] = "cost",
    keys: Annotated[
        str | None,
        Option(
            metavar="FILE",
            envvar="KILBURN_KEYS",
            help="Require a key of clients. The keys are in this file or database; see `kilburn keys add`.",
        ),
    ] = None,
    memory: Annotated[
        int,
        Option(
            min=0,
            metavar="TOKENS",
            help="Learn facts, and add up to so many tokens of them to each question; 0 for none. With --keys, each key has its "
            "own number.",
        ),
    ] = 0,
    one_user: Annotated[
        bool,
        Option(
            "--one-user",
            help="Without --keys: all clients are one user. By default each provider key that a client sends is a user.",
        ),
    ] = False,
    dashboard: Annotated[
        bool, Option("--dashboard", help="Show the sessions at /dashboard, to people who sign in with a key.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, Advanced(metavar="NAME", help="Accept requests for this host name too; may be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Advanced(metavar="ORIGIN", help="Accept requests of web pages of this origin; may be repeated.")
    ] = None,
    memory_tools: Annotated[
        str,
        Advanced(
            metavar="auto|on|off",
            help="Offer the model the tools recall and search_memory. auto: until it refuses tools; then the gateway searches "
            "for the words of the user.",
        ),
    ] = "auto",
    link: Annotated[
        str,
        Advanced(
            metavar="auto|on|off",
            help="Link a session to the earlier one that a client compacted. auto: if the gateway knows whose sessions they are.",
        ),
    ] = "auto",
    file_tokens: Annotated[
        int,
        Advanced(
            min=0,
            metavar="N",
            help="Tokens of a file that a request names by an id or a URL, until the provider reports what it takes.",
        ),
    ] = FILE_TOKENS,
    limit: Annotated[
        list[str] | None, Advanced(metavar="NAME=N", help=f"Limit what clients use; may be repeated. The defaults: {BOUNDS}.")
    ] = None,
    prices: Annotated[
        str | None,
        Advanced(
            metavar="NAME",
            help="The price table for the savings that are shown: hosted, automatic or local; by default the one that fits.",
        ),
    ] = None,
    log: Annotated[
        str, Advanced(metavar="FILE", help='Write a line of JSON for each request to this file; "-" for standard error.')
    ] = "-",
    contents: Annotated[bool, Advanced("--log-contents", help="Write the texts of requests to the log, too.")] = False,
    fail: Annotated[
        str,
        Advanced(
            metavar="closed|open",
            help="Refuse a request that the gateway cannot read or store, for example on a full disk, or pass it on unread.",
        ),
    ] = "closed",
    background: Annotated[
        bool,
        Advanced(
            "--background/--no-background",
            help="Learn, embed and expire sessions in this process when it is idle. Otherwise `kilburn worker` does that.",
        ),
    ] = True,
    workers: Annotated[
        int,
        Advanced(
            min=1,
            max=MOST_WORKERS,
            metavar="N",
            help="Number of processes that serve the same store; SIGHUP replaces them one by one. The limits running, bodies and "
            "connections hold for each of them.",
        ),
    ] = 1,
    drain: Annotated[float, Advanced(min=0.0, metavar="SECONDS", help="How long running requests may take at the end.")] = 60.0,
    wait: Annotated[
        float,
        Advanced(
            "--wait", min=0.0, metavar="SECONDS", help="How long to wait at the start for a database that cannot be reached."
        ),
    ] = 60.0,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Serve the APIs of OpenAI and Anthropic. Clients' messages become sessions, and prompts stay within the window.

    Without --upstream and --model, the local model smollm2 answers. Its file, 98 MB, is downloaded once.

    Examples:

        kilburn serve --upstream https://api.openai.com/v1

        kilburn serve --upstream https://api.anthropic.com --window 60000

        kilburn serve --upstream https://api.openai.com/v1 --workers 4
    """
    asked = _Asked(
        host=host,
        upstream=upstream,
        model=model,
        window=window,
        policy=policy,
        keys=keys,
        one_user=one_user,
        allow_host=allow_host or [],
        memory=memory,
        memory_tools=memory_tools,
        link=link,
        file_tokens=file_tokens,
        allow_origin=allow_origin or [],
        limit=limit or [],
        prices=prices,
        log=log,
        fail=fail,
        contents=contents,
        dashboard=dashboard,
        drain=drain,
        db=db or "agent.db",
        tenant=tenant or "default",
        background=background,
    )
    gateway = _gateway()
    check_listening(host, keys)
    settings = _settings(gateway, asked)
    _wait_for_databases(asked, wait)
    if keys is not None:
        _tell_if_nobody_comes_in(keys)
    if workers == 1:
        _listen(gateway, settings, asked, port)
    elif status := _work_together(gateway, settings, asked, port, workers):
        raise Exit(status)


def _wait_for_databases(asked: _Asked, seconds: float) -> None:
    """Wait until the databases of the store and of the keys can be reached, so long at most.

    Raises:
        StoreUnavailable: one cannot. StoreError: it cannot be opened.
    """
    steps: list[Callable[[], Any]] = []
    if is_url(asked.db) and asked.fail == "closed":
        steps.append(lambda: open_backend(asked.db, tenant=asked.tenant))
    if asked.keys is not None and is_url(asked.keys):
        steps.append(partial(open_keys, asked.keys))
    end, told = time.monotonic() + seconds, False
    while steps:
        try:
            steps[-1]().close()
            steps.pop()
        except StoreUnavailable as error:
            if time.monotonic() >= end:
                raise
            if not told:
                say(f"waiting for the database, {seconds:g} s at most (--wait): {error}")
            told = True
            time.sleep(BETWEEN)


def _tell_if_nobody_comes_in(place: str) -> None:
    """Say so where no key is valid. It is no error: a gateway that runs knows a key that is made later."""
    with closing(Keys(place)) as known:
        if problem := known.problem():
            say(problem)


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for: the options of `serve` that each worker has, too."""

    host: str
    upstream: str | None
    model: str | None
    window: int
    policy: str
    keys: str | None
    one_user: bool
    allow_host: list[str]
    memory: int
    memory_tools: str
    link: str
    file_tokens: int
    allow_origin: list[str]
    limit: list[str]
    prices: str | None
    log: str
    fail: str
    contents: bool
    dashboard: bool
    drain: float
    db: str
    tenant: str
    background: bool


class _Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told first.

    Args:
        folder: for files that say whose turn it is.
        word: what the dashboard's forms bring back where nobody signs in.
    """

    asked: _Asked
    folder: str
    word: str


def _settings(gateway: Any, asked: _Asked) -> Any:
    upstream, speaker = asked.upstream, _speaker(asked.upstream, asked.model)
    usual = "local" if upstream is None else "automatic" if has_openai_api(upstream) else "hosted"
    return gateway.Settings(
        db=asked.db,
        tenant=asked.tenant,
        upstream=upstream,
        model=speaker,
        window=asked.window if speaker is None else min(asked.window, speaker.context or asked.window),
        policy=asked.policy,
        keys=asked.keys,
        one_user=asked.one_user,
        memory=asked.memory,
        memory_tools=asked.memory_tools,
        link=asked.link,
        file_tokens=asked.file_tokens,
        hosts=(*LOOPBACK, asked.host, *asked.allow_host),
        origins=tuple(asked.allow_origin),
        limits=parse_limits(asked.limit, keyed=asked.keys is not None),
        prices=prices_of(asked.prices or usual),
        log=Log(opened_log(asked.log)),
        contents=asked.contents,
        fail=asked.fail,
        background=asked.background,
        tokenizer="auto" if speaker is None else counter_for(speaker.tokenizer),
    )


def _gateway() -> Any:
    """The gateway's module, which needs an extra."""
    try:
        import uvicorn  # noqa: F401 -- whether it is there
    except ModuleNotFoundError as error:
        raise MissingExtra("uvicorn", "serve") from error
    from kilburn.gateway import app

    return app


def _speaker(upstream: str | None, model: str | None) -> Any:
    """The model that answers; None where an upstream does."""
    if upstream is not None and model is not None:
        raise SpecError("an upstream and a model", advice="give one of --upstream and --model")
    if upstream is not None:
        return None
    speaker = fetched(model or "smollm2")
    if speaker is None:
        raise SpecError("a gateway needs a model that answers", advice="give --upstream URL or --model SPEC")
    return speaker


def _listen(gateway: Any, settings: Any, asked: _Asked, port: int) -> None:
    import uvicorn

    people = None
    if asked.dashboard:
        from kilburn.dashboard.behind_keys import mounted

        people = mounted(lambda: server.should_exit)
    server = uvicorn.Server(_config(gateway.build(settings, people), settings, asked))
    with listener_at(asked.host, port) as listener, ended_by_signals(server):
        _tell(settings, asked, listener)
        server.run(sockets=[listener])


def _config(served: Any, settings: Any, asked: _Asked) -> Any:
    import uvicorn

    from kilburn.gateway.connection import uvicorn_options

    options = uvicorn_options(settings.limits)
    # uvicorn takes whole seconds, and 0 for no bound.
    return uvicorn.Config(served, log_level="warning", timeout_graceful_shutdown=max(1, round(asked.drain)), **options)


def _tell(settings: Any, asked: _Asked, listener: socket.socket) -> None:
    host = asked.host
    place = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    say(f"{place}/v1 speaks OpenAI's API, {place} Anthropic's; the store is {shown(settings.db)}")
    if asked.dashboard:
        say(f"{place}/dashboard shows its sessions{'' if settings.keys is None else ' to whoever has a key'}")
    if settings.keys is None:
        say("all clients are one user (--one-user)" if settings.one_user else EACH_CREDENTIAL)
    if settings.model is not None and not takes_tools(settings.model):
        say(f"{settings.model.name} takes no tools: what has left the window is searched for the user's words")
    try:
        usual_embedder()
    except KilburnError as error:
        say(f"searches are by words alone, not by meaning: {error.what}: {error.advice}")


def _work_together(gateway: Any, settings: Any, asked: _Asked, port: int, count: int) -> int:
    """Serve with several processes; returns the exit status."""
    from kilburn.gateway.workers import Workers, worker_command

    if asked.db == ":memory:":
        raise SpecError("several workers over a store in memory", advice="give a file or a URL with --db, or --workers 1")
    signing = None
    if asked.dashboard:
        from kilburn.dashboard import behind_keys  # whether it is there

        signing = behind_keys.signing_of(settings.keys)
    with listener_at(asked.host, port) as listener, shared_folder() as folder:

        async def run() -> int:
            await gateway.check(settings)
            workers = Workers(
                listener,
                count=count,
                command=worker_command(__name__, "work"),
                begin=_Begin(asked=asked, folder=folder, word=secrets.token_urlsafe(32)),
                drain=asked.drain,
                prices=settings.prices,
                signing=signing,
                notify=lambda: _tell(settings, asked, listener),
            )
            return await workers.run()

        return asyncio.run(run())


@contextmanager
def shared_folder(place: str | None = None) -> Iterator[str]:
    """A folder for what workers share. A worker that begins after weeks needs it, too.

    Args:
        place: where it is made; None for where temporary files are.
    """
    with tempfile.TemporaryDirectory(prefix="kilburn-", dir=place) as folder:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # systemd-tmpfiles deletes what nobody has touched for ten days, and nothing below a folder that is locked.
            fcntl.flock(held, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(held)


def work(listening: int, line: int) -> int:
    """Be a worker, and return its exit status: what a parent begins, with the numbers of the socket that listens and of the one
    that leads to the parent."""
    try:
        gateway = _gateway()
        from kilburn.gateway.worker import Parent, WorkerServer, first_line

        parent_socket = socket.socket(fileno=line)
        said = first_line(parent_socket)
        begin = msgspec.json.decode(said.body, type=_Begin)
        settings, parent = _settings(gateway, begin.asked), Parent(parent_socket, begin.folder, said.id)
        people = None
        if begin.asked.dashboard:
            from kilburn.dashboard.behind_keys import mounted

            people = mounted(lambda: server.should_exit, parent.sign, begin.word)
        served = gateway.build(settings, people, parent)
        server = WorkerServer(_config(served, settings, begin.asked), socket.socket(fileno=listening), parent)
        server.run()
    except (KilburnError, OSError) as error:
        say(str(error))
        return 1
    return 0


@contextmanager
def ended_by_signals(server: Any) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end a server of uvicorn that has told where it is, also before it heeds them itself. Until then
    Python would raise KeyboardInterrupt wherever it is, and there are places from which that goes nowhere.

    Raises:
        KeyboardInterrupt: at the end, after Ctrl-C.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens: who reads the address may connect at once."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise SpecError(f"{host} port {port}: {why}", advice="give another --port or --host") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so only for what it bound itself
    return listener


def opened_log(path: str) -> IO[str]:
    """Where lines go: standard error, or the end of a file that only its owner may read."""
    if path == "-":
        return sys.stderr
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a", encoding="utf-8")
