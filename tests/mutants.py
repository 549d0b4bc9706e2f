"""Breaks the code on purpose, one place at a time, and reports which breaks the tests notice.

    python tests/mutants.py              every mutant
    python tests/mutants.py NAME ...     some of them
    python tests/mutants.py --list       their names, and whether the text that each changes is in the code

A mutant replaces one piece of text in a copy of the checkout and runs the tests that should fail then. A text that is not
found exactly once is an error: bring the mutant up to date with the code. The exit status is 1 where a mutant survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "kv", "lab", "tests", "conftest.py", "pyproject.toml")
SECONDS = 600
"""How long the tests of one mutant may run; a mutant that hangs is noticed."""


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Args:
        name: what goes wrong.
        file: below src/kilburn.
        old, new: the text there, and what takes its place.
        tests: below tests/, separated by blanks.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # The kernel: the laws of moves.
    Mutant(
        "a pinned page may leave",
        "kernel/laws.py",
        "if page in window.pins:",
        "if page in ():",
        "kernel/test_pins.py",
    ),
    Mutant(
        "the user's latest message may leave",
        "kernel/laws.py",
        "if standing is not None and change.at.get(standing, Place.IN) != Place.IN and",
        "if standing is None and",
        "kernel/test_request.py kernel/test_pins.py",
    ),
    Mutant(
        "a retired page may be loaded",
        "kernel/laws.py",
        "if window.at(page.id) == Place.RETIRED:",
        "if window.at(page.id) == Place.DROPPED:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "a fold of a fold is allowed",
        "kernel/laws.py",
        "if deepest >= depth:",
        "if deepest > depth:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "a fold may overlap another in part",
        "kernel/laws.py",
        "left = window.stand_ins.of(fold) - chosen\n        if left:",
        "left = window.stand_ins.of(fold) - chosen\n        if left and not chosen:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "an excerpt may quote a page that it does not cite",
        "kernel/laws.py",
        "if {page for page, _ in move.parts} - set(move.pages):",
        "if {page for page, _ in move.parts} - set(window.pages):",
        "kernel/test_laws.py",
    ),
    Mutant(
        "an empty summary replaces its sources",
        "kernel/laws.py",
        "if move.text is not None and not move.text.strip():",
        "if move.text is not None and not move.text:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "a call may leave before its result comes",
        "kernel/laws.py",
        "if acts_as is Kind.CALL and any(map(awaited, (page.id, *page.sources))):",
        "if acts_as is Kind.CALL and any(map(awaited, page.sources)):",
        "kernel/test_laws.py",
    ),
    Mutant(
        "forgetting stops where a session ends",
        "kernel/forgetting.py",
        "in store.citing(number, more) if more else ():",
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
        "a fold has the trust of the system",
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
        "a page that is unpinned stays pinned",
        "kernel/window.py",
        "pinned=event.act is Act.PIN",
        "pinned=True",
        "kernel/test_pins.py",
    ),
    Mutant(
        "a call without a result is sent",
        "kernel/render.py",
        "if part.kind is Kind.CALL and part.call not in answered]",
        "if part.kind is Kind.CALL and part.call in answered]",
        "kernel/test_window.py kernel/test_abandoned.py kernel/test_loop.py",
    ),
    Mutant(
        "a message may claim more trust than its role has",
        "wire/form.py",
        "message.trust > TRUST_OF_ROLE[role]:",
        "message.trust > TRUST_OF_ROLE[role] + 9:",
        "kernel/test_laws.py",
    ),
    Mutant(
        "recalled words keep the trust of whoever repeats them",
        "kernel/admission.py",
        "return min([lowest, *trusts, *(there[source].trust for source in message.sources)])",
        "return min([lowest, *trusts])",
        "kernel/test_laws.py",
    ),
    Mutant(
        "a call's id may be used twice",
        "kernel/admission.py",
        "if known is not None or part.call in calls:",
        "if part.call in calls:",
        "kernel/test_process.py kernel/test_names.py kernel/test_loop.py",
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
        "stores/codec.py",
        "if hashlib.sha256(data).digest() != digest:",
        "if not digest:",
        "stores/test_sqlite.py",
    ),
    Mutant(
        "no row is compared with its seal",
        "stores/sealed.py",
        "return seal == seal_of(*values) if self.seals else True",
        "return True",
        "stores/test_damage.py",
    ),
    Mutant(
        "a tenant may read another's session by its number",
        "stores/sealed.py",
        'f"{_SESSIONS} WHERE id = ? AND tenant = ?"',
        'f"{_SESSIONS} WHERE id = ? AND tenant >= ? - tenant"',
        "stores/test_contract.py stores/test_sqlite.py",
    ),
    Mutant(
        "an error leaves half a transaction behind",
        "stores/connection.py",
        '            try:\n                db.execute("ROLLBACK")',
        '            try:\n                db.execute("COMMIT")',
        "stores/test_contract.py stores/test_interrupts.py stores/test_sqlite.py",
    ),
    Mutant(
        "a commit need not reach the disk",
        "stores/sqlite.py",
        'db.pragma("synchronous", synchronous)',
        'db.pragma("synchronous", "OFF")',
        "stores/test_sqlite.py stores/test_faults.py",
    ),
    Mutant(
        "forgotten bytes stay in the file's free pages",
        "stores/sqlite.py",
        'db.pragma("secure_delete", True)',
        'db.pragma("secure_delete", False)',
        "stores/test_erasure.py",
    ),
    Mutant(
        "forgotten bytes stay between the rows",
        "stores/sqlite.py",
        "damaged = wipe(self._db)",
        "damaged = []",
        "stores/test_erasure.py",
    ),
    Mutant(
        "forgotten bytes come back from a page in memory",
        "stores/sqlite.py",
        "        self._db.release_memory()\n",
        "",
        "stores/test_erasure.py",
    ),
    Mutant(
        "forgotten words lead to the pages of the text index",
        "stores/textindex.py",
        "        self._reguide_past(words)\n",
        "",
        "stores/test_erasure.py",
    ),
    Mutant(
        "rows of a damaged page are overwritten",
        "stores/slack.py",
        "    if fragments != len(page) - last:\n",
        "    if False:\n",
        "stores/test_erasure.py",
    ),
    Mutant(
        "other users may read the file",
        "stores/sqlite.py",
        "os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600",
        "os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644",
        "stores/test_sqlite.py",
    ),
    Mutant(
        "a damaged session is begun anew under its name",
        "stores/sqlite.py",
        "if same or there < self._sessions_made() or any(",
        "if same or any(",
        "stores/test_damage.py",
    ),
    Mutant(
        "forgotten words stay in the text index",
        "stores/transaction.py",
        "self._index.remove((first, last, content_of(self._db, self._process, page)) for first, last, page in ranges)",
        "self._index.remove(())",
        "stores/test_erasure.py stores/test_search.py stores/test_contract.py",
    ),
    Mutant(
        "forgotten words stay in quarantine",
        "stores/transaction.py",
        '        self._db.execute("DELETE FROM quarantine WHERE process = ?", (self._process,))\n',
        "",
        "stores/test_damage.py stores/test_erasure.py",
    ),
    Mutant(
        "a text that two pages share is erased with the first",
        "stores/transaction.py",
        'WHERE id = ?1 AND NOT EXISTS(SELECT 1 FROM page WHERE content = ?1)"',
        'WHERE id = ?1"',
        "stores/test_erasure.py stores/test_contract.py stores/test_machine.py",
    ),
    Mutant(
        "a forgotten page keeps its mark",
        "stores/transaction.py",
        "_stand(self._process, number, State(Place.DROPPED))",
        "_stand(self._process, number, State(Place.DROPPED, pinned=True))",
        "stores/test_erasure.py stores/test_contract.py stores/test_machine.py kernel/test_forget.py",
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
        "text/judgement.py",
        "        if share >= 0.34:",
        "        if share >= 0.99:",
        "text/test_judgement.py",
    ),
    Mutant(
        "a summary that copies its source is accepted",
        "text/judgement.py",
        "if copied >= 0.8 and",
        "if copied > 1 and",
        "text/test_judgement.py",
    ),
)


def places_of(mutant: Mutant) -> int:
    """How often the text that it changes is in the code."""
    file = ROOT / "src" / "kilburn" / mutant.file
    return file.read_text(encoding="utf-8").count(mutant.old) if file.exists() else 0


def copied(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def notices(mutant: Mutant, folder: Path) -> str:
    """Which test notices a mutant in the copy, or "" where none does."""
    target = folder / "src" / "kilburn" / mutant.file
    whole = target.read_text(encoding="utf-8")
    target.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("src", "kv/src", "lab/src"))}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        target.write_text(whole, encoding="utf-8")
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        raise RuntimeError(f"{mutant.name}: pytest ends with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].partition(" ")[2].partition(" - ")[0]


def main(names: list[str]) -> int:
    lost = [
        f"{mutant.name}: its text is {places_of(mutant)} times in {mutant.file}" for mutant in MUTANTS if places_of(mutant) != 1
    ]
    lost += [
        f"{mutant.name}: there is no tests/{name}"
        for mutant in MUTANTS
        for name in mutant.tests.split()
        if not (ROOT / "tests" / name).exists()
    ]
    unknown = set(names) - {mutant.name for mutant in MUTANTS} - {"--list"}
    print(*lost, *(f"no mutant is called {name!r}" for name in unknown), sep="\n", file=sys.stderr)
    if "--list" in names or lost or unknown:
        print(*(mutant.name for mutant in MUTANTS), sep="\n")
        return int(bool(lost or unknown))
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="kilburn-mutants-") as scratch:
        folder = copied(Path(scratch))
        for mutant in chosen:
            began = time.monotonic()
            found = notices(mutant, folder)
            print(f"{time.monotonic() - began:6.0f} s  {mutant.name}: {found or 'SURVIVES'}", flush=True)
            survivors += [] if found else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
