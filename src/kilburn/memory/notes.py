"""Notes: named texts of a user or an agent, such as `core/human` or `workflows/release`.

A note is a page with a name; each user or agent has a collection of notes. One page of each name is in force (law 9). An edit
appends a page and retires its predecessor in the same transaction, so every version stays readable, and history, undo, trust,
search and forgetting work as in any collection.

    notes = store.notes("ana")
    first = notes.write("core/human", "Ana drinks tea.")
    notes.write("core/human", "Ana drinks coffee.", seen=first.digest)
    print(notes.diff("core/human"))
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from kilburn.arguments import checked
from kilburn.backend import SegmentKind, State
from kilburn.collections.collection import Collection, undisturbed
from kilburn.collections.names import checked_name
from kilburn.collections.versions import Versions
from kilburn.errors import KernelError, NoteConflict, UnknownAddress
from kilburn.event import Act
from kilburn.kernel.store import NOTES, Store
from kilburn.memory.secrets import Secrets, screen
from kilburn.message import Kind
from kilburn.move import Add, Drop, Restore, Retire
from kilburn.page import Page, Place, digest_of, parse_address

MAX_SUGGESTIONS = 5
"""Names in the advice of an error at most."""

LEARNED = ("guidelines", "examples", "workflows")
"""Folders of notes that are learned from the user's feedback. A writer that has read untrusted text may not change them."""


class NoteVersion:
    """One version of a note: a page, and its text, which is read on access.

    Attributes:
        name: name of the note at that version.
        digest: SHA-256 of its text, hex; a writer names the version that it has seen by it.
        address: `p1`, `f3`; any version can be recalled by it. page: the id of that page.
        trust: the lowest trust of its writer and its sources; TOOL if a tool's text got into it. role: the same as a role: user,
            assistant or tool.
        time: when it was written, in seconds since the epoch.
        in_force: whether it is the current version.
    """

    def __init__(self, collection: Collection, page: Page, state: State) -> None:
        self.name, self.digest, self.address = page.name or "", page.digest, page.address
        self.trust, self.time, self.tokens, self.role = page.trust, page.time, page.tokens, page.role
        self.in_force = state.at is Place.OUT
        self._collection, self.page = collection, page.id

    def __repr__(self) -> str:
        """Return the name and address; no text."""
        return f"<NoteVersion {self.address} of {self.name!r}{'' if self.in_force else ', not in force'}>"

    @property
    def text(self) -> str:
        """The exact text.

        Raises:
            Forgotten, StoreCorrupt.
        """
        return self._collection.contents.text(self.page)


