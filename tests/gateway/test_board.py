"""The board and the alerts, against what a gateway's /metrics really says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.talk import user
from kilburn.cli import main
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.keys import Key
from kilburn.gateway.metrics import CURRENT, POLICIES, Metrics
from kilburn.kernel.ledger import Stats
from kilburn.prices import PRICES
from kilburn.testing.upstream import Upstream, calling

promql_parser = pytest.importorskip("promql_parser")

BOARD = json.loads(files("kilburn.gateway").joinpath("board.json").read_text("utf-8"))
ALERTS = files("kilburn.gateway").joinpath("alerts.yml").read_text("utf-8")

Series = dict[str, list[dict[str, str]]]
"""The labels of each sample, by its name."""


def scraped(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name if family.type == "gauge" else f"{family.name}_total", [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    """What /metrics says after requests in which everything happened."""
    from contextlib import ExitStack

    from gateway.conftest import gateway

    with ExitStack() as stack:
        make = stack.enter_context(_as_context(gateway, tmp_path_factory.mktemp("board")))
        turns = 0

        def say(sent: Any) -> Any:
            nonlocal turns
            turns += 1
            return calling(("recall", {"address": "p2"})) if turns % 3 == 0 and sent.body.get("tools") else f"Fine {turns}."

        setup = make(upstream=Upstream(otherwise=say), window=1200, policy="fifo")
        messages: list[Any] = []
        for turn in range(12):
            messages.append(user(f"question {turn} " + "about the parser and its tests " * 12))
            reply, _ = setup.chat(messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        httpx2.post(f"{setup.url}/v1/chat/completions", content=b"{")
        yield scraped(httpx2.get(f"{setup.url}/metrics").text)


def _as_context(fixture: Any, folder: Path) -> Any:
    from contextlib import contextmanager

    return contextmanager(fixture.__wrapped__ if hasattr(fixture, "__wrapped__") else fixture)(folder)


def queries() -> list[str]:
    on_board = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    in_rules = re.findall(r"^        expr: (?:>-\n((?:          .*\n)+)|(.*)\n)", ALERTS, re.M)
    assert len(in_rules) == ALERTS.count("alert:")
    return on_board + [" ".join((block or line).split()) for block, line in in_rules]


def parsed(query: str) -> Any:
    """A query, with what Grafana puts in place of its variables."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$tenant", ".*"))


def selectors(node: Any) -> Iterator[Any]:
    """The selectors in a query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vs", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str | float | int):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


@pytest.mark.parametrize("query", queries())
def test_each_query_asks_for_what_a_gateway_has(query: str, real: Series) -> None:
    found = list(selectors(parsed(query)))
    assert len(found) == len(re.findall(r"\bkilburn_\w+", query)), "every selector is looked at"
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    for one in found:
        assert one.name in real, one.name
        labels = {label for sample in real[one.name] for label in sample}
        asked = {matcher.name for matcher in one.matchers.matchers}
        if real[one.name]:
            assert asked <= labels, (one.name, asked - labels)
            assert grouped <= labels | {"le"}, (one.name, grouped - labels)
        for matcher in one.matchers.matchers:
            values = {sample.get(matcher.name, "") for sample in real[one.name]}
            if str(matcher.op) == "MatchOp.Equal" and matcher.name == "kind":
                assert matcher.value in values


def test_what_is_asked_of_kinds_and_routes_is_there(real: Series) -> None:
    kinds = {labels["kind"] for labels in real["kilburn_tokens_total"]}
    for query in queries():
        for wanted in re.findall(r'kind=~?"([^"]*)"', query):
            assert set(wanted.split("|")) <= kinds
    assert {"recall"} <= {labels["tool"] for labels in real["kilburn_lookups_total"]}
    assert real["kilburn_compactions_total"]
    assert {f"kilburn_{name}" for name in CURRENT} <= real.keys()


def test_the_verbs_print_what_grafana_and_prometheus_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["metrics", "board"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == BOARD
    places = [tuple(panel["gridPos"].values()) for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert [panel["id"] for panel in made["panels"]] == list(range(1, len(places) + 1))
    assert main(["metrics", "alerts"]) == 0
    assert capsys.readouterr().out == ALERTS


TESTED = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'kilburn_hits_total{tenant="low"}', values: '0+5x40'}
      - {series: 'kilburn_faults_total{tenant="low"}', values: '0+5x40'}
      - {series: 'kilburn_hits_total{tenant="high"}', values: '0+7x40'}
      - {series: 'kilburn_faults_total{tenant="high"}', values: '0+3x40'}
      - {series: 'kilburn_hits_total{tenant="quiet"}', values: '0x20 1x20'}
      - {series: 'kilburn_faults_total{tenant="quiet"}', values: '0x20 2x20'}
      - {series: 'kilburn_unread_total{tenant="low", reason="StoreFull"}', values: '0x20 3x20'}
      - {series: 'kilburn_embedding_failing{tenant="low"}', values: '1x40'}
    alert_rule_test:
      - eval_time: 30m
        alertname: KilburnHitRateLow
        exp_alerts:
          - exp_labels: {severity: warning, tenant: low}
            exp_annotations:
              summary: "low: the window serves 50% of what is asked for"
              description: >-
                Under 60% the window is too small: start the gateway with a larger --window. kilburn top names the sessions.
      - eval_time: 22m
        alertname: KilburnServesUnread
        exp_alerts:
          - exp_labels: {severity: critical, tenant: low, reason: StoreFull}
            exp_annotations:
              summary: "low: requests are served unread: StoreFull"
              description: "Nothing of them is kept. The gateway's log says more."
      - eval_time: 10m
        alertname: KilburnEmbeddingFails
        exp_alerts: []
"""


def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    (tmp_path / "rules.yml").write_text(ALERTS, encoding="utf-8")
    (tmp_path / "tests.yml").write_text(TESTED, encoding="utf-8")
    for arguments in (["check", "rules", "rules.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run([tool, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_labels_stay_bounded_whatever_a_ledger_says() -> None:
    metrics = Metrics(PRICES["hosted"])
    for number in range(200):
        exchange = Exchange(key=Key(tenant="t"), session="s")
        exchange.stats_before, exchange.stats_after = Stats(), Stats(prompts=1)
        exchange.compacted = [(f"policy {number}\n", f"outcome {number}", -5)]
        metrics.observe(exchange)
    samples = scraped(metrics.page().decode())["kilburn_compactions_total"]
    assert len(samples) == POLICIES + 1
    assert {labels["outcome"] for labels in samples} == {"other"}


def test_a_scrape_does_not_grow_with_sessions() -> None:
    def size(sessions: int) -> int:
        metrics = Metrics(PRICES["hosted"])
        for number in range(sessions):
            exchange = Exchange(key=Key(tenant="t"), session=f"s{number}", form="chat")
            exchange.stats_before, exchange.stats_after = Stats(), Stats(prompts=1)
            metrics.observe(exchange)
        return len([line for line in metrics.page().decode().splitlines() if line.startswith("kilburn_")])

    assert size(1500) == size(1)
