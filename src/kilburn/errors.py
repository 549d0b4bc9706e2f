"""Every error that Kilburn raises on purpose, as one tree.

    KilburnError
    ├── WireError              foreign JSON -> pages
    │   ├── InvalidMessage       not a message of any known form
    │   ├── OrphanResult         a tool result whose call was never admitted
    │   └── DuplicateCall        two calls of one message have the same id
    ├── KernelError            a move, an address or a budget
    │   ├── LawBroken            a move that one of the ten laws forbids (carries `.law`)
    │   │   └── PinsExceedWindow   the pinned pages alone do not fit
    │   ├── UnknownAddress       no such page, or not an address
    │   ├── Forgotten            the page was dropped on purpose
    │   ├── NoteConflict         a note that another writer changed meanwhile (carries `.note`)
    │   ├── EmptyPrompt          nothing to send: a new session, or one of which all is forgotten
    │   └── InvalidBudget        a window or reserve that cannot be
    ├── StoreError             disk
    │   ├── StoreBusy            another writer held the file for too long
    │   ├── StoreStale           another writer moved this session on
    │   ├── StoreCorrupt         bytes that do not match their digest, or no database
    │   ├── StoreFull            no space left
    │   ├── StoreReadOnly        opened for reading, or a read-only file or folder
    │   ├── StoreUnavailable     a database that cannot be reached, or does not answer
    │   └── StoreVersion         a file or an SQLite that this version cannot use
    ├── ModelError             a language model
    │   ├── Refused              the provider will not answer this request (4xx, policy, key)
    │   │   └── ToolsRefused       the model, or its server, takes no tools
    │   ├── Overlong             prompt and reply exceed the model's context
    │   ├── RateLimited          too many requests (carries `.retry_after`, seconds)
    │   ├── Unavailable          time-out, connection, 5xx, or a model that is not loaded
    │   ├── Cancelled            a job that was taken out of a scheduler's queue, or stopped
    │   ├── DeadlinePassed       a job that was not done in time
    │   └── TokensSpent          a job whose tenant has no tokens left for it
    ├── KVError                the blocks of a KV cache
    │   ├── OutOfBlocks          no block is free, and none can be freed (carries `.needed`)
    │   ├── FreedSequence        a sequence that was freed or preempted
    │   ├── FreedBlock           a block without an owner, or given back twice
    │   ├── InvalidRange         positions that are not in the sequence, or ranges that overlap
    │   ├── PrefixRefused        a sequence whose KV is not that of its tokens shares no prefix
    │   ├── BudgetTooSmall       fewer tokens than what must stay
    │   └── SpillFailed          the KV could not be written to disk; it is still in the cache
    ├── MemoryRefused          a memory that may not be written
    │   ├── SecretFound          it holds a secret (carries `.rules`, never the secret)
    │   └── QuotaExceeded        its user has as many as are allowed (carries `.have`, `.limit`)
    ├── ToolError              a tool of an agent
    ├── AccessDenied           a call that an agent may not make (carries `.cause`)
    ├── SandboxError           code that a model wrote: a sandbox that is closed, busy, or cannot start again
    │   ├── SandboxRefused       this machine cannot keep what the sandbox promises
    │   └── NoValue              no such variable inside, or JSON cannot carry it
    ├── WorkspaceError         a working folder of a branch
    │   └── MergeConflict        both changed the same files (carries `.paths`)
    ├── SpecError              a name that resolves to nothing, or arguments that do not fit
    │   └── UnsupportedModel     an architecture that the KV engine cannot run exactly (carries `.family`)
    └── MissingExtra           an optional dependency that is not installed

Each message names the boundary that was crossed and what to do next. After an error the state is
the state before it. This module refuses to be a list of codes: catch the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilburn.extras import command

__all__ = [
    "AccessDenied",
    "BudgetTooSmall",
    "Cancelled",
    "DeadlinePassed",
    "DuplicateCall",
    "EmptyPrompt",
    "Forgotten",
    "FreedBlock",
    "FreedSequence",
    "InvalidBudget",
    "InvalidMessage",
    "InvalidRange",
    "KVError",
    "KernelError",
    "KilburnError",
    "LawBroken",
    "MemoryRefused",
    "MergeConflict",
    "MissingExtra",
    "ModelError",
    "NoValue",
    "NoteConflict",
    "OrphanResult",
    "OutOfBlocks",
    "Overlong",
    "PinsExceedWindow",
    "PrefixRefused",
    "QuotaExceeded",
    "RateLimited",
    "Refused",
    "SandboxError",
    "SandboxRefused",
    "SecretFound",
    "SpecError",
    "SpillFailed",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreStale",
    "StoreUnavailable",
    "StoreVersion",
    "TokensSpent",
    "ToolError",
    "ToolsRefused",
    "Unavailable",
    "UnknownAddress",
    "UnsupportedModel",
    "WireError",
    "WorkspaceError",
]


class KilburnError(Exception):
    """Base of all errors raised on purpose. `boundary` is where it happened, `advice` what to do."""

    boundary = "kilburn"

    def __init__(self, message: str, *, advice: str = "") -> None:
        self.what = message
        self.advice = advice
        super().__init__(f"{self.boundary}: {message}" + (f" ({advice})" if advice else ""))


class WireError(KilburnError):
    """A message from outside could not become pages."""

    boundary = "wire"


class InvalidMessage(WireError):
    """Not a message of any known form: unknown role, wrong type, invalid JSON, lone surrogate."""


class OrphanResult(WireError):
    """A tool result whose call was never admitted to this session."""


class DuplicateCall(WireError):
    """Two calls of one message have the same id. An id that an earlier message used is no error."""


class KernelError(KilburnError):
    """A move, an address or a budget that the kernel refuses."""

    boundary = "kernel"


class LawBroken(KernelError):
    """A move that breaks one of the ten laws (`law`, 1 to 10; see docs/design/architecture.md)."""

    def __init__(self, law: int, message: str, *, advice: str = "") -> None:
        self.law = law
        super().__init__(f"law {law}: {message}", advice=advice)


class PinsExceedWindow(LawBroken):
    """Pins, and calls that wait for their results, would not fit the window (law 2 against law 3)."""

    def __init__(self, message: str, *, advice: str = "unpin something, or open a larger window") -> None:
        super().__init__(2, message, advice=advice)


class UnknownAddress(KernelError):
    """Not an address (`p17`, `p17-p42`, `f3`), or no such page in this session."""


class Forgotten(KernelError):
    """The page was dropped by an explicit forget; nothing of it is kept."""


class NoteConflict(KernelError):
    """A note is not what its writer has read: somebody changed it meanwhile. Nothing was written. `note` is what it is now, or
    None if it is gone."""

    def __init__(self, message: str, *, advice: str = "", note: Any = None) -> None:
        self.note = note
        super().__init__(message, advice=advice)


class EmptyPrompt(KernelError):
    """There is no message to send to a model, which every provider refuses: the session is new, or all that its prompt showed
    was forgotten. The next append makes it go on."""

    def __init__(
        self,
        message: str = "there is nothing to send to the model: the session is new, or what its prompt had was forgotten",
        *,
        advice: str = "append a message first",
    ) -> None:
        super().__init__(message, advice=advice)


class InvalidBudget(KernelError):
    """A window or reserve that cannot be."""


class StoreError(KilburnError):
    """The store could not do what was asked; what was acknowledged before is intact."""

    boundary = "store"


class StoreBusy(StoreError):
    """Another writer held the file for longer than the time-out."""


class StoreStale(StoreError):
    """Another writer appended to this session since it was opened here."""


class StoreCorrupt(StoreError):
    """Bytes that do not match their digest, or a file that is no Kilburn store."""


class StoreFull(StoreError):
    """No space left on the device."""


class StoreReadOnly(StoreError):
    """A write to a store that was opened for reading, or to a read-only file or folder."""


class StoreUnavailable(StoreError):
    """A database that cannot be reached, lets nobody in, or does not answer in time. Of a write whose reply was lost nobody knows
    whether it was done: who opens the session again sees it."""


class ClockSkew(StoreError):
    """The clocks of this machine and of the database differ too much for a rule to decide what is over; nothing was changed."""


class StoreVersion(StoreError):
    """The store was written by a newer Kilburn or a development version, or SQLite or PostgreSQL is too old."""


class ModelError(KilburnError):
    """A language model did not give a usable reply. `status` is the HTTP status of its provider, or None."""

    boundary = "model"
    status: int | None = None


class Refused(ModelError):
    """The provider will not answer this request: key, permission, content policy, malformed request."""


class ToolsRefused(Refused):
    """The model, or the server before it, takes no request with tools; without them it may answer."""


class Overlong(ModelError):
    """Prompt and reply together exceed the model's context."""


