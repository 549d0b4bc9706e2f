"""`eval drift`: what is planted is what is looked for, loss is counted as it happens, and the promises of pins,
depth and addresses show in the report."""

from __future__ import annotations

import json
import random
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn.model import Request
from kilburn.testing import Scripted
from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.drift import evaluate, measure
from kilburn_lab.evals.drift_report import DriftReport, Probe, Trial
from kilburn_lab.evals.plants import ARMS, FACTS, RULES, garden, work


@pytest.fixture(scope="module")
def report() -> DriftReport:
    """Four policies, few replicates."""
    return evaluate(["summarize", "recursive", "hybrid", "fifo"], replicates=3, passes=[1, 6])


@pytest.mark.parametrize("policy", ["summarize", "hybrid", "fifo"])
def test_what_left_the_window_is_one_search_or_one_recall_away(report: DriftReport, policy: str) -> None:
    for row in report.shares:
        if row.policy == policy:
            assert row.recalled == 1.0
            assert row.recalls <= 1
            assert row.shown <= row.searched <= 1.0
            assert row.shown_low <= row.shown <= row.shown_high
    assert report.share("fifo", "fact", 6).shown < 0.2


def test_rules_stay_wherever_they_stand_and_facts_do_not(report: DriftReport) -> None:
    """The kernel keeps rules of a plain message too. What nobody holds leaves, so the measure can say so."""
    for policy in ("summarize", "recursive", "hybrid", "fifo"):
        for arm in ("system", "pinned", "plain"):
            assert report.share(policy, "rule", 6, arm).shown_low == 1.0
    assert report.share("fifo", "fact", 6).shown == 0.0


def test_what_a_policy_keeps_of_its_prefix_stands_beside_what_it_loses(report: DriftReport) -> None:
    for row in report.losses:
        assert row.kept is not None
        assert 0.0 < row.kept < 1.0
        assert row.again > 0
    assert {"kept", "again"} <= set(report.table().split())


def test_what_must_hold_holds(report: DriftReport) -> None:
    assert {row.arm for row in report.health} == set(ARMS)
    for row in report.health:
        assert (row.resolved, row.changed, row.overflow, row.lost) == (1.0, 0, 0, 0)
        assert row.depth <= (6 if row.policy == "recursive" else 1)
        assert sum(row.outcomes.values()) >= 3 * 6
        assert 0.0 < row.pinned < 0.15


def test_summaries_of_summaries_get_deeper_and_their_sources_farther(report: DriftReport) -> None:
    assert {row.depth for row in report.health if row.policy == "recursive"} == {6}
    last = report.share("recursive", "fact", 6)
    assert last.recalled == last.shown < 1.0
    assert last.recalls == 6
    assert report.loss("recursive").back == 0.0


def forgetful(chance: float, seed: int = 0) -> Scripted:
    """A model that repeats what it is given, but for a share of the lines that it forgets each time."""
    calls = count()

    def answer(request: Request) -> str:
        log = str(request.messages[-1]["content"]).partition("\n")[2].partition("\n</log-")[0]
        memory = random.Random(f"{seed}/{next(calls)}")
        kept = "\n".join(line for line in log.split("\n") if memory.random() >= chance)
        return kept[: 4 * request.max_tokens] or "nothing"

    return Scripted([answer] * 10_000)


def test_a_loss_of_one_line_in_ten_at_each_pass_is_measured_as_such_and_compounds() -> None:
    curves = [
        trial.curve
        for seed in range(8)
        for trial in [measure("recursive(to=1500)", "plain", seed, window=4000, passes=(12,), model=forgetful(0.1, seed))]
    ]
    trials = [Trial(policy="r", arm="plain", replicate=seed, window=4000, curve=curve) for seed, curve in enumerate(curves)]
    loss = DriftReport.of(trials, window=4000, passes=[12], seed=0).loss("r")
    assert loss.low < 0.1 < loss.high
    assert 0.06 < loss.rate < 0.14
    assert loss.back == 0.0
    assert loss.curve[-1] == pytest.approx(loss.compound, abs=0.15)
    assert sorted(loss.curve, reverse=True) == loss.curve


def test_words_that_only_copy_and_forget_are_rejected_where_summaries_are_judged() -> None:
    spec = "summarize(trigger=3000, tail=1000, to=1500)"
    report = evaluate([spec], arms=["plain"], replicates=4, window=8000, passes=[5], model=forgetful(0.3))
    alone, asking = report.losses
    assert asking.policy == f"{spec} +model"
    assert asking.curve == alone.curve
    assert report.health[-1].asked == {"done": 20}
    assert {row.depth for row in report.health} == {1}


