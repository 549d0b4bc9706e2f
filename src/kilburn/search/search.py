"""The one search over the past, for people, agents and policies.

It gathers candidates by words (the store's index) and, if the store has vectors, by meaning; adds the pages that
stand beside the best; leaves out what is retired, proposed or forgotten, what was not valid at the time that is asked
about (law 9), and what belongs to another user; lets the ranking score the rest; and fills the token budget with
passages, a text that occurs twice only once. Pages are read from the store by number: no session is opened for this.

Hundreds of pages are candidates and a handful is shown. The candidates are skimmed: nothing of them is verified, so a
damaged one may be ranked wrongly or missed. What is shown is read and verified, and judged again by what was verified. If
something of it is damaged, the search is done again with every candidate verified, without the segments that are damaged.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from itertools import groupby, islice

import msgspec

from kilburn.backend import Backend, Passage, SegmentInfo, SegmentKind, State, at_once
from kilburn.budget import Counter
from kilburn.claims import DOUBTS, contested, together
from kilburn.collections.collecting import is_true, until_of
from kilburn.errors import ModelError, SpecError, StoreCorrupt
from kilburn.kernel.contents import Contents
from kilburn.kernel.window import WindowState
from kilburn.message import Kind
from kilburn.page import Page, Place, Span, address_of, parse_address, searchable_words
from kilburn.retrieval import Candidate, Meanings, Query, Ranking, Scored
from kilburn.search.confidence import ENOUGH, confidence
from kilburn.search.found import DamageWarning, Findings, Found

PLACES: Mapping[str, tuple[SegmentKind, ...]] = {
    "sessions": (SegmentKind.SESSION,),
    "facts": (SegmentKind.MEMORY,),
    "documents": (SegmentKind.DOCUMENT,),
    "notes": (SegmentKind.NOTES,),
    "all": tuple(SegmentKind),
}
"""Where one can search."""

log = logging.getLogger("kilburn")

RANKING = "blend"
"""The ranking unless another one is named."""

MIN_DEPTH, MAX_DEPTH = 60, 400
"""Passages that each arm of a search brings, depending on the budget."""

USER_DEPTH = 24
"""Maximum number of passages that a search of the user's messages returns."""

MAX_WORD_HITS = 4000
"""Passages of the arm of words from which on it looks for no further ones."""

BESIDE = 24
"""Candidates whose neighbours are candidates too, at least; more for a larger budget."""

ALONE = (SegmentKind.MEMORY, SegmentKind.NOTES)
"""Segments whose pages have no neighbours."""

REACH = 4
"""How far away a neighbour is."""

TIE, ALSO = 0.95, 3
"""A passage matches as well as another one with this share of its score; passages that a page brings beside its best."""

Key = tuple[int, int]
"""Number of a segment, and id of a page."""


