"""A board for Grafana, and alerts for Prometheus, of what `/metrics` of a gateway says. A test asks each query of a real one."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

OF = '{tenant=~"$tenant"}'
"""The tenants that are chosen on the board."""

EVERY = "[$__rate_interval]"

WIDE, WIDTH, HEIGHT = 24, 8, 8
"""Columns of a board, and of a panel; rows of a panel."""


class Panel(NamedTuple):
    """One picture.

    Args:
        title, words: what it shows, and how to read it.
        unit: as Grafana names it.
        queries: by what stands beside its line.
        low: under this it is red; None for no such bound. high: over this.
    """

    title: str
    words: str
    unit: str
    queries: dict[str, str]
    low: float | None = None
    high: float | None = None


def _rate(name: str, labels: str = "", by: str = "tenant") -> str:
    chosen = OF if not labels else OF.replace("}", f", {labels}}}")
    return f"sum by ({by}) (rate({name}{chosen}{EVERY}))"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', by='le')})"


HITS = f"{_rate('kilburn_hits_total')} / ({_rate('kilburn_hits_total')} + {_rate('kilburn_faults_total')})"
ASKED = _rate("kilburn_request_seconds_count", 'route=~"/v1/(chat/completions|messages|responses)"')
CALLS = f"{_rate('kilburn_upstream_calls_total')} / {ASKED}"

PANELS = (
    Panel(
        "Hit rate",
        "Prompts and recalls that the window served. Under 60%: a larger --window.",
        "percentunit",
        {"{{tenant}}": HITS},
        low=0.6,
    ),
    Panel("Sessions under 60%", "Over their whole life.", "none", {"{{tenant}}": f"kilburn_sessions_alarmed{OF}"}, high=1),
    Panel("Requests", "By status.", "reqps", {"{{status}}": _rate("kilburn_requests_total", by="status")}),
    Panel(
        "Problems",
        "Requests that failed or were refused.",
        "reqps",
        {"{{problem}}": _rate("kilburn_problems_total", by="problem")},
    ),
    Panel(
        "Served unread",
        "Something here failed, and the client was served all the same.",
        "reqps",
        {"{{reason}}": _rate("kilburn_unread_total", by="reason")},
    ),
    Panel(
        "Tokens",
        "Sent by clients, shipped upstream, read from its cache.",
        "short",
        {"{{kind}}": _rate("kilburn_tokens_total", 'kind=~"sent|shipped|cached"', by="kind")},
    ),
    Panel(
        "What edits cost and freed",
        "Tokens that a provider read again because of an edit, and tokens that compactions freed.",
        "short",
        {"{{kind}}": _rate("kilburn_tokens_total", 'kind=~"reprefilled|freed"', by="kind")},
    ),
    Panel("Saved", "Money since the start, in the unit of the price table.", "short", {"{{tenant}}": f"kilburn_saved{OF}"}),
    Panel(
        "Compactions",
        "By policy and outcome.",
        "cps",
        {"{{policy}} {{outcome}}": _rate("kilburn_compactions_total", by="policy, outcome")},
    ),
    Panel(
        "Faults",
        "Recalls of what was out; refaults: of what had just left.",
        "cps",
        {"faults": _rate("kilburn_faults_total"), "refaults": _rate("kilburn_refaults_total")},
    ),
    Panel(
        "Lookups",
        "Recalls and searches, by what they came to.",
        "cps",
        {"{{tool}} {{outcome}}": _rate("kilburn_lookups_total", by="tool, outcome")},
    ),
    Panel(
        "Added by the gateway",
        "To the first byte.",
        "s",
        {"p50": _quantile(0.5, "kilburn_added_seconds"), "p95": _quantile(0.95, "kilburn_added_seconds")},
    ),
    Panel(
        "First byte",
        "From the request to the first byte of its reply.",
        "s",
        {"p50": _quantile(0.5, "kilburn_first_byte_seconds"), "p95": _quantile(0.95, "kilburn_first_byte_seconds")},
    ),
    Panel(
        "Upstream",
        "Each call, to its end.",
        "s",
        {"p50": _quantile(0.5, "kilburn_upstream_seconds"), "p95": _quantile(0.95, "kilburn_upstream_seconds")},
    ),
    Panel(
        "Calls for each request",
        "Over 1: rounds in which the model's recalls were answered.",
        "short",
        {
            "{{tenant}}": CALLS,
        },
    ),
    Panel("Store", "The file and its log.", "bytes", {"bytes": "kilburn_store_bytes"}),
    Panel(
        "In the background",
        "Sessions in memory, and what waits.",
        "none",
        {
            "sessions in memory": f"sum(kilburn_sessions_open{OF})",
            "to be learned from": "kilburn_learning_waiting",
            "spans": "kilburn_spans_waiting",
            "embedding is behind": f"max(kilburn_embedding_behind{OF})",
            "embedding fails": f"max(kilburn_embedding_failing{OF})",
            "jobs that failed": f"max(kilburn_jobs_failed{OF})",
        },
    ),
)


def board() -> dict[str, Any]:
    """The board, as Grafana imports it."""
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "Kilburn",
        "uid": "kilburn",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "tenant",
                    "label": "Tenant",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(kilburn_requests_total, tenant)",
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": [{**panel, "datasource": source} for panel in panels],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.low is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.low}]
    elif panel.high is not None:
        steps.append({"color": "red", "value": panel.high})
    bounded = panel.low is not None or panel.high is not None
    shown = {"thresholdsStyle": {"mode": "line"}} if bounded else {}
    across = WIDE // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.words,
        "gridPos": {"x": number % across * WIDTH, "y": number // across * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": shown, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend}
            for at, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def alerts() -> str:
    """Rules of alerts for Prometheus, as YAML."""
    return files("kilburn.gateway").joinpath("alerts.yml").read_text("utf-8")
