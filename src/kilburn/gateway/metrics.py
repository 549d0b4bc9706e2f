"""Figures of the gateway: for Prometheus, and for each session used since the start.

Every series has the tenant as a label, so that a tenant sees only its own. No label has a value that clients choose freely.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from kilburn.effect import Outcome
from kilburn.errors import MissingExtra
from kilburn.gateway.exchange import Exchange, SessionTotals
from kilburn.gateway.threads import in_thread
from kilburn.kernel.ledger import ALARM, ENOUGH, Stats
from kilburn.model import Tokens
from kilburn.prices import Prices

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
    from prometheus_client.metrics_core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "prometheus_client", "serve") from error


ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/embeddings", "/v1/models")
FASTER = (0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Bounds of the histogram of the gateway's own time, in seconds."""
SLOWER = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
POLICIES = 20
"""Maximum number of policy names that are labels. Another program may write any name into a ledger, so further ones are
`other`."""

CURRENT = {
    "store_bytes": "Size of the store's file and of its log.",
    "sessions_open": "Sessions in memory.",
    "learning_waiting": "Sessions that wait to be learned from.",
    "embedding_behind": "Whether passages wait for a vector.",
    "embedding_failing": "Whether embedding in the background fails.",
    "spans_waiting": "Spans that wait to be exported.",
    "requests_waiting": "Requests that wait for an equal one that is being answered.",
    "jobs_failed": "Jobs in the background that failed again and again; `kilburn worker --status` names them.",
}
"""Figures that are looked up for each page."""

OWNED = ("sessions_open", "embedding_behind", "embedding_failing", "jobs_failed")
"""Figures of `CURRENT` for each tenant."""

SUMMED = ("sessions_open", "learning_waiting", "spans_waiting", "requests_waiting")
"""Figures of `CURRENT` for each process."""

COUNTED_FIELDS = (
    *("path", "status", "problem", "unread", "warnings", "seconds", "first", "waited", "received", "rounds", "upstream", "form"),
    *("lookups", "session", "began", "sent", "new", "usage", "compacted", "stats_before", "stats_after", "idle"),
)
"""Fields of an exchange that are counted, beside its tenant and user."""

OUTCOMES = frozenset(str(outcome) for outcome in Outcome)

SESSIONS = 2000
"""Maximum number of sessions with figures; the least recently used one is dropped first."""

COUNTED = {
    "new": "tokens_seen",
    "shipped": "tokens_shipped",
    "reprefilled": "tokens_reprefilled",
    "hits": "hits",
    "faults": "faults",
    "refaults": "refaults",
    "evictions": "evictions",
    "folds": "folds",
}
"""Figure of a row -> the session's own figure whose growth it is."""


def saved(prices: Prices, exchange: Exchange) -> float:
    """Return the cost of this request without Kilburn, less its actual cost; it may be negative.

    Without Kilburn, the client's whole history goes to the provider once, and the provider's cache has all of it that is not new,
    unless the cache has expired. So the comparison is with the client's best case, even if the history would not fit the model's
    window. As long as nothing is evicted, nothing is saved or lost: the provider gets the client's bytes. The first request of a
    session saves nothing: it may be a fork, of which the provider's cache may have more.
    """
    usage, start, end = exchange.usage, exchange.stats_before, exchange.stats_after
    if usage is None or not usage.sound or start is None or end is None or not start.prompts:
        return 0.0
    rounds = max(1, exchange.rounds)
    shipped = (end.tokens_shipped - start.tokens_shipped) / rounds
    if rounds == 1 and shipped >= exchange.sent:
        return 0.0
    # The session's counter may count more than the provider does. What the provider counts beyond it is sent beside the
    # conversation, such as tools, and would have been sent without Kilburn too.
    scale = min(1.0, usage.prompt / rounds / shipped) if shipped else 1.0
    prompt = round(usage.prompt / rounds + scale * (exchange.sent - shipped))
    warm = exchange.idle is not None and exchange.idle <= prices.ttl
    cached = max(0, prompt - round(scale * exchange.new)) if warm else 0
    cache_writes = prompt - cached if usage.written else 0
    alone = Tokens(prompt=prompt, reply=usage.reply, cached=cached, written=cache_writes)
    return prices.cost(alone) - prices.cost(usage)


class Counts(Protocol):
    """Counts the gateway's answers, in this process or for several."""

    def observe(self, exchange: Exchange) -> None:
        """Count one exchange."""
        ...

    async def page(self, tenant: str | None) -> bytes:
        """See `Metrics.page`."""
        ...

    async def sessions(self, tenant: str | None, sees: Callable[[str], bool]) -> list[SessionTotals]:
        """See `Metrics.sessions`."""
        ...