@checked
class Notes:
    """The notes of one owner, made by `Store.notes`. Safe to use from several threads.

    Args:
        owner: a user or an agent; "" for all users.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self.owner = store, owner
        self._segment = f"{NOTES}/{owner}" if owner else NOTES
        self._begun: Collection | None = None

    @property
    def collection(self) -> Collection:
        """Where they are, begun where there are none; its ledger, `recall` and `closure` are those of any segment.

        Raises:
            StoreReadOnly: there are none, and the store was opened for reading.
        """
        if self._begun is None:
            self._begun = self._store._collection(self._segment, SegmentKind.NOTES, self.owner)
        return self._begun

    @property
    def head(self) -> int:
        """Number of the last event in their ledger now; 0 where there are none."""
        return self.collection.ledger.head if self._exist() else 0

    def _exist(self) -> bool:
        backend = self._store.backend
        return self._begun is not None or backend.segment(self._segment, time=0.0, create=False) is not None

    def protect(self, *names: str) -> None:
        """Make these notes, and those below them, read-only for agents, through every `Notes` of this owner that the same store
        made. Persons may change them, and so may policies that write to the collection itself, such as `consolidate`.

        Raises:
            KernelError: no name of a note.
        """
        self._store._readonly.setdefault(self.owner, set()).update(map(checked_name, names))

    def readonly(self, name: str) -> bool:
        """Return whether no agent may change a note."""
        return any(is_at(name, above) for above in self._store._readonly.get(self.owner, ()))

    def check(self, names: Iterable[str], *, policy: str, tainted: bool = False) -> None:
        """Check that a writer may change notes of these names: the permission of every door to notes.

        Args:
            policy, tainted: see `write`.

        Raises:
            KernelError: one of them is read-only, or was learned from the user's feedback and the writer has read untrusted text.
        """
        for name in names if policy != "user" else ():
            if self.readonly(name):
                raise KernelError(f"{name!r} is read-only", advice="only a person changes it")
            if tainted and any(is_at(name, folder) for folder in LEARNED):
                reason = f"{name!r} was learned from the user's feedback, and you have read what a tool returned"
                raise KernelError(reason, advice="only a person changes it now")

    def list(self, under: str = "", *, accepts: Callable[[str], bool] | None = None) -> Sequence[NoteVersion]:
        """Return the notes in force, by name.

        Args:
            under: only those below this name: `core` for `core/human`; "" for all.
            accepts: only those whose name it accepts; the others are not read.
        """
        below = f"{under.rstrip('/')}/" if under else ""
        ids = [page for name, page in self._named().items() if name.startswith(below) and (accepts is None or accepts(name))]
        if not ids:
            return []
        rows = self.collection.backend.read((self.collection.number, page) for page in ids)
        versions = [NoteVersion(self.collection, page, state) for page, state in rows.values() if state.at is Place.OUT]
        return sorted(versions, key=lambda note: note.name)

    def texts(self, versions: Sequence[NoteVersion]) -> Mapping[str, str]:
        """Return the exact texts of some versions, by their digests, read at once.

        Raises:
            StoreCorrupt: one of them was forgotten, or is damaged.
        """
        return self._store.backend.contents.texts({note.digest for note in versions}) if versions else {}

    def read(self, name: str) -> NoteVersion:
        """Return a note as it is now.

        Raises:
            KernelError: no name of a note. UnknownAddress: there is none of this name.
        """
        note = self.find(name)
        if note is None:
            raise self._unknown(name)
        return note

    def find(self, name: str) -> NoteVersion | None:
        """Return a note as it is now, or None if there is none of this name.

        Raises:
            KernelError: no name of a note.
        """
        page = self._named().get(checked_name(name))
        return None if page is None else NoteVersion(self.collection, *self.collection.read(page))

    def write(
        self,
        name: str,
        text: str,
        *,
        seen: str | None = None,
        anew: bool = False,
        sources: Iterable[int] = (),
        cites: Sequence[tuple[int, int]] = (),
        policy: str = "user",
        tainted: bool = False,
        secrets: Secrets = None,
        why: str = "",
    ) -> NoteVersion:
        """Write a note, new or in place of what it says now; what it said before stays in its history. The same text again
        changes nothing.

        Args:
            seen: the digest of the version that the writer has seen; "" if there must be none yet; None for any version.
            anew: the text has nothing of the previous version. Otherwise that version is its source: the new one is trusted no
                more, and is forgotten with it.
            sources: pages of other notes' versions that the writer has read: the new version is trusted no more, and is
                forgotten with them.
            cites: pages of other segments that it was made from: (number of the segment, page id).
            policy: the writer; "user" for a person, otherwise the agent or the policy.
            tainted: whether the writer had read what a tool returned.
            secrets: what to do if the text holds a secret: see `kilburn.memory.secrets.screen`.

        Raises:
            NoteConflict: the note was changed since `seen`. KernelError: an invalid name, an empty or too long text; see
            `check`. UnknownAddress, Forgotten: a cited page does not exist. LawBroken: it is pinned. SecretFound, MissingExtra.
            StoreError. Nothing was changed.
        """
        name = checked_name(name)
        text, _ = screen(text, secrets)

        def written() -> NoteVersion:
            head, current = self.head, self.find(name)
            self._check_seen(name, current, seen)
            if current is not None and current.digest == digest_of(text) and not anew:
                return current
            pages = dict.fromkeys([*sources, *([] if current is None or anew else [current.page])])
            add = Add(text=text, kind=Kind.TEXT, name=name, sources=tuple(pages), cites=tuple(cites), why=why)
            retired = [] if current is None else [Retire((current.page,), refers=0, why=why)]
            return self._applied([name], add, *retired, policy=policy, tainted=tainted, head=head)

        return undisturbed(written)

    def rename(self, name: str, to: str, *, seen: str | None = None, policy: str = "user", why: str = "") -> NoteVersion:
        """Rename a note. Its history continues under the new name.

        Raises:
            UnknownAddress: there is no such note. NoteConflict: it was changed since `seen`, or the other name is taken.
            LawBroken: it is pinned. StoreError. Nothing was changed.
        """
        name, to = checked_name(name), checked_name(to)

        def renamed() -> NoteVersion:
            head, current, existing = self.head, self.find(name), self.find(to)
            if current is None:
                raise self._unknown(name)
            self._check_seen(name, current, seen)
            if existing is not None:
                raise NoteConflict(
                    f"there is a note {to!r} already", advice="delete it first, or take another name", note=existing
                )
            page = current.page
            add = Add(text=current.text, kind=Kind.TEXT, name=to, sources=(page,), why=why)
            return self._applied([name, to], add, Retire((page,), refers=0, why=why), policy=policy, head=head)

        return undisturbed(renamed, lambda: self.head)

    def delete(
        self, name: str, *, seen: str | None = None, policy: str = "user", tainted: bool = False, why: str = ""
    ) -> NoteVersion:
        """Retire a note and return its last version. Its versions can still be read, and `restore` brings one back; use `forget`
        to erase them.

        Raises:
            UnknownAddress: there is no such note. NoteConflict: it was changed since `seen`. LawBroken: it is pinned.
        """
        name = checked_name(name)

        def deleted() -> NoteVersion:
            head, current = self.head, self.find(name)
            if current is None:
                raise self._unknown(name)
            self._check_seen(name, current, seen)
            self.apply([name], Retire((current.page,), why=why), policy=policy, tainted=tainted, seen=head)
            return NoteVersion(self.collection, *self.collection.read(current.page))

        return undisturbed(deleted)

    def history(self, name: str) -> Sequence[NoteVersion]:
        """Return the versions of a note, in the order in which they were written: also those that had another name, and those
        before it was deleted. The whole ledger is read.

        Raises:
            UnknownAddress: there never was one of this name, or it was forgotten.
        """
        name = checked_name(name)
        if not self._exist():
            raise self._unknown(name)
        collection = self.collection
        rows = {page.id: (page, state) for page, state in collection.pages(history=True)}
        versions = Versions(collection.backend.events(collection.number))
        ids = {page for page, (row, _) in rows.items() if row.name == name}
        chain = versions.of(*ids) & rows.keys()
        if not chain:
            raise self._unknown(name)
        order = {page: at for at, page in enumerate(self._written())}
        return [NoteVersion(collection, *rows[page]) for page in sorted(chain, key=lambda page: order.get(page, 0))]

    def restore(self, name: str, address: str, *, why: str = "") -> NoteVersion:
        """Put an earlier version in force again, as a person, with the trust that it had; what the note says now is retired.

        Args:
            address: of the version, as `history` has it.

        Raises:
            UnknownAddress, Forgotten: there is no such version. KernelError: it is in force, or had another name.
        """
        name = checked_name(name)
        if not self._exist():
            raise self._unknown(name)

        def restored() -> NoteVersion:
            head, current, page = self.head, self.find(name), self._version(name, address)
            if current is not None and current.page == page.id:
                raise KernelError(f"{address} is what {name!r} says now", advice="see its history")
            retirement = [] if current is None else [Retire((current.page,), by=page.id, why=why)]
            self.collection.apply(Restore((page.id,), why), *retirement, cause="undo", seen=head)
            return NoteVersion(self.collection, *self.collection.read(page.id))

        return undisturbed(restored)

    def diff(self, name: str, old: str = "", new: str = "") -> str:
        """Return the changes between two versions of a note as a unified diff; "" if there are none.

        Args:
            old, new: their addresses; "" for the version in force and the one before `new`.

        Raises:
            UnknownAddress, Forgotten: there is no such version.
        """
        versions = [*self.history(name)]
        places = {version.address: at for at, version in enumerate(versions)}
        if strange := [address for address in (old, new) if address and address not in places]:
            raise UnknownAddress(f"{strange[0]} is no version of {name!r}", advice=f"it has {', '.join(places)}")
        in_force = next((at for at, version in enumerate(versions) if version.in_force), len(versions) - 1)
        last = places[new] if new else in_force
        first = versions[places[old]] if old else versions[last - 1] if last else None
        old_text = "" if first is None else first.text
        heads = (f"{name} {'(none)' if first is None else first.address}", f"{name} {versions[last].address}")
        return unified_diff(old_text, versions[last].text, *heads)

    def forget(self, name: str, why: str = "") -> Sequence[str]:
        """Forget a note for ever: all its versions, and everything that was made from them, in every place; returns the addresses
        of its versions.

        Raises:
            UnknownAddress: there is no such note. StoreError.
        """
        versions = self.history(name)
        self.collection.apply(Drop(tuple(version.page for version in versions), why))
        return [version.address for version in versions]

    def _named(self) -> dict[str, int]:
        if not self._exist():
            return {}
        with self.collection.lock:
            self.collection.ledger.refresh()
            return dict(self.collection.named() or {})

    def _unknown(self, name: str) -> UnknownAddress:
        near = difflib.get_close_matches(name, names := sorted(self._named()), MAX_SUGGESTIONS, 0.4) or names[:MAX_SUGGESTIONS]
        return UnknownAddress(f"there is no note {name!r}", advice=f"there is {', '.join(near) or 'none yet'}")

    def _check_seen(self, name: str, current: NoteVersion | None, seen: str | None) -> None:
        digest = "" if current is None else current.digest
        if seen is None or seen == digest:
            return
        if current is None:
            raise NoteConflict(f"the note {name!r} is gone", advice="write it as a new one, or restore it")
        reason = f"there is a note {name!r} already" if not seen else f"the note {name!r} was changed meanwhile"
        raise NoteConflict(reason, advice=f"read it: it is {current.address} now; then edit that", note=current)

    def _version(self, name: str, address: str) -> Page:
        numbers = self.collection.contents.resolve(address)
        page = self.collection.read(numbers[0])[0]
        if len(numbers) > 1 or page.name != name:
            called = f", but of {page.name!r}" if len(numbers) == 1 and page.name else ""
            raise UnknownAddress(f"{address} is no version of {name!r}{called}", advice="see its history")
        return page

    def _written(self) -> Sequence[int]:
        """Return all pages in the order in which they were written."""
        events = self.collection.backend.events(self.collection.number)
        return [page for event in events if event.act is Act.ADMIT for page in event.pages]

    def apply(
        self, names: Iterable[str], *changes: Add | Retire, policy: str, tainted: bool = False, seen: int | None = None
    ) -> Sequence[str]:
        """Apply changes to notes of these names in one transaction; see `Collection.apply`.

        Raises:
            KernelError: see `check`. Nothing was changed.
        """
        self.check(names, policy=policy, tainted=tainted)
        return self.collection.apply(*changes, policy=policy, tainted=tainted, seen=seen)

    def _applied(
        self, names: Iterable[str], *changes: Add | Retire, policy: str, tainted: bool = False, head: int | None = None
    ) -> NoteVersion:
        (address,) = self.apply(names, *changes, policy=policy, tainted=tainted, seen=head)
        return NoteVersion(self.collection, *self.collection.read(parse_address(address)[0]))


def is_at(name: str, above: str) -> bool:
    """Return whether a note has this name, or one below it."""
    return name == above or name.startswith(f"{above}/")


def unified_diff(old_text: str, new_text: str, old: str, new: str) -> str:
    """Return a unified diff of two texts under their headings; "" where they are the same."""
    lines = difflib.unified_diff(old_text.splitlines(), new_text.splitlines(), old, new, lineterm="")
    return "".join(f"{line}\n" for line in lines)
