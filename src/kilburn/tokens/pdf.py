"""The text of a PDF, read by another process within limits of its own: whoever sent the file may have made it to take long.

The other process runs this file as a script. It imports nothing of Kilburn.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading

log = logging.getLogger("kilburn")

MAX_BYTES = 50_000_000
"""Bytes of a file that is read at all: OpenAI's limit; Anthropic's is 32 MB."""
MAX_PAGES = 100
"""Pages that are read at most; a note says how many are left."""
MAX_CHARS = 400_000
MAX_STREAM_BYTES = 8_000_000
"""Bytes that one stream of the file may have when it is decoded."""
CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
WALL_SECONDS = 60
"""Seconds on a machine that does not limit processor time, or is busy."""

MAX_PROCESSES = 2
"""Files that are read at the same time."""
_slots = threading.BoundedSemaphore(MAX_PROCESSES)

PASSED_ON = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Of the environment, what Python may need to start. Keys and other secrets are not passed on."""


def pdf_text(data: bytes) -> str:
    """Return the text of a PDF, page by page under its number, as far as it can be read within the limits; "" if it has none."""
    import subprocess

    if len(data) > MAX_BYTES:
        log.info("the text of a PDF of %d bytes is not read: the limit is %d", len(data), MAX_BYTES)
        return ""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        with _slots:
            result = subprocess.run(
                [sys.executable, "-P", __file__],
                input=data,
                capture_output=True,
                env=environment,
                timeout=WALL_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("the text of a PDF of %d bytes was not read: %s", len(data), type(error).__name__)
        return ""
    if result.returncode:
        log.info("the text of a PDF of %d bytes was not read to its end: exit status %d", len(data), result.returncode)
    return result.stdout.decode("utf-8", "replace")


def _limit() -> None:
    try:
        import resource
    except ImportError:
        return  # Windows: the time that the other process waits is the limit.
    for kind, bound in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
        hard = resource.getrlimit(kind)[1]
        limit = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (limit, limit))


def _main() -> None:
    _limit()
    import pypdf

    logging.disable()
    with pypdf.apply_configuration(
        zlib_maximum_output_length=MAX_STREAM_BYTES,
        lzw_maximum_output_length=MAX_STREAM_BYTES,
        run_length_maximum_output_length=MAX_STREAM_BYTES,
    ):
        pages = pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read()), strict=False).pages
        total, size = len(pages), 0
        out = sys.stdout.buffer
        for number in range(min(total, MAX_PAGES)):
            text = pages[number].extract_text().strip()[: MAX_CHARS - size]
            size += len(text)
            if text:
                out.write(f"[page {number + 1}]\n{text}\n".encode("utf-8", "replace"))
                out.flush()
            if size >= MAX_CHARS or (number + 1 == MAX_PAGES < total):
                out.write(f"[the rest of {total:,} pages is left out]\n".encode())
                break


if __name__ == "__main__":
    _main()
