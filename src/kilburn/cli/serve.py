"""`serve`: the gateway. Any agent gets the store by changing its base URL."""

from __future__ import annotations

import os
import socket
import sys
from typing import IO, Annotated, Any

from typer import Option

from kilburn.cli.access import fetched
from kilburn.cli.shell import Db, Tenant, app
from kilburn.errors import KilburnError, MissingExtra, SpecError
from kilburn.gateway.access import LOOPBACK
from kilburn.gateway.limits import check_listening, limits_of
from kilburn.gateway.logs import Log
from kilburn.model import takes_tools
from kilburn.prices import prices_of
from kilburn.search.choice import usual_embedder
from kilburn.terminal import say
from kilburn.tokens.choice import counter_for

BOUNDS = (
    "rate=600 (requests a minute of a key; none without keys), messages=100000 (of a history), body=67108864 and "
    "bodies=1073741824 (bytes of a request, and of all), upload=1073741824 (bytes of a file that goes "
    "through), values=500000 and depth=128 (of a request's JSON), "
    "running=512 and per_key=256 (at once), headers=100, header_bytes=32768, connections=2048, "
    "patience=20 (seconds for headers, for a body to begin, and to read on), pace=16384 (bytes a second of a body)"
)


@app.command()
def serve(
    host: Annotated[str, Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8000,
    upstream: Annotated[
        str | None,
        Option(metavar="URL", help='What answers: "https://api.openai.com/v1", "https://api.anthropic.com" ...'),
    ] = None,
    model: Annotated[
        str | None, Option(metavar="SPEC", help='Or a model: "smollm2", "local(\'x.gguf\')", "chat(\'gpt-5\')" ...')
    ] = None,
    window: Annotated[int, Option(min=1000, help="Tokens of the window; the model's own where that is smaller.")] = 32_000,
    policy: Annotated[str, Option(metavar="SPEC", help="What decides at the window.")] = "cost",
    keys: Annotated[
        str | None,
        Option(
            metavar="FILE",
            envvar="KILBURN_KEYS",
            help="The keys that clients need, in a file or a database; see `kilburn keys add`.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="A name by which clients may call it; may be repeated."),
    ] = None,
    memory: Annotated[
        int,
        Option(
            min=0,
            metavar="TOKENS",
            help="Long-term memory put beside a question, and learned; 0 for none. With keys, each key says it.",
        ),
    ] = 0,
    memory_tools: Annotated[
        str,
        Option(
            metavar="auto|on|off",
            help="Offer the model recall and search_memory; auto: until it refuses tools, then search for the user's words.",
        ),
    ] = "auto",
    link: Annotated[
        str,
        Option(
            metavar="auto|on|off",
            help="Link a session to an earlier one that a client compacted; auto: where it is known whose they are.",
        ),
    ] = "auto",
    allow_origin: Annotated[
        list[str] | None,
        Option(metavar="ORIGIN", help="A web page's origin that may call it; may be repeated."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        Option(metavar="NAME=N", help=f"A bound on what clients take; may be repeated: {BOUNDS}."),
    ] = None,
    prices: Annotated[
        str | None,
        Option(metavar="NAME", help="The price table, for what is saved: hosted, automatic or local; else what fits."),
    ] = None,
    log: Annotated[str, Option(metavar="FILE", help='A line of JSON for each request goes there; "-" is standard error.')] = "-",
    fail: Annotated[
        str,
        Option(
            metavar="closed|open",
            help="What the gateway cannot read or keep, on a full disk for example: refuse it, or send it on unread.",
        ),
    ] = "closed",
    contents: Annotated[bool, Option("--log-contents", help="The log has what was asked, too.")] = False,
    dashboard: Annotated[
        bool, Option("--dashboard", help="Show its sessions at /dashboard to people who sign in with a key.")
    ] = False,
    db: Db = None,
    tenant: Tenant = None,
) -> None:
    """Serve OpenAI's and Anthropic's API; what clients say becomes sessions, and prompts stay within the window.

    Without --upstream and --model, the local model smollm2 answers; its file is fetched once, 98 MB.

    Examples:

        kilburn serve --upstream https://api.openai.com/v1

        kilburn serve --upstream https://api.anthropic.com --window 60000
    """
    gateway = _gateway()
    check_listening(host, keys)
    speaker = _speaker(upstream, model)
    settings = gateway.Settings(
        db=db or "agent.db",
        tenant=tenant or "default",
        upstream=upstream,
        model=speaker,
        window=window if speaker is None else min(window, speaker.context or window),
        policy=policy,
        keys=keys,
        memory=memory,
        memory_tools=memory_tools,
        link=link,
        hosts=(*LOOPBACK, host, *(allow_host or ())),
        origins=tuple(allow_origin or ()),
        limits=limits_of(limit or (), keyed=keys is not None),
        prices=prices_of(prices or ("local" if upstream is None else "automatic" if upstream.endswith("/v1") else "hosted")),
        log=Log(opened_log(log)),
        contents=contents,
        fail=fail,
        tokenizer="auto" if speaker is None else counter_for(speaker.tokenizer),
    )
    _listen(gateway, settings, host, port, shows=dashboard)


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


def _listen(gateway: Any, settings: Any, host: str, port: int, *, shows: bool) -> None:
    import uvicorn

    from kilburn.gateway.connection import uvicorn_options

    people = None
    if shows:
        from kilburn.dashboard.behind_keys import mounted

        people = mounted(lambda: server.should_exit)
    config = uvicorn.Config(gateway.build(settings, people), log_level="warning", **uvicorn_options(settings.limits))
    server = uvicorn.Server(config)
    with listener_at(host, port) as listener:
        place = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        say(f"{place}/v1 speaks OpenAI's API, {place} Anthropic's; the store is {settings.db}")
        if shows:
            say(f"{place}/dashboard shows its sessions{'' if settings.keys is None else ' to whoever has a key'}")
        if settings.model is not None and not takes_tools(settings.model):
            say(f"{settings.model.name} takes no tools: what has left the window is searched for the user's words")
        try:
            usual_embedder()
        except KilburnError as error:
            say(f"searches are by words alone, not by meaning: {error.what}: {error.advice}")
        server.run(sockets=[listener])


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
