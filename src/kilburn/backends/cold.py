"""A cold place: a folder or an object store that keeps texts of one tenant which nobody has read for long.

An object holds one text as its row held it, compressed, and encrypted if the tenant has a key. Its name begins with the SHA-256
of the object, so whoever sees the place alone can prove that it is whole; the rest of the name is chance, so that no object is
ever written twice, and what is deleted is never what somebody just wrote. The store says which text is in which object.
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
"""How an object begins; then whether it is encrypted, and if so its nonce."""


class ColdSite(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tenant's cold texts are.

    Args:
        url: `file:///...`, `s3://bucket/...`, and whatever else `obstore` opens; a folder by its path.
        folder: the tenant's own, below: two stores may share a place.
        key: the file with the key; "" where nothing is encrypted. proof: says whether it is the same key.
        versions: whether it is known that the place keeps versions of what is deleted there.
    """

    url: str
    folder: str
    key: str = ""
    proof: str = ""
    versions: bool = False


def place_of(setting: str | None) -> ColdSite | None:
    """The place that a setting names; None where there is none.

    Raises:
        StoreCorrupt: it cannot be read.
    """
    if setting is None:
        return None
    try:
        return msgspec.json.decode(setting, type=ColdSite)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"the setting {SETTING!r} cannot be read: {error}", advice="`kilburn cold set` it again") from error


def new_place(url: str, key: str = "", *, versions: bool = False) -> ColdSite:
    """A new place, made if it is a folder, and tried out. A file for the key that is not there is made.

    Args:
        versions: whether the place may keep versions of what is deleted there.

    Raises:
        SpecError: no place of this kind, no key, or a place that keeps versions. StoreError: nothing can be written there.
        MissingExtra.
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
            f"{url} keeps versions: what is deleted there stays as an older one",
            advice="switch that off, or let older versions expire by a rule of the bucket and say --versions",
        )
    tried = place.put(b"tried out", digest=b"")
    if place.get(tried, digest=b"") != b"tried out":
        raise StoreError(f"{url} does not give back what was written there", advice="give another place")
    place.delete(tried)
    return site


def _proof(key: bytes) -> str:
    return hashlib.sha256(b"kilburn cold" + key).hexdigest()[:16]


def _key_in(path: str, *, make: bool = False) -> bytes:
    """The key in a file.

    Raises:
        SpecError: there is none.
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


RETRIES, LONG = 4, 15
"""How often an object store is asked again that does not answer, or is too busy, and the seconds after which it is not."""


class _Folder:
    """Objects as the files of a folder."""

    errors = OSError

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, folder: str) -> None:
        # Nobody but its owner may read there, whatever the umask is.
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
        # A writer that was killed leaves a part.
        whole.with_name(f"{whole.name}#").unlink(missing_ok=True)
        whole.unlink()

    def paths(self, folder: str) -> Iterator[str]:
        for parent, _, names in os.walk(self._root / folder, onerror=_raised):
            for name in names:
                yield (Path(parent) / name).relative_to(self._root).as_posix()


def _raised(error: OSError) -> None:
    raise error


class _Bucket:
    """Objects in an object store. The library's threads are those of the process that used it first: a child of a fork has none
    of them, and cannot use it.

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

        retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=LONG)}
        self._store: Any = from_url(self._url, retry_config=retry, client_options={"timeout": timedelta(seconds=LONG)})

    @property
    def _objects(self) -> Any:
        """The open store.

        Raises:
            OSError: it would wait for ever.
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
        MissingExtra: obstore is not installed, and it is no folder. StoreError: no such kind of place, or it cannot be opened.
    """

    def __init__(self, place: ColdSite) -> None:
        self.place = place
        self._known: Any = None
        self._objects: _Folder | _Bucket
        if place.url.startswith("file://"):
            self._objects = _Folder(Path(unquote(place.url.removeprefix("file://"))))
        else:
            self._objects = _Bucket(place.url)
        with self._told("opening it"):
            self._objects.open(place.folder)

    def _cipher(self) -> Any:
        """What encrypts; None where nothing is encrypted. To delete an object nobody needs the key.

        Raises:
            SpecError: the file has another key, or none. MissingExtra.
        """
        if self.place.key and self._known is None:
            key = _key_in(self.place.key)
            if _proof(key) != self.place.proof:
                raise SpecError(f"{self.place.key} has another key than that of the cold texts", advice="put the right one back")
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ModuleNotFoundError as error:
                raise MissingExtra("cryptography", "cold") from error
            self._known = AESGCM(key)
        return self._known

    @contextmanager
    def _told(self, doing: str, *, of_one: bool = False) -> Iterator[None]:
        """Errors of the place as errors of the store.

        Args:
            of_one: whether it may be that an object is not there; else the place itself is not.

        Raises:
            StoreError: it cannot be reached, or it refuses. FileNotFoundError: there is no such object.
        """
        try:
            yield
        except (self._objects.errors, OSError, ValueError) as error:
            if of_one and isinstance(error, FileNotFoundError):
                raise
            why = str(error).partition("\n")[0]
            message = f"the cold place {self.place.url}: {doing}: {why}"
            raise StoreError(message, advice="check that it is there and may be read and written, then try again") from error

    def _path(self, name: str) -> str:
        # What somebody else put there has a path, and no name of ours.
        return f"{self.place.folder}/{name if '/' in name else f'{name[:2]}/{name}'}"

    def put(self, data: bytes, digest: bytes) -> str:
        """Write an object, durably; returns its name.

        Args:
            digest: of the text: an object cannot stand for another one.
        """
        name, body = self.made(data, digest)
        self.write(name, body)
        return name

    def made(self, data: bytes, digest: bytes) -> tuple[str, bytes]:
        """A new object's name and bytes."""
        body = MARK + b"\x00" + data
        cipher = self._cipher()
        if cipher is not None:
            nonce = secrets.token_bytes(NONCE)
            body = MARK + SEALED + nonce + cipher.encrypt(nonce, data, digest)
        return f"{hashlib.sha256(body).hexdigest()}-{secrets.token_hex(8)}", body

    def keeps_versions(self) -> bool:
        """Whether the place keeps an object that is deleted, as an older version, as far as it says so: a bucket of S3 does.

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
        """Write an object, durably; returns the version that it has in the place, if the place says so.

        Raises:
            StoreError.
        """
        with self._told("writing"):
            return self._objects.put(self._path(name), body)

    def get(self, name: str, digest: bytes) -> bytes:
        """What an object holds: one read.

        Raises:
            StoreCorrupt: it is missing, or not what was written. StoreError: the place cannot be reached.
        """
        advice = "put the object back from a backup of the cold place; `kilburn cold scrub` lists all that are wrong"
        try:
            with self._told("reading", of_one=True):
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
        """Delete an object; one that is not there is deleted.

        Raises:
            StoreError: it may still be there.
        """
        try:
            with self._told("deleting", of_one=True):
                self._objects.delete(self._path(name))
        except FileNotFoundError:
            pass

    def names(self) -> Iterator[str]:
        """The names of all objects of the tenant; of one that lies where none of ours does, its path.

        Raises:
            StoreError.
        """
        with self._told("listing"):
            for path in self._objects.paths(self.place.folder):
                name = path.rpartition("/")[2]
                yield name if path == self._path(name) else path.removeprefix(f"{self.place.folder}/")
