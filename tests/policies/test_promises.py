"""What each policy promises in its docstring, seen from a session that uses it."""

from __future__ import annotations

import json

import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.testing import FakeClock, check_laws

TASK = user("Fix the tokenizer cache in src/parser.py")


def opened(policy: str, window: int = 1000, clock: FakeClock | None = None) -> Session:
    session = Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4", clock=clock or FakeClock()).session("a")
    session.append(TASK)
    return session


def resident(session: Session) -> list[str]:
    return [page.address for page in session.window.resident()]


def filler(number: int, size: int = 380) -> str:
    return f"filler {number} ".ljust(size, "z")


def test_fifo_evicts_the_oldest_first_and_pages_of_a_group_together() -> None:
    session = opened("fifo(spare=0)", 500)
    session.append(assistant(None, call_of("c")), tool("c", filler(0)))
    for number in range(6):
        session.append(user(filler(number)))
    gone = [address for event in session.ledger.events() if event.act is Act.EVICT for address in event.pages]
    assert gone[:2] == [2, 3]
    assert gone == sorted(gone)
    assert resident(session)[0] == "p1"


def test_fifo_spare_frees_more_at_once() -> None:
    counts = {}
    for spare in (0, 400):
        session = opened(f"fifo(spare={spare})")
        for number in range(40):
            session.append(user(filler(number)))
        counts[spare] = sum(event.act is Act.EVICT for event in session.ledger.events())
    assert counts[400] < counts[0]


@pytest.mark.parametrize("policy", ["fifo", "lru", "importance", "tiered"])
def test_what_just_came_stays_though_more_were_to_be_freed(policy: str) -> None:
    """The older pages free the excess, and not the eighth of the window beyond it."""
    session = opened(policy, 400)
    session.append(assistant(filler(1, 100)), assistant(filler(2, 100)))
    session.append(assistant(filler(3, 1380)))
    (move,) = [event for event in session.ledger.events() if event.act is Act.EVICT]
    assert move.policy == policy
    assert set(move.pages) <= {2, 3}
    assert session.render()[-1] == assistant(filler(3, 1380))


def test_oldest_evicts_no_more_than_it_must_and_the_users_words_last() -> None:
    session = opened("oldest", 600)
    session.append(user(filler(0, 200)))
    for number in range(1, 12):
        session.append(assistant(filler(number)))
    moves = [event for event in session.ledger.events() if event.act is Act.EVICT]
    assert all(len(move.pages) == 1 and move.policy == "oldest" for move in moves)
    assert [move.pages[0] for move in moves][:3] == [3, 4, 5]
    assert "p2" in resident(session)
    # A filler and one handle more would not have fitted.
    assert session.prompts.use + 95 > 600


def test_where_a_policy_frees_nothing_the_kernel_does_what_oldest_would() -> None:
    ledgers = {}
    for policy in ("oldest", "mask"):
        session = opened(policy, 600)
        session.append(assistant(None, call_of("c")), tool("c", filler(0)))
        for number in range(9):
            session.append(user(filler(number)), assistant(filler(number, 90)))
        ledgers[policy] = [
            event.pages for event in session.ledger.events() if event.act is Act.EVICT and event.why == "over capacity"
        ]
        assert ledgers[policy]
    assert ledgers["mask"] == ledgers["oldest"]


def test_lru_keeps_what_was_recalled() -> None:
    session = opened("lru(spare=0)")
    for number in range(8):
        session.append(user(filler(number)))
    session.recall("p2")
    session.append(user(filler(8)), user(filler(9)), user(filler(10)))
    assert "p2" in resident(session)
    assert "p3" not in resident(session)


def test_importance_keeps_what_was_marked_and_what_is_near_the_task() -> None:
    session = opened("importance(spare=0)")
    session.append(assistant("the deploy key lives in vault seven " + "k" * 300))
    session.rate("p2", 1.0)
    session.append(assistant("parser tokenizer cache: src parser holds the tokenizer cache " + "k" * 200))
    for number in range(30):
        session.append(assistant(filler(number)))
    assert "p2" in resident(session)
    assert resident(session)[-1] == f"p{session.window.last}", "the newest is never the victim of its own arrival"


def test_importance_decays_with_time_not_with_looks() -> None:
    clock = FakeClock(tick=0.0)
    session = opened("importance(spare=0, explicit=0.0, nearness=0.0, frequency=0.0, half_life=10.0, turns=1e9)", clock=clock)
    for number in range(8):
        session.append(user(filler(number)))
        clock.advance(100)
    session.recall("p3")
    for _ in range(50):
        session.edits.idle()
    session.append(user(filler(8)), user(filler(9)), user(filler(10)))
    assert "p3" in resident(session)
    assert "p2" not in resident(session)


def test_importance_lets_go_of_what_was_used_long_ago() -> None:
    session = opened("importance(spare=0, explicit=0.0, nearness=0.0, half_life=1e9, turns=5.0)", 100_000)
    session.append(assistant(filler(0)))
    session.recall("p2")
    for number in range(1, 41):
        session.append(assistant(filler(number)))
    session.edits.resize(Budget(session.prompts.use - 25 * session.window.pages[2].tokens))
    assert "p2" not in resident(session)


