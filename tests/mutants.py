"""Break the code on purpose, one place at a time, and report which defects the default tests detect.

    python tests/mutants.py                  run every mutant
    python tests/mutants.py NAME ...         run the mutants whose names contain one of these texts, such as "law 9:"
    python tests/mutants.py --workers 2      run two at a time, each in its own copy of the checkout
    python tests/mutants.py --list           print the names, and the mutants that do not fit the code

A mutant replaces one piece of text in a copy of the checkout and runs the tests that should fail then, as `pytest` selects them
by default (no slow tests), up to the first that fails. A text that does not occur exactly once is an error: bring the mutant up
to date with the code. The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "kv", "lab", "tests", "docs", "examples", "README.md", "conftest.py", "pyproject.toml", "run.py")
TIMEOUT = 1200
"""Seconds that the tests of one mutant may run. A mutant that hangs is detected."""


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Args:
        name: what goes wrong; "law N: ..." if it breaks one of the ten laws of docs/design/architecture.md.
        file: the changed file, below src/kilburn.
        old, new: the text to replace, and its replacement.
        tests: test files below tests/, separated by blanks, the likeliest detector first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # The kernel: the laws of moves.
    Mutant(
        "law 3: a pinned page may leave",
        "kernel/laws.py",
        "if page in window.pins:",
        "if page in ():",
        "kernel/test_pins.py",
    ),
    Mutant(
        "law 3: the user's latest message may leave",
        "kernel/laws.py",
        "if standing is not None and change.at.get(standing, Place.IN) != Place.IN and",
        "if standing is None and",
        "kernel/test_request.py kernel/test_pins.py",
    ),
    Mutant(
        "law 9: a retired page may be loaded",
        "kernel/laws.py",
        "if window.at(page.id) == Place.RETIRED:",
        "if window.at(page.id) == Place.DROPPED:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 4: a fold of a fold is allowed",
        "kernel/laws.py",
        "if deepest >= depth:",
        "if deepest > depth:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 4: a fold may overlap another in part",
        "kernel/laws.py",
        "left = window.stand_ins.of(fold) - chosen\n        if left:",
        "left = window.stand_ins.of(fold) - chosen\n        if left and not chosen:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 4: an excerpt may quote a page that it does not cite",
        "kernel/laws.py",
        "if {page for page, _ in move.parts} - set(move.pages):",
        "if {page for page, _ in move.parts} - set(window.pages):",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 5: an empty summary replaces its sources",
        "kernel/laws.py",
        "if move.text is not None and not move.text.strip():",
        "if move.text is not None and not move.text:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 6: a call may leave before its result comes",
        "kernel/laws.py",
        "if acts_as is Kind.CALL and any(map(awaited, (page.id, *page.sources))):",
        "if acts_as is Kind.CALL and any(map(awaited, page.sources)):",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 1: forgetting stops where a session ends",
        "forgetting/closure.py",
        "in backend.citing(number, more) if more else ():",
        "in ():",
        "kernel/test_forget.py kernel/test_collection.py",
    ),
    Mutant(
        "a summary as long as its sources is made",
        "kernel/folding.py",
        "if page.tokens >= freed:",
        "if page.tokens > 2 * freed:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 7: a fold has the trust of the system",
        "kernel/folding.py",
        "least = min(least, window.pages[page].trust)",
        "least = max(least, window.pages[page].trust)",
        "kernel/test_laws.py",
    ),
    Mutant(
        "an excerpt's tail is cut without an omission",
        "kernel/folding.py",
        "if end < len(text):\n        pieces.append",
        "if end < len(text) - 40:\n        pieces.append",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 1: a policy may forget",
        "kernel/kernel.py",
        'if policy != "user":\n                    raise LawBroken(1,',
        'if policy == "kernel":\n                    raise LawBroken(1,',
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 2: where a policy frees too little, the kernel frees nothing",
        "kernel/planning.py",
        "        if kernel.excess:\n            self.enforce(eases=eases)",
        "        if kernel.excess and eases:\n            self.enforce(eases=eases)",
        "kernel/test_laws.py kernel/test_process.py policies/test_conformance.py",
    ),
    Mutant(
        "law 2: a message larger than the window is shown whole",
        "kernel/planning.py",
        "window.at(number) == Place.IN and page.tokens > room and",
        "window.at(number) == Place.IN and page.tokens > 9 * room and",
        "kernel/test_oversize.py kernel/test_process.py",
    ),
    Mutant(
        "law 4: a policy's fact needs no source",
        "collections/collecting.py",
        "if not evidence and not by_person and self.info.kind is SegmentKind.MEMORY:",
        "if not evidence and not by_person and self.info.kind is SegmentKind.SESSION:",
        "kernel/test_collection.py",
    ),
    Mutant(
        "law 5: a plan that breaks a law is carried out in part",
        "kernel/consultation.py",
        "        except KernelError as error:\n            self.kernel.undo(point)\n",
        "        except KernelError as error:\n",
        "kernel/test_laws.py kernel/test_drive.py kernel/test_steps.py policies/test_misbehaving.py",
    ),
    Mutant(
        "law 6: a fold may take a call and leave its result",
        "kernel/laws.py",
        "if left is not None and behind is not None:",
        "if left is not None and behind is not None and left < 0:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 7: what an agent learns after an untrusted read is in force at once",
        "collections/collecting.py",
        "held = not by_person and (self.tainted or waits) and",
        "held = not by_person and waits and",
        "kernel/test_collection.py memory/test_taint.py",
    ),
    Mutant(
        "law 8: a checkpoint loses the pins",
        "kernel/checkpoint.py",
        "State(at=states[page].at, pinned=pinned, importance=importance)",
        "State(at=states[page].at, pinned=False, importance=importance)",
        "kernel/test_checkpoint.py kernel/test_pins.py kernel/test_reopen.py",
    ),
    Mutant(
        "law 8: replay gives a page of another counter its old cost",
        "kernel/replay.py",
        "            window.costs.update(_costs(backend, ChainMap(dict(pages), window.pages), foreign, counter))\n",
        "            _costs(backend, ChainMap(dict(pages), window.pages), foreign, counter)\n",
        "kernel/test_reopen.py kernel/test_checkpoint.py",
    ),
    Mutant(
        "law 9: a search about a time finds what began later",
        "collections/collecting.py",
        "return (begins is None or begins <= at) and",
        "return",
        "memory/test_recall.py kernel/test_collection.py",
    ),
    Mutant(
        "law 9: a search finds what is true no longer",
        "collections/collecting.py",
        " and (until is None or at < until)",
        "",
        "memory/test_recall.py kernel/test_collection.py",
    ),
    Mutant(
        "law 9: what is merely proposed is in the index",
        "collections/collecting.py",
        "if place is Place.OUT:\n            self.index.append(number)",
        "if place:\n            self.index.append(number)",
        "kernel/test_collection.py kernel/test_collection_machine.py",
    ),
    Mutant(
        "law 10: a tenant opens another's session by its name",
        "backends/sealed.py",
        'f"{_SESSIONS} WHERE tenant = ? AND name = ?"',
        'f"{_SESSIONS} WHERE tenant <= ? + tenant AND name = ?"',
        "backends/test_sqlite.py kernel/test_forget.py",
    ),
    Mutant(
        "law 10: a tenant sees the sessions of all",
        "backends/sealed.py",
        'f"{_SESSIONS} NOT INDEXED WHERE tenant = ? ORDER BY id"',
        'f"{_SESSIONS} NOT INDEXED WHERE tenant <= ? + tenant ORDER BY id"',
        "backends/test_sqlite.py kernel/test_forget.py",
    ),
    # The kernel: the window's figures, the prompt, replay.
    Mutant(
        "a gap forgets to take off the tokens of a page that comes back",
        "kernel/gaps.py",
        "self._put((first, last, pages - 1, total - tokens))",
        "self._put((first, last, pages - 1, total))",
        "kernel/test_gaps.py",
    ),
    Mutant(
        "handles cost nothing",
        "kernel/gaps.py",
        "self._sum += self._costs[start]",
        "self._sum += 0",
        "kernel/test_gaps.py kernel/test_bound.py kernel/test_process.py",
    ),
    Mutant(
        "a wall that goes leaves its gap in two",
        "kernel/gaps.py",
        "if 0 < at < len(self._starts):",
        "if 1 < at < len(self._starts):",
        "kernel/test_gaps.py",
    ),
    Mutant(
        "a fault ten turns after the eviction is no refault",
        "kernel/ledger.py",
        "-(10**9)) <= REFAULT",
        "-(10**9)) < REFAULT",
        "kernel/test_ledger.py kernel/test_receipts.py kernel/test_process.py",
    ),
    Mutant(
        "a prompt that fills the window counts as an overflow",
        "kernel/ledger.py",
        "stats.overflow += tokens > window",
        "stats.overflow += tokens >= window",
        "kernel/test_ledger.py kernel/test_process.py",
    ),
    Mutant(
        "law 8: a page that is unpinned stays pinned",
        "kernel/window.py",
        "pinned=event.act is Act.PIN",
        "pinned=True",
        "kernel/test_pins.py",
    ),
    Mutant(
        "law 6: a call without a result is sent",
        "kernel/render.py",
        "if part.kind is Kind.CALL and part.call not in answered]",
        "if part.kind is Kind.CALL and part.call in answered]",
        "kernel/test_window.py kernel/test_abandoned.py kernel/test_loop.py",
    ),
    Mutant(
        "law 7: a message may claim more trust than its role has",
        "wire/form.py",
        "message.trust > TRUST_OF_ROLE[role]:",
        "message.trust > TRUST_OF_ROLE[role] + 9:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "law 7: recalled words keep the trust of whoever repeats them",
        "kernel/admission.py",
        "return min([lowest, *trusts, *(there[source].trust for source in message.sources)])",
        "return min([lowest, *trusts])",
        "kernel/test_laws.py",
    ),
    Mutant(
        "a call's id may be used twice",
        "kernel/admission.py",
        "    if call not in taken:\n        return call",
        "    if call:\n        return call",
        "kernel/test_repeated_calls.py",
    ),
    Mutant(
        "a reply that was cut counts as whole",
        "kernel/drive.py",
        "cut = reply.finish == Finish.LENGTH or len(reply.text) > most",
        "cut = len(reply.text) > most",
        "kernel/test_drive.py policies/test_summarize.py",
    ),
    Mutant(
        "a provider's words reach the ledger",
        "kernel/drive.py",
        "return Answer(outcome=Outcome.FAILED, detail=type(error).__name__)",
        "return Answer(outcome=Outcome.FAILED, detail=str(error))",
        "kernel/test_drive.py kernel/test_background.py",
    ),
    # The stores.
    Mutant(
        "a text is not compared with its digest",
        "backends/codec.py",
        "if hashlib.sha256(data).digest() != digest:",
        "if not digest:",
        "backends/test_sqlite.py",
    ),
    Mutant(
        "a page is not compared with its seal",
        "backends/sealed.py",
        'if seal != seal_of("page", segment, number, record):',
        "if not seal:",
        "backends/test_damage.py",
    ),
    Mutant(
        "law 10: a tenant may read another's session by its number",
        "backends/sealed.py",
        'f"{_SESSIONS} WHERE id = ? AND tenant = ?"',
        'f"{_SESSIONS} WHERE id = ? AND tenant >= ? - tenant"',
        "backends/test_contract.py backends/test_sqlite.py",
    ),
    Mutant(
        "law 5: an error leaves half a transaction behind",
        "backends/connection.py",
        '            try:\n                db.execute("ROLLBACK")',
        '            try:\n                db.execute("COMMIT")',
        "backends/test_contract.py backends/test_interrupts.py backends/test_sqlite.py",
    ),
    Mutant(
        "a commit need not reach the disk",
        "backends/sqlite.py",
        'db.pragma("synchronous", synchronous)',
        'db.pragma("synchronous", "OFF")',
        "kernel/test_faults.py backends/test_faults.py backends/test_sqlite.py",
    ),
    Mutant(
        "forgotten bytes stay in the file's free pages",
        "backends/sqlite.py",
        'db.pragma("secure_delete", True)',
        'db.pragma("secure_delete", False)',
        "backends/test_erasure.py",
    ),
    Mutant(
        "forgotten bytes stay between the rows",
        "backends/sqlite.py",
        "damaged = wipe(self._db, pages if was_wiped else None)",
        "damaged = []",
        "backends/test_erasure.py",
    ),
    Mutant(
        "forgotten bytes stay where another program has moved them",
        "backends/sqlite.py",
        "os.stat(self.path).st_mtime_ns == noted[0]",
        "True",
        "backends/test_erasure.py",
    ),
    Mutant(
        "forgotten bytes come back from a page in memory",
        "backends/sqlite.py",
        "            self._db.release_memory()\n",
        "            pass\n",
        "backends/test_erasure.py",
    ),
    Mutant(
        "forgotten words lead to the pages of the text index",
        "backends/textindex.py",
        "        self._reguide_past(words)\n",
        "",
        "backends/test_erasure.py",
    ),
    Mutant(
        "rows of a damaged page are overwritten",
        "backends/slack.py",
        "    if fragments != len(page) - last:\n",
        "    if False:\n",
        "backends/test_erasure.py",
    ),
    Mutant(
        "other users may read the file",
        "backends/sqlite.py",
        "os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600",
        "os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644",
        "backends/test_sqlite.py",
    ),
    Mutant(
        "a damaged session is begun anew under its name",
        "backends/sqlite.py",
        "if same or there < made or any(",
        "if same or any(",
        "backends/test_damage.py",
    ),
    Mutant(
        "forgotten words stay in the text index",
        "backends/transaction.py",
        "self._index.remove((first, last, content_of(self._db, self._segment, page)) for first, last, page in ranges)",
        "self._index.remove(())",
        "backends/test_erasure.py backends/test_search.py backends/test_contract.py",
    ),
    Mutant(
        "forgotten words stay in quarantine",
        "backends/transaction.py",
        '"DELETE FROM quarantine WHERE ',
        '"DELETE FROM quarantine WHERE 0 AND ',
        "backends/test_damage.py backends/test_erasure.py",
    ),
    Mutant(
        "a text that two pages share is erased with the first",
        "backends/contenttable.py",
        '"NOT EXISTS(SELECT 1 FROM page WHERE content = content.id) AND ',
        '"',
        "backends/test_erasure.py backends/test_contract.py backends/test_machine.py",
    ),
    Mutant(
        "a forgotten page stays pinned",
        "backends/transaction.py",
        "State(Place.DROPPED))",
        "State(Place.DROPPED, pinned=True))",
        "backends/test_erasure.py backends/test_contract.py backends/test_machine.py kernel/test_forget.py",
    ),
    # The wire.
    Mutant(
        "a result without its call passes the chat form's check",
        "wire/validity.py",
        'if call not in waiting:\n                raise OrphanResult(f"{where}: no open call',
        'if call is None:\n                raise OrphanResult(f"{where}: no open call',
        "wire/test_validity.py",
    ),
    Mutant(
        "a result may stand behind other blocks",
        "wire/validity.py",
        "        if other:\n",
        "        if other and not waiting:\n",
        "wire/test_validity.py",
    ),
    Mutant(
        "unsigned thinking passes",
        "wire/validity.py",
        'if block["type"] == "thinking" and not block.get("signature"):',
        'if block["type"] == "thinking" and "signature" not in block:',
        "wire/test_validity.py",
    ),
    Mutant(
        "five cache breakpoints pass",
        "wire/validity.py",
        "if count > BREAKPOINTS:",
        "if count > BREAKPOINTS + 1:",
        "wire/test_validity.py",
    ),
    Mutant(
        "unknown keys of a call do not come back",
        "wire/chat.py",
        'and call["type"] == "function" and list(inner) == ["name", "arguments"]',
        'and call["type"] == "function"',
        "wire/test_form.py",
    ),
    Mutant(
        "a text may contain its own quotation's mark",
        "wire/quotation.py",
        "if nonce not in text:",
        "if nonce:",
        "wire/test_quotation.py",
    ),
    Mutant(
        "two calls of one message may share an id",
        "wire/parts.py",
        "    if call in seen:",
        "    if call in seen and not call:",
        "wire/test_form.py wire/test_validity.py",
    ),
    # The policies.
    Mutant(
        "fifo evicts what just came",
        "policies/fifo.py",
        "(page for page in view.pages if page.message != view.turn)",
        "(page for page in view.pages if page.message)",
        "policies/test_promises.py",
    ),
    Mutant(
        "lru evicts the most recently used",
        "policies/lru.py",
        "key=lambda page: use.turn if",
        "key=lambda page: -use.turn if",
        "policies/test_promises.py",
    ),
    Mutant(
        "mask keeps one output fewer",
        "policies/mask.py",
        "max(0, len(outputs) - self.keep)",
        "max(0, len(outputs) - self.keep + 1)",
        "policies/test_promises.py",
    ),
    Mutant(
        "importance does not decay",
        "policies/importance.py",
        "score += recency * 0.5 ** max(0.0, age)",
        "score += recency",
        "policies/test_promises.py",
    ),
    Mutant(
        "hybrid keeps no core of important pages",
        "policies/hybrid.py",
        "capacity // 4 if self.core is None else self.core",
        "0 if self.core is None else self.core",
        "policies/test_promises.py",
    ),
    Mutant(
        "tiered's core takes the oldest words first",
        "policies/tiered.py",
        "(-view.importance.get(page.id, 0.0), -page.id)",
        "(-view.importance.get(page.id, 0.0), page.id)",
        "policies/test_promises.py",
    ),
    Mutant(
        "clear_tool_uses clears less than its least",
        "policies/clear_tool_uses.py",
        "if not cleared or freed < least:",
        "if not cleared:",
        "policies/test_clear_tool_uses.py",
    ),
    Mutant(
        "chain lets two policies touch one page",
        "policies/chain.py",
        "if not touched or touched.isdisjoint(together):",
        "if not touched or together:",
        "policies/test_promises.py",
    ),
    Mutant(
        "a summary that repeats itself is accepted",
        "selection/judgement.py",
        "        if share >= 0.34:",
        "        if share >= 0.99:",
        "text/test_judgement.py",
    ),
    Mutant(
        "a summary that copies its source is accepted",
        "selection/judgement.py",
        "if copied >= 0.8 and",
        "if copied > 1 and",
        "text/test_judgement.py",
    ),
)


def occurrences(mutant: Mutant) -> int:
    """Return how often the text that a mutant replaces occurs in its file."""
    file = ROOT / "src" / "kilburn" / mutant.file
    return file.read_text(encoding="utf-8").count(mutant.old) if file.exists() else 0


def copy_checkout(folder: Path) -> Path:
    """Copy what the tests need to a new folder, and return it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def detect(mutant: Mutant, folder: Path) -> str:
    """Run a mutant's tests in a copy of the checkout. Return the first test that fails, or "" if the mutant survives."""
    target = folder / "src" / "kilburn" / mutant.file
    original = target.read_text(encoding="utf-8")
    target.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(str(folder / part) for part in ("src", "kv/src", "lab/src"))
    # The same random examples for every mutant, and none from the failure of an earlier one.
    environment = {**os.environ, "PYTHONPATH": path, "HYPOTHESIS_PROFILE": "ci"}
    environment.pop("KILBURN_TESTS", None)
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT} s"
    finally:
        target.write_text(original, encoding="utf-8")
    if run.returncode == 0:
        return ""
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if run.returncode not in (1, 2) or not failures:
        raise RuntimeError(f"{mutant.name}: pytest exits with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return failures[0].partition(" ")[2].partition(" - ")[0]


def stale_mutants() -> list[str]:
    """Describe each mutant that does not fit the code or names a test file that does not exist."""
    problems = [
        f"{mutant.name}: its text occurs {occurrences(mutant)} times in {mutant.file}"
        for mutant in MUTANTS
        if occurrences(mutant) != 1
    ]
    missing = [
        f"{mutant.name}: tests/{name} does not exist"
        for mutant in MUTANTS
        for name in mutant.tests.split()
        if not (ROOT / "tests" / name).exists()
    ]
    return problems + missing


def run_mutants(mutants: Sequence[Mutant], workers: int) -> list[str]:
    """Run mutants, print a line for each, and return the names of the survivors."""
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kilburn-mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            copies.put(copy_checkout(Path(scratch, str(number))))

        def run(mutant: Mutant) -> None:
            folder, start = copies.get(), time.monotonic()
            try:
                detector = detect(mutant, folder)
            finally:
                copies.put(folder)
            print(f"{time.monotonic() - start:6.0f} s  {mutant.name}: {detector or 'SURVIVES'}", flush=True)
            if not detector:
                survivors.append(mutant.name)

        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(run, mutants):
                pass
    return survivors


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(description="Break the code on purpose, and report which defects the tests detect.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only mutants whose names contain this text")
    parser.add_argument("--list", action="store_true", help="print the names of the mutants, and run nothing")
    parser.add_argument("--workers", type=int, default=1, help="mutants to run at a time (default: 1)")
    options = parser.parse_args(arguments)
    problems = stale_mutants()
    problems += [f"no mutant's name contains {name!r}" for name in options.names if not any(name in m.name for m in MUTANTS)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.list or problems:
        print(*(mutant.name for mutant in MUTANTS), sep="\n")
        return int(bool(problems))
    mutants = [mutant for mutant in MUTANTS if not options.names or any(name in mutant.name for name in options.names)]
    survivors = run_mutants(mutants, options.workers)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants detected")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
