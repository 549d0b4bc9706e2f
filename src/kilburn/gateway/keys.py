"""The gateway's keys, each with its tenant, user and options.

A key is `kilburn-NAME-SECRET`: a name of 8 hexadecimal digits, and 256 random bits. The file holds the SHA-256 of the whole key,
so that a reader of the file cannot use it. A slow hash adds nothing: 256 bits cannot be guessed.
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
from kilburn.backends.gateways import open_keys
from kilburn.backends.places import is_url, shown
from kilburn.errors import SpecError, StoreError
from kilburn.file import write_file

if TYPE_CHECKING:
    from kilburn.backends.postgres.keys import StoredKeys

log = logging.getLogger("kilburn.gateway")

FORM = re.compile(rb"kilburn-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
MAX_KEY_DELAY = 2.0
"""Seconds after which every gateway knows a change of the keys in a database."""

MAX_KEY_AGE = 30.0
"""Seconds for which known keys are accepted while their database does not answer."""

STAND_INS = frozenset({"", "kilburn", "none"})
"""Placeholder keys of clients whose SDK requires one: the gateway's own provider key is used instead."""

MAX_FILE_BYTES = 16 << 20
"""Maximum size of a keys file, in bytes: about 50,000 keys."""


class Link(StrEnum):
    """Whether a session is linked to an earlier one with the same content."""

    AUTO = "auto"
    """Links if the user is known: the key is one person's, or the request names its user."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The options of one key, without its secret.

    Args:
        name: 8 hexadecimal digits, the public part; "" for a client that needs no key.
        digest: SHA-256 of the whole key, in hexadecimal digits.
        tenant: the only partition that it gives access to.
        user: the owner of its sessions and memory, if the key is one person's; "" for an application's key.
        note: a person's note about it, for lists.
        memory: maximum tokens of long-term memory in a prompt; 0 for none.
        learn: whether facts are learned from conversations.
        upstream: name of the environment variable that holds the provider's key; "" to pass on the client's own.
        rate: requests per minute; 0 for the gateway's limit.
        link: whether sessions are linked by their content.
        figures: it only reads the figures of all tenants at `/metrics`.
        looks: it only reads visible sessions and figures, here and in the dashboard; it changes nothing, and asks no model.
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
        """Whether the key is one person's: it has a user, or it is of this machine, where no keys are needed."""
        return bool(self.user) or not self.name


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of keys. An unknown field may be a restriction, so a file with one is refused."""

    version: int = 1
    keys: list[Key] = []


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """Return the keys of a file or of a database, oldest first, with revoked ones.

    Raises:
        SpecError: the file is missing or invalid, or other users may write to it. OSError: it cannot be read.
        StoreError: the database cannot be read.
    """
    if is_url(path):
        with closing(open_keys(os.fspath(path))) as store:
            return sorted((_decode_key(body) for _, _, body in store.since(0)), key=lambda key: key.created)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _missing(path) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise SpecError(f"{path} is not a file", advice="give the file that `kilburn keys add` wrote")
    with open(descriptor, "rb") as file:
        if mode & 0o022:
            raise SpecError(f"other users may write to {path}, and could add keys", advice=f"chmod go-w {path}")
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES:,} bytes")
        key_file = msgspec.json.decode(data, type=KeyFile)
        if key_file.version != 1:
            raise ValueError(f"version {key_file.version}")
        if len({key.name for key in key_file.keys}) < len(key_file.keys):
            raise ValueError("two keys of one name")
        for key in key_file.keys:
            _check(key)
    except (ValueError, msgspec.DecodeError, SpecError) as error:
        raise SpecError(
            f"{path} is not a keys file: {error}", advice="restore it, or begin a new one with `kilburn keys add`"
        ) from None
    return key_file.keys


def _decode_key(body: bytes) -> Key:
    """Decode a key of a database.

    Raises:
        SpecError: the key is invalid, or has an unknown option, which may be a restriction.
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
        # The text may be the provider's key itself, so the error does not repeat it.
        raise SpecError(
            "this is not the name of an environment variable", advice="give the variable's name, never the provider's key"
        )
    if key.memory < 0 or key.rate < 0:
        raise SpecError("memory and rate are 0 or more")


def add_key(path: str | os.PathLike[str], options: Key) -> tuple[Key, str]:
    """Add a key to a file, which is created if needed, or to a database. Return its options and its secret, which is stored
    nowhere.

    Args:
        options: the key's options; `name`, `digest` and times are set here.

    Raises:
        SpecError: see `read_keys`; an invalid option. OSError, StoreError: it cannot be written; nothing was changed.
    """
    with _changing(path) as keys:
        name = secrets.token_hex(4)
        while name in {key.name for key in keys}:
            name = secrets.token_hex(4)
        secret = f"kilburn-{name}-{secrets.token_urlsafe(32)}"
        digest = hashlib.sha256(secret.encode()).hexdigest()
        new_key = msgspec.structs.replace(options, name=name, digest=digest, created=time.time(), revoked=0.0)
        _check(new_key)
        keys.append(new_key)
    return new_key, secret