def segment_kinds(where: str | Iterable[str]) -> set[SegmentKind]:
    """Return the kinds of segments that `where` names.

    Raises:
        SpecError: another name, or none.
    """
    names = [where] if isinstance(where, str) else list(where)
    unknown = [name for name in names if name not in PLACES]
    if unknown or not names:
        raise SpecError(f"where={where!r}"[:200], advice=f"give one or more of {', '.join(PLACES)}")
    return {kind for name in names for kind in PLACES[name]}


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A candidate with its score."""

    candidate: Candidate
    scored: Scored

    @property
    def key(self) -> Key:
        """Which page it is."""
        return self.candidate.segment, self.candidate.page.id


class _Seen(msgspec.Struct, gc=False):
    """The candidates of one page: its best passage, its scores, and its passages by words."""

    span: Span
    entry: int
    words: float = 0.0
    meaning: float | None = None
    best: float = -1.0
    by_words: dict[Span, float] = {}


class Searcher:
    """Searches a store.

    Args:
        vectors: the search by meaning; None to search by words only.
        windows: windows of open sessions, by segment number. Pages in them are not read from the store. The window of a branch is
            also entered for its ancestors.
        owner: returns the number of the segment in which a page of such a window was created.
        shown: returns whether the prompt shows a page of such a window; None for the pages that are whole in it.
        contents: caches texts of these sessions; None to read them from the store.
        by_user: search only the user's messages, by words only.
        infos: the segments to search; a mapping has them by number.
        everywhere: whether these are all segments of the tenant.
    """

    def __init__(
        self,
        backend: Backend,
        ranking: Ranking,
        vectors: Meanings | None,
        infos: Iterable[SegmentInfo] | Mapping[int, SegmentInfo],
        *,
        windows: Mapping[int, WindowState] | None = None,
        owner: Callable[[int], int] | None = None,
        shown: Callable[[int], bool] | None = None,
        contents: Contents | None = None,
        by_user: bool = False,
        everywhere: bool = False,
    ) -> None:
        self._backend, self._ranking, self._vectors = backend, ranking, vectors
        self._infos: Mapping[int, SegmentInfo]
        if isinstance(infos, Mapping):
            self._infos = infos
        else:
            self._infos = {info.number: info for info in infos if not info.damaged}
        self._numbers = None if everywhere else list(self._infos)
        self._windows, self._owner, self._shown, self._by_user = windows or {}, owner, shown, by_user
        self._texts_by_digest = backend.contents.texts if contents is None else contents.texts
        # Pages that were skimmed, or read; the keys of those that were read and verified, or are in a window.
        self._rows: dict[Key, tuple[Page, State]] = {}
        self._verified: set[Key] = set()
        # Whether all are verified at once, because one was damaged; segments that turned out damaged.
        self._careful = False
        self._lost: set[int] = set()
        self.text = ""
        """What words and meaning were searched for: the last query without the names of speakers."""

    def ranked(
        self,
        query: str,
        now: float,
        tokens: int,
        at: float | None = None,
        accepts: Callable[[Page, State], bool] | None = None,
        *,
        beside: bool = False,
        unseen: bool = False,
    ) -> list[Ranked]:
        """Return the matching pages, best first. Except for pages of open windows they are not verified yet: `best`, or the
        caller, verifies them.

        Args:
            now: the time, in seconds since the epoch.
            tokens: the budget for which there should be enough of them.
            at: only what was known and valid then; None for now.
            accepts: tells which pages may be among them; None for all.
            beside: whether pages that do not match themselves may be among them, because they stand beside ones that do.
            unseen: whether pages that the windows show come last.

        Raises:
            StoreError: the store cannot be read. If the embedder fails, words alone are searched for.
        """
        if not query.strip() or not self._infos or tokens < 1:
            return []
        time = now if at is None else at
        depth = USER_DEPTH if self._by_user else max(MIN_DEPTH, min(MAX_DEPTH, tokens // 10))

        def usable(key: Key) -> bool:
            if self._by_user and not self._rows[key][0].is_by_user:
                return False
            return self._is_true(key, now, at) and (accepts is None or accepts(*self._rows[key]))

        text, speakers = query, frozenset[str]()
        hits = self._by_words(query, depth, unseen=unseen)
        self._read([hit_key(hit) for hit in hits])
        query_speakers = _named(query, {page.speaker for page, _ in self._rows.values() if page.speaker})
        if query_speakers:
            text, speakers = _without(query, query_speakers), query_speakers
            hits = self._by_words(text, depth, unseen=unseen) or hits
        self.text = text
        matches: dict[Key, _Seen] = {}
        top = hits[0].score if hits else 1.0
        for hit in hits:
            score, key = hit.score, (hit.segment, hit.page)
            if key in matches:
                _note(matches, hit, words=score, worth=score / top)
            else:
                matches[key] = _Seen(hit.span, hit.entry, score, None, score / top, {hit.span: score})
        try:
            if self._vectors is not None:
                self._by_meaning(text, depth, matches)
        except ModelError as error:
            # An endpoint that is down must not take the words with it.
            log.warning("searched by words alone: %s", error)
            self._vectors = None
        self._read([key for key in matches if key not in self._rows])
        usables = {key for key in matches if self._is_read(key) and usable(key)}
        matching = set(matches)
        if beside or self._vectors is not None:
            # By words alone, what stands beside a page and has none of them says nothing of it.
            self._add_neighbours(text, matches, usables, max(BESIDE, depth // 8))
        # Those that came as neighbours are behind the others.
        usables.update(key for key in islice(matches, len(matching), None) if self._is_read(key) and usable(key))
        candidates = [
            self._candidate(key, passages) for key, passages in matches.items() if key in usables and key[0] not in self._lost
        ]
        scored = self._ranking.rank(Query(text=query, now=time, speakers=speakers), candidates)
        best = [Ranked(candidates[scored_page.index], scored_page) for scored_page in scored]
        if unseen:
            best.sort(key=lambda scored_page: self.is_shown(scored_page.key))
        return (
            best
            if beside or len(matching) == len(matches)
            else [scored_page for scored_page in best if scored_page.key in matching]
        )

    def _by_words(self, text: str, depth: int, *, unseen: bool) -> list[Passage]:
        """Passages that match, best first. More are looked for if more than half of them cannot be seen from here, or are in the
        window where `unseen` is asked for."""
        limit = depth
        while True:
            passages = self._backend.words.search(text, segments=self._numbers, limit=limit, by_user=self._by_user)
            hits = [hit for hit in passages if hit.segment in self._infos and self._is_there(hit_key(hit))]
            useful = sum(not self.is_shown(hit_key(hit)) for hit in hits) if unseen else len(hits)
            if len(passages) < limit or useful >= depth // 2 or limit >= MAX_WORD_HITS:
                return hits
            limit *= 8

    def _is_there(self, key: Key) -> bool:
        """Whether a page can be seen from here: not one that an ancestor has made since this branch forked."""
        window = self._windows.get(key[0])
        return window is None or (key[1] in window.pages and (self._owner is None or self._owner(key[1]) == key[0]))

    def is_shown(self, key: Key) -> bool:
        """Whether a window shows a page."""
        window = self._windows.get(key[0])
        if window is None:
            return False
        return window.at(key[1]) is Place.IN if self._shown is None else self._shown(key[1])

    def _by_meaning(self, text: str, depth: int, matches: dict[Key, _Seen]) -> None:
        assert self._vectors is not None
        nearest = {passage.entry: (passage, cosine) for passage, cosine in self._vectors.nearest(text, self._numbers, depth)}
        missing = [page.entry for page in matches.values() if page.entry not in nearest]
        similar = self._vectors.similar(text, missing) if missing else {}
        for page in matches.values():
            near = nearest.get(page.entry)
            cosine = near[1] if near is not None else similar.get(page.entry)
            if cosine is not None:
                page.meaning = cosine
                page.best += cosine
        for passage, cosine in nearest.values():
            if passage.segment in self._infos:
                _note(matches, passage, meaning=cosine, worth=cosine)

    def _add_neighbours(self, text: str, matches: dict[Key, _Seen], usables: set[Key], limit: int) -> None:
        best = sorted(usables, key=lambda key: matches[key].best, reverse=True)[:limit]
        beside = {
            (segment, page + step): None
            for segment, page in best
            if self._infos[segment].kind not in ALONE
            for step in range(-REACH, REACH + 1)
            if page > 0 and page + step > 0
        }
        new = [key for key in beside if key not in matches]
        if not new:
            return
        entries = self._backend.words.entries(new)
        self._read(entries)
        cosines: dict[int, float] = {}
        if self._vectors is not None and entries:
            cosines = self._vectors.similar(text, [passage.entry for passages in entries.values() for passage in passages])
        for passages in entries.values():
            for passage in passages:
                cosine = cosines.get(passage.entry)
                _note(matches, passage, meaning=cosine, worth=cosine or 0.0)

    def _read(self, keys: Iterable[Key], *, verified: bool = False) -> None:
        """Skim pages that are not there yet, or read them `verified`; take them from a window if it is open."""
        missing: list[Key] = []
        open_pages: dict[int, list[int]] = {}
        for key in dict.fromkeys(keys):
            if key in self._rows or key[0] not in self._infos or key[0] in self._lost:
                continue
            if key[0] not in self._windows:
                missing.append(key)
            elif self._is_there(key):
                open_pages.setdefault(key[0], []).append(key[1])
        for segment, pages in open_pages.items():
            window = self._windows[segment]
            window.pages.fetch(pages)  # in one query
            self._rows.update(((segment, page), (window.pages[page], window.states[page])) for page in pages)
            self._verified.update((segment, page) for page in pages)
        if missing and not (self._careful or verified):
            try:
                self._rows.update(self._backend.skim(missing))
                return
            except StoreCorrupt:
                self._careful = True
        self._verify(missing)

    def _verify(self, keys: Sequence[Key]) -> bool:
        """Read pages, verified; a segment that turns out damaged is told and left out. Returns whether all are whole."""
        if not keys:
            return True
        try:
            self._take(self._backend.read(keys), keys)
            return True
        except StoreCorrupt:
            for segment, group in groupby(sorted(keys), key=lambda key: key[0]):
                segment_keys = list(group)
                try:
                    self._take(self._backend.read(segment_keys), segment_keys)
                except StoreCorrupt as error:
                    self._lost.add(segment)
                    message = f"not searched: session {self._infos[segment].name!r}: {error.what}"
                    warnings.warn(message, DamageWarning, stacklevel=5)
            return False

    def _take(self, rows: Mapping[Key, tuple[Page, State]], keys: Iterable[Key]) -> None:
        """Take pages that were verified; what was skimmed and is not there any more is gone."""
        self._verified.update(keys)
        for key in keys:
            if key in rows:
                self._rows[key] = rows[key]
            else:
                self._rows.pop(key, None)

    def _is_read(self, key: Key) -> bool:
        """Whether a page was read; a segment that turned out damaged meanwhile is left out, with all that was read of it."""
        return key in self._rows and key[0] not in self._lost

    def _is_true(self, key: Key, now: float, at: float | None) -> bool:
        """Whether what a page that was read says is true at the time that is asked about."""
        # A clock that lags behind the last change is of no use: as in a listing.
        when = max(now, self._infos[key[0]].used) if at is None else at
        return is_true(*self._rows[key], when, now=at is None)

    def _candidate(self, key: Key, match: _Seen) -> Candidate:
        page, state = self._rows[key]
        return Candidate(
            segment=key[0],
            kind=self._infos[key[0]].kind,
            page=page,
            state=state,
            span=match.span,
            also=_also(match),
            words=match.words,
            meaning=match.meaning,
        )

    def findings(
        self,
        query: str,
        tokens: int,
        now: float,
        counter: Counter,
        *,
        limit: int | None,
        at: float | None,
        abstain: bool,
        unseen: bool = False,
    ) -> Findings:
        """What matches, within `tokens`; see `Store.search`.

        Raises:
            StoreError: see `ranked`.
        """
        ranked, best = self.best(query, tokens, now, counter, limit, at=at, beside=abstain, unseen=unseen, apart=not abstain)
        page_ids = {parse_address(hit.address)[0] for hit in best}
        shown = (page for page in ranked if page.candidate.page.id in page_ids)
        by_place = {(self._infos[page.key[0]].name, page.candidate.page.address): page for page in shown}
        of = [by_place.get((hit.session, hit.address)) for hit in best]
        cosines = [None if page is None else page.candidate.meaning for page in of]
        turns = [None if page is None or page.candidate.kind in ALONE else page.key for page in of]
        sure = confidence(self.text, best, cosines, turns)
        if not abstain:
            return Findings(best, sure)
        alone = {hit.session for hit, page in zip(best, of, strict=True) if page is not None and page.candidate.kind in ALONE}
        hits = reading_order(best, alone)
        return Findings(hits, sure) if sure >= ENOUGH else Findings((), sure, hits)

    def best(
        self,
        query: str,
        tokens: int,
        now: float,
        counter: Counter,
        limit: int | None = None,
        *,
        at: float | None = None,
        beside: bool = False,
        unseen: bool = False,
        apart: bool = False,
    ) -> tuple[list[Ranked], list[Found]]:
        """What matches, ranked, and the best of it as passages, which are verified; see `ranked` and `_found`.

        Raises:
            StoreError: see `ranked`.
        """
        while True:
            # An embedder may take long, and no transaction stays open for so long.
            # Pages and texts of a session that was just opened are not in memory yet.
            ahead = not self._windows or any(window.pages.held < window.last for window in self._windows.values())
            with at_once(self._backend, ahead=ahead) if self._vectors is None else nullcontext():
                ranked = self.ranked(query, now, tokens, at, beside=beside, unseen=unseen)
                hits = self._found(ranked, counter, tokens, now, limit, at=at, apart=apart)
            if hits is not None:
                return ranked, hits
            # Something is damaged, or not as it was when it was ranked. It is verified from now on, so this ends.
            self._careful = True
            self._rows = {key: row for key, row in self._rows.items() if key in self._verified}

    def _found(
        self,
        ranked: Sequence[Ranked],
        counter: Counter,
        tokens: int,
        now: float,
        limit: int | None = None,
        *,
        at: float | None = None,
        apart: bool = False,
    ) -> list[Found] | None:
        """Return the best passages, best first, as many as fit into `tokens`; a text that occurs twice only once.

        What does not fit is left out, and what comes after it may still fit. Facts that contradict each other are marked, and
        stand one after the other. None where one is not what it was ranked by, or what doubts it is damaged.

        Args:
            apart: whether the same text in two segments is two hits.
        """
        rivals = contested((match.candidate.segment, match.candidate.page.claim) for match in ranked)
        against = {match.key: [ranked[place] for place in places] for match, places in zip(ranked, rivals, strict=True) if places}
        ranked = [ranked[place] for place in together(rivals)] if against else ranked
        chosen: list[tuple[Ranked, Span, str, int]] = []
        texts_shown: set[tuple[int, str]] = set()
        remaining, crumbs, batch = tokens, tokens // REST_SHARE, FIRST_READ if limit is None else min(FIRST_READ, limit)
        passages = ((match, span) for match in ranked for span in (match.candidate.span, *match.candidate.also))
        rest = filter(lambda passage: passage[1][1] - passage[1][0] <= remaining * LETTERS, passages)
        # Passages that fit into the remaining room are rare: read more passages each time, unless little room remains.
        while remaining > crumbs and (limit is None or len(chosen) < limit) and (batch_passages := list(_some(rest, batch))):
            batch *= GROWTH
            if not self._holds([page for match, _ in batch_passages for page in (match, *against.get(match.key, ()))]):
                return None
            texts = self._texts([match for match, _ in batch_passages])
            for match, span in batch_passages:
                whole = texts.get(match.candidate.page.digest)
                if whole is None or span[1] > len(whole):
                    continue  # damaged, which was told or which `fsck` reports
                text = whole[slice(*span)]
                cost = counter.count(text)
                if cost > remaining:
                    continue
                same = (match.candidate.segment if apart else 0, _same(text))
                if same not in texts_shown and (limit is None or len(chosen) < limit):
                    texts_shown.add(same)
                    remaining -= cost
                    chosen.append((match, span, text, cost))
        matches = [match for match, *_ in chosen]
        self._read_calls(matches)
        hits = [self._hit(match, span, text, cost, now, against.get(match.key, ())) for match, span, text, cost in chosen]
        return self._doubted(hits, matches, counter, remaining, now, limit, at)

    def _doubted(
        self,
        hits: list[Found],
        pages: Sequence[Ranked],
        counter: Counter,
        remaining: int,
        now: float,
        limit: int | None,
        at: float | None,
    ) -> list[Found] | None:
        """The hits with their doubts: each fact that is doubted is marked, and what doubts it comes before it, if it fits. None
        where a doubt is damaged."""
        facts = [ranked.key for ranked in pages if ranked.candidate.kind is SegmentKind.MEMORY]
        keys = [
            key
            for segment in dict.fromkeys(segment for segment, _ in facts)
            for key in self._backend.citing(segment, [page for of, page in facts if of == segment])
            if key[0] == segment
        ]
        self._read(keys)
        keys = [key for key in keys if key[0] in self._lost or self._is_doubt(key)]
        if not self._is_whole(keys):
            return None
        doubts: dict[Key, list[Key]] = {}
        for key in keys:
            page = self._rows[key][0] if self._is_doubt(key) and self._is_true(key, now, at) else None
            if page is None or page.claim is None:
                continue
            # It names what it doubts where another fact does so, which it is made from, too.
            objects = page.claim.object.split()
            by = [(key[0], source) for source in page.sources if objects and address_of(source) not in objects] or [key]
            for source in page.sources:
                if not objects or address_of(source) in objects:
                    doubts.setdefault((key[0], source), []).extend(by)
        if not doubts:
            return hits
        if not self._is_whole([key for of in doubts.values() for key in of]):
            return None
        doubts = {key: [by for by in of if self._is_read(by) and self._is_true(by, now, at)] for key, of in doubts.items()}
        older: set[Key] = set()
        for key, of in doubts.items():
            # Of what was said since, the newest; an older one is shown again when that is forgotten.
            doubts_by_time = sorted((by for by in of if self._is_doubt(by)), key=lambda by: (self._rows[by][0].time, by))
            older.update(doubts_by_time[:-1])
            doubts[key] = [by for by in of if by not in doubts_by_time[:-1]]
        older.difference_update(*doubts.values())
        # A doubt is as good as the first fact that it is brought for.
        doubters: dict[Key, Ranked] = {}
        for ranked in pages:
            for key in doubts.get(ranked.key, ()):
                if key not in doubters:
                    doubters[key] = Ranked(self._candidate(key, _Seen(span=(0, 0), entry=0)), ranked.scored)
        hit_by_key = {ranked.key: hit for ranked, hit in zip(pages, hits, strict=True) if ranked.key in doubters}
        texts = self._texts([*doubters.values()])
        ordered: list[Found] = []
        placed: set[Key] = set()
        more = 0
        for ranked, hit in zip(pages, hits, strict=True):
            if ranked.key in placed or ranked.key in older:
                continue
            for key in doubts.get(ranked.key, ()):
                text = texts.get(doubters[key].candidate.page.digest)
                cost = remaining + 1 if text is None else counter.count(text)
                if (
                    text is not None
                    and key not in hit_by_key
                    and cost <= remaining
                    and (limit is None or len(hits) + more < limit)
                ):
                    remaining, more = remaining - cost, more + 1
                    hit_by_key[key] = self._hit(doubters[key], (0, len(text)), text, cost, now, ())
                if key in hit_by_key and key not in placed:
                    placed.add(key)
                    ordered.append(hit_by_key[key])
            if ranked.key in doubters:
                placed.add(ranked.key)
            names = tuple(f"{self._infos[segment].name} {address_of(page)}" for segment, page in doubts.get(ranked.key, ()))
            ordered.append(msgspec.structs.replace(hit, doubted=names) if names else hit)
        return ordered

    def _holds(self, ranked: Sequence[Ranked]) -> bool:
        """Whether pages are, verified, what they were ranked by."""
        new = [key for key in dict.fromkeys(page.key for page in ranked) if key not in self._verified]
        return self._verify(new) and all(
            page.key in self._rows and self._rows[page.key] == (page.candidate.page, page.candidate.state) for page in ranked
        )

    def _is_doubt(self, key: Key) -> bool:
        claim = self._rows[key][0].claim if self._is_read(key) else None
        return claim is not None and claim.relation == DOUBTS

    def _is_whole(self, keys: Sequence[Key]) -> bool:
        """Read pages and verify them; whether no segment of theirs turned out damaged."""
        self._read(keys)
        self._verify([key for key in dict.fromkeys(keys) if self._is_read(key) and key not in self._verified])
        return not any(key[0] in self._lost for key in keys)

    def _texts(self, ranked: Sequence[Ranked]) -> dict[str, str]:
        """Return the texts that pages were found by, by the digests of the pages' own texts."""
        pages = {page.candidate.page.digest: page for page in ranked}
        try:
            return self._searchable(pages.values())
        except StoreCorrupt:
            texts: dict[str, str] = {}
            for page in pages.values():
                try:
                    texts.update(self._searchable([page]))
                except StoreCorrupt as error:
                    if self._is_forgotten(page.key):
                        continue
                    name = self._infos[page.candidate.segment].name
                    message = f"not searched: {page.candidate.page.address} of session {name!r}: {error.what}"
                    warnings.warn(message, DamageWarning, stacklevel=4)
            return texts

    def _is_forgotten(self, key: Key) -> bool:
        """Return whether another writer has forgotten a page since it was read."""
        with suppress(StoreCorrupt):
            row = self._backend.skim([key]).get(key)
            return row is None or row[1].at is Place.DROPPED
        return False

    def _searchable(self, ranked: Collection[Ranked]) -> dict[str, str]:
        # A block's own text may be 30 MB of base64, and is not what is found.
        pages = [page.candidate.page for page in ranked]
        sources = {page.digest: page.extra if page.kind is Kind.OPAQUE else page.digest for page in pages}
        texts = self._texts_by_digest(set(sources.values()))
        return {
            digest: texts[source] if source == digest else searchable_words(texts[source])
            for digest, source in sources.items()
            if source in texts
        }

    def _hit(self, ranked: Ranked, span: Span, text: str, cost: int, now: float, against: Iterable[Ranked]) -> Found:
        candidate = ranked.candidate
        page, state = candidate.page, candidate.state
        return Found(
            session=self._infos[candidate.segment].name,
            address=page.address,
            span=span,
            text=text,
            score=ranked.scored.score,
            age=max(0.0, now - page.time),
            origin=self._origin(candidate),
            where=state.at,
            tokens=cost,
            speaker=page.speaker,
            time=page.time,
            trust=page.trust,
            since=page.since,
            until=until_of(page, state),
            why=dict(ranked.scored.terms),
            claim=page.claim,
            contested=tuple(f"{self._infos[rival.candidate.segment].name} {rival.candidate.page.address}" for rival in against),
        )

    def _read_calls(self, ranked: Iterable[Ranked]) -> None:
        """Read and verify the calls that pages answer."""
        calls = {(page.candidate.segment, answers): None for page in ranked if (answers := page.candidate.page.answers)}
        if new := [key for key in calls if key not in self._verified]:
            self._read(new, verified=True)
            self._verify([key for key in new if self._is_read(key) and key not in self._verified])

    def _origin(self, candidate: Candidate) -> str:
        page = candidate.page
        if page.answers:
            call = (candidate.segment, page.answers)
            if self._is_read(call) and self._rows[call][0].name:
                return f"tool {self._rows[call][0].name}"
        return str(page.role)


