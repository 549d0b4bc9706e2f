"""LangGraph's `BaseStore` over Kilburn's long-term memory.

    graph = builder.compile(store=KilburnStore(store))

A namespace is the memory of the user of that name, its labels joined by "." (`("ana", "tea")` is `store.memory("ana.tea")`), and
an item is a page there, so `recall` finds it and `forget` erases it. A put adds a page and retires its predecessor; a delete
retires it. So earlier values stay readable, and a recall as of an earlier time finds them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kilburn.backend import SegmentKind, State
from kilburn.collections.collecting import MAX_CHARS, as_changes, is_true
from kilburn.collections.collection import Collection, undisturbed
from kilburn.errors import MissingExtra, SpecError
from kilburn.event import STATE, Act
from kilburn.kernel.store import MEMORY, Store
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Claim, Page, Place
from kilburn.search.search import Searcher

try:
    from langgraph.store.base import (
        BaseStore,
        GetOp,
        Item,
        ListNamespacesOp,
        Op,
        PutOp,
        Result,
        SearchItem,
        SearchOp,
        TTLConfig,
        validate_op_namespace,
    )
except ImportError as error:
    raise MissingExtra("langgraph", "langgraph") from error

__all__ = ["KilburnStore"]

ITEM, UNSEARCHED = "item", "item that is not searched"
"""What an item's page claims to be; its subject is the key."""

READ_BATCH = 500
"""Pages that are read at a time."""

RANKED = 4000
"""Tokens for which a search ranks items: enough for the deepest one."""


class _Entry(NamedTuple):
    """The newest page of a key, its first page and the time of that, and the time at which it ended."""

    page: int
    first: int
    created: float
    ended: float | None


class _Row(NamedTuple):
    memory: Collection
    entry: _Entry
    page: Page


