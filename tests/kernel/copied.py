"""A store with one of everything, and what a reader sees of a store."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.backend import Backend
from kilburn.backends.places import open_backend
from kilburn.backends.upkeep import inspect_store
from kilburn.event import Act
from kilburn.kernel.store import Store
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Claim

EMBEDDER = "hand-made"

COPIES = """
import os, signal, sys
from kilburn.backends.places import canonical_name, open_backend
from kilburn.copying import copy

source, target, to, *numbers = sys.argv[1:]
done = 0

def step(last):
    global done
    done += 1
    if done == last:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(verb, last):
    def do(*values, **names):
        if names.get("create", True):
            step(last)
        result = verb(*values, **names)
        if names.get("create", True):
            step(last)
        return result
    return do

for number in map(int, numbers):
    child = os.fork()
    if not child:
        ours, theirs = open_backend(source, readonly=True), open_backend(target, tenant=to, durable=False)
        verbs = [(theirs, name) for name in ("segment", "commit", "erase", "sync")]
        for part, name in [*verbs, (theirs.settings, "put"), (theirs.vectors, "add")]:
            setattr(part, name, counted(getattr(part, name), number))
        copy(ours, theirs, canonical_name(source) + "#default")
        theirs.close()
        print(done, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == signal.SIGKILL:
        print("killed", flush=True)
    elif status:
        print("failed", flush=True)
"""
"""Copies once for each number, and kills itself before or after the verb that writes with this number; 0 for never."""

WRITER = """
import itertools, sys, time
from kernel.copied import opened

with opened(sys.argv[1]) as store:
    work = store.session("work")
    for number in itertools.count():
        work.append({"role": "user", "content": f"{number} is new " * 9})
        print(number, flush=True)
        time.sleep(0.005)  # so that what is compared stays small
"""
"""Appends to a session until it is killed."""


def run_copies(source: str, target: str, steps: Iterable[int], to: str = "default") -> list[str]:
    """What became of copies in programs of their own, that are killed at these steps: "killed", or the number of its steps."""
    words = [sys.executable, "-c", COPIES, source, target, to, *map(str, steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    assert "failed" not in done.stdout, done.stderr
    return done.stdout.split()


@contextmanager
def writer(source: str) -> Iterator[None]:
    """Somebody appends to the session "work" meanwhile."""
    folder = str(Path(__file__).parents[1])
    words = [sys.executable, "-c", WRITER, source]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder}) as program:
        assert program.stdout is not None
        program.stdout.readline()
        drain = threading.Thread(target=program.stdout.read)
        drain.start()
        try:
            yield
        finally:
            program.kill()
            drain.join()


def opened(place: Path | str, tenant: str = "default", **more: Any) -> Store:
    return kilburn.open(str(place), window=600, policy="hybrid", tokenizer="chars/4", embedder=None, tenant=tenant, **more)


def fill(path: Path, tenant: str = "default") -> None:
    """Sessions with folds, branches that returned and that did not, memories, a document, notes; pages and whole sessions that
    were forgotten; pins, marks, vectors, settings."""
    with opened(path, tenant) as store:
        gone = store.session("gone")
        gone.append(user("canarygone and its secrets"))
        work = store.session("work", user="ana")
        work.append({"role": "system", "content": "You fix bugs."}, user("Fix the parser."))
        for number in range(14):
            work.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", f"line {number}\n" * 20))
        work.append(assistant(None, call_of("x")))
        branch = work.fork("look into the lexer", call="x")
        for number in range(6):
            branch.append(assistant(None, call_of(f"b{number}")), tool(f"b{number}", f"deep {number}\n" * 20))
        nested = branch.fork("deeper")
        nested.append(assistant("nothing there"))
        branch.branches.exit("the lexer is sound")
        work.append(user("and now?"), assistant("canarypage said once"), user("go on"))
        open_branch = work.fork("still open")
        open_branch.append(assistant("thinking"))
        work.pin("p4")
        work.rate("p5", 0.7)
        memory, shared = store.memory("ana"), store.memory()
        claim = Claim(subject="Ana", relation="lives in", object="Porto")
        memory.collection.apply(
            Add(text="Ana", kind=Kind.ENTITY),
            Add(text="Ana lives in Porto", claim=claim, cites=((work.number, 2),), refers=(0,)),
            policy="learner",
        )
        memory.collection.apply(Add(text="Ana lives in Faro", sources=(-1,)), Retire(pages=(-1,), refers=0))
        memory.collection.ledger.record(Act.NOTE, policy="learner", learned=gone.number, upto=1, outcome="done", waiting=[])
        shared.collection.apply(Add(text="the parser is old", cites=((work.number, 3), (branch.number, branch.window.last))))
        store.notes("ana").write("plans/today", "fix it")
        store.notes("ana").write("plans/today", "fix it now")
        document = store.document("handbook")
        document.add("Chapter one. The brig Hesper.")
        forked = store.session("copy~2")
        forked.ledger.record(Act.NOTE, policy="gateway", forked=work.number, continues=[work.number, gone.number], known=2)
        forked.append(user("from a client"))
        store.forget(session="gone")
        store.forget(
            session="work", address=next(page.address for page, _ in work.contents.pages() if "canarypage" in page.label)
        )
        waiting = [entry for entry, _ in store.backend.vectors.unembedded(EMBEDDER, 1000)]
        store.backend.vectors.add(EMBEDDER, [(entry, entry.to_bytes(16, "big")) for entry in waiting[::2]])
        store.backend.settings.put("retention", '{"archive": 30}')


def seen(backend: Backend) -> dict[str, Any]:
    """All that a reader sees of a tenant, with names in place of numbers."""
    infos = list(backend.segments())
    names = {info.number: info.name if info.kind != "forgotten" else "forgotten" for info in infos}
    found: dict[str, Any] = {"settings": {k: v for k, v in backend.settings.all().items() if not k.startswith("copi")}}
    for info in infos:
        if info.kind == "forgotten":
            continue
        pages = []
        for page, state in backend.pages(info.number):
            texts = [backend.contents.texts([digest])[digest] if digest else "" for digest in (page.digest, page.extra)]
            cites = [(names[number], cited) for number, cited in page.cites]
            pages.append((repr(page).replace(repr(page.cites), ""), cites, texts, state))
        events = [
            (event.number, event.act, event.time, event.turn, event.pages, event.why, event.policy, event.cause, event.tokens)
            for event in backend.events(info.number)
        ]
        data = [
            {k: v for k, v in event.data.items() if k not in ("forked", "learned", "continues")}
            for event in backend.events(info.number)
        ]
        found[info.name] = (info.kind, info.user, info.created, info.used, info.head, info.tokens, pages, events, data)
    found["forgotten"] = {name: backend.forgotten(number) for number, name in names.items() if name != "forgotten"}
    vectors = list(itertools.chain.from_iterable(backend.vectors.read(each) for each in backend.vectors.embedders()))
    passages = backend.words.passages(vector.entry for vector in vectors)
    found["vectors"] = sorted(
        (names[passages[vector.entry].segment], passages[vector.entry].page, passages[vector.entry].span, vector.data)
        for vector in vectors
    )
    return found


def look(place: Path | str, tenant: str = "default") -> dict[str, Any]:
    """`seen` of a file or a database, which is sound."""
    with closing(open_backend(str(place), tenant=tenant)) as backend:
        assert inspect_store(backend) == []
        return seen(backend)
