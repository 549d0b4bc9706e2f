"""The hub: single files of model repositories, over plain HTTP.

`hf:OWNER/REPO/FILE` is a GET of `<endpoint>/OWNER/REPO/resolve/main/FILE`, where the endpoint is `$HF_ENDPOINT` or
https://huggingface.co. The digest that the hub states for a large file (`X-Linked-Etag`, a sha256) identifies the
file when a download continues, and verifies the result. Nothing else of the hub is supported: no listing, no keys, no
branches but main.
"""

from __future__ import annotations

import os
import re
import time
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from kilburn.errors import ModelError, RateLimited, Refused, SpecError, Unavailable
from kilburn.models.download import Download, Progress, disk_errors, open_own

__all__ = ["HubFile", "fetch", "parse"]

_CHUNK = 1 << 18
_TIMEOUT = 30.0
_FRUITLESS = 3
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

    Continues where an earlier download stopped. After a broken connection it tries again, until three tries in a row
    bring nothing. Raises `Refused` for a 4xx, `RateLimited` for a 429, and `Unavailable` for a server or a network
    that fails.
    """
    fruitless = 0
    while True:
        before = _reached(download)
        try:
            # The last byte is requested again, so that the range is not empty if the file is complete.
            return _try(download, file.url, max(0, before - 1), name, progress)
        except _Broken as error:
            fruitless = 0 if _reached(download) > before else fruitless + 1
            if fruitless == _FRUITLESS:
                raise Unavailable(
                    f"{file.url}: {error}",
                    advice="check the network and pull again: what has arrived stays; or use the path of a file you have",
                ) from error
            time.sleep(0.2 * 2**fruitless)


def _reached(download: Download) -> int:
    return download.partial.stat().st_size if download.journal() else 0


def _try(download: Download, url: str, start: int, name: str, progress: Progress | None) -> tuple[int, str]:
    hops = _Hops()
    request = Request(url, headers={"User-Agent": "kilburn", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = build_opener(hops).open(request, timeout=_TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code == 416 and start:
                download.discard()
            elif error.code < 500:
                raise _refused(error, url) from error
            raise _Broken(f"{error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _Broken(str(error) or type(error).__name__) from error
    with response:
        size, sha256 = hops.stated(response)
        if size is None and response.headers.get("Transfer-Encoding", "").lower() != "chunked":
            raise Unavailable(f"{url}: no length is stated, so a part looks like a whole", advice="use another server")
        line = f"{sha256} {size}"
        if start and not (_continues(response, start) and download.journal()[0] == line):
            # The file has changed, or the server does not support ranges: begin again.
            download.discard()
            if response.status == 206:
                raise _Broken("the file changed while it was downloaded")
            start = 0
        done = _receive(download, response, start, size, line if sha256 else "", name, progress)
    if size is not None and done != size:
        raise _Broken(f"the connection ended after {done:,} of {size:,} bytes")
    return done, sha256


def _receive(
    download: Download, response: HTTPResponse, start: int, size: int | None, line: str, name: str, progress: Progress | None
) -> int:
    download.room((size or 0) - start)
    with disk_errors(download.partial):
        file = os.fdopen(open_own(download.partial, os.O_RDWR | os.O_CREAT), "rb+")
    done = start
    with file:
        if line and not start:
            download.note(line)
        if not start:
            file.truncate(0)
        file.seek(start)
        while True:
            if progress is not None:
                progress(name, done, size or 0)
            try:
                chunk = response.read(_CHUNK)
            except (OSError, HTTPException) as error:
                raise _Broken(str(error) or type(error).__name__) from error
            if not chunk or (size is not None and done >= size):
                break
            with disk_errors(download.partial):
                file.write(chunk)
                file.flush()
            done += len(chunk)
    return done


def _continues(response: HTTPResponse, start: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _refused(error: HTTPError, url: str) -> ModelError:
    if error.code == 429:
        after = error.headers.get("Retry-After", "")
        return RateLimited(f"{url}: 429", advice="wait, then pull again", retry_after=float(after) if after.isdigit() else None)
    advice = "check owner, repository and file name; for a gated file, download it yourself and use its path"
    return Refused(f"{url}: {error.code} {error.reason}", advice=advice)


class _Broken(Exception):
    """The network or the server failed; another try may help."""


class _Hops(HTTPRedirectHandler):
    """Follows redirects, and remembers what the hub stated before it redirected to a content network."""

    def __init__(self) -> None:
        self._seen: list[HTTPMessage] = []

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in {"https", req.type}:
            raise Unavailable(f"{req.full_url} leads to {newurl[:200]!r}, which is not https", advice="use another server")
        self._seen.append(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def stated(self, response: HTTPResponse) -> tuple[int | None, str]:
        """Size in bytes of the whole file, None if unknown; and its sha256, "" if unknown."""
        linked = {key: value for headers in (*self._seen, response.headers) for key, value in headers.items()}
        linked = {key.lower(): value.strip() for key, value in linked.items()}
        tag = linked.get("x-linked-etag", "").removeprefix("W/").strip('"')
        whole = response.headers.get("Content-Range", "").rpartition("/")[2] if response.status == 206 else ""
        for size in (linked.get("x-linked-size", ""), whole, response.headers.get("Content-Length", "")):
            if size.isdigit():
                return int(size), tag if _SHA256.fullmatch(tag) else ""
        return None, tag if _SHA256.fullmatch(tag) else ""