class KilburnStore(BaseStore):
    """A store of LangGraph in the memories of a tenant. What is put counts as said by the user, and is true at once.

    Values are JSON. A search with a query ranks by words, and by meaning if the store has an embedder; items that match
    nothing come after the others, without a score. All of a value is searched, whatever fields `index` names; with
    `index=False` nothing is. A `ttl` counts from the put: a read does not prolong it.

    Puts of one namespace in one batch are one transaction. Safe to use from several threads; several programs may use one file.
    """

    supports_ttl = True

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ttl_config: TTLConfig | None = {"refresh_on_read": False}
        self._lock = threading.RLock()
        self._seen: dict[int, tuple[int, dict[str, _Entry]]] = {}

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out operations: reads first, then writes. Of two puts of one key the last one counts.

        Raises:
            InvalidNamespaceError, SpecError, KernelError: nothing was written. StoreError.
        """
        listed, puts = list(ops), dict[tuple[str, ...], dict[str, Add | None]]()
        for op in listed:
            validate_op_namespace(op)
            if isinstance(op, PutOp):
                puts.setdefault(op.namespace, {})[op.key] = self._add(op)
        as_changes(add for adds in puts.values() for add in adds.values() if add is not None)
        results = [self._answer(op) for op in listed]
        for namespace, adds in puts.items():
            self._write(namespace, adds)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """`batch` in a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    def _answer(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            memory = self._memory(op.namespace)
            rows = [] if memory is None else list(self._rows(memory, [op.key]))
            return next(iter(self._items(rows, Item)), None)
        if isinstance(op, SearchOp):
            return self._search(op)
        if isinstance(op, ListNamespacesOp):
            names = {_namespace(memory) for memory in self._memories() if any(self._rows(memory))}
            names = {name for name in names if all(_matches(name, condition) for condition in op.match_conditions or ())}
            return sorted({name[: op.max_depth] for name in names})[op.offset :][: op.limit]
        if isinstance(op, PutOp):
            return None
        raise SpecError(f"a {type(op).__name__}", advice="give operations of langgraph.store.base")

    def _search(self, op: SearchOp) -> list[SearchItem]:
        prefix = tuple(op.namespace_prefix)
        memories = [memory for memory in self._memories() if _namespace(memory)[: len(prefix)] == prefix]
        rows = [row for memory in memories for row in self._rows(memory)]
        if op.filter:
            values = self._items(rows, Item)
            rows = [row for row, item in zip(rows, values, strict=True) if _meets(item.value, op.filter)]
        scores: dict[tuple[int, int], float] = {}
        if op.query:
            search = Searcher(self._store.backend, self._store.ranking, self._store.vectors, [memory.info for memory in memories])
            ranked = search.ranked(op.query, self._store.clock(), RANKED, accepts=lambda page, _: _relation(page) == ITEM)
            scores = {hit.key: hit.scored.score for hit in ranked}
            order = {key: place for place, key in enumerate(scores)}
            rows.sort(key=lambda row: order.get((row.memory.number, row.page.id), len(order)))
        rows = rows[op.offset :][: op.limit]
        for memory in memories if op.query else ():
            if hits := [row.page.id for row in rows if row.memory is memory]:
                memory.ledger.record(Act.SEARCH, hits, cause="fault")
        items = self._items(rows, SearchItem)
        for item, row in zip(items, rows, strict=True):
            item.score = scores.get((row.memory.number, row.page.id))
        return items

    def _items(self, rows: Sequence[_Row], kind: Any) -> list[Any]:
        texts: dict[str, str] = {}
        for at in range(0, len(rows), READ_BATCH):
            texts |= self._store.backend.contents.texts({row.page.digest for row in rows[at : at + READ_BATCH]})
        return [
            kind(
                namespace=_namespace(row.memory),
                key=row.page.claim.subject if row.page.claim else "",
                value=json.loads(texts[row.page.digest]),
                created_at=dt.datetime.fromtimestamp(row.entry.created, tz=dt.UTC),
                updated_at=dt.datetime.fromtimestamp(row.page.time, tz=dt.UTC),
            )
            for row in rows
        ]

    def _add(self, op: PutOp) -> Add | None:
        """Return the page of an item, or None for a delete."""
        if op.value is None:
            return None
        try:
            text = json.dumps(op.value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(
                f"the value of {op.key[:80]!r} is no JSON: {error}", advice="put text, numbers, lists, dicts"
            ) from None
        return Add(
            text=text,
            kind=Kind.FACT if len(text) <= MAX_CHARS[Kind.FACT] else Kind.TEXT,
            claim=Claim(subject=op.key, relation=UNSEARCHED if op.index is False else ITEM, many=True),
            until=None if op.ttl is None else self._store.clock() + 60 * op.ttl,
            why="put",
        )

    def _write(self, namespace: tuple[str, ...], adds: Mapping[str, Add | None]) -> None:
        memory = self._memory(namespace)
        if memory is None:
            if not any(adds.values()):
                return
            memory = self._store.memory(".".join(namespace)).collection

        def write() -> None:
            head = memory.ledger.head
            standing = {row.page.claim.subject: row.page.id for row in self._rows(memory, adds) if row.page.claim}
            new = [add for add in adds.values() if add is not None]
            places = {add.claim.subject: at for at, add in enumerate(new) if add.claim}
            old = [
                Retire((page,), refers=places.get(key), why="put" if key in places else "deleted")
                for key, page in standing.items()
            ]
            memory.apply(*new, *old, seen=head)

        undisturbed(write)

    def _memories(self) -> Iterator[Collection]:
        return (memory for memory in self._store.collections() if memory.info.kind is SegmentKind.MEMORY)

    def _memory(self, namespace: tuple[str, ...]) -> Collection | None:
        name = ".".join(namespace)
        info = self._store.backend.segment(f"{MEMORY}/{name}" if name else MEMORY, time=0.0, create=False)
        return None if info is None else self._store.memory(name).collection

    def _rows(self, memory: Collection, keys: Iterable[str] | None = None) -> Iterator[_Row]:
        """Yield the present items of these keys, or of all, in the order in which they were first put."""
        latest = self._entries(memory)
        entries = latest.values() if keys is None else [latest[key] for key in keys if key in latest]
        remaining = iter(sorted(entries, key=lambda entry: entry.first))
        time = max(self._store.clock(), memory.info.used)
        while batch := list(itertools.islice(remaining, READ_BATCH)):
            states = self._read(memory, [entry.page for entry in batch])
            for entry, (page, state) in zip(batch, states, strict=True):
                if state.at is Place.OUT and is_true(page, state, time, now=True):
                    yield _Row(memory, entry, page)

    def _read(self, memory: Collection, pages: Sequence[int]) -> list[tuple[Page, State]]:
        rows = self._store.backend.read((memory.number, page) for page in pages)
        return [rows[memory.number, page] if (memory.number, page) in rows else memory.read(page) for page in pages]

    def _entries(self, memory: Collection) -> dict[str, _Entry]:
        """Return the newest page of each key. Only events since the last call are read."""
        with self._lock:
            head = memory.ledger.head
            read_head, cached = self._seen.get(memory.number, (0, {}))
            if read_head == head:
                return cached
            changed = sorted({page for event in memory.ledger.events(read_head) if event.act in STATE for page in event.pages})
            rows = [row for at in range(0, len(changed), READ_BATCH) for row in self._read(memory, changed[at : at + READ_BATCH])]
            entries = dict(cached)
            for page, state in sorted(rows, key=lambda row: (row[1].at is Place.OUT, row[0].id)):
                if page.claim is None or not _relation(page):
                    continue
                key = page.claim.subject
                old = entries.get(key)
                if old is None or old.page < page.id or state.at is Place.OUT:
                    continued = old is not None and old.ended == page.time
                    first, created = (old.first, old.created) if old and continued else (page.id, page.time)
                    entries[key] = _Entry(page.id, first, created, state.until)
                elif old.page == page.id:
                    entries[key] = old._replace(ended=state.until)
            self._seen[memory.number] = head, entries
            return entries


def _namespace(memory: Collection) -> tuple[str, ...]:
    return tuple(memory.info.user.split(".")) if memory.info.user else ()


def _relation(page: Page) -> str:
    """Return the relation of a page that is an item, or "" for another page."""
    return page.claim.relation if page.claim is not None and page.claim.relation in (ITEM, UNSEARCHED) else ""


def _matches(namespace: Sequence[str], condition: Any) -> bool:
    path = list(condition.path)
    if len(path) > len(namespace):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(pattern in ("*", label) for pattern, label in zip(path, part, strict=True))


def _meets(value: Any, condition: Any) -> bool:
    """Return whether a value meets the condition of a filter, as LangGraph's own stores understand filters."""
    if isinstance(condition, dict) and any(name.startswith("$") for name in condition):
        return all(_compares(value, name, operand) for name, operand in condition.items())
    if isinstance(condition, dict):
        return isinstance(value, dict) and all(_meets(value.get(name), inner) for name, inner in condition.items())
    if isinstance(condition, list | tuple):
        return isinstance(value, list) and len(value) == len(condition) and all(map(_meets, value, condition))
    return bool(value == condition)


def _compares(value: Any, operator: str, operand: Any) -> bool:
    if operator in ("$eq", "$ne"):
        return bool(value == operand) == (operator == "$eq")
    if operator not in ("$gt", "$gte", "$lt", "$lte"):
        raise SpecError(f"the filter {operator!r}", advice="use $eq, $ne, $gt, $gte, $lt or $lte")
    try:
        number, right = float(value), float(operand)
    except (TypeError, ValueError):
        return False
    return {"$gt": number > right, "$gte": number >= right, "$lt": number < right, "$lte": number <= right}[operator]
