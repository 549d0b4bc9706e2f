"""Which fold stands for which pages, in a form that stays cheap for a fold that grows.

A fold that is remade every few steps cites thousands of pages that its predecessor cited. Pages that one fold stands
for share one entry here, so that the next fold takes over the entry and adds only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set

_NOTHING: frozenset[int] = frozenset()


class _Bundle:
    """Pages that one fold stands for."""

    __slots__ = ("fold", "pages")

    def __init__(self, fold: int, pages: set[int]) -> None:
        self.fold, self.pages = fold, pages


class StandIns(Mapping[int, int]):
    """From a page to the fold that stands for it."""

    def __init__(self) -> None:
        self._bundles: dict[int, _Bundle] = {}
        self._folds: dict[int, _Bundle] = {}

    def copy(self) -> StandIns:
        """The same, to be changed by itself."""
        copied = StandIns()
        for fold, bundle in self._folds.items():
            copied._folds[fold] = twin = _Bundle(fold, bundle.pages.copy())
            copied._bundles.update(dict.fromkeys(bundle.pages, twin))
        return copied

    def __getitem__(self, page: int) -> int:
        return self._bundles[page].fold

    def __contains__(self, page: object) -> bool:
        return page in self._bundles

    def __iter__(self) -> Iterator[int]:
        return iter(self._bundles)

    def __len__(self) -> int:
        return len(self._bundles)

    def folds(self) -> Set[int]:
        """The folds that stand for pages."""
        return self._folds.keys()

    def of(self, fold: int) -> Set[int]:
        """The pages that a fold stands for."""
        bundle = self._folds.get(fold)
        return bundle.pages if bundle is not None else _NOTHING

    def over(self, pages: Set[int]) -> set[int]:
        """The folds that stand for any of these pages: found from the smaller side."""
        if len(pages) <= len(self._folds):
            return {self._bundles[page].fold for page in pages if page in self._bundles}
        return {fold for fold, bundle in self._folds.items() if not bundle.pages.isdisjoint(pages)}

    def put(self, pages: Collection[int], fold: int) -> Callable[[], None]:
        """Make a fold stand for pages, in place of any other, beside those that it stands for already; returns what undoes it."""
        chosen = pages if isinstance(pages, Set) else set(pages)
        if (existing := self._folds.get(fold)) is not None:
            # A fold that comes back may stand for some of its pages still.
            changes = self._move(chosen - existing.pages, existing)
            return lambda: self._put_back(changes)
        largest = max((self._folds[old] for old in self.over(chosen)), key=lambda bundle: len(bundle.pages), default=None)
        rest = chosen - largest.pages if largest is not None else chosen
        if largest is None or len(chosen) - len(rest) < len(largest.pages):
            changes = self._move(chosen, _Bundle(fold, set()))
            return lambda: self._put_back(changes)
        former = largest.fold
        changes = self._move(rest, largest)
        self._rename(largest, fold)

        def undo() -> None:
            self._rename(largest, former)
            self._put_back(changes)

        return undo

    def take(self, pages: Iterable[int]) -> Callable[[], None]:
        """Make no fold stand for pages; returns what undoes it."""
        changes = self._move(set(pages), None)
        return lambda: self._put_back(changes)

    def _put_back(self, changes: Iterable[tuple[Set[int], _Bundle | None]]) -> None:
        for pages, bundle in changes:
            self._move(pages, bundle)

    def _move(self, pages: Set[int], target: _Bundle | None) -> list[tuple[Set[int], _Bundle | None]]:
        """Put pages into a bundle, or into none; returns the bundles that they were in, each with its pages."""
        loose = pages - self._bundles.keys()
        changes: list[tuple[Set[int], _Bundle | None]] = [(loose, None)] if loose else []
        for fold in self.over(pages):
            bundle = self._folds[fold]
            part = bundle.pages & pages
            changes.append((part, bundle))
            bundle.pages -= part
            if not bundle.pages:
                del self._folds[fold]
        if target is None:
            for page in pages:
                self._bundles.pop(page, None)
        elif pages:
            self._bundles.update(dict.fromkeys(pages, target))
            target.pages |= pages
            self._folds[target.fold] = target
        return changes

    def _rename(self, bundle: _Bundle, fold: int) -> None:
        self._folds.pop(bundle.fold, None)
        bundle.fold = fold
        self._folds[fold] = bundle