FIRST_READ, GROWTH, MOST_READ = 24, 3, 200_000
"""Texts that are read first, at most; how many times more each time after that; and the tokens of the pages that are read at a
time, but for the last of them."""

REST_SHARE = 16
"""Stop reading texts when this fraction of the budget remains: a sixteenth."""

LETTERS = 12
"""Characters of a token, on average in a passage, at most: one that must take more tokens than are left is not read."""


def _some(passages: Iterator[tuple[Ranked, Span]], limit: int) -> Iterator[tuple[Ranked, Span]]:
    """Yield the passages that are read next."""
    size = 0
    for passage in islice(passages, limit):
        yield passage
        size += passage[0].candidate.page.tokens
        if size >= MOST_READ:
            return


def hit_key(hit: Passage) -> Key:
    """Which page a passage is of."""
    return hit.segment, hit.page


def reading_order(hits: Sequence[Found], alone: Set[str]) -> list[Found]:
    """Return hits by session, in the order in which something was said that was found there; within each, as it was said. Facts
    and notes, each of which is read alone, are together and stay in the order that they have.

    Args:
        alone: names of the segments that hold facts and notes.
    """
    begins: dict[str, float] = {}
    names = ["" if hit.session in alone else hit.session for hit in hits]
    for hit, name in zip(hits, names, strict=True):
        begins[name] = min(begins.get(name, hit.time), hit.time)
    keys = [
        (begins[name], name, *((hit.time, int(hit.address[1:]), hit.span) if name else (0.0, rank, (0, 0))))
        for rank, (hit, name) in enumerate(zip(hits, names, strict=True))
    ]
    return [hits[place] for place in sorted(range(len(hits)), key=keys.__getitem__)]


