"""Slots of llama.cpp's own server: saves a prompt's keys and values to disk, and restores them without computing.

llama.cpp ends the whole session when it gets a truncated slot file, and accepts changed bytes silently. So every file
has a checksum beside it here, and only an unchanged file is restored.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from kilburn.errors import InvalidRange, KVError, MissingExtra, Refused, SpillFailed, Unavailable
from kilburn_kv.llama.states import SavedState, States
from kilburn_kv.prefixes import PrefixKey

__all__ = ["Slots"]

_HEADER = 256
"""Bytes before the tokens in a slot file, at most."""


class Server(Protocol):
    """llama.cpp's server in this process, as `kilburn.models.llama_server.load` gives it."""

    context: int

    @property
    def slots(self) -> Path:
        """The folder whose files it saves and restores."""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The decoded response of one endpoint."""


@dataclass(frozen=True)
class Prefilled:
    """How a prompt was prefilled.

    Args:
        computed: tokens that were computed; always at least the last one.
        cached: tokens whose keys and values were cached.
        seconds: how long it took.
    """

    computed: int
    cached: int
    seconds: float


class Slots:
    """The slot of a server, and its saved states.

    Args:
        server: the server of the slot; chats through the same server use the same slot.
        model: identifies the weights, as a digest of their file.
        folder: for saved states; created if it is missing.
        tenant: whose states these are; another tenant's are a miss.

    Raises:
        MissingExtra: xllamacpp is not installed.
    """

    def __init__(self, server: Server, model: str, folder: str | Path, *, tenant: str = "") -> None:
        try:
            form = f"xllamacpp {version('xllamacpp')}"
        except PackageNotFoundError as error:
            raise MissingExtra("xllamacpp", "local") from error
        self._server = server
        self.states = States(Path(folder), PrefixKey(model, "f16", tenant), form)

    def tokenize(self, text: str) -> list[int]:
        """The model's tokens of a text, as in a prompt: text that looks like a control token becomes one.

        Raises:
            Unavailable: the server is gone.
        """
        body = {"content": text, "add_special": False, "parse_special": True}
        found: list[int] = self._server.ask("POST", "/tokenize", body)["tokens"]
        return found

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Make the slot hold exactly these tokens; those that it already has are not computed again.

        Raises:
            InvalidRange: no tokens. Overlong: more than its window. Refused, Unavailable: llama.cpp will not, or is gone.
        """
        if not tokens:
            raise InvalidRange("a slot of no tokens", advice="give at least one")
        body = {"prompt": list(tokens), "n_predict": 0, "cache_prompt": True, "id_slot": 0}
        times = self._server.ask("POST", "/completion", body)["timings"]
        return Prefilled(times["prompt_n"], times["cache_n"], times["prompt_ms"] / 1000)

    def save(self, tokens: Sequence[int]) -> SavedState:
        """Write the slot with exactly these tokens to disk; missing ones are computed first.

        Raises:
            SpillFailed: it could not be written; the slot is still usable. KVError: another request used the slot in
                the meantime. Also what `prefill` raises.
        """
        self.prefill(tokens)
        name = self.states.name(tokens)
        with self.states.writing(name) as place:
            with self._link(place) as link:
                try:
                    told = self._server.ask("POST", "/slots/0?action=save", {"filename": link})
                except Unavailable as error:
                    raise SpillFailed(f"llama.cpp cannot write to {place.parent}", advice="is there space left?") from error
            if place.stat().st_size != told["n_written"]:
                raise SpillFailed(f"{place.parent} did not take the whole slot", advice="is there space left?")
            with place.open("rb") as file:
                head = file.read(_HEADER + 4 * len(tokens))
            if told["n_saved"] != len(tokens) or array("i", tokens).tobytes() not in head:
                raise KVError(
                    "another request took the slot while it was saved", advice="save again, or wait for the other to end"
                )
            return self.states.commit(place, name, tokens)

    def restore(self, name: str) -> int | None:
        """Restore what `save` wrote under this name; returns its tokens, or None if it is missing, damaged, or of
        another model or tenant.

        A prompt that begins with these tokens is then not prefilled again. The old content of the slot is lost, even
        if llama.cpp does not accept the state (also None).
        """
        with self.states.reading(name) as found:
            if found is None or len(found[0].tokens) > self._server.context:
                return None
            # The file that was checked, even if another one has its name by now.
            with self._link(Path(f"/proc/self/fd/{found[1]}")) as link:
                try:
                    told = self._server.ask("POST", "/slots/0?action=restore", {"filename": link})
                except (Refused, Unavailable):
                    return None
        restored: int = told["n_restored"]
        return restored

    @contextmanager
    def _link(self, place: Path) -> Iterator[str]:
        """A link to the file: llama.cpp only accepts a bare file name in its own folder."""
        link = self._server.slots / secrets.token_hex(8)
        link.symlink_to(place.absolute())
        try:
            yield link.name
        finally:
            link.unlink()
