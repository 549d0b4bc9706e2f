"""Saved keys and values in a folder: the engine's own bytes, and a record of what they are.

Both files are named after the model, the tenant and the tokens. A state that is damaged, or of another version, model
or tenant, is a miss, not an error: it can be computed again. It is never passed to the engine. The record is written
last, and a file has its name only when it is complete. Files are not synced to the disk, so they may be damaged after
a power cut; the checksum detects this.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kilburn.errors import SpillFailed
from kilburn_kv.prefixes import PrefixKey

_VERSION = 1
_STATE, _RECORD = ".kv", ".json"


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved state is.

    Args:
        form: the program that wrote the bytes, and its version: another one may have another format.
        key: whose they are.
        name: the name of both files.
        tokens: the tokens whose keys and values they are.
        bytes: size of the state.
        sha256: of the state, hex.
        about: further data for the engine, as JSON.
        version: of this record.
    """

    form: str
    key: PrefixKey
    name: str
    tokens: tuple[int, ...]
    bytes: int
    sha256: str
    about: msgspec.Raw = msgspec.Raw(b"null")
    version: int = _VERSION


@dataclass(frozen=True)
class SavedState:
    """A state that is on disk.

    Args:
        name: for `restore`.
        tokens: how many it has.
        bytes: its size on disk, without the record.
    """

    name: str
    tokens: int
    bytes: int


class States:
    """The saved states of one model and one tenant.

    Args:
        folder: created if it is missing, readable by this user only. Several models and tenants may share it.
        key: whose states they are.
        form: the program that writes them, and its version.
    """

    def __init__(self, folder: Path, key: PrefixKey, form: str) -> None:
        self.folder, self.key, self.form = folder, key, form

    def name(self, tokens: Sequence[int], moves: Sequence[tuple[str, int, int, int, int]] = ()) -> str:
        """The name of the state of these tokens after these moves: the same in every process."""
        told = msgspec.json.encode(("kilburn.kv.llama", _VERSION, self.form, self.key, list(tokens), list(moves)))
        return hashlib.sha256(told).hexdigest()[:40]

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path to write a state to, for `commit`. If `commit` was not called, the file is removed.

        Raises:
            SpillFailed: it could not be written; the name is as before.
        """
        place = self.folder / f".{name}.{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield place
        except OSError as error:
            raise SpillFailed(
                f"cannot write to {self.folder}: {error.strerror or error}", advice="free some space there, or save elsewhere"
            ) from error
        finally:
            for left in (place, place.with_name(place.name + _RECORD)):
                # Usually the file is gone already, or the folder was never created.
                with suppress(OSError):
                    left.unlink()

    def commit(self, place: Path, name: str, tokens: Sequence[int], about: object = None) -> SavedState:
        """Rename what was written to its name."""
        os.chmod(place, 0o600)
        with place.open("rb") as file:
            size, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        record = StateRecord(
            form=self.form,
            key=self.key,
            name=name,
            tokens=tuple(tokens),
            bytes=size,
            sha256=sha256,
            about=msgspec.Raw(msgspec.json.encode(about)),
        )
        beside = place.with_name(place.name + _RECORD)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(place, self.folder / (name + _STATE))
        os.replace(beside, self.folder / (name + _RECORD))
        return SavedState(name, len(tokens), size)

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple[StateRecord, int] | None]:
        """The record of a state, and its open file, whose bytes have been checked; None for a miss."""
        record = self._record(name)
        if record is None:
            yield None
            return
        try:
            state = (self.folder / (name + _STATE)).open("rb")
        except OSError:
            yield None
            return
        with state:
            yield (record, state.fileno()) if _is_whole(state.fileno(), record) else None

    def forget(self, name: str) -> None:
        """Remove a saved state, if it is there and of this model and tenant."""
        if self._record(name) is not None:
            for end in (_RECORD, _STATE):
                (self.folder / (name + end)).unlink(missing_ok=True)

    def _record(self, name: str) -> StateRecord | None:
        # A name is hexadecimal, so it cannot lead out of the folder.
        if not name.isalnum():
            return None
        try:
            record = msgspec.json.decode((self.folder / (name + _RECORD)).read_bytes(), type=StateRecord)
        except (OSError, msgspec.DecodeError):
            return None
        ours = (_VERSION, self.form, self.key, name)
        return record if (record.version, record.form, record.key, record.name) == ours else None


def _is_whole(state: int, record: StateRecord) -> bool:
    digest = hashlib.sha256()
    try:
        if os.fstat(state).st_size != record.bytes:
            return False
        offset = 0
        while piece := os.pread(state, 1 << 20, offset):
            digest.update(piece)
            offset += len(piece)
    except OSError:
        return False
    return digest.hexdigest() == record.sha256
