"""`kilburn serve` that cannot begin says why and what to do; its limits are those that it names."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest
import uvicorn

from cli.terminal import kilburn, program
from kilburn.cli.serve import BOUNDS, ended_by_signals
from kilburn.errors import SpecError
from kilburn.gateway.keys import Key, add_key, revoke_key
from kilburn.gateway.limits import RATE, RequestBounds, parse_limits

FAR = ("serve", "--upstream", "http://127.0.0.1:9/v1")


def test_what_keeps_it_from_listening_is_told(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", Key())
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "text.db").write_text("This is a text, and no database.")
    db = ("--db", tmp_path / "a.db")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, said, status in (
            (("--port", port), "already in use", 2),
            (("--host", "no-such-host.invalid", "--keys", tmp_path / "keys.json"), "no-such-host.invalid", 2),
            (("--host", "0.0.0.0"), "no keys are set", 2),
            (("--keys", tmp_path / "none.json"), "there is no keys file", 2),
            (("--keys", tmp_path / "bad.json"), "is not a keys file", 2),
            (("--keys", tmp_path), "is not a file", 2),
            (("--log", tmp_path / "no" / "log"), "No such file", 1),
            (("--limit", "messages=many"), "is no number", 2),
            (("--limit", "messages=0"), "is no limit", 2),
            (("--limit", "pages=5"), "messages", 2),
            (("--upstream", "ftp://x"), "give one such as https://api.openai.com/v1", 2),
            (("--policy", "nonsense"), "no policies named 'nonsense'", 2),
            (("--prices", "nonsense"), "hosted, automatic, local", 2),
            (("--db", tmp_path / "text.db"), "is not a database", 1),
            (("--db", tmp_path / "none" / "a.db"), "there is no folder", 1),
            (("--model", "nobody"), "give one of --upstream and --model", 2),
        ):
            done = kilburn(*FAR, "--port", "0", *db, *words)
            assert (done.status, said in done.err) == (status, True), done.err
            assert "Traceback" not in done.err
            assert done.err.count("\n") == 1


def told_of_keys(place: object) -> str:
    """What `kilburn serve` says of its keys. It ends then, as several workers cannot share a store in memory."""
    *lines, last = kilburn(*FAR, "--workers", 2, "--db", ":memory:", "--keys", place).err.splitlines()
    assert "several workers over a store in memory" in last
    return "\n".join(lines)


def test_keys_that_let_nobody_in_are_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"version": 1, "keys": []}')
    assert f"there is no key in {file}, so no client is admitted" in told_of_keys(file)
    assert "make one with `kilburn keys add`" in told_of_keys(file)
    made, _ = add_key(file, Key())
    assert told_of_keys(file) == ""
    revoke_key(file, made.name)
    assert f"every key in {file} is revoked, so no client is admitted" in told_of_keys(file)


def test_a_file_of_keys_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    done = kilburn(*FAR, "--port", "0", "--keys", tmp_path / "loop.json")
    assert done.status == 1
    assert "loop.json: Too many levels" in done.err


def test_without_its_extra_it_names_it(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no', name='uvicorn')")
    done = program(*FAR, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2] / 'src'}")
    assert done.status in (1, 2)
    assert "[serve]" in done.err
    assert "Traceback" not in done.err


def test_every_limit_is_named_with_its_default() -> None:
    named = dict(re.findall(r"(\w+)=(\d+)", BOUNDS))
    assert {name: float(value) for name, value in named.items()} == {
        **{name: float(getattr(RequestBounds(), name)) for name in RequestBounds.__struct_fields__},
        "rate": RATE,
    }
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "threat-model.md").read_text()
    assert f"{RATE} with keys" in page
    assert f"{RequestBounds().messages:,}" in page


def test_what_each_worker_has_for_itself_is_said_where_it_is_set() -> None:
    docs = Path(__file__).parents[2] / "docs"
    bounds, page = RequestBounds(), (docs / "howto" / "gateway-workers.md").read_text()
    for name, one, four in (
        ("running", f"{bounds.running:,}", f"{4 * bounds.running:,}"),
        ("bodies", f"{bounds.bodies >> 30} GiB", f"{4 * bounds.bodies >> 30} GiB"),
        ("connections", f"{bounds.connections:,}", f"{4 * bounds.connections:,}"),
    ):
        assert re.search(rf"\| `{name}`: [^|]+ \| {one} \| {four} \|", page), name
    assert "running=512 and connections=2048 (concurrent, in each worker)" in BOUNDS
    assert "bodies=1073741824 (bytes of a request, and of all requests in a worker)" in BOUNDS
    given = parse_limits(re.findall(r"--limit ((?:running|bodies)=\d+)", page), keyed=False)
    assert (4 * given.running, 4 * given.bodies) == (bounds.running, 1 << 30)
    told = kilburn("serve", "--help").out
    assert "The limits running, bodies and connections hold for each of them." in " ".join(told.replace("│", " ").split())
    model = (docs / "explanation" / "threat-model.md").read_text()
    assert f"| concurrent requests of a key; of a process | {bounds.per_key}; {bounds.running} |" in model


def test_limits_are_read_and_checked() -> None:
    assert parse_limits((), keyed=False) == RequestBounds()
    assert parse_limits((), keyed=True).rate == RATE
    assert parse_limits(["rate=0", "messages=9", "patience=0.5"], keyed=True) == RequestBounds(messages=9, patience=0.5)
    for wrong in ("body", "body=", "body=-1", "body=x", "patience=nan", "body=1.5", "=3"):
        with pytest.raises(SpecError):
            parse_limits([wrong], keyed=False)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_comes_before_the_server_heeds_any_ends_it(number: int, raised: type[BaseException]) -> None:
    def exits(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, exits), signal.signal(signal.SIGINT, signal.default_int_handler)
    server = uvicorn.Server(uvicorn.Config(lambda *_: None, lifespan="off", log_level="warning"))

    def serve() -> None:
        with socket.socket() as listener, ended_by_signals(server):
            listener.bind(("127.0.0.1", 0))
            signal.raise_signal(number)
            server.run(sockets=[listener])  # ends at once

    try:
        with pytest.raises(raised):
            serve()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