class RateLimited(ModelError):
    """Too many requests. `retry_after` is in seconds, or None where the provider did not say."""

    def __init__(self, message: str, *, advice: str = "", retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message, advice=advice)


class Unavailable(ModelError):
    """Time-out, broken connection, a 5xx, or a model that is not loaded."""


class Cancelled(ModelError):
    """A job was taken out of a scheduler's queue before its reply was complete, and nothing of the reply is kept; or a branch
    was left because the run that began it was given up."""


class DeadlinePassed(ModelError):
    """A job's reply was not complete in time, most often because others were served first; nothing of it is kept."""


class TokensSpent(ModelError):
    """A scheduler's tenant has too few tokens left for a job."""


class KVError(KilburnError):
    """The KV cache could not do what was asked; every sequence is as it was, and no block is lost.

    `made`: from `kilburn_kv.generation.generate` only: the tokens that each sequence had generated by then, and has cached.
    """

    boundary = "kv"
    made: list[list[int]] | None = None


class OutOfBlocks(KVError):
    """Fewer blocks are free than are needed (`needed`)."""

    def __init__(
        self, message: str, *, needed: int, advice: str = "free or evict something, or preempt with Tables.reserve"
    ) -> None:
        self.needed = needed
        super().__init__(message, advice=advice)


