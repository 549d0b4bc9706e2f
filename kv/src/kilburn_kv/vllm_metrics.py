"""Reads vLLM's page of metrics: Prometheus' text format, with the metric names of any version.

`prometheus_client` (extra `vllm`) parses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from kilburn.errors import MissingExtra

__all__ = ["read_metrics"]

_NAMES = {
    "queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "preemptions": ("vllm:num_preemptions",),
}
"""Field of `VllmMetrics` -> its names, newest first."""

_CONFIG = "vllm:cache_config_info"
_CONFIG_LABELS = {"block": "block_size", "blocks": "num_gpu_blocks", "caching": "enable_prefix_caching"}


class VllmMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a vLLM, summed over all its tenants and engines; None for those that this version does not have.

    Args:
        queries: prompt tokens that were looked up in the prefix cache since the server started (the
            first versions of the V1 engine counted blocks).
        hits: those of them that were found.
        usage: share of the KV cache that running requests hold, 0 to 1; of the fullest engine.
        running: requests that are being answered.
        waiting: requests in the queue.
        preemptions: requests that lost their KV to others and had to be prefilled again, since the start.
        block: tokens of a KV block.
        blocks: how many there are.
        caching: whether its prefix cache is on.
        found: field -> name of the metric that it was read from.
    """

    queries: int | None = None
    hits: int | None = None
    usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    block: int | None = None
    blocks: int | None = None
    caching: bool | None = None
    found: dict[str, str] = {}

    @property
    def hit_rate(self) -> float | None:
        """Hits per query, or None where there were none or they are not known."""
        return self.hits / self.queries if self.queries and self.hits is not None else None

    def since(self, earlier: VllmMetrics) -> VllmMetrics:
        """The same with `queries`, `hits` and `preemptions` counted from `earlier` on, or from a restart in between."""
        changed: dict[str, int] = {}
        restarted = False
        for name in ("queries", "hits", "preemptions"):
            now, before = getattr(self, name), getattr(earlier, name)
            if now is not None and before is not None:
                restarted = restarted or now < before
                changed[name] = now - before
        return self if restarted else msgspec.structs.replace(self, **changed)


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line of Prometheus' text format; lines that are none are passed over.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise MissingExtra("prometheus_client", "vllm") from error
    for line in text.split("\n"):
        # Line by line: one that cannot be read is not to hide those behind it.
        try:
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    yield sample.name, sample.labels, float(sample.value)
        except (ValueError, IndexError, OverflowError):
            continue


def read_metrics(text: str) -> VllmMetrics:
    """vLLM's figures in a page of metrics, under the names of any version; all None where there are none.

    Raises:
        MissingExtra: see `samples`.
    """
    series: dict[str, list[float]] = {}
    config: dict[str, str] = {}
    for name, labels, value in samples(text):
        if name == _CONFIG:
            config = labels
        elif math.isfinite(value):
            series.setdefault(name, []).append(value)
    fields: dict[str, Any] = {}
    found: dict[str, str] = {}
    for field, names in _NAMES.items():
        # The client library prints a counter with "_total" behind its name.
        for name in (printed for given in names for printed in (given + "_total", given)):
            if name in series:
                fields[field] = max(series[name]) if field == "usage" else sum(map(round, series[name]))
                found[field] = name
                break
    for field, label in _CONFIG_LABELS.items():
        setting = _setting(config.get(label, ""))
        if setting is not None:
            fields[field], found[field] = setting, f"{_CONFIG}{{{label}}}"
    return VllmMetrics(**fields, found=found)


def _setting(text: str) -> int | bool | None:
    """A label of the configuration: a count or a switch; None for what is neither."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
