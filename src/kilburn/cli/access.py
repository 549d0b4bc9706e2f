"""How verbs open a store: for reading beside its writer, or for writing without moving its windows.

A session's window belongs to the agent that works in it. A verb opens the session with a very large window, so that
nothing is evicted by looking or forgetting. A verb that reads never creates a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial, wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, NamedTuple

from typer import Option

import kilburn
from kilburn.backend import SegmentKind
from kilburn.backends.places import is_url, open_backend
from kilburn.budget import Budget
from kilburn.cli.screen import progress
from kilburn.cli.shell import Db, Json, Tenant
from kilburn.errors import KilburnError, MissingExtra, SpecError
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.kernel.store import DOCUMENT, MEMORY, NOTES, Store
from kilburn.models.detection import detect
from kilburn.models.download import Progress
from kilburn.models.weights import catalogue, pull
from kilburn.search.choice import vectors_for
from kilburn.terminal import line, say

Advanced = partial(Option, rich_help_panel="Advanced")
"""An option that stands apart in `--help`: few people set it in their first week."""

CONNECT = "set OPENAI_API_KEY or ANTHROPIC_API_KEY, start Ollama, llama.cpp or vLLM on this machine, or give --model SPEC"
"""How a person connects a language model."""

WIDE = 1 << 40
"""Tokens: a window that is always large enough."""

MOST = 2000
"""Passages that a verb embeds on its own account: about ten seconds."""


def existing(db: str | None, *, advice: str = "give its file with --db, or in KILBURN_DB; `kilburn chat` makes one") -> str:
    """The path of an existing store, or a URL.

    Args:
        advice: what to do where there is none.

    Raises:
        SpecError: there is none.
    """
    path = db or "agent.db"
    if not is_url(path) and not Path(path).exists():
        raise SpecError(f"there is no store at {path}", advice=advice)
    return path


def reading(db: str | None, tenant: str | None, *, meaning: bool = False) -> Store:
    """An existing store, opened for reading only: nothing that is asked is recorded.

    Args:
        meaning: whether it is searched by meaning too, where the store has vectors and their embedder is here.
    """
    return writing(existing(db), tenant, readonly=True, meaning=meaning)


class StorePlace(NamedTuple):
    """What --db, --tenant and --json of a verb say: which store, and how it prints."""

    db: str | None
    tenant: str | None
    json: bool

    def reading(self) -> Store:
        """The store, opened for reading; see `reading`."""
        return reading(self.db, self.tenant)

    def writing(self, *, new: bool = False) -> Store:
        """The store, opened for changes; see `writing`.

        Args:
            new: whether it may be made.
        """
        return writing((self.db or "agent.db") if new else existing(self.db), self.tenant)


def stored(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with the options --db, --tenant and --json in place of its parameter `where`."""
    kept = [each for each in signature(verb, eval_str=True).parameters.values() if each.name != "where"]
    options = {"db": (Db, None), "tenant": (Tenant, None), "json": (Json, False)}
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind) for name, (kind, default) in options.items()
    ]

    @wraps(verb)
    def run(*, db: str | None, tenant: str | None, json: bool, **given: Any) -> None:
        verb(**given, where=StorePlace(db, tenant, json))

    run.__signature__ = Signature([*kept, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*kept, *more)}
    return run


def writing(
    path: str,
    tenant: str | None,
    *,
    clock: Callable[[], float] = time.time,
    tokenizer: str = "auto",
    readonly: bool = False,
    meaning: bool = False,
) -> Store:
    """A store opened for changes made by a person, at times that `clock` tells.

    Args:
        meaning: see `reading`; what was added is embedded in the background while the store is open for writing: see
            `kilburn.open`.
    """
    backend = open_backend(path, tenant=tenant or "default", readonly=readonly)
    try:
        vectors = vectors_for(backend, "auto") if meaning else None
        made = Store(backend, Budget(WIDE), "fifo", tokenizer=tokenizer, clock=clock, vectors=vectors)
    except BaseException:
        backend.close()
        raise
    if vectors is not None:
        vectors.start()
    return made


