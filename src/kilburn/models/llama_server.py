"""llama.cpp in this process: loads a GGUF file and sends requests to it.

The runtime is xllamacpp. It runs llama.cpp's own server on a loopback port that the system chooses; a random key that
only this object knows keeps other users of the machine out. Requests use this port and not the callback API, for one
reason: closing the connection cancels a reply within about a second, even while the prompt is being read, while the
callback can only stop it at a token. Messages and replies are the business of `kilburn.models.local`.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import tempfile
import threading
import time
import urllib.parse
import weakref
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kilburn.errors import KilburnError, MissingExtra, Unavailable
from kilburn.models.provider_errors import provider_error
from kilburn.native import inside, keep
from kilburn.native import load as load_library

__all__ = ["load"]

_PROMPT_CACHE_MIB = 512
"""Memory for prompts of other conversations, so that returning to one need not prefill it again."""

_SPINS = "2000"
"""How many turns a thread of llama.cpp spins at a barrier before it sleeps."""

_loaded: weakref.WeakValueDictionary[tuple[Path, int, int], LlamaServer] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def load(path: Path, context: int, threads: int) -> LlamaServer:
    """Return the loaded model at `path`; one that is loaded already, with the same window and threads, is shared.

    Raises:
        MissingExtra: xllamacpp is not installed.
        Unavailable: no such file, or llama.cpp cannot load it.
    """
    key = (path.resolve(), context, threads)
    with _loading:
        server = _loaded.get(key)
        if server is None:
            server = _loaded[key] = LlamaServer(*key)
        return server


class LlamaServer:
    """One loaded model. It is freed when there is no reference to it any more.

    Attributes:
        context: tokens of its window: the requested number, or what it was trained for if that is less.
        parameters: number of the model's parameters.
        template: its chat template, in Jinja.
    """

    def __init__(self, path: Path, context: int, threads: int) -> None:
        if not path.is_file():
            raise Unavailable(f"no model file at {path}", advice="kilburn models pull smollm2, or give the path of a GGUF file")
        runtime = _load_runtime()
        self._who = path.stem
        self._key = secrets.token_urlsafe(24)
        self._slots = tempfile.TemporaryDirectory(prefix="kilburn-slots-")
        weakref.finalize(self, self._slots.cleanup)
        settings = _settings(runtime.CommonParams(), path, context, threads)
        settings.api_keys = [self._key]
        settings.slot_save_path = self._slots.name + os.sep
        try:
            with inside():
                self._server: Any = runtime.Server(settings)
        except (RuntimeError, ValueError, OSError) as error:
            raise Unavailable(
                f"llama.cpp cannot load {path}: {error}", advice="is it a whole GGUF file? kilburn models pull fetches it anew"
            ) from error
        self._wires: set[socket.socket] = set()
        # Its threads compute; while a reply is decoded, the end of the program would be a crash.
        keep(self, LlamaServer._end)
        address = urllib.parse.urlsplit(self._server.listening_address)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 0
        about = self.ask("GET", "/props")
        self.context: int = about["default_generation_settings"]["n_ctx"]
        self.template: str = about["chat_template"]
        self.parameters: int = self.ask("GET", "/v1/models")["data"][0]["meta"]["n_params"]

    def _end(self) -> None:
        """End llama.cpp's threads, whatever they are at; who waits for a reply gets an error."""
        # First: a server that still streams may wait half a minute for the reader.
        for wire in list(self._wires):
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
        self._server = None

    @property
    def slots(self) -> Path:
        """The folder that slots are saved to and restored from."""
        return Path(self._slots.name)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the decoded response of one endpoint of llama.cpp's server.

        Raises:
            Refused, Overlong, Unavailable: it did not respond, or responded with an error.
        """
        connection = self._connection(timeout)
        try:
            response = self._send(connection, method, path, body)
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise self._lost_error(error) from error
        finally:
            connection.close()

    def stream(self, body: dict[str, Any], timeout: float | None) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a streamed chat completion; closing the generator ends it in llama.cpp too.

        Raises:
            Refused, Overlong, Unavailable: as `ask`, or the time was up.
        """
        end = None if timeout is None else time.monotonic() + timeout
        connection = self._connection(timeout)
        wire: socket.socket | None = None
        try:
            connection.connect()
            wire = connection.sock
            self._wires.add(wire)
            response = self._send(connection, "POST", "/v1/chat/completions", body)
            while True:
                if end is not None:
                    wire.settimeout(max(end - time.monotonic(), 0.001))
                line = response.readline().strip()
                if end is not None and time.monotonic() > end:
                    raise TimeoutError("the time was up")
                if line == b"data: [DONE]":
                    return
                if line.startswith((b"data: ", b"error: ")):
                    chunk = json.loads(line.split(b" ", 1)[1])
                    if line.startswith(b"error") or "error" in chunk:
                        raise provider_error(self._who, None, chunk, line.decode("utf-8", "replace"))
                    yield chunk
                elif not line and response.isclosed():
                    return
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise self._lost_error(error) from error
        finally:
            if wire is not None:
                # Shut down, not closed: the response still holds the socket, and llama.cpp must see the end.
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
                self._wires.discard(wire)
            connection.close()

    def _connection(self, timeout: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            content = response.read()
            raise provider_error(self._who, response.status, _decode(content), content.decode("utf-8", "replace"))
        return response

    def _lost_error(self, error: Exception) -> KilburnError:
        if isinstance(error, TimeoutError):
            return Unavailable(f"{self._who}: no whole reply in time", advice="give it more time, or a shorter prompt")
        return Unavailable(f"{self._who}: llama.cpp did not answer: {error}", advice="load the model again")


def _load_runtime() -> Any:
    """xllamacpp, imported so that its threads sleep while they wait for each other.

    By default libgomp spins some milliseconds at each of the many barriers of a token. On two cores
    beside one busy process that took decoding from 115 to 2 tokens/s; with short spins it stayed at
    11, and on an idle machine nothing is lost. libgomp reads the variable once, when it is loaded.
    """
    patient = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if patient:
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        return load_library("xllamacpp")
    except ModuleNotFoundError as error:
        raise MissingExtra("xllamacpp", "local") from error
    finally:
        if patient:
            del os.environ["GOMP_SPINCOUNT"]


def _settings(settings: Any, path: Path, context: int, threads: int) -> Any:
    settings.model.path = str(path)
    settings.n_ctx = context
    settings.n_parallel = 1
    # A small batch, because llama.cpp notices only between batches that a request was cancelled.
    settings.n_batch = 512
    settings.cache_ram_mib = _PROMPT_CACHE_MIB
    settings.fit_params = False
    settings.warmup = False
    settings.ui = False
    settings.verbosity = -1
    for cpu in (settings.cpuparams, settings.cpuparams_batch):
        cpu.n_threads = threads
        # Waiting threads sleep: spinning ones starve each other on a machine that does other work too.
        cpu.poll = 0
    return settings


def _decode(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None
