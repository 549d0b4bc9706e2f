"""The hub: single files of model repositories, through `huggingface_hub`.

`hf:OWNER/REPO/FILE` is a file of branch main at `$HF_ENDPOINT` or https://huggingface.co. The sha256 that the hub states
for a large file identifies the file when a download continues, and verifies the result. The library speaks to the hub. It
tries again after a broken connection, not after a status of 500. Where the bytes go and whether they are right is decided
here: the library's own cache keeps no part of a download that failed, and compares only sizes. Nothing else of the hub is
supported: no listing, no keys, no branches but main.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import msgspec

from kilburn.errors import MissingExtra, ModelError, RateLimited, Refused, SpecError, Unavailable
from kilburn.models.download import Download, Progress, disk_errors, open_own

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a repository; `path` may have folders."""

    owner: str
    repo: str
    path: str

    @property
    def url(self) -> str:
        """Where it is; raises `SpecError` if `$HF_ENDPOINT` is no http(s) address."""
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        if urlsplit(endpoint).scheme not in {"http", "https"}:
            raise SpecError(f"HF_ENDPOINT is {endpoint!r}", advice="give an https:// address, or unset it")
        return f"{endpoint.rstrip('/')}/{self.owner}/{self.repo}/resolve/main/{quote(self.path)}"


def parse(spec: str) -> HubFile:
    """Read `hf:OWNER/REPO/FILE`. Raises `SpecError` for anything else, `..` and hidden names included."""
    segments = spec.removeprefix("hf:").split("/")
    if not spec.startswith("hf:") or len(segments) < 3 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise SpecError(f"{spec!r} names no file of the hub", advice="write hf:OWNER/REPO/FILE.gguf")
    return HubFile(owner=segments[0], repo=segments[1], path="/".join(segments[2:]))


def fetch(download: Download, file: HubFile, name: str, progress: Progress | None) -> tuple[int, str]:
    """Fill the partial file; returns its size in bytes and its sha256, "" if the hub stated none.

    Continues where an earlier download stopped, in steps of the 10 MiB that the library writes at once: what a broken
    connection brought of the next step is fetched again. It tries again until five tries in a row bring no step.

    Raises:
        Refused: for a 4xx. RateLimited: for a 429. Unavailable: a server, a network or a disk fails. MissingExtra.
    """
    url = file.url
    hub, network_error = _load_library()
    try:
        stated = hub.get_hf_file_metadata(url, token=False, library_name="kilburn")
        if stated.size is None:
            # A mirror that leads elsewhere without saying how long the file is.
            stated = hub.get_hf_file_metadata(stated.location, token=False, library_name="kilburn")
        if urlsplit(stated.location).scheme not in {"https", urlsplit(url).scheme}:
            raise Unavailable(f"{url} leads to {stated.location[:200]!r}, which is not https", advice="use another server")
        if stated.size is None:
            raise Unavailable(f"{url}: no length is stated, so a part looks like a whole", advice="use another server")
        sha256 = stated.etag if _SHA256.fullmatch(stated.etag or "") else ""
        line = f"{sha256} {stated.size}" if sha256 else ""
        if download.journal() != (line,):
            # Another file by now, or nothing that could be continued.
            download.discard()
        with disk_errors(download.partial):
            partial = os.fdopen(open_own(download.partial, os.O_RDWR | os.O_CREAT), "rb+")
        with partial:
            target = _Target(download, partial, stated.size, name, progress)
            if line and not target.start:
                download.vouch(line)
            download.room(stated.size - target.start)
            bar = hub.utils.silent_tqdm
            hub.file_download.http_get(
                stated.location, target, resume_size=target.start, expected_size=stated.size, tqdm_class=bar
            )
    except hub.errors.HfHubHTTPError as error:
        raise _error_of(error.response.status_code, error.response.headers, url) from error
    except (network_error, OSError, ValueError) as error:
        raise Unavailable(
            f"{url}: {error}",
            advice="check the network and pull again: what has arrived stays; or use the path of a file you have",
        ) from error
    return stated.size, sha256


def _load_library() -> tuple[Any, type[Exception]]:
    """huggingface_hub, and what its network raises."""
    # Read once, at import; without it the library would tell the hub what else is installed here.
    quiet = "HF_HUB_DISABLE_TELEMETRY" not in os.environ
    if quiet:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import_module("huggingface_hub.file_download")
        return import_module("huggingface_hub"), import_module("httpx2").HTTPError
    except ModuleNotFoundError as error:
        raise MissingExtra("huggingface_hub", "local") from error
    finally:
        if quiet:
            del os.environ["HF_HUB_DISABLE_TELEMETRY"]


class _Target:
    """The partial file, as the library writes to it: behind what is there, and never more than was stated.

    Attributes:
        start: bytes that were there.
    """

    def __init__(self, download: Download, file: BinaryIO, size: int, name: str, progress: Progress | None) -> None:
        self._path, self._file, self._size = download.partial, file, size
        self._name, self._progress = name, progress
        self.start = file.seek(0, os.SEEK_END)
        self._tell_progress()

    def write(self, chunk: bytes) -> None:
        with disk_errors(self._path):
            self._file.write(chunk[: max(0, self._size - self._file.tell())])
            self._file.flush()
        self._tell_progress()

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, place: int) -> None:
        self._file.seek(place)

    def truncate(self) -> None:
        with disk_errors(self._path):
            self._file.truncate()

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress(self._name, self._file.tell(), self._size)


def _error_of(status: int, headers: Mapping[str, str], url: str) -> ModelError:
    if status == 429:
        after = headers.get("Retry-After", "")
        return RateLimited(f"{url}: 429", advice="wait, then pull again", retry_after=float(after) if after.isdigit() else None)
    if status >= 500:
        return Unavailable(f"{url}: {status}", advice="pull again later: what has arrived stays")
    advice = "check owner, repository and file name; for a gated file, download it yourself and use its path"
    return Refused(f"{url}: {status}", advice=advice)