class OwnCounts:
    """The counts of this process alone."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.observe = metrics, metrics.observe

    async def page(self, tenant: str | None) -> bytes:
        """See `Counts`."""
        return await in_thread(self._metrics.page, tenant)

    async def sessions(self, tenant: str | None, sees: Callable[[str], bool]) -> list[SessionTotals]:
        """See `Counts`."""
        return self._metrics.sessions(tenant, sees)


class Metrics:
    """Counts exchanges. Safe to use from several threads.

    Args:
        prices: prices of the upstream's tokens.
        current: yields the present figures: a name of `CURRENT`, the tenant or "" for none, and the value.
        collectors: collectors of process figures; None for those of this process.
    """

    def __init__(
        self,
        prices: Prices,
        current: Callable[[], Iterable[tuple[str, str, float]]] = tuple,
        collectors: Iterable[Collector] | None = None,
    ) -> None:
        self.prices = prices
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[str, str], SessionTotals] = OrderedDict()
        self._users: dict[tuple[str, str], str] = {}
        """The owner of each session, which is not shown."""
        self._series: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self._due: dict[Any, float] = {}
        """Growth of series since the last page. prometheus_client is too slow to be called in each request."""
        self._registry = CollectorRegistry()
        if collectors is None:
            ProcessCollector(registry=self._registry)
        for collector in collectors or ():
            self._registry.register(collector)
        self._now = current
        self._latest = _Latest()
        self._registry.register(self._latest)
        self._policies: set[str] = set()

        def series(kind: Any, name: str, words: str, *labels: str, **options: Any) -> Any:
            return kind(f"kilburn_{name}", words, labelnames=["tenant", *labels], registry=self._registry, **options)

        self._requests = series(Counter, "requests", "Requests.", "route", "status")
        self._problems = series(Counter, "problems", "Requests that failed or were refused.", "problem")
        self._seconds = series(Histogram, "request_seconds", "From a request's start to its end.", "route", buckets=SLOWER)
        added = "What the gateway added to the first byte of a reply."
        self._added = series(Histogram, "added_seconds", added, buckets=FASTER)
        self._tokens = series(
            Counter,
            "tokens",
            "Tokens: sent by clients, new of them, shipped upstream, read from its cache, written to it, replied, "
            "processed again because of an edit, and freed by compactions.",
            "kind",
        )
        self._calls = series(Counter, "upstream_calls", "Calls of the upstream, including hidden rounds.")
        self._hits = series(Counter, "hits", "Prompts and recalls that the window served.")
        self._faults = series(Counter, "faults", "Recalls of pages that were out of the window.")
        self._refaults = series(Counter, "refaults", "Recalls of pages that had left at most 10 turns before.")
        compactions = "Compactions by policy and outcome; policy kernel: evictions that no policy requested."
        self._compactions = series(Counter, "compactions", compactions, "policy", "outcome")
        lookups = "Recalls and searches by the model, and searches for the model (brought), by outcome."
        self._lookups = series(Counter, "lookups", lookups, "tool", "outcome")
        self._upstream = series(Histogram, "upstream_seconds", "From the start of an upstream call to its end.", buckets=SLOWER)
        first = "From a request's start to the first byte of its reply."
        self._first = series(Histogram, "first_byte_seconds", first, buckets=SLOWER)
        unread = "Requests that were served unread, or whose reply was not stored, because of an internal failure."
        self._unread = series(Counter, "unread", unread, "reason")
        self._shortened = series(
            Counter,
            "shortened",
            "Requests whose prompt did not show everything, whose tools and other fields exceed their room, or whose reply may "
            "be larger than what is reserved for it.",
        )
        self._alarms = series(Gauge, "sessions_alarmed", f"Sessions with a hit rate under {ALARM:.0%}.")
        self._saved = series(Gauge, "saved", "Money saved since the start, in the unit of the price table.")

    def observe(self, exchange: Exchange) -> None:
        """Count one exchange."""
        tenant = exchange.key.tenant if exchange.key is not None else ""
        route = exchange.path if exchange.path in ROUTES else "other"
        with self._lock:
            self._add(1, self._requests, tenant, route, str(exchange.status))
            if exchange.problem:
                self._problems.labels(tenant, exchange.problem).inc()
            if exchange.unread:
                self._unread.labels(tenant, exchange.unread).inc()
            if exchange.warnings:
                self._add(1, self._shortened, tenant)
            self._labelled(self._seconds, tenant, route).observe(exchange.seconds)
            if exchange.added is not None:
                self._labelled(self._added, tenant).observe(exchange.added)
            if exchange.rounds:
                self._add(exchange.rounds, self._calls, tenant)
            for seconds in exchange.upstream:
                self._labelled(self._upstream, tenant).observe(seconds)
            if exchange.form and exchange.first is not None:
                self._labelled(self._first, tenant).observe(exchange.first)
            for tool, outcome in exchange.lookups:
                self._add(1, self._lookups, tenant, tool, outcome)
            if exchange.session:
                self._count(tenant, exchange)

    def _add(self, more: float, family: Any, *labels: str) -> None:
        """Increase a series."""
        series = self._labelled(family, *labels)
        if more:
            self._due[series] = self._due.get(series, 0) + more

    def _labelled(self, family: Any, *labels: str) -> Any:
        """Return the series of these labels."""
        series = self._series.get((family, labels))
        if series is None:
            series = self._series[family, labels] = family.labels(*labels)
        return series

    def _count(self, tenant: str, exchange: Exchange) -> None:
        row = self._row(tenant, exchange.session)
        self._users[tenant, exchange.session] = exchange.key.user if exchange.key is not None else ""
        row.requests += 1
        row.used = exchange.began
        grown = {"sent": exchange.sent, **_growth(exchange.stats_before, exchange.stats_after)}
        if exchange.usage is not None and exchange.usage.sound:
            usage = exchange.usage
            grown |= {"cached": usage.cached, "written": usage.written, "replied": usage.reply}
        for name, more in grown.items():
            setattr(row, name, getattr(row, name) + more)
        for kind in ("sent", "new", "shipped", "cached", "written", "replied", "reprefilled"):
            self._add(grown.get(kind, 0), self._tokens, tenant, kind)
        for policy, outcome, freed in exchange.compacted:
            self._add(1, self._compactions, tenant, self._policy(policy), outcome if outcome in OUTCOMES else "other")
            self._add(max(0, freed), self._tokens, tenant, "freed")
        self._add(grown.get("hits", 0), self._hits, tenant)
        self._add(grown.get("faults", 0), self._faults, tenant)
        self._add(grown.get("refaults", 0), self._refaults, tenant)
        money = saved(self.prices, exchange)
        row.saved += money
        self._add(money, self._saved, tenant)
        if exchange.stats_after is not None:
            self._look(row, exchange.stats_after)

    def _policy(self, name: str) -> str:
        if name not in self._policies and len(self._policies) >= POLICIES:
            return "other"
        self._policies.add(name)
        return name

    def _look(self, row: SessionTotals, stats: Stats) -> None:
        """Store a session's state after its reply."""
        row.window, row.tokens_in_window = stats.window, stats.tokens_in_window
        row.fill, row.hit_rate = stats.fill, stats.hit_rate
        alarm = stats.hit_rate is not None and stats.hit_rate < ALARM and stats.hits + stats.faults >= ENOUGH
        if alarm != row.alarm:
            self._alarms.labels(row.tenant).inc(1 if alarm else -1)
            row.alarm = alarm

    def _row(self, tenant: str, session: str) -> SessionTotals:
        row = self._rows.get((tenant, session))
        if row is None:
            row = self._rows[tenant, session] = SessionTotals(tenant=tenant, session=session)
            if len(self._rows) > SESSIONS:
                place, dropped = self._rows.popitem(last=False)
                del self._users[place]
                if dropped.alarm:
                    self._alarms.labels(dropped.tenant).dec()
        self._rows.move_to_end((tenant, session))
        return row

    def sessions(self, tenant: str | None = None, sees: Callable[[str], bool] = lambda user: True) -> list[SessionTotals]:
        """Return the sessions used since the start, last used first; of one tenant, or None for all.

        Args:
            sees: decides whether the sessions of a user are shown.
        """
        return [row for row, user in self.rows(tenant) if sees(user)]

    def rows(self, tenant: str | None = None) -> list[tuple[SessionTotals, str]]:
        """Return the same, each with its owner."""
        with self._lock:
            rows = [(row, self._users[at]) for at, row in reversed(self._rows.items()) if tenant in (None, row.tenant)]
            return [(msgspec.structs.replace(row), user) for row, user in rows]

    def page(self, tenant: str | None = None) -> bytes:
        """Return the figures in Prometheus' text format; of one tenant, or None for all tenants and the process itself."""
        figures = list(self._now())  # it may wait for the store, and requests do not wait for that
        with self._lock:
            self._latest.figures = figures
            for series, more in self._due.items():
                series.inc(more)
            self._due.clear()
            return generate_latest(self._registry if tenant is None else _Of(self._registry, tenant))


class _Latest(Collector):
    """The figures that were looked up last."""

    figures: Sequence[tuple[str, str, float]] = ()

    def collect(self) -> Iterator[Metric]:
        families = {
            name: GaugeMetricFamily(f"kilburn_{name}", words, labels=["tenant"] if name in OWNED else [])
            for name, words in CURRENT.items()
        }
        for name, tenant, figure in self.figures:
            families[name].add_metric([tenant] if name in OWNED else [], figure)
        yield from families.values()


class _Of(Collector):
    """The series of one tenant."""

    def __init__(self, registry: Collector, tenant: str) -> None:
        self._whole, self._tenant = registry, tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            samples = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            if samples:
                family.samples = samples
                yield family


def _growth(start: Stats | None, end: Stats | None) -> dict[str, int]:
    if start is None or end is None:
        return {}
    return {name: max(0, getattr(end, figure) - getattr(start, figure)) for name, figure in COUNTED.items()}