def probe(passes: int, *, shown: bool) -> Probe:
    return Probe(kind="fact", passes=passes, shown=shown, searched=True, recalled=True, recalls=0 if shown else 1, cost=7)


def test_losses_and_returns_are_counted_from_one_compaction_to_the_next() -> None:
    first = Trial(policy="p", arm="plain", replicate=0, window=9, curve=[[True, False], [False, True], [False, True]])
    first.seen, first.probes = [10, 20, 30], [probe(2, shown=True), probe(2, shown=False)]
    second = Trial(policy="p", arm="plain", replicate=1, window=9, curve=[[True, True]], seen=[12], changed=5, lost=True)
    made = DriftReport.of([first, second], window=9, passes=[2], seed=0)
    loss = made.loss("p")
    assert loss.rate == 1 / 3
    assert loss.back == 1 / 2
    assert loss.curve == [3 / 4, 1 / 2, 1 / 2]
    assert loss.compound == pytest.approx((2 / 3) ** 3)
    row = made.share("p", "fact", 2)
    assert (row.trials, row.seen, row.shown, row.recalls, row.cost) == (1, 20, 0.5, 1, 7)
    assert (made.health[0].changed, made.health[0].lost) == (5, 1)
    with pytest.raises(KeyError):
        made.share("p", "fact", 3)


@pytest.mark.parametrize("seed", range(3))
def test_a_garden_holds_its_plants_and_the_work_none_of_them(seed: int) -> None:
    gardens = {arm: garden(seed, arm) for arm in ARMS}
    plants = {arm: [plant for plant, _ in made.plants] for arm, made in gardens.items()}
    assert plants["system"] == plants["pinned"] == plants["plain"]
    for made in gardens.values():
        assert [plant.kind for plant, _ in made.plants] == ["rule"] * RULES + ["fact"] * FACTS
        for plant, at in made.plants:
            assert plant.value in made.messages[at]["content"]
            assert sum(plant.value in json.dumps(message) for message in made.messages) == 1
    assert gardens["pinned"].messages == gardens["plain"].messages
    parts = gardens["plain"].parts
    steps = list(islice(work(seed, parts), 120))
    later = json.dumps(steps)
    assert not [plant.value for plant in plants["plain"] if plant.value in later]
    assert all(part in later for part in parts), "a search has to choose"
    assert steps == list(islice(work(seed, parts), 120))
    assert len({message["tool_calls"][0]["id"] for message, _ in steps}) == 120


def test_recorded_runs_serve_as_work_and_begin_anew_at_their_end(tmp_path: Path) -> None:
    steps = tuple(Step(f"thought {number}", f"cat part-{number}", "recorded line\n" * 40) for number in range(5))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(msgspec.json.encode(Trajectory("r", (), steps)))
    report = evaluate(["fifo"], arms=["plain"], replicates=2, passes=[1, 9], data=file)
    assert report.share("fifo", "fact", 9).trials == 2
    served = list(islice(work(0, ["part"], [Trajectory("r", (), steps)]), 7))
    assert ["part-0" in message["tool_calls"][0]["function"]["arguments"] for message, _ in served] == [
        True,
        *[False] * 4,
        True,
        False,
    ]


def test_the_same_seed_gives_the_same_report() -> None:
    one, two = (evaluate(["hybrid"], arms=["plain"], replicates=2, passes=[3], seed=5).to_json() for _ in range(2))
    assert one == two
    assert evaluate(["hybrid"], arms=["plain"], replicates=2, passes=[3], seed=9).to_json() != one


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"window": 10}, {"passes": []}, {"passes": [0]}, {"replicates": 0}, {"arms": ["nowhere"]}]
    for arguments in wrong:
        with pytest.raises(SpecError):
            evaluate(**arguments)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(SpecError, match="no runs"):
        evaluate(["fifo"], data=empty)
    with pytest.raises(SpecError, match="no policies"):
        evaluate(["no_such_policy"], replicates=1)


def test_the_command_prints_a_table_or_json() -> None:
    words = ("lab", "drift", "--policy", "fifo", "--arm", "plain", "--sample", 1, "--passes", 2)
    table = kilburn(*words)
    assert table.status == 0, table.err
    assert "Facts, verbatim" in table.out
    found = kilburn(*words, "--json").json
    assert {(row["policy"], row["kind"], row["passes"]) for row in found["shares"]} == {("fifo", "fact", 2), ("fifo", "rule", 2)}


def test_wrong_input_of_the_command_exits_2(tmp_path: Path) -> None:
    for words in (("--policy", "nope"), ("--arm", "nope"), ("--data", tmp_path / "none.jsonl")):
        said = kilburn("lab", "drift", "--sample", 1, "--passes", 1, *words)
        assert (said.status, said.out) == (2, ""), words
        assert "Traceback" not in said.err
