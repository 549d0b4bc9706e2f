"""The format of spilled keys and values: tensors, their description, and a checksum of every byte.

A file has eight bytes with its type and version, the tensors one after the other, a header in JSON, and the header's
length. The header has the SHA-256 of each tensor, and the file is named after the SHA-256 of the header. So a file
that was truncated, changed or renamed is a `Miss`. It is written under a temporary name, and renamed when all of it
is on the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import msgspec

from kilburn.errors import SpillFailed
from kilburn.file import sync_folder
from kilburn_kv.lineage import Alteration, Eviction
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.tensors import Tensor, torch

__all__ = ["Miss"]

MAGIC = b"kilbnKV\x01"
"""Its last byte is the version; a file with another version is a miss."""

SUFFIX = ".kv"
DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
}


class Why(StrEnum):
    """Why nothing could be restored."""

    ABSENT = "absent"
    """There is no such file."""
    FOREIGN = "foreign"
    """Another model, dtype, tenant or kind of machine wrote it."""
    VERSION = "version"
    """It has another version of this format."""
    CORRUPT = "corrupt"
    """Its bytes are not those that were written."""
    UNREADABLE = "unreadable"
    """The system did not let it be read."""


class Miss(msgspec.Struct, frozen=True):
    """Nothing could be restored, and nothing was changed.

    Args:
        why: the kind of miss.
        what: the same in words.
    """

    why: Why
    what: str


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a file: its name, its dtype as torch names it, its shape and the SHA-256 of its bytes, hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What every file says.

    Args:
        key: whose keys and values they are.
        order: of the bytes of a number, "little" or "big".
        tokens: of the whole sequence by logical position, or of the page.
        sections: the tensors, in order.
        shifts: those of `Sequence.shifts` that are of its positions.
        first: of each of these whose first key is there too, the shift that it had; the keys are a tensor, in this order.
        owners: as `CachedSequence.owners`.
        stood: as `Table.stood`: the pages that may have been visible when this was computed.
    """

    key: PrefixKey
    tokens: list[int]
    owners: list[str]
    shifts: dict[int, int]
    first: dict[int, int]
    stood: dict[int, int]
    order: str = sys.byteorder
    sections: list[TensorEntry] = []


class SequenceHeader(_Header, frozen=True, kw_only=True, tag="sequence"):
    """A sequence.

    Args:
        cached: the runs (half-open) of logical positions that are cached.
        evictions: as `Table.evictions`.
        pages: page -> range.
        altered: as `Table.altered`.
        shared: whether it may share prefixes.
        watch: whether attention was summed, and how many recent queries were observed; None for no observation.
    """

    cached: list[tuple[int, int]]
    evictions: list[Eviction]
    pages: dict[int, tuple[int, int]]
    altered: dict[Alteration, int]
    shared: bool
    watch: tuple[bool, int] | None = None


class PageHeader(_Header, frozen=True, kw_only=True, tag="page"):
    """A page of a sequence.

    Args:
        page: its id.
        start: its first logical position.
        context: SHA-256, hex, of what determines its keys and values: the tokens up to its end, and the evictions
            before it was complete; empty if more was done to the sequence.
    """

    page: int
    start: int
    context: str


Header = SequenceHeader | PageHeader
"""What a file says of itself."""

Contents = tuple[Header, Mapping[str, Tensor]]
"""A file's header and tensors."""


