"""The levels of one tenant: a store, a budget, a policy, and the processes that live there.

`kilburn.open` makes it. It finds the parts by name and connects them.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kilburn.budget import Budget
from kilburn.errors import KilburnError, SpecError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale
from kilburn.kernel.drive import answerer
from kilburn.kernel.found import DamageWarning, Found, found
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.planning import Planner
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import resolve
from kilburn.policy import Policy
from kilburn.store import ProcessInfo, Store, check_name
from kilburn.tokens.choice import counter_for

__all__ = ["Hierarchy"]


class Hierarchy:
    """A one-level store for the agents of one tenant.

    Args:
        store: an open store; it serves exactly one tenant.
        budget: what each process's window may hold.
        policy: a spec such as "hybrid" or "summarize(keep=4)", or an object with `plan`.
        tokenizer: "auto", a model's name, "chars/4", or a `Counter`.
        model: answers when a policy asks: a spec, a model, or None.
        clock: seconds since the epoch.
        foreign: whether these specs may name classes from outside Kilburn; see `kilburn.open`.
    """

    def __init__(
        self,
        store: Store,
        budget: Budget,
        policy: Any = "hybrid",
        *,
        tokenizer: Any = "auto",
        model: Any = None,
        clock: Callable[[], float] = time.time,
        foreign: bool = True,
    ) -> None:
        self.store, self.budget, self.clock = store, budget, clock
        self.policy_name = policy if isinstance(policy, str) else type(policy).__name__.lower()
        if self.policy_name in ("kernel", "user"):
            raise SpecError(
                f"a policy named {self.policy_name!r}",
                advice="the ledger has this name for moves that a policy may not make; rename it",
            )
        self.policy: Policy = resolve("policies", policy, foreign=foreign)
        self.model = None if model is None or model == "none" else resolve("models", model, foreign=foreign)
        if tokenizer == "auto" and self.model is not None:
            tokenizer = self.model.tokenizer
        self.counter = counter_for(tokenizer)
        # What a model's chat template adds to every prompt, besides its messages.
        self.budget = Budget(budget.window, budget.reserve, budget.overhead + int(getattr(self.counter, "overhead", 0)))
        self._processes: dict[str, Process] = {}
        self._lock = threading.RLock()
        self._closed = False

    @property
    def tenant(self) -> str:
        """The tenant that this store serves."""
        return self.store.tenant

    def process(self, name: str) -> Process:
        """The process of that name: created, or reopened where it was left.

        Raises:
            SpecError: not a valid name: see `kilburn.store.check_name`.
            StoreReadOnly: it does not exist, and the store was opened for reading.
        """
        with self._lock:
            try:
                check_name(name, "session")
            except SpecError:
                # Older versions allowed more names; sessions with such names stay readable.
                if name not in [info.name for info in self.store.processes()]:
                    raise
            if name not in self._processes or self._processes[name].kernel.stale:
                info = self.store.process(name, time=self.clock(), create=not self.store.readonly)
                if info is None:
                    raise StoreReadOnly(
                        f"no session {name!r} here, and this store was opened for reading", advice="see kilburn ps"
                    )
                self._processes[name] = self._open(info)
            return self._processes[name]

    def _open(self, info: ProcessInfo) -> Process:
        kernel = Kernel(self.store, info, self.counter, self.budget, self.clock)
        answer = answerer(self.model)
        planner = Planner(kernel, self.policy, self.policy_name, answer if self.model is not None else None)
        made = Process(kernel, planner, answer)
        if not self.store.readonly:
            planner.reopen()
        return made

    def processes(self) -> list[ProcessInfo]:
        """All sessions of this tenant, oldest first; `damaged` says so if one is known to be damaged."""
        return list(self.store.processes())

    def search(self, query: str, tokens: int = 1000, limit: int = 20) -> list[Found]:
        """Passages of all sessions of this tenant that match, best first, within a token budget.

        Sessions that are damaged are left out, with a warning.
        """
        passages = self.store.search(query, limit=limit)
        names = {info.number: info.name for info in self.store.processes()} if passages else {}
        kernels: dict[int, Kernel] = {}
        for number in {passage.process for passage in passages} & names.keys():
            try:
                process = self.process(names[number])
                process.refresh()
                kernels[number] = process.kernel
            except StoreCorrupt as error:
                warnings.warn(f"not searched: {error.what}", DamageWarning, stacklevel=2)
        hits = [passage for passage in passages if passage.process in kernels]
        return found(hits, kernels, self.counter, tokens, self.clock())

    def close(self) -> None:
        """Write the waiting observations, and release the file; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for process in self._processes.values():
                if not self.store.readonly:
                    self._flush(process)
        finally:
            self.store.close()

    @staticmethod
    def _flush(process: Process) -> None:
        process.abandon()
        try:
            process.kernel.flush()
        except StoreStale:
            # Another writer continued this session; only observations are left here.
            process.kernel.undo()
        except StoreError as error:
            # Reading a session must not fail because the reading cannot be recorded.
            count = len(process.kernel.pending.events)
            warnings.warn(f"{count} observations of session {process.name!r} are not in its ledger: {error.what}", stacklevel=4)

    def __enter__(self) -> Hierarchy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except KilburnError:
            # An earlier error says more than the one that it caused here.
            if error is None:
                raise