def _note(
    passages: dict[Key, _Seen], hit: Passage, *, words: float = 0.0, meaning: float | None = None, worth: float = 0.0
) -> None:
    """Take a passage into account: a page's words and meaning are those of its best passages, its span is the best one's."""
    page = passages.setdefault((hit.segment, hit.page), _Seen(hit.span, hit.entry))
    if words:
        page.words = max(page.words, words)
        page.by_words[hit.span] = words
    if meaning is not None:
        page.meaning = meaning if page.meaning is None else max(page.meaning, meaning)
    if worth > page.best:
        page.span, page.entry, page.best = hit.span, hit.entry, worth


def _also(page: _Seen) -> tuple[Span, ...]:
    """Passages of a page, besides its best, whose words match as well as those of any, in order."""
    if len(page.by_words) < 2:
        # Of most pages there is one, the best or, by meaning, another one.
        return tuple(span for span in page.by_words if span != page.span)
    ties = (span for span, words in page.by_words.items() if words >= TIE * page.words and span != page.span)
    return tuple(sorted(islice(ties, ALSO)))


def _named(query: str, speakers: Iterable[str]) -> frozenset[str]:
    """Those speakers whom a query names. Only a query without capitals may write a name without."""
    folded = query.islower()
    return frozenset(speaker for speaker in speakers if len(speaker) > 1 and _name(speaker, folded).search(query) is not None)


def _without(query: str, names: Iterable[str]) -> str:
    """The query without these names; as it was, where nothing else is in it."""
    folded = query.islower()
    rest = query
    for name in sorted(names, key=len, reverse=True):
        rest = _name(name, folded).sub(" ", rest)
    rest = " ".join(rest.split())
    return rest if re.search(r"\w", rest) else query


def _name(name: str, folded: bool) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?:['’]s)?(?!\w)", re.IGNORECASE if folded else 0)


def _same(text: str) -> str:
    """Equal for texts that differ only in case, blanks and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text