def revoke_key(path: str | os.PathLike[str], name: str) -> Key:
    """Revoke a key. A running gateway refuses it from the next request on, or within `MAX_KEY_DELAY` seconds if the keys are in a
    database. The key stays in the list.

    Raises:
        SpecError: no such key; see `read_keys`. OSError, StoreError: it cannot be written; nothing was changed.
    """
    with _changing(path, create=False) as keys:
        for at, key in enumerate(keys):
            if key.name == name:
                if not key.revoked:
                    keys[at] = msgspec.structs.replace(key, revoked=time.time())
                return keys[at]
        # If the whole key is given by mistake, the error shows only its first characters.
        raise SpecError(f"no key {name[:8]!r}", advice="see `kilburn keys list`; the name is the 8 digits after `kilburn-`")


@contextmanager
def _changing(path: str | os.PathLike[str], *, create: bool = True) -> Iterator[list[Key]]:
    """Yield the keys of a file or of a database, which are written when the block ends. Two programs take turns."""
    if is_url(path):
        with closing(open_keys(os.fspath(path))) as store, store.changing() as bodies:
            keys = [_decode_key(body) for body in bodies.values()]
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
    """The keys of a file, read again after each change, or of a database, which announces its changes.

    Args:
        path: the file, or the URL of the database.

    Raises:
        SpecError, OSError: see `read_keys`; also from `find`, as long as the file is damaged or missing, or the database has not
            been readable for some time. An unreadable key of a database is ignored; an error is raised if all are unreadable.
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
                    problem = "none of the keys in this database can be read"
                    raise SpecError(problem, advice="use the Kilburn that made them, or a newer one")
            except BaseException:
                self._stored.close()
                raise
            threading.Thread(target=self._watch, args=(self._stored,), name="kilburn-keys", daemon=True).start()

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._ended.set()

    def problem(self) -> str:
        """Return why no client is admitted, and what to do; "" if there is a valid key."""
        self._refresh()
        if any(not key.revoked for key in self._known.values()):
            return ""
        place = shown(os.fspath(self.path))
        problem = f"every key in {place} is revoked" if self._known else f"there is no key in {place}"
        return f"{problem}, so no client is admitted: make one with `kilburn keys add` and the same --keys; no restart is needed"

    def find(self, presented: bytes) -> Key | None:
        """Return the valid key with this secret; None if there is none."""
        self._refresh()
        form = FORM.fullmatch(presented)
        key = self._known.get(form[1].decode()) if form else None
        # The hashes are compared in constant time.
        same = hmac.compare_digest(hashlib.sha256(presented).hexdigest(), key.digest if key is not None else "0" * 64)
        return key if key is not None and same and not key.revoked else None

    def valid(self, key: Key) -> Key | None:
        """Return the present options of a key that was found earlier; None if it is revoked or replaced."""
        self._refresh()
        current = self._known.get(key.name)
        return current if current is not None and current.digest == key.digest and not current.revoked else None

    def _watch(self, store: StoredKeys) -> None:
        with closing(store):
            while not self._ended.is_set():
                try:
                    for _ in store.changes(self._ended):
                        self._read_changed(store)
                except StoreError as error:
                    log.warning("the keys cannot be read: %s", error)
                    self._ended.wait(MAX_KEY_DELAY / 2)

    def _read_changed(self, store: StoredKeys) -> None:
        began, keys = time.monotonic(), dict(self._known)
        for changed, name, body in store.since(self._changed):
            self._changed = changed
            try:
                keys[name] = _decode_key(body)
            except SpecError as error:
                log.warning("a key in the database is ignored: %s", error)
                keys.pop(name, None)
        self._known, self._read = keys, began

    def _refresh(self) -> None:
        if self._stored is not None:
            if time.monotonic() - self._read > MAX_KEY_AGE:
                raise SpecError("the keys cannot be read", advice="see why the database does not answer")
            return
        try:
            status = os.stat(self.path)
            version = status.st_mtime_ns, status.st_ino, status.st_size
            if version != self._seen:
                self._known = {key.name: key for key in read_keys(self.path)}
                self._seen = version
        except (OSError, SpecError) as error:
            self._known, self._seen = {}, None
            raise _missing(self.path) if isinstance(error, FileNotFoundError) else error from None