def embed(store: Store, most: int = MOST) -> None:
    """Make the vectors of what waits for one, so many passages at most, if there is an embedder on this machine: a search
    makes a few, and no program may run in between that makes the others."""
    vectors = vectors_for(store.backend) if most else None
    if vectors is None:
        return
    try:
        with progress("embedding", unit="passages") as done:
            vectors.catch_up(most, done)
    except KilburnError as error:
        say(line(f"not all are found by meaning yet: {error}"))


def session(store: Store, name: str) -> Session:
    """A session that exists.

    Raises:
        SpecError: there is none of that name.
    """
    return counting(store, name).session(name)


def counting(store: Store, name: str) -> Store:
    """The store, opened with the counter that the agent of a session used, so that nothing is counted again.

    Raises:
        SpecError: there is no session of that name.
    """
    infos = store.sessions()
    known = [info.name for info in infos]
    if name not in known:
        names = ", ".join(map(repr, known[:5])) + (" ..." if len(known) > 5 else "")
        if name.startswith((MEMORY, DOCUMENT, NOTES)):
            raise SpecError(f"there is no {name!r}", advice="see `kilburn memories list`, `documents list` and `notes list`")
        raise SpecError(f"no session {name!r}", advice=f"this tenant has {names or 'no session'}")
    return _counting(store, infos[known.index(name)].number)


def owners(store: Store, kind: SegmentKind) -> list[str]:
    """Whose collections of a kind there are; "" among them for those of all users."""
    return [held.info.user for held in store.collections() if held.info.kind is kind]


def ownerless(store: Store, kind: SegmentKind, owner: str, what: str, otherwise: str) -> SpecError:
    """The error that somebody has no collection of a kind, which says who has.

    Args:
        what: "is no memory", "are no notes". otherwise: the command that begins one.
    """
    whose, others = f"of {owner!r}" if owner else "of all users", ", ".join(repr(one) for one in owners(store, kind) if one)
    return SpecError(f"there {what} {whose}", advice=f"give --user: {others}" if others else f"see {otherwise} --help")


def opened(store: Store, number: int, name: str) -> Session:
    """A session that exists, counted by the counter that its agent used, so that nothing is counted again."""
    return _counting(store, number).session(name)


def _counting(store: Store, number: int) -> Store:
    ruler = counter_of(store.backend, number)
    if ruler == store.counter.name:
        return store
    return Store(store.backend, store.budget, "fifo", tokenizer=ruler, clock=store.clock)


def closed_after(model: Any) -> Any:
    """The model as a context, at whose end what it holds open is closed."""
    return closing(model) if hasattr(model, "close") else nullcontext(model)


def conversing(db: str | None, tenant: str | None, model: Any, *, window: int, policy: str, reply: int) -> Store:
    """The store, opened for an agent with this model, in a window that the model has.

    Args:
        reply: tokens of one reply, at most.
    """
    held = min(window, getattr(model, "context", None) or window)
    return kilburn.open(
        db or "agent.db", window=held, policy=policy, tenant=tenant or "default", reserve=min(reply, held // 2), model=model
    )


def detected() -> str | None:
    """The spec of a model that answers without being named, which is said on standard error; None if there is none."""
    model = detect()
    if model is None:
        return None
    say(line(f"{model.name} answers, because {model.reason}; choose another model with --model"))
    return model.spec


def fetched(spec: str) -> Any:
    """The model of a spec, as `model_of` gives it; a file that is missing is downloaded first, with its progress shown."""
    with progress(spec, unit="bytes") as done:
        return model_of(spec, lambda _, have, total: done(have, total or None))


def model_of(spec: str | None, fetch: Progress | None = None) -> Any:
    """The model of a spec; of a name of the catalogue, an `hf:` name or a GGUF file; None for "none".

    Args:
        fetch: if given, a missing file is downloaded first, and this function is called with the progress.

    Raises:
        SpecError: it names nothing. ModelError, MissingExtra: it is not available.
    """
    if spec is None or spec == "none":
        return None
    known = {item.name for item in catalogue() if item.form == "GGUF"}
    if not (spec.startswith("hf:") or spec.endswith(".gguf") or spec in known):
        return resolve("models", spec)
    if find_spec("xllamacpp") is None:
        # Before the download, which would be in vain.
        raise MissingExtra("xllamacpp", "local")
    if fetch is not None:
        pull(spec, progress=fetch)
    return resolve("models", f"local({spec!r})")
