"""Figures and log lines of exchanges, over a real server; what a tenant sees of others."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import kilburn
from kilburn.cli import main
from kilburn.errors import StoreCorrupt
from kilburn.event import Act
from kilburn.gateway.access import Access
from kilburn.gateway.app import Settings, build
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.keys import Key, Keys, add_key
from kilburn.gateway.logs import Log, log_line
from kilburn.gateway.metrics import COUNTED_FIELDS, SESSIONS, Metrics, OwnCounts, saved
from kilburn.gateway.status import routes
from kilburn.jobs.claims import FAILED, JobName, JobState, try_again
from kilburn.kernel.ledger import Stats
from kilburn.model import Tokens
from kilburn.prices import PRICES
from kilburn.testing.upstream import Break, Refusal, Sent, Upstream, calling
from kilburn.testing.upstream import serving as served
from waiting import until

CANARY = "canary-7f3e"


def turn(exchange: Exchange, session: str, *, hits: int = 1, faults: int = 0) -> None:
    """What whoever answers says of one request."""
    exchange.form, exchange.model, exchange.session, exchange.finish = "messages", "m-1", session, "stop"
    exchange.sent, exchange.new, exchange.rounds, exchange.idle, exchange.waited = 5000, 100, 2, 10.0, 0.0
    exchange.usage = Tokens(prompt=2400, cached=2000, written=400, reply=50)
    exchange.stats_before = Stats(prompts=10, tokens_seen=9900, tokens_shipped=7000, hits=20, faults=4, tokens_reprefilled=5)
    rate = (20 + hits) / (24 + hits + faults)
    exchange.stats_after = Stats(
        tokens_seen=10_000,
        tokens_shipped=9000,
        tokens_reprefilled=45,
        hits=20 + hits,
        faults=4 + faults,
        hit_rate=rate,
        tokens_in_window=1100,
        window=2000,
    )


class Works:
    """A served gateway without an upstream."""

    def __init__(self, serving: Callable[..., int], folder: Path, *, keyed: bool = True, contents: bool = False) -> None:
        self.metrics, self.out = Metrics(PRICES["hosted"]), io.StringIO()
        self.log = Log(self.out)
        self.trouble: Exception | None = None
        self.checks = 0
        file = folder / "keys.json"
        self.ana = {"x-api-key": add_key(file, Key(tenant="acme", user="ana"))[1]}
        self.ben = {"x-api-key": add_key(file, Key(tenant="bricks"))[1]}
        self.prometheus = {"x-api-key": add_key(file, Key(tenant="ops", figures=True))[1]}

        async def answer(request: Request) -> Response:
            body = await request.body()
            turn(request.state.exchange, f"s-{request.state.key.tenant}", faults=30 if body == b"faults" else 0)
            return Response(b"{}")

        def check() -> None:
            self.checks += 1
            if self.trouble is not None:
                raise self.trouble

        app = Starlette(
            routes=[
                Route("/v1/messages", answer, methods=["POST"]),
                *routes(OwnCounts(self.metrics), check, lambda: "words", keyed=keyed),
            ]
        )

        def observe(exchange: Exchange) -> None:
            for reader in (self.metrics.observe, self.log.observe):
                reader(exchange)

        self.access = Access(app, keys=Keys(file) if keyed else None, observe=observe, contents=contents)
        self.url = f"http://127.0.0.1:{serving(self.access)}"
        self.http = httpx2.Client(base_url=self.url, timeout=600)

    def lines(self, count: int) -> list[dict[str, Any]]:
        """The log, once it has so many lines."""
        until(lambda: self.out.getvalue().count("\n") >= count)
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


@pytest.fixture
def works(serving: Callable[..., int], tmp_path: Path) -> Iterator[Callable[..., Works]]:
    made: list[Works] = []

    def build(**options: Any) -> Works:
        made.append(Works(serving, tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        each.http.close()


def series(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_tenant_sees_its_own_figures_and_prometheus_those_of_all(works: Callable[..., Works]) -> None:
    it = works()
    for headers in (it.ana, it.ana, it.ben):
        assert it.http.post("/v1/messages", headers=headers).status_code == 200
    assert it.http.get("/metrics").status_code == 401
    mine = series(it.http.get("/metrics", headers=it.ana).text)
    assert mine["kilburn_tokens_total{kind=shipped,tenant=acme}"] == 4000
    assert mine["kilburn_tokens_total{kind=sent,tenant=acme}"] == 10_000
    assert mine["kilburn_tokens_total{kind=reprefilled,tenant=acme}"] == 80
    assert mine["kilburn_tokens_total{kind=cached,tenant=acme}"] == 4000
    assert mine["kilburn_upstream_calls_total{tenant=acme}"] == 4
    assert mine["kilburn_added_seconds_count{tenant=acme}"] == 2
    assert not [name for name in mine if "acme" not in name]
    assert [row["session"] for row in it.http.get("/sessions", headers=it.ben).json()["sessions"]] == ["s-bricks"]
    whole = series(it.http.get("/metrics", headers=it.prometheus).text)
    assert whole["kilburn_requests_total{route=/v1/messages,status=200,tenant=bricks}"] == 1
    assert whole["kilburn_problems_total{problem=invalid_api_key,tenant=}"] == 1
    assert whole["process_open_fds{}"] > 0
    assert len(it.http.get("/sessions", headers=it.prometheus).json()["sessions"]) == 2
    assert it.http.post("/v1/messages", headers=it.prometheus).status_code == 403


def test_the_alarm_is_on_while_a_hit_rate_is_low(works: Callable[..., Works]) -> None:
    it = works(keyed=False)
    for body, alarmed in ((b"faults", 1.0), (b"", 0.0), (b"faults", 1.0)):
        it.http.post("/v1/messages", content=body)
        figures = series(it.http.get("/metrics").text)
        assert figures["kilburn_sessions_alarmed{tenant=default}"] == alarmed
        [row] = it.http.get("/sessions").json()["sessions"]
        assert row["alarm"] is (alarmed > 0)
    assert figures["kilburn_faults_total{tenant=default}"] == 60


def test_clients_cannot_make_series_at_will(works: Callable[..., Works]) -> None:
    it = works(keyed=False)
    before = len(series(it.http.get("/metrics").text))
    it.http.get("/nothing")
    grown = len(series(it.http.get("/metrics").text))
    for number in range(50):
        it.http.get(f"/v1/{number}", headers={"user-agent": str(number)})
    assert len(series(it.http.get("/metrics").text)) == grown
    assert grown - before < 40


def test_figures_of_many_sessions_stay_bounded() -> None:
    metrics = Metrics(PRICES["hosted"])
    for number in range(SESSIONS + 50):
        exchange = Exchange(key=Key(tenant="t"))
        turn(exchange, f"s{number}", faults=30)
        metrics.observe(exchange)
    rows = metrics.sessions("t")
    assert len(rows) == SESSIONS
    assert rows[0].session == f"s{SESSIONS + 49}"
    assert series(metrics.page("t").decode())["kilburn_sessions_alarmed{tenant=t}"] == SESSIONS
    assert metrics.sessions("other") == []


def test_what_is_saved_is_counted_against_the_best_that_a_client_could_have_had() -> None:
    prices = PRICES["hosted"]
    exchange = Exchange()
    turn(exchange, "s")
    # Two rounds of 1,000 shipped tokens with 200 of tools beside them. Alone: 5,200 tokens in one, of which 100 are new.
    alone = prices.cost(Tokens(prompt=5200, cached=5100, written=100, reply=50))
    assert exchange.usage is not None
    assert saved(prices, exchange) == pytest.approx(alone - prices.cost(exchange.usage))
    exchange.idle = 301.0
    alone = prices.cost(Tokens(prompt=5200, written=5200, reply=50))
    assert saved(prices, exchange) == pytest.approx(alone - prices.cost(exchange.usage))
    exchange.usage = Tokens(prompt=5, cached=10)
    assert saved(prices, exchange) == 0.0


def test_a_line_says_who_and_how_much_and_not_what(works: Callable[..., Works]) -> None:
    it = works()
    it.http.post(f"/v1/messages?key={CANARY}", headers={**it.ana, "x-note": CANARY}, content=CANARY.encode())
    it.http.post("/v1/messages", headers={"x-api-key": f"kilburn-{CANARY}"}, content=CANARY.encode())
    it.http.get("/%1b%5b31m%e2%80%ae%0a{%22forged%22:1}" + "x" * 5000, headers=it.ana)
    first, second, third = it.lines(3)
    assert CANARY not in it.out.getvalue()
    assert it.ana["x-api-key"] not in it.out.getvalue()
    assert it.ana["x-api-key"].split("-", 2)[2] not in it.out.getvalue()
    assert "\x1b" not in it.out.getvalue()
    assert "\u202e" not in it.out.getvalue()
    assert first["path"] == "/v1/messages"
    assert (first["tenant"], first["user"], first["session"], first["status"]) == ("acme", "ana", "s-acme", 200)
    assert first["usage"] == {"prompt": 2400, "cached": 2000, "written": 400, "reply": 50}
    assert (second["status"], second["problem"], "key" in second) == (401, "invalid_api_key", False)
    assert len(third["path"]) <= 200


def test_contents_are_logged_if_they_are_asked_for(works: Callable[..., Works]) -> None:
    it = works(contents=True)
    it.http.post("/v1/messages", headers=it.ana, content=b"\xff" + CANARY.encode())
    [line] = it.lines(1)
    assert line["asked"] == "\ufffd" + CANARY
    assert it.ana["x-api-key"] not in it.out.getvalue()


def test_a_log_that_cannot_be_written_stops_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        log = Log(full)
        for _ in range(3):
            log.observe(Exchange())
        assert log.lost == 3
        assert capsys.readouterr().err.count("the log cannot be written") == 1
        # What waits in its buffer cannot be written at its end either.
        with pytest.raises(OSError, match="No space"):
            full.close()


def test_health_is_open_and_says_little(works: Callable[..., Works]) -> None:
    it = works()
    assert it.http.get("/health").json()["status"] == "ok"
    for _ in range(20):
        it.http.get("/health")
    assert it.checks <= 2
    it.trouble = StoreCorrupt(f"/secret/{CANARY}")
    until(lambda: it.http.get("/health").status_code == 503)
    answer = it.http.get("/health")
    assert answer.json()["problem"] == "StoreCorrupt"
    assert CANARY not in answer.text


def test_top_shows_a_gateway_that_runs(
    works: Callable[..., Works], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = works()
    it.http.post("/v1/messages", headers=it.ana, content=b"faults")
    monkeypatch.delenv("KILBURN_KEY", raising=False)
    assert main(["top", "--url", it.url, "--once"]) == 2
    assert "KILBURN_KEY" in capsys.readouterr().err
    monkeypatch.setenv("KILBURN_KEY", it.ana["x-api-key"])
    assert main(["top", "--url", it.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "s-acme" in shown
    assert "38.2% low" in shown
    assert main(["top", "--url", f"{it.url}/", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["sessions"]
    assert (row["tenant"], row["sent"], row["shipped"], row["cached"], row["faults"]) == ("acme", 5000, 2000, 2000, 30)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:x"])
def test_top_says_that_an_address_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url]) == 2
    assert "no address of a gateway" in capsys.readouterr().err


def test_top_says_that_nobody_answers(serving: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1

    async def page(request: Request) -> Response:
        return Response(b'{"sessions": [{"session": 1}]}')

    port = serving(Starlette(routes=[Route("/sessions", page)]))
    assert main(["top", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err.count("no gateway answers") == 2


def test_a_line_of_an_exchange_that_was_never_read() -> None:
    assert log_line(Exchange(status=499))["status"] == 499


def full_exchange() -> Exchange:
    """Return an exchange with a value in every field that is counted or logged."""
    exchange = Exchange(client_name="mine-7", method="POST", path="/v1/messages", client="::1", status=200, size=9, stream=True)
    turn(exchange, "s-acme")
    exchange.key = Key(tenant="acme", user="ana", name="k", digest="d")
    exchange.problem, exchange.unread, exchange.trace, exchange.logged_body = "upstream_error", "StoreBusy", "a.py:1", b"{}"
    exchange.received, exchange.first, exchange.waited, exchange.seconds = 0.1, 0.5, 0.2, 2.0
    exchange.warnings, exchange.upstream = ["shortened: a page"], [0.2]
    exchange.compacted, exchange.lookups = [("lru", "done", 40)], [("recall", "hit")]
    return exchange


def test_an_exchange_counts_the_same_in_a_worker_and_in_its_parent() -> None:
    exchange = full_exchange()
    own, parent = Metrics(PRICES["hosted"]), Metrics(PRICES["hosted"])
    own.observe(exchange)
    fields = {name: getattr(exchange, name) for name in COUNTED_FIELDS}
    body = msgspec.json.encode({**fields, "key": {"tenant": "acme", "user": "ana"}})
    parent.observe(msgspec.json.decode(body, type=Exchange))
    figures = {name: value for name, value in series(own.page("acme").decode()).items() if "_created" not in name}
    assert len(figures) > 50
    assert figures["kilburn_tokens_total{kind=shipped,tenant=acme}"] == 2000
    assert {name: value for name, value in series(parent.page("acme").decode()).items() if "_created" not in name} == figures
    assert [row for row, _ in parent.rows()] == [row for row, _ in own.rows()]


def test_a_line_has_every_field_that_is_known() -> None:
    line = log_line(full_exchange())
    names = (
        "time id client method path status seconds bytes key tenant user named form model session stream rounds sent new finish"
    )
    names += " problem unread warnings trace first waited added usage tokens_in_window hit_rate asked"
    assert set(line) == set(names.split())
    assert (line["named"], line["client"], line["asked"]) == ("mine-7", "::1", "{}")
    assert set(line["usage"]) == {"prompt", "cached", "written", "reply"}


def words(message: dict[str, Any]) -> str:
    return str(message.get("content") or json.dumps(message.get("tool_calls")))


def tokens(bodies: list[list[dict[str, Any]]]) -> float:
    return sum(len(words(message)) for messages in bodies for message in messages) / 4


class Speaker:
    """A model that recalls these pages before it answers, where it is asked to."""

    def __init__(self, *pages: str) -> None:
        self.pages, self.number = pages, 0
        self.recalled: list[bool] = []
        self.upstream = Upstream(otherwise=self.say)

    def say(self, sent: Sent) -> Any:
        self.number += 1
        if sent.body.get("tools") and sent.body["messages"][-1]["content"].startswith("Please"):
            asked = [message["content"] for message in sent.body["messages"] if message["role"] == "user"]
            self.recalled += [any("river 1 " in str(text) for text in asked) for _ in self.pages]
            return calling(*[("recall", {"address": page}) for page in self.pages])
        return f"Answer {self.number} of the river."

    def talk(self, setup: Any, turns: int) -> tuple[list[list[dict[str, Any]]], int]:
        """What a client sends, which goes on from what it is answered; and the tokens of the replies."""
        messages: list[dict[str, Any]] = []
        sent, replied = [], 0
        for turn in range(turns):
            lead = "Please tell. " if turn > 14 and turn % 3 == 0 else ""
            messages.append({"role": "user", "content": lead + f"The river {turn} carries sand and gold to the sea. " * 15})
            reply, _ = setup.chat(messages)
            rounds = (reply.usage.model_extra or {}).get("kilburn_rounds", [{"completion_tokens": reply.usage.completion_tokens}])
            replied += sum(each["completion_tokens"] for each in rounds)
            sent.append(list(messages))
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return sent, replied


def test_the_figures_of_two_gateways_add_up_where_a_session_goes_from_one_to_the_other(tmp_path: Path) -> None:
    """Before this, what was new in a request, and what left the window for its sake, was not counted by a gateway that had to
    read its session first."""
    db = tmp_path / "a.db"
    with served(Upstream(otherwise="Fine.")) as far:
        settings = Settings(db=str(db), upstream=f"{far}/v1", tokenizer="chars/4", embedder=None, window=700)
        with served(build(settings)) as one, served(build(settings)) as other:
            messages: list[dict[str, str]] = []
            for number, near in enumerate([one, other, other, one, one, one, other, one] * 2):
                messages.append({"role": "user", "content": f"question {number} " + "x" * 400})
                body, headers = {"model": "m", "messages": messages}, {"x-kilburn-session": "s"}
                answer = httpx2.post(f"{near}/v1/chat/completions", json=body, headers=headers, timeout=600).json()
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            pages = [series(httpx2.get(f"{near}/metrics", timeout=600).text) for near in (one, other)]
    with kilburn.open(db, readonly=True, tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        ledger, compacted = session.ledger.figures, sum(event.act is Act.COMPACT for event in session.ledger.events())

    def counted(name: str) -> float:
        return sum(figure for page in pages for key, figure in page.items() if key.startswith(name))

    assert counted("kilburn_tokens_total{kind=new,") == ledger.tokens_seen
    assert counted("kilburn_tokens_total{kind=shipped,") == ledger.tokens_shipped
    assert counted("kilburn_tokens_total{kind=reprefilled,") == ledger.tokens_reprefilled
    assert counted("kilburn_hits_total") == ledger.hits
    assert counted("kilburn_compactions_total") == compacted > 2


def test_the_figures_are_what_the_provider_and_the_client_count(gateway: Any) -> None:
    speaker = Speaker("p3")
    upstream = speaker.upstream
    setup = gateway(upstream=upstream, window=3000, policy="fifo")
    sent, replied = speaker.talk(setup, 25)
    shipped = [one.body["messages"] for one in upstream.sent]
    again, before = 0.0, []
    for now in [[words(message) for message in messages] for messages in shipped]:
        same = next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), len(before))
        again += sum(len(text) for text in now[same:] if text in before) / 4
        before = now
    [row] = httpx2.get(f"{setup.url}/sessions").json()["sessions"]
    calls, recalls = len(upstream.sent), len(speaker.recalled)
    assert recalls > 2
    assert not any(speaker.recalled), "each recall was of what was not in the prompt"
    assert (row["requests"], row["faults"], row["hits"]) == (25, recalls, calls)
    assert row["hit_rate"] == pytest.approx(calls / (calls + recalls))
    assert (row["cached"], row["written"]) == (sum(one.cached for one in upstream.sent), 0)
    assert row["replied"] == replied
    assert row["sent"] == pytest.approx(tokens(sent), rel=0.03)
    assert row["shipped"] == pytest.approx(tokens(shipped), rel=0.03)
    assert row["reprefilled"] == pytest.approx(again, rel=0.1)
    assert again > 2000
    # The same client without the gateway.
    bare = Upstream(otherwise="Fine.")
    with served(bare) as url:
        for messages in sent:
            httpx2.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": messages})
    here, alone = (
        sum(PRICES["hosted"].cost(Tokens(prompt=one.tokens, cached=one.cached)) for one in each.sent) for each in (upstream, bare)
    )
    assert row["saved"] == pytest.approx(alone - here, abs=0.1 * here)
    page = series(httpx2.get(f"{setup.url}/metrics").text)
    assert page["kilburn_upstream_calls_total{tenant=default}"] == calls
    for kind in ("sent", "new", "shipped", "cached", "written", "replied", "reprefilled"):
        assert page[f"kilburn_tokens_total{{kind={kind},tenant=default}}"] == row[kind]
    assert page["kilburn_saved{tenant=default}"] == pytest.approx(row["saved"])


@pytest.mark.parametrize("tokenizer", ["chars/4", "auto"])
def test_as_long_as_nothing_leaves_the_window_nothing_is_saved(gateway: Any, tokenizer: str) -> None:
    speaker = Speaker()
    setup = gateway(upstream=speaker.upstream, window=50_000, tokenizer=tokenizer)
    speaker.talk(setup, 6)
    [row] = httpx2.get(f"{setup.url}/sessions").json()["sessions"]
    assert (row["requests"], row["saved"], row["reprefilled"], row["faults"]) == (6, 0.0, 0, 0)


def test_recalls_without_end_put_the_alarm_on(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker("p3", "p5", "p7", "p9", "p11", "p13")
    setup = gateway(upstream=speaker.upstream, window=2000)
    speaker.talk(setup, 32)
    [row] = httpx2.get(f"{setup.url}/sessions").json()["sessions"]
    assert row["hit_rate"] < 0.6
    assert row["alarm"]
    assert "kilburn_sessions_alarmed{tenant=default}" in series(httpx2.get(f"{setup.url}/metrics").text)
    assert main(["top", "--once", "--url", setup.url]) == 0
    assert f"{row['hit_rate']:.1%} low" in capsys.readouterr().out


def test_nothing_that_is_said_is_seen_by_who_watches(
    gateway: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(0)
    out = io.StringIO()
    script = [
        calling(("search_memory", {"query": CANARY}), ("recall", {"address": CANARY})),
        calling(("write", {"text": CANARY})),
        Refusal(status=400, words=CANARY),
        Refusal(status=529, words=CANARY, retry_after=1),
        *[Break(how=how, after=2) for how in ("cut", "torn", "short", "garbled", "error")],
    ]
    setup = gateway(upstream=Upstream(*script, otherwise=CANARY), window=1000, memory=200, log=Log(out))
    asked = {"role": "user", "content": f"{CANARY} " + "The river carries sand. " * 40}
    call = {"id": "c1", "type": "function", "function": {"name": CANARY, "arguments": json.dumps({CANARY: CANARY})}}
    history = [{"role": "system", "content": CANARY}] + [asked, {"role": "assistant", "content": CANARY}] * 12
    tool = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": CANARY},
    ]
    good = [*history, *tool, asked]
    bodies: list[Any] = [{"model": "m", "messages": good, "user": CANARY, CANARY: 1, "stream": at > 3} for at in range(10)]
    wrong = (
        {"role": CANARY, "content": CANARY},
        {"role": "tool", "tool_call_id": CANARY, "content": CANARY},
        CANARY,
        {CANARY: 1},
    )
    bodies += [{"model": "m", "messages": [one]} for one in wrong]
    bodies += [{"model": "m", "messages": CANARY}, {"model": "m", "messages": [asked], "stream": CANARY}, [CANARY]]
    raw = [json.dumps(body).encode() for body in bodies] + [b'{"' + CANARY.encode(), CANARY.encode() + b"\xff"]
    heads = {"authorization": f"Bearer {CANARY}", "x-api-key": CANARY, "x-other": CANARY, "user-agent": CANARY, "cookie": CANARY}
    statuses = set()
    with httpx2.Client(base_url=setup.url, timeout=600, headers=heads, trust_env=False) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            for body in raw:
                try:
                    statuses.add(client.post(f"{path}?q={CANARY}", content=body).status_code)
                except httpx2.HTTPError:
                    statuses.add(0)
        client.request("PUT", "/v1/messages", content=CANARY)
        client.get("/v1/models", headers={"origin": f"http://{CANARY}"})
        watched = [client.get(path).text for path in ("/health", "/metrics", "/sessions")]
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {200, 400, 529} <= statuses
    assert len(lines) >= 3 * len(raw)
    assert all(line.get("problem") for line in lines if line["status"] >= 400)
    assert any(line["status"] == 200 and line.get("problem") for line in lines), "a stream that broke off is told"
    seen = [
        out.getvalue(),
        *watched,
        *capsys.readouterr(),
        *(str(vars(record)) for record in caplog.records if "kilburn" in record.name),
    ]
    assert not [text for text in seen if CANARY in text]


def test_jobs_that_failed_again_and_again_are_counted(gateway: Any) -> None:
    setup = gateway("Fine.")
    setup.chat([{"role": "user", "content": "a"}])

    def failed() -> float:
        lines = httpx2.get(f"{setup.url}/metrics", timeout=600).text.splitlines()
        (line,) = [line for line in lines if line.startswith("kilburn_jobs_failed{")]
        return float(line.split()[-1])

    assert failed() == 0
    with setup.store() as store:
        for segment, tries in ((1, FAILED - 1), (2, FAILED), (3, FAILED + 9)):
            kept = msgspec.json.encode(JobState(tries, 0.0, error="Unavailable")).decode()
            store.backend.settings.put(JobName("learn", segment).name, kept)
        assert failed() == 2
        assert try_again(store.backend) == 3
    assert failed() == 0