@dataclass(frozen=True)
class Draft:
    """A tensor to write, in pieces: what its shape is as a whole, and the pieces in order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor] = field(repr=False)

    def section(self, digest: str) -> TensorEntry:
        """Its entry in the header."""
        return TensorEntry(self.name, str(self.dtype).removeprefix("torch."), self.shape, digest)


def size_of(header: Header, drafts: Iterable[Draft]) -> int:
    """Bytes that the file will have."""
    sections = [draft.section("0" * 64) for draft in drafts]
    text = msgspec.json.encode(msgspec.structs.replace(header, sections=sections))
    return len(MAGIC) + sum(section.bytes for section in sections) + len(text) + 8


def write(folder: Path, header: Header, drafts: Iterable[Draft]) -> tuple[str, int]:
    """Write a file; returns its address (the SHA-256 of its header) and its bytes.

    It is on the disk when this returns: the file and its name are synced.

    Raises:
        SpillFailed: the system could not; nothing of it is left.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
    except OSError as error:
        raise _failure(folder, error) from error
    part = Path(name)
    try:
        with open(descriptor, "wb") as file:
            # This lock shows others, when they remove abandoned files, that this one is still being written.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            address = _write_tensors(file, header, drafts)
            file.flush()
            os.fsync(descriptor)
            size = file.tell()
        part.replace(folder / (address + SUFFIX))
        sync_folder(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _failure(folder, error) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return address, size


def _write_tensors(file: BinaryIO, header: Header, drafts: Iterable[Draft]) -> str:
    file.write(MAGIC)
    sections = []
    for draft in drafts:
        digest = hashlib.sha256()
        for piece in draft.pieces:
            raw = _bytes_of(piece.detach().to("cpu").contiguous())
            digest.update(raw)
            file.write(raw)
        sections.append(draft.section(digest.hexdigest()))
    text = msgspec.json.encode(msgspec.structs.replace(header, sections=sections))
    file.write(text)
    file.write(len(text).to_bytes(8, "little"))
    return hashlib.sha256(text).hexdigest()


def read(folder: Path, address: str, key: PrefixKey) -> Contents | Miss:
    """A file's header and tensors, every byte checked; on the CPU, in memory of their own."""
    if len(address) != 64 or not address.isalnum():
        return Miss(Why.ABSENT, f"{address!r} is no address")
    path = folder / (address + SUFFIX)
    try:
        with path.open("rb") as file:
            return _read_tensors(file, address, key)
    except FileNotFoundError:
        return Miss(Why.ABSENT, f"there is no {path}")
    except OSError as error:
        return Miss(Why.UNREADABLE, f"{path}: {error}")


def header_of(path: Path) -> Header | Miss:
    """The header of a file, without its tensors: whose it is, and what it was made from."""
    try:
        with path.open("rb") as file:
            found = _read_header(file, path.name.removesuffix(SUFFIX))
    except FileNotFoundError:
        return Miss(Why.ABSENT, f"there is no {path}")
    except OSError as error:
        return Miss(Why.UNREADABLE, f"{path}: {error}")
    return found if isinstance(found, Miss) else found[0]


def _read_header(file: BinaryIO, address: str) -> tuple[Header, int] | Miss:
    """The header, and the bytes before it that are tensors."""
    size = os.fstat(file.fileno()).st_size
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if magic[:-1] == MAGIC[:-1] and len(magic) == len(MAGIC):
            return Miss(Why.VERSION, f"{address} is of version {magic[-1]}, this reads version {MAGIC[-1]}")
        return Miss(Why.CORRUPT, f"{address} does not begin as such a file does")
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(8), "little")
    room = size - len(MAGIC) - 8 - length
    if room < 0:
        return Miss(Why.CORRUPT, f"{address} was cut, or changed at its end")
    file.seek(len(MAGIC) + room)
    text = file.read(length)
    if hashlib.sha256(text).hexdigest() != address:
        return Miss(Why.CORRUPT, f"{address} was cut, or its header changed")
    try:
        return msgspec.json.decode(text, type=Header), room
    except msgspec.DecodeError as error:
        return Miss(Why.CORRUPT, f"{address} has a header that is none: {error}")


def _read_tensors(file: BinaryIO, address: str, key: PrefixKey) -> Contents | Miss:
    told = _read_header(file, address)
    if isinstance(told, Miss):
        return told
    header, room = told
    if header.key != key or header.order != sys.byteorder:
        # Neither says whose it is: another tenant is not to learn that.
        return Miss(Why.FOREIGN, f"{address} is not of this model, dtype and tenant")
    sections = header.sections
    if any(each.dtype not in DTYPES or min(each.shape, default=0) < 0 for each in sections) or room != sum(
        each.bytes for each in sections
    ):
        return Miss(Why.CORRUPT, f"{address} has tensors of another size than it says")
    file.seek(len(MAGIC))
    found: dict[str, Tensor] = {}
    for each in sections:
        tensor = found[each.name] = torch.empty(each.shape, dtype=DTYPES[each.dtype])
        raw = _bytes_of(tensor)
        if file.readinto(raw) != len(raw) or hashlib.sha256(raw).hexdigest() != each.digest:  # type: ignore[attr-defined]
            return Miss(Why.CORRUPT, f"{each.name} of {address} changed since it was written")
    return header, found


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of writers that have ended."""
    for path in folder.glob(".*.part"):
        # It is gone: its writer has finished.
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    found: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return found


def _failure(folder: Path, error: OSError) -> SpillFailed:
    return SpillFailed(
        f"the system could not write to {folder}: {error}", advice="make room on the disk, or spill to another folder"
    )