class FreedSequence(KVError):
    """The sequence was freed or preempted: its blocks may belong to another by now."""


class FreedBlock(KVError):
    """A block that nobody owns was shared or given back, or one was given back twice."""


class InvalidRange(KVError):
    """Positions that are not within the sequence, or a page's range that overlaps another's."""


class PrefixRefused(KVError):
    """A sequence that was evicted from, blended or compressed, or has no key, cannot share its prefix."""


class BudgetTooSmall(KVError):
    """A budget that does not hold what must stay: a press's sinks and window, pinned pages, the latest message."""


class SpillFailed(KVError):
    """A sequence's KV could not be written to disk; it is still in the cache, and usable."""


class MemoryRefused(KilburnError):
    """A memory that may not be written; nothing of it was."""

    boundary = "memory"


class SecretFound(MemoryRefused):
    """The text holds a secret. `rules` names the rules that found one; the secret itself is not in the error."""

    def __init__(self, rules: Sequence[str], detail: str = "") -> None:
        self.rules = tuple(dict.fromkeys(rules))
        message = f"the text holds a secret ({', '.join(self.rules)})" + (f"; {detail}" if detail else "")
        super().__init__(message, advice="take it out of the text, or have it redacted")


class QuotaExceeded(MemoryRefused):
    """A user's memory is full. It has `have` of what `unit` counts; `limit` are allowed, and `more` were to be added."""

    def __init__(self, unit: str, *, have: int, more: int, limit: int, user: str = "") -> None:
        self.unit, self.have, self.more, self.limit = unit, have, more, limit
        whose = f"the memory of {user!r}" if user else "this memory"
        super().__init__(
            f"{whose} has {have:,} {unit}, {more:,} more are too many: {limit:,} are allowed",
            advice="forget or sweep some, raise the quota, or let it evict the least valuable",
        )


class ToolError(KilburnError):
    """A tool of an agent failed, or was called with arguments that do not fit its types."""

    boundary = "tool"


class AccessDenied(KilburnError):
    """A call that an agent has no right to make, or that nobody said yes to; it was not carried out. `cause` says what stood
    against it (see `kilburn.agents.access.Decision`)."""

    boundary = "agent"

    def __init__(self, message: str, *, cause: str, advice: str = "") -> None:
        self.cause = cause
        super().__init__(message, advice=advice)


class SandboxError(KilburnError):
    """A sandbox that is closed, that runs a cell already, or that cannot start again."""

    boundary = "sandbox"


class SandboxRefused(SandboxError):
    """This machine lacks what the sandbox needs to keep its promises, so nothing was run."""


class NoValue(SandboxError):
    """No variable of this name inside, or one that JSON cannot carry."""


class WorkspaceError(KilburnError):
    """A working folder that cannot be made, read or merged; the parent's folder is as it was."""

    boundary = "workspace"


class MergeConflict(WorkspaceError):
    """A working folder cannot be merged: `paths` names the files that stand against it. Nothing was changed."""

    def __init__(self, paths: Sequence[str], why: str) -> None:
        self.paths = tuple(paths)
        listing = ", ".join(self.paths[:5]) + (f" and {len(self.paths) - 5} more" if len(self.paths) > 5 else "")
        super().__init__(f"not merged: {listing}: {why}", advice="settle it in one of the two folders, or discard one")


class SpecError(KilburnError):
    """A name that resolves to nothing, or arguments that do not fit what it names."""

    boundary = "resolve"


class UnsupportedModel(SpecError):
    """An architecture that the KV engine cannot run exactly, or not in this way; `family` is transformers' name of it."""

    def __init__(self, family: str, reason: str, *, advice: str = "") -> None:
        self.family = family
        super().__init__(f"{family}: {reason}", advice=advice or "use a decoder like Llama, Qwen2, Qwen3 or SmolLM2")


class MissingExtra(KilburnError):
    """An optional dependency is not installed; the advice names the extra."""

    boundary = "install"

    def __init__(self, module: str, extra: str) -> None:
        self.module = module
        self.extra = extra
        super().__init__(f"{module} is not installed", advice=command(extra))


class HitRateWarning(UserWarning):
    """The window misses too much of what the agent asks for (see `Stats`)."""


class ClockWarning(UserWarning):
    """The clocks of this machine and of the database differ by more than a minute."""


class DamageWarning(UserWarning):
    """A session or page was left out of a search because it is damaged; `kilburn fsck` says how."""
