"""A cold place: a folder or an object store for texts of one tenant that have not been read for a long time.

An object contains one text, compressed as in its row, and encrypted if the tenant has a key. Its name begins with the SHA-256 of
the object, so that the place can be verified without the store. The rest of the name is random, so that no object is written
twice, and deleting one never hits a newer one. The store knows which text is in which object.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from kilburn.backends.chilling import SETTING
from kilburn.errors import MissingExtra, SpecError, StoreCorrupt, StoreError

MARK, SEALED, NONCE = b"KC1", b"\x01", 12
"""An object begins with `MARK`; an encrypted one continues with `SEALED` and a nonce of `NONCE` bytes."""


class ColdSite(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a tenant's cold texts.

    Args:
        url: `file:///...`, `s3://bucket/...`, or another URL that `obstore` opens; a folder by its path.
        folder: the tenant's own folder in it: stores may share a place.
        key: the file with the key; "" without encryption. proof: identifies the key.
        versions: whether the place may keep versions of deleted objects.
    """

    url: str
    folder: str
    key: str = ""
    proof: str = ""
    versions: bool = False


def parse_place(setting: str | None) -> ColdSite | None:
    """Return the place that a setting names, or None without a setting.

    Raises:
        StoreCorrupt: it cannot be read.
    """
    if setting is None:
        return None
    try:
        return msgspec.json.decode(setting, type=ColdSite)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(
            f"the setting {SETTING!r} cannot be read: {error}", advice="set it again with `kilburn cold set`"
        ) from error


def new_place(url: str, key: str = "", *, versions: bool = False) -> ColdSite:
    """Return a new place after a test of writing, reading and deleting. A missing folder, and a missing file for the key, are
    created.

    Args:
        versions: whether the place may keep versions of deleted objects.

    Raises:
        SpecError: an unknown kind of place, an unreadable key, or a place that keeps versions. StoreError: nothing can be
        written there. MissingExtra.
    """
    site = ColdSite(
        url=url if "://" in url else Path(url).absolute().as_uri(),
        folder=secrets.token_hex(8),
        key=os.path.abspath(key) if key else "",
        proof=_proof(_key_in(key, make=True)) if key else "",
        versions=versions,
    )
    place = ColdPlace(site)
    if not versions and place.keeps_versions():
        raise SpecError(
            f"{url} keeps versions: deleted objects stay there as older versions",
            advice="switch that off, or let older versions expire by a rule of the bucket and say --versions",
        )
    tried = place.put(b"tried out", digest=b"")
    if place.get(tried, digest=b"") != b"tried out":
        raise StoreError(f"{url} does not return what was written there", advice="give another place")
    place.delete(tried)
    return site


def _proof(key: bytes) -> str:
    return hashlib.sha256(b"kilburn cold" + key).hexdigest()[:16]


