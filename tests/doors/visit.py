"""How the fuzzers visit: a raw client, a gateway before the stub, and the form in which a fuzzer is run for long."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from doors.stub import PATHS, Answer, Seen, Server
from doors.stub import serving as provider
from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import serving

Json = dict[str, Any]
WORDS = (
    "river",
    "sand",
    "gold",
    "mill",
    "weir",
    "barge",
    "lock",
    "ferry",
    "heron",
    "reed",
    "oar",
    "tide",
    "mud",
    "stone",
    "rope",
    "eel",
)


class Broken(AssertionError):
    """A promise that does not hold: which, and the least that shows it."""

    def __init__(self, promise: str, shown: str) -> None:
        super().__init__(f"{promise}\n    {shown[:1500]}")
        self.promise = promise
        self.shown = shown


def check(holds: object, promise: str, shown: Any) -> None:
    """Raise if a promise does not hold."""
    if not holds:
        raise Broken(promise, shown if isinstance(shown, str) else json.dumps(shown, default=repr))


@dataclass
class Got:
    """What a client received. `broken`: the connection ended before the body did."""

    status: int
    headers: dict[str, str]
    raw: bytes
    broken: bool = False

    @property
    def body(self) -> bytes:
        """Without the content encoding."""
        if self.headers.get("content-encoding") == "gzip":
            return zlib.decompressobj(31).decompress(self.raw)
        return self.raw

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def words(self) -> str:
        """What an error says, without what differs each time."""
        try:
            said = str(self.json["error"]["message"])
        except (ValueError, LookupError, TypeError):
            said = repr(self.body)
        return re.sub(r"\d+|'[^']*'|`[^`]*`", "_", said)[:90]

    @property
    def session(self) -> str:
        return self.headers.get("x-kilburn-session", "")

    @property
    def everything(self) -> bytes:
        """Head and body."""
        return repr(sorted(self.headers.items())).encode() + b"\n" + self.body


def visit(
    url: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str = "POST", patience: float = 600
) -> Got:
    """One request on a connection of its own. `body`: bytes, or what becomes JSON."""
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=patience)
    given = {"content-type": "application/json", "authorization": "Bearer client-key"} | (headers or {})
    if path.endswith("messages"):
        given = {"x-api-key": "client-key", "anthropic-version": "2023-06-01"} | given
    try:
        connection.request(method, path, raw, {name: value for name, value in given.items() if value})
        response = connection.getresponse()
        broken = False
        try:
            said = response.read()
        except http.client.IncompleteRead as cut:
            said, broken = cut.partial, True
        return Got(response.status, {name.lower(): value for name, value in response.headers.items()}, said, broken)
    finally:
        connection.close()


@dataclass
class Ground:
    """A gateway and the stub behind it."""

    url: str
    stub: Server
    folder: Path
    rng: random.Random = field(default_factory=random.Random)

    def ask(self, form: str, body: Any, **more: Any) -> Got:
        return visit(self.url, PATHS[form], body, **more)

    def sessions(self) -> list[str]:
        """The names that the gateway has figures of."""
        listed = visit(self.url, "/sessions", method="GET").json
        rows = listed["sessions"] if isinstance(listed, dict) else listed
        return [row["session"] if "session" in row else row["name"] for row in rows]


def folder_of_memory() -> Path:
    """A folder for a store: in memory, where the machine has that."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="doors-", dir=shared if shared.is_dir() else None))


@contextmanager
def gateway(answer: Callable[[Seen], Answer], *, form: str = "chat", **settings: Any) -> Iterator[Ground]:
    """A gateway in this process, native for a dialect, before a stub that answers so."""
    folder = folder_of_memory()
    try:
        with provider(answer) as stub:
            far = stub.url if form == "messages" else f"{stub.url}/v1"
            given = {
                "db": str(folder / "doors.db"),
                "upstream": far,
                "tokenizer": "chars/4",
                "embedder": None,
                "window": 1_000_000,
            }
            with serving(build(Settings(**(given | settings)))) as url:
                yield Ground(url, stub, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prose(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


Trial = Callable[[random.Random], None]


def find_broken(trial: Trial, *, trials: int, seed: int = 0) -> dict[str, tuple[int, int, str]]:
    """Run trials and return the broken promises: how often each broke, the seed of its smallest case, and that case."""
    broken: dict[str, tuple[int, int, str]] = {}
    for number in range(seed, seed + trials):
        try:
            trial(random.Random(number))
        except Broken as failure:
            times, first, shown = broken.get(failure.promise, (0, number, failure.shown))
            if len(failure.shown) < len(shown):
                first, shown = number, failure.shown
            broken[failure.promise] = (times + 1, first, shown)
    return broken


def format_broken(broken: dict[str, tuple[int, int, str]]) -> str:
    return "\n".join(
        f"{times} x {promise} [seed {seed}]\n    {shown[:1500]}" for promise, (times, seed, shown) in sorted(broken.items())
    )


def run(fuzzers: dict[str, Callable[[], Any]], words: str) -> None:
    """A long run from the command line. Each fuzzer is a context that gives a trial."""
    parser = argparse.ArgumentParser(description=words.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=fuzzers, action="append")
    options = parser.parse_args()
    failed = False
    for name in options.only or fuzzers:
        with fuzzers[name]() as trial:
            broken = find_broken(trial, trials=options.trials, seed=options.seed)
        failed = failed or bool(broken)
        print(f"{name}: {options.trials} trials from seed {options.seed}: {len(broken)} promises broken", flush=True)
        if broken:
            print(format_broken(broken), flush=True)
    sys.exit(failed)
