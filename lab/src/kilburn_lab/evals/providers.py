"""What the prompt caches of providers read and write, by the rules that they document (as of November 2026).

A cache does not read whatever beginning two prompts share. It reads *entries*, and an entry ends where a request was marked:

- *anthropic*: at the client's marks, here on the last block and on the last one of the user before it, as Kilburn's gateway sets
  them. An entry is found if it ends at most 20 blocks before a mark. A write costs 1.25 times plain input, a read a tenth,
  an entry lives for 5 minutes after its last use, and has 1,024 tokens or more (Claude Sonnet).
- *anthropic-shared*: the same with a third mark, where a request parts from the one before it: what a client could have that
  knows which passage it will take away again.
- *openai* (GPT-5.6 and later): at the end of the newest message, unless the client sets marks, which Kilburn does not.
  The latest 80 entries are looked at. Writes and reads cost as above, an entry lives for 30 minutes, 1,024 tokens or more.
- *deepseek*: at the end of each request and of each reply, and where the system has noticed that two requests begin alike, from
  the third one on. A write costs nothing extra, a read a fiftieth, and an entry lives for hours.

An entry ends with a block here. DeepSeek's further entries, at fixed intervals of long texts, are left out, because their length
is not documented. A provider may drop an entry early, and a token of it is not four characters: ratios say more than dollars.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from kilburn.prices import PRICES, Prices
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.prefix import Block

ENTRIES = 80
"""Entries of a session that are remembered, the last used ones."""


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's prices, and the rules of its cache.

    Args:
        least: tokens of the shortest entry.
        marks: entries that a request writes at most, from its end: the last block, and then the last ones of the user.
        shared: whether a request also marks where it parts from the one before.
        lookback: blocks before a mark where an entry is found; None for all.
        notices: whether replies, and what two requests share, become entries too.
    """

    prices: Prices
    least: int = 1024
    marks: int = 1
    shared: bool = False
    lookback: int | None = None
    notices: bool = False


PROVIDERS = {
    "anthropic": Provider(prices=PRICES["hosted"], marks=2, lookback=20),
    "anthropic-shared": Provider(prices=PRICES["hosted"], marks=2, shared=True, lookback=20),
    "openai": Provider(prices=Prices(input=2.0, cached=0.2, written=2.5, output=12.0, ttl=1800.0)),
    "deepseek": Provider(prices=Prices(input=0.15, cached=0.003, written=0.15, output=0.6, ttl=math.inf), least=64, notices=True),
}
"""By name. Prices are in dollars: of Claude Sonnet, GPT-5.6 Terra, and DeepSeek V4.1 Flash outside of peak hours."""


class PromptCache:
    """The cache of one provider, for one session."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._entries: dict[bytes, None] = {}
        self._seen: dict[bytes, None] = {}
        self._last: list[bytes] = []

    def copy(self) -> PromptCache:
        """What it is now; the copy goes on by itself."""
        made = PromptCache(self._provider)
        made._entries, made._seen, made._last = dict(self._entries), dict(self._seen), self._last
        return made

    def ship(self, prompt: Sequence[Block], chain: Sequence[bytes]) -> tuple[int, int]:
        """Tokens of a prompt that are read, and that are written; the others are plain input.

        Args:
            chain: see `chain_of`.
        """
        rules = self._provider
        ends: list[int] = []
        for block in prompt:
            ends.append((ends[-1] if ends else 0) + len(block.text))
        if not ends or ends[-1] < rules.least * CHARACTERS:
            return 0, 0
        marks = [len(chain) - 1, *(at for at in reversed(range(len(chain) - 1)) if prompt[at].role != "assistant")][: rules.marks]
        alike = sum(one == other for one, other in zip(self._last, chain, strict=False))  # a digest is of all before it too
        if rules.shared and alike:
            marks.append(alike - 1)
        if rules.notices:
            self._notice(prompt, chain)
        fit = [at for at, end in enumerate(ends) if end >= rules.least * CHARACTERS]
        reach = [at for at in fit if rules.lookback is None or any(0 <= mark - at <= rules.lookback for mark in marks)]
        hit = next((at for at in reversed(reach) if chain[at] in self._entries), None)
        read = 0 if hit is None else ends[hit] // CHARACTERS
        if hit is not None:
            self._write(chain[hit])
        if rules.notices and (known := [at for at in fit if chain[at] in self._seen]):
            self._write(chain[known[-1]])
        self._seen.update(dict.fromkeys(chain))
        for mark in sorted(marks):
            if mark in fit:
                self._write(chain[mark])
        self._last = list(chain)
        return read, -(-ends[-1] // CHARACTERS) - read

    def _notice(self, prompt: Sequence[Block], chain: Sequence[bytes]) -> None:
        """The reply to the last request is an entry, if it stands behind it now."""
        at = len(self._last)
        if 0 < at < len(chain) and chain[at - 1] == self._last[-1]:
            while at < len(chain) and prompt[at].role == "assistant":
                self._write(chain[at])
                at += 1

    def _write(self, entry: bytes) -> None:
        self._entries.pop(entry, None)
        self._entries[entry] = None
        if len(self._entries) > ENTRIES:
            del self._entries[next(iter(self._entries))]


def chain_of(prompt: Sequence[Block]) -> list[bytes]:
    """A digest for each beginning of a prompt that ends with a block."""
    chain: list[bytes] = []
    running = hashlib.blake2b(digest_size=16)
    for block in prompt:
        for part in block:
            raw = part.encode("utf-8", "surrogatepass")
            running.update(len(raw).to_bytes(8, "big") + raw)
        chain.append(running.digest())
    return chain