def _key_in(path: str, *, make: bool = False) -> bytes:
    """Return the key in a file.

    Raises:
        SpecError: the file has no valid key.
    """
    if make and not os.path.lexists(path):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
    try:
        key = bytes.fromhex(Path(path).read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise SpecError(f"the key file {path} cannot be read: {error}", advice="put it back, as it was made") from error
    if len(key) != 32:
        raise SpecError(f"the key file {path} has no key of 32 bytes in hex", advice="put it back, as it was made")
    return key


MAX_RETRIES, TIMEOUT = 4, 15
"""Retries of a request to an object store that is busy or does not answer, and the seconds until the last one."""


class _Folder:
    """Objects as files in a folder."""

    errors = OSError

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, folder: str) -> None:
        # Only its owner may read there, whatever the umask is.
        os.makedirs(self._root / folder, mode=0o700, exist_ok=True)

    def put(self, path: str, body: bytes) -> None:
        whole = self._root / path
        whole.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = whole.with_name(f"{whole.name}#")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        part.replace(whole)
        for path_synced in (whole.parent, whole.parent.parent, whole.parent.parent.parent):
            directory = os.open(path_synced, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def get(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def delete(self, path: str) -> None:
        whole = self._root / path
        # A killed writer leaves a partial file.
        whole.with_name(f"{whole.name}#").unlink(missing_ok=True)
        whole.unlink()

    def paths(self, folder: str) -> Iterator[str]:
        for parent, _, names in os.walk(self._root / folder, onerror=_raised):
            for name in names:
                yield (Path(parent) / name).relative_to(self._root).as_posix()


def _raised(error: OSError) -> None:
    raise error


class _Bucket:
    """Objects in an object store. The library has one thread pool per process, which a forked child does not inherit and cannot
    replace: the child gets an error.

    Raises:
        MissingExtra: the library is not installed.
    """

    process: int | None = None

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore import exceptions
        except ModuleNotFoundError as error:
            raise MissingExtra("obstore", "cold") from error
        self._library, self._url = obstore, url
        self.errors: type[Exception] = exceptions.BaseError

    def open(self, folder: str) -> None:
        from obstore.store import from_url

        retry: Any = {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=TIMEOUT)}
        self._store: Any = from_url(self._url, retry_config=retry, client_options={"timeout": timedelta(seconds=TIMEOUT)})

    @property
    def _objects(self) -> Any:
        """Return the open store.

        Raises:
            OSError: this is a forked child, in which the library would wait for ever.
        """
        _Bucket.process = _Bucket.process or os.getpid()
        if _Bucket.process != os.getpid():
            raise OSError('this process was forked from one that used the place: start it anew instead ("spawn")')
        return self._store

    def put(self, path: str, body: bytes) -> str | None:
        version: str | None = self._library.put(self._objects, path, body, mode="create")["version"]
        return version

    def get(self, path: str) -> bytes:
        return bytes(self._library.get(self._objects, path).bytes())

    def delete(self, path: str) -> None:
        self._library.delete(self._objects, path)

    def paths(self, folder: str) -> Iterator[str]:
        for entries in self._library.list(self._objects, prefix=f"{folder}/"):
            yield from (str(entry["path"]) for entry in entries)


class ColdPlace:
    """Reads, writes and deletes the objects of one tenant.

    Raises:
        MissingExtra: the place is an object store, and obstore is not installed. StoreError: it cannot be opened.
    """

    def __init__(self, place: ColdSite) -> None:
        self.place = place
        self._known: Any = None
        self._objects: _Folder | _Bucket
        if place.url.startswith("file://"):
            self._objects = _Folder(Path(unquote(place.url.removeprefix("file://"))))
        else:
            self._objects = _Bucket(place.url)
        with self._translated("opening it"):
            self._objects.open(place.folder)

    def _cipher(self) -> Any:
        """Return the cipher, or None without encryption. Deleting an object does not need the key.

        Raises:
            SpecError: the file has another key, or none. MissingExtra.
        """
        if self.place.key and self._known is None:
            key = _key_in(self.place.key)
            if _proof(key) != self.place.proof:
                raise SpecError(f"{self.place.key} has another key than the cold texts", advice="restore the right key")
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ModuleNotFoundError as error:
                raise MissingExtra("cryptography", "cold") from error
            self._known = AESGCM(key)
        return self._known

    @contextmanager
    def _translated(self, doing: str, *, of_one: bool = False) -> Iterator[None]:
        """Turn errors of the place in the block into errors of the store.

        Args:
            of_one: whether a missing file means a missing object; otherwise the place itself is missing.

        Raises:
            StoreError: the place cannot be reached, or refuses. FileNotFoundError: there is no such object.
        """
        try:
            yield
        except (self._objects.errors, OSError, ValueError) as error:
            if of_one and isinstance(error, FileNotFoundError):
                raise
            why = str(error).partition("\n")[0]
            message = f"the cold place {self.place.url}: {doing}: {why}"
            raise StoreError(message, advice="check that it exists and can be read and written, then try again") from error

    def _path(self, name: str) -> str:
        # A foreign file is named by its path.
        return f"{self.place.folder}/{name if '/' in name else f'{name[:2]}/{name}'}"

    def put(self, data: bytes, digest: bytes) -> str:
        """Write an object durably and return its name.

        Args:
            digest: that of the text, so that an object cannot replace another text's.
        """
        name, body = self.made(data, digest)
        self.write(name, body)
        return name

    def made(self, data: bytes, digest: bytes) -> tuple[str, bytes]:
        """Return a new object's name and bytes."""
        body = MARK + b"\x00" + data
        cipher = self._cipher()
        if cipher is not None:
            nonce = secrets.token_bytes(NONCE)
            body = MARK + SEALED + nonce + cipher.encrypt(nonce, data, digest)
        return f"{hashlib.sha256(body).hexdigest()}-{secrets.token_hex(8)}", body

    def keeps_versions(self) -> bool:
        """Whether the place keeps deleted objects as older versions. Only buckets of S3 report this.

        Raises:
            StoreError: nothing can be written there.
        """
        if not self.place.url.startswith("s3"):
            return False
        name, body = self.made(b"does it keep versions?", b"")
        version = self.write(name, body)
        self.delete(name)
        return version not in (None, "null")

    def write(self, name: str, body: bytes) -> str | None:
        """Write an object durably, and return its version if the place reports one.

        Raises:
            StoreError.
        """
        with self._translated("writing"):
            return self._objects.put(self._path(name), body)

    def get(self, name: str, digest: bytes) -> bytes:
        """Return the content of an object, in one read.

        Raises:
            StoreCorrupt: it is missing or altered. StoreError: the place cannot be reached.
        """
        advice = "put the object back from a backup of the cold place; `kilburn cold scrub` lists all missing and altered ones"
        try:
            with self._translated("reading", of_one=True):
                body = self._objects.get(self._path(name))
        except FileNotFoundError as error:
            raise StoreCorrupt(f"the cold object {self._path(name)} is not in {self.place.url}", advice=advice) from error
        if hashlib.sha256(body).hexdigest() != name.partition("-")[0] or not body.startswith(MARK):
            raise StoreCorrupt(f"the cold object {self._path(name)} in {self.place.url} is not what was written", advice=advice)
        sealed, rest = body[len(MARK) : len(MARK) + 1], body[len(MARK) + 1 :]
        if sealed != SEALED:
            return rest
        cipher = self._cipher()
        if cipher is None:
            raise StoreCorrupt(
                f"the cold object {self._path(name)} is encrypted", advice="`kilburn cold set` names the key's file"
            )
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(cipher.decrypt(rest[:NONCE], rest[NONCE:], digest))
        except InvalidTag as error:
            raise StoreCorrupt(f"the cold object {self._path(name)} does not fit its text", advice=advice) from error

    def delete(self, name: str) -> None:
        """Delete an object; a missing one counts as deleted.

        Raises:
            StoreError: it may still exist.
        """
        try:
            with self._translated("deleting", of_one=True):
                self._objects.delete(self._path(name))
        except FileNotFoundError:
            pass

    def names(self) -> Iterator[str]:
        """Yield the names of all objects of the tenant, and the paths of foreign files in its folder.

        Raises:
            StoreError.
        """
        with self._translated("listing"):
            for path in self._objects.paths(self.place.folder):
                name = path.rpartition("/")[2]
                yield name if path == self._path(name) else path.removeprefix(f"{self.place.folder}/")
