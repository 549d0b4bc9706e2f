"""The gateway's keys: who may come in, as which tenant and user, and with what options.

A key is `kilburn-NAME-SECRET`: 8 hexadecimal digits that name it, and 256 random bits. The file holds the SHA-256 of the
whole key, never the key, so a reader of the file cannot come in. A slow hash adds nothing: nobody guesses 256 bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kilburn.backend import check_name
from kilburn.backends.places import is_url, shown
from kilburn.backends.together import open_keys
from kilburn.errors import SpecError, StoreError
from kilburn.file import write_file

if TYPE_CHECKING:
    from kilburn.backends.postgres.keys import StoredKeys

log = logging.getLogger("kilburn.gateway")

FORM = re.compile(rb"kilburn-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
LATE = 2.0
"""Seconds after which every gateway knows what was changed in a database."""

OLD = 30.0
"""Seconds for which keys let in when the database with them does not answer."""

STAND_INS = frozenset({"", "kilburn", "none"})
"""Keys that a client sends because its SDK requires one: the gateway's own provider key is used instead."""

LARGEST = 16 << 20
"""Bytes of a keys file, which is some 50,000 keys."""


class Link(StrEnum):
    """Whether a session is linked to an earlier one because it says the same."""

    AUTO = "auto"
    """Where it is known whose they are: the key is one person's, or the request names its user."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key: what it opens. It never holds the key itself.

    Args:
        name: 8 hexadecimal digits, the public part; "" for a client that needs no key.
        digest: SHA-256 of the whole key, in hexadecimal digits.
        tenant: the partition that it opens, and no other.
        user: whose sessions and memory these are, if the key is one person's; "" for nobody in particular, as of an
            application's key.
        note: what a person called it, for lists.
        memory: tokens of long-term memory that are put before a prompt; 0 for none.
        learn: whether facts are learned from what is said.
        upstream: name of the environment variable that holds the provider's key; "" to pass on the client's own.
        rate: requests per minute; 0 for the gateway's limit.
        link: whether sessions are linked by what they say.
        figures: it reads the figures of all tenants at `/metrics`, and opens nothing else.
        looks: it looks at what it may see, here and in the dashboard; it changes nothing, and asks no model.
        created, revoked: seconds since the epoch; `revoked` is 0 for a key that is valid.
    """

    name: str = ""
    digest: str = ""
    tenant: str = "default"
    user: str = ""
    note: str = ""
    memory: int = 0
    learn: bool = False
    upstream: str = ""
    rate: int = 0
    link: Link = Link.AUTO
    figures: bool = False
    looks: bool = False
    created: float = 0.0
    revoked: float = 0.0

    @property
    def person(self) -> bool:
        """Whether it is one person's: it has a user, or it is of this machine, where no keys are needed."""
        return bool(self.user) or not self.name


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A keys file. A field that this version does not know may be a restriction, so a file with one is refused."""

    version: int = 1
    keys: list[Key] = []


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """The keys of a file or of a database, oldest first, revoked ones too.

    Raises:
        SpecError: there is none, it is no keys file, or others than its owner may write to it. OSError: it cannot be read.
        StoreError: the database cannot be read.
    """
    if is_url(path):
        with closing(open_keys(os.fspath(path))) as stored:
            return sorted((_key_of(body) for _, _, body in stored.since(0)), key=lambda key: key.created)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _missing(path) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise SpecError(f"{path} is no file", advice="give the file that `kilburn keys add` wrote")
    with open(descriptor, "rb") as file:
        if mode & 0o022:
            raise SpecError(f"others may write to {path}, and so let themselves in", advice=f"chmod go-w {path}")
        data = file.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError(f"over {LARGEST:,} bytes")
        found = msgspec.json.decode(data, type=KeyFile)
        if found.version != 1:
            raise ValueError(f"version {found.version}")
        if len({key.name for key in found.keys}) < len(found.keys):
            raise ValueError("two keys of one name")
        for key in found.keys:
            _check(key)
    except (ValueError, msgspec.DecodeError, SpecError) as error:
        raise SpecError(
            f"{path} is no keys file: {error}", advice="restore it, or begin a new one with `kilburn keys add`"
        ) from None
    return found.keys


def _key_of(body: bytes) -> Key:
    """A key of a database.

    Raises:
        SpecError: it is none, or has an option that this version does not know, which may be a restriction.
    """
    try:
        key = msgspec.json.decode(body, type=Key)
        _check(key)
    except (msgspec.DecodeError, SpecError) as error:
        raise SpecError(f"a key that cannot be read: {error}", advice="use the Kilburn that made it, or a newer one") from None
    return key


def _missing(path: str | os.PathLike[str]) -> SpecError:
    return SpecError(f"there is no keys file {path}", advice="make a key with `kilburn keys add --keys FILE`")


def _check(key: Key) -> None:
    if not re.fullmatch("[0-9a-f]{8}", key.name) or not re.fullmatch("[0-9a-f]{64}", key.digest):
        raise SpecError(f"{key.name[:8]!r} is no name of a key, or has no digest")
    check_name(key.tenant, "tenant")
    if key.user:
        check_name(key.user, "user")
        if key.user.startswith("/"):
            raise SpecError(f"the user {key.user[:40]!r} begins with /", advice="these are end users below a key; give another")
    if key.upstream and not VARIABLE.fullmatch(key.upstream):
        # What was given may be the provider's key itself, so it is not repeated.
        raise SpecError("that is no name of an environment variable", advice="give the variable's name, never the provider's key")
    if key.memory < 0 or key.rate < 0:
        raise SpecError("memory and rate are 0 or more")


def add_key(path: str | os.PathLike[str], asked: Key) -> tuple[Key, str]:
    """Add a key to a file, which is created where there is none, or to a database; returns it and the key itself, which nothing
    keeps.

    Args:
        asked: its options; `name`, `digest` and times are set here.

    Raises:
        SpecError: see `read_keys`; an option that cannot be. OSError, StoreError: it cannot be written; all is as it was.
    """
    with _changing(path) as keys:
        name = secrets.token_hex(4)
        while name in {key.name for key in keys}:
            name = secrets.token_hex(4)
        secret = f"kilburn-{name}-{secrets.token_urlsafe(32)}"
        digest = hashlib.sha256(secret.encode()).hexdigest()
        made = msgspec.structs.replace(asked, name=name, digest=digest, created=time.time(), revoked=0.0)
        _check(made)
        keys.append(made)
    return made, secret


def revoke_key(path: str | os.PathLike[str], name: str) -> Key:
    """Revoke a key: a running gateway refuses it from the next request on, or within `LATE` seconds where keys are in a database.
    It stays in the list.

    Raises:
        SpecError: no such key; see `read_keys`. OSError, StoreError: it cannot be written; all is as it was.
    """
    with _changing(path, create=False) as keys:
        for at, key in enumerate(keys):
            if key.name == name:
                if not key.revoked:
                    keys[at] = msgspec.structs.replace(key, revoked=time.time())
                return keys[at]
        # The name is what stands before the secret; who gives the whole key by mistake does not see it repeated.
        raise SpecError(f"no key {name[:8]!r}", advice="see `kilburn keys list`; the name is the 8 digits after `kilburn-`")


@contextmanager
def _changing(path: str | os.PathLike[str], *, create: bool = True) -> Iterator[list[Key]]:
    """The keys of a file or of a database, which are written when the block ends; two programs at once take turns."""
    if is_url(path):
        with closing(open_keys(os.fspath(path))) as stored, stored.changing() as bodies:
            keys = [_key_of(body) for body in bodies.values()]
            yield keys
            bodies.update({key.name: msgspec.json.encode(key) for key in keys})
        return
    folder = os.open(Path(path).resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = [] if create and not os.path.lexists(path) else read_keys(path)
        yield keys
        with write_file(Path(path).resolve(), force=True) as file:
            file.write(msgspec.json.format(msgspec.json.encode(KeyFile(keys=keys))) + b"\n")
    finally:
        os.close(folder)


class Keys:
    """The keys of a file, read again whenever it changes, or of a database, which says when they change.

    Args:
        path: the file, or the URL of the database.

    Raises:
        SpecError, OSError: see `read_keys`; also from `find`, as long as the file is damaged or gone, or the database cannot be
            read for some time. Of a database, a key that cannot be read lets nobody in, and if none can be read, none are known.
        StoreError: the database cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._known: dict[str, Key] = {}
        self._ended = threading.Event()
        self._stored = open_keys(os.fspath(path)) if is_url(path) else None
        self._changed, self._read = 0, 0.0
        if self._stored is None:
            self._refresh()
        else:
            try:
                self._read_changed(self._stored)
                if self._changed and not self._known:
                    what = "none of the keys in this database can be read"
                    raise SpecError(what, advice="use the Kilburn that made them, or a newer one")
            except BaseException:
                self._stored.close()
                raise
            threading.Thread(target=self._watch, args=(self._stored,), name="kilburn-keys", daemon=True).start()

    def close(self) -> None:
        """Read no more; idempotent."""
        self._ended.set()

    def problem(self) -> str:
        """Why nobody comes in, and what to do; "" if there is a valid key."""
        self._refresh()
        if any(not key.revoked for key in self._known.values()):
            return ""
        place = shown(os.fspath(self.path))
        what = f"every key in {place} is revoked" if self._known else f"there is no key in {place}"
        return f"{what}, so nobody comes in: make one with `kilburn keys add` and the same --keys; no restart is needed"

    def find(self, presented: bytes) -> Key | None:
        """The valid key that was presented; None if it is none of ours."""
        self._refresh()
        form = FORM.fullmatch(presented)
        key = self._known.get(form[1].decode()) if form else None
        # What is compared are hashes, in a time that does not depend on where they differ.
        same = hmac.compare_digest(hashlib.sha256(presented).hexdigest(), key.digest if key is not None else "0" * 64)
        return key if key is not None and same and not key.revoked else None

    def valid(self, key: Key) -> Key | None:
        """A key that was found earlier, with the options that it has now; None if it was revoked since, or is another one's."""
        self._refresh()
        known = self._known.get(key.name)
        return known if known is not None and known.digest == key.digest and not known.revoked else None

    def _watch(self, stored: StoredKeys) -> None:
        with closing(stored):
            while not self._ended.is_set():
                try:
                    for _ in stored.changes(self._ended):
                        self._read_changed(stored)
                except StoreError as error:
                    log.warning("the keys cannot be read: %s", error)
                    self._ended.wait(LATE / 2)

    def _read_changed(self, stored: StoredKeys) -> None:
        began, known = time.monotonic(), dict(self._known)
        for changed, name, body in stored.since(self._changed):
            self._changed = changed
            try:
                known[name] = _key_of(body)
            except SpecError as error:
                log.warning("a key in the database lets nobody in: %s", error)
                known.pop(name, None)
        self._known, self._read = known, began

    def _refresh(self) -> None:
        if self._stored is not None:
            if time.monotonic() - self._read > OLD:
                raise SpecError("the keys cannot be read", advice="see why the database does not answer")
            return
        try:
            now = os.stat(self.path)
            seen = now.st_mtime_ns, now.st_ino, now.st_size
            if seen != self._seen:
                self._known = {key.name: key for key in read_keys(self.path)}
                self._seen = seen
        except (OSError, SpecError) as error:
            self._known, self._seen = {}, None
            raise _missing(self.path) if isinstance(error, FileNotFoundError) else error from None