def test_tiered_prefers_the_newest_words_of_the_user() -> None:
    session = opened("tiered(core=60)")
    session.append(user(filler(0, 160)), user(filler(1, 160)), user("the latest request stays anyway"))
    for number in range(20):
        session.append(assistant(filler(number)))
    assert "p3" in resident(session)
    assert "p2" not in resident(session)


def test_hybrid_keeps_what_was_marked_whole() -> None:
    session = opened("hybrid")
    session.append(assistant("the deploy key lives in vault seven " + "k" * 300))
    session.rate("p2", 1.0)
    for number in range(20):
        session.append(assistant(filler(number)))
    assert "p2" in resident(session)


def test_tiered_keeps_the_users_words_longer_than_outputs() -> None:
    session = opened("tiered")
    session.append(user("constraint: never touch the lock file"))
    for number in range(20):
        session.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    assert "p2" in resident(session)
    assert "never touch the lock file" in json.dumps(session.render())


def test_mask_turns_old_outputs_into_handles_and_keeps_the_calls() -> None:
    session = opened("mask(keep=2)")
    for number in range(14):
        session.append(
            assistant(f"step {number}", call_of(f"c{number}", path=f"f{number}.py")), tool(f"c{number}", filler(number))
        )
    prompt = session.render()
    outputs = [message["content"] for message in prompt if message["role"] == "tool"]
    assert len(outputs) == 14
    whole = [number for number, output in enumerate(outputs) if output == filler(number)]
    assert whole[-2:] == [12, 13]
    masked = [output for output in outputs if " out: " in output]
    assert masked
    assert "f0.py" in masked[0], "the handle says what it was"
    assert sum(bool(message.get("tool_calls")) for message in prompt) == 14
    check_laws(session)


def test_mask_keeps_exactly_the_last_outputs() -> None:
    session = opened("mask(keep=3, trigger=100)", 10_000)
    for number in range(6):
        session.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    outputs = [message["content"] for message in session.render() if message["role"] == "tool"]
    assert [number for number, output in enumerate(outputs) if output == filler(number)] == [3, 4, 5]


def test_chain_leaves_out_what_an_earlier_policy_touched() -> None:
    session = opened("chain(fifo, lru)")
    for number in range(20):
        session.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]


def test_mask_leaves_excluded_tools_and_small_gains_alone() -> None:
    session = opened("mask(keep=0, exclude=['plan'])")
    session.append(assistant(None, call_of("p", "plan")), tool("p", filler(99)))
    for number in range(7):
        session.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    assert filler(99) in [message["content"] for message in session.render()]
    waits = opened("mask(keep=0, least=100000)")
    for number in range(9):
        waits.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    assert not [event for event in waits.ledger.events() if event.act is Act.EVICT and event.policy.startswith("mask")]
    assert waits.render().tokens <= 1000


def test_summarize_acts_at_its_trigger_and_folds_from_originals() -> None:
    session = opened("summarize(ask=False)", 2000)
    last = 0
    for number in range(60):
        session.append(
            assistant(
                f"decided to use option {number} in src/mod{number}.py because of ValueError {number}. " + "Then more talk. " * 6
            )
        )
        folds = sum(event.act is Act.FOLD and event.policy.startswith("summarize") for event in session.ledger.events())
        if folds == 1 and not last:
            last = session.window.last
    assert 0 < last < 60
    for page, _ in session.contents.pages():
        assert page.depth <= 1
        assert all(source > 0 for source in page.sources)
    assert "option 59" in json.dumps(session.render())
    assert session.stats().fallbacks == 0, "the kernel never had to help"
    check_laws(session)


def test_preprocess_condenses_on_the_way_in_only() -> None:
    session = opened("preprocess(limit=100, to=60)", 8000)
    log = "\n".join(f"INFO step {number} ok" for number in range(300)) + "\nERROR disk 7 failed at /var/data/x.bin\nINFO done"
    session.append(assistant(None, call_of("c")), tool("c", log))
    shown = session.render()[-1]["content"]
    assert len(shown) < len(log) // 4
    assert "ERROR disk 7 failed at /var/data/x.bin" in shown
    assert session.recall("p3") == log
    session.append(user(log))
    assert session.render()[-1]["content"] == log, "only outputs of tools"
    session.append(assistant(None, call_of("d")), tool("d", "short"))
    assert session.render()[-1]["content"] == "short"
    check_laws(session)


def test_chain_asks_in_order_and_touches_no_page_twice() -> None:
    session = opened("chain(mask(keep=1), fifo(spare=0))")
    for number in range(12):
        session.append(assistant(f"step {number} " + "t" * 200, call_of(f"c{number}")), tool(f"c{number}", filler(number)))
    acts = [event for event in session.ledger.events() if event.act in (Act.EVICT, Act.REFUSE)]
    assert any("tool outputs" in event.why for event in acts)
    assert any(event.why == "oldest first" for event in acts)
    assert not [event for event in acts if event.act is Act.REFUSE]
    check_laws(session)
    with pytest.raises(ValueError, match="at least one"):
        type(session._planner.policy)()
