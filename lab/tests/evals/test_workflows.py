"""`lab workflows`: the programs do what the world says, the script knows only its prompt, and the files decide."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn.model import Request
from kilburn_lab.evals.errands import CRAFTS, Craft, Errand, ErrandWorld
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.workflows import NAMES, ErrandScript, FlowReport, evaluate


@pytest.fixture
def world(tmp_path: Path) -> ErrandWorld:
    return ErrandWorld(tmp_path, 7)


@pytest.fixture(scope="module")
def report() -> FlowReport:
    return evaluate(("true",), streams=1, errands=18, seed=3)


def values_of(errand: Errand, craft: Craft, half: int) -> list[str]:
    """The words of a simple errand, in the order in which its program takes them."""
    pattern = re.sub(r"\\\{(\d)\\\}", r"(?P<v\1>[\\w.]+)", re.escape(craft.asks[half]))
    found = re.search(rf"(?:^|: ){pattern}\.$", errand.text)
    return [found[f"v{at}"] for at in range(len(craft.takes))] if found else []


@pytest.mark.parametrize("half", range(2))
def test_each_program_does_what_its_errands_ask_for(tmp_path: Path, half: int) -> None:
    world = ErrandWorld(tmp_path, 5, HALVES[half])
    left = set(CRAFTS)
    while left:
        errand = world.errand(1)
        world.begin(errand)
        assert not world.is_done(errand)
        fitting = [(name, craft) for name, craft in world.programs.items() if values_of(errand, craft, half)]
        # The most particular wording: "the last line first" is also "the last line".
        name, craft = max(fitting, key=lambda each: len(each[1].asks[half]))
        options = dict(re.findall(r"(-\w) ([A-Z]+)", world.shell(f"{name} --help")))
        values = dict(zip(craft.takes, values_of(errand, craft, half), strict=True))
        said = world.shell(f"{name} {' '.join(f'{letter} {values[what]}' for letter, what in options.items())}")
        assert (said, world.is_done(errand)) == ("", True), errand.text
        left.discard(craft)


def test_an_errand_is_not_done_if_a_file_is_wrong_or_was_changed(world: ErrandWorld) -> None:
    errand = world.errand(1)
    world.begin(errand)
    for name, text in errand.wanted.items():
        (world.folder / name).write_text(text)
    assert world.is_done(errand)
    first = next(iter(errand.files))
    (world.folder / first).write_text("changed\n")
    assert not world.is_done(errand)


@pytest.mark.parametrize(
    "command",
    [
        "/bin/ls",
        "cat ../secret",
        "cat /etc/passwd",
        "ls /",
        "ls ..",
        "cd /",
        "kill -9 $$",
        "enable kill; kill -9 $$",
        "echo x > y.txt",
        "exec ls",
        "python3 -c 1",
        "{first} --nosuch",
        "{first}",
    ],
)
def test_the_shell_has_nothing_but_the_world(world: ErrandWorld, command: str) -> None:
    (world.folder.parent / "secret").write_text("secret")
    before = sorted(path.name for path in world.folder.iterdir())
    said = world.shell(command.format(first=next(iter(world.programs))))
    assert re.match(r"exit \d+\n", said)
    assert "root:" not in said
    assert sorted(path.name for path in world.folder.iterdir()) == before


def test_the_script_begins_by_looking_and_follows_what_its_prompt_shows() -> None:
    def next_command(*messages: dict[str, str]) -> str:
        (reply,) = ErrandScript(random.Random(1)).stream(Request(messages=messages))
        return reply.message.parts[0].text  # type: ignore[union-attr]

    errand = {"role": "user", "content": "Join aa.txt and bb.txt, into cc.txt."}
    flow = '1. shell {"command": "boba -x {file2} -y {file3} -z {file1}"}'
    shown = {
        "role": "user",
        "content": f"<workflows-1>\nHow.\nabc workflows/join, trust tool:\nJoin {{file1}} and {{file2}}.\n\n{flow}\n",
    }
    assert next_command(errand) == '{"command":"ls bin"}'
    assert next_command(errand, shown) == '{"command":"boba -x bb.txt -y cc.txt -z aa.txt"}'


def test_memory_saves_steps_and_the_base_has_none(report: FlowReport) -> None:
    base, mine = report.row("none", "all"), report.row("true", "all")
    assert base.shown == 0 < mine.shown
    assert mine.steps < base.steps
    assert mine.fewer > 0
    assert report.kept["true"] > report.kept["none"] == 0


def test_the_same_seed_gives_the_same_figures(report: FlowReport) -> None:
    assert evaluate(("true",), streams=1, errands=18, seed=3) == report
    assert evaluate((), streams=1, errands=18, seed=4).row("none", "all") != report.row("none", "all")


def test_each_kind_is_a_third(report: FlowReport) -> None:
    assert [report.row("none", NAMES[parts]).errands for parts in (1, 2, 3, 0)] == [6, 6, 6, 18]


def test_a_judge_that_only_lies_keeps_no_success() -> None:
    """What is learned then is what failed; so what is shown does no errand."""
    told = evaluate(("lying",), streams=1, errands=9, lies=100, seed=3)
    assert told.kept["lying"] <= 9 * (1 - told.row("lying", "all").done) + 1e-9


@pytest.mark.parametrize("options", [{"streams": 0}, {"errands": 2}, {"limit": 0}, {"lies": 101}, {"half": "x"}])
def test_what_cannot_be_measured(options: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        evaluate((), **options)  # type: ignore[arg-type]


def test_the_verb_prints_a_table() -> None:
    said = kilburn("lab", "workflows", "--sample", "1", "--errands", "3", "--judge", "true")
    assert said.status == 0
    assert "Workflows kept and retired: none 0 and 0, true " in said.out
