from __future__ import annotations

import kilburn
from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.future import future_of
from kilburn_lab.evals.references import Reference, references, shuffle_names
from kilburn_lab.evals.sample import sample_of

QUIET = Step("hm", "pwd", "nothing")


def test_a_use_is_the_line_that_the_name_stands_in() -> None:
    run = Trajectory(
        "r", (), (Step("look", "ls", "alpha_file.py\nthe beta_file.py\n"), QUIET, Step("so", "open beta_file.py", ""))
    )
    [(page, [(turn, [span])])] = [(page, list(uses)) for page, uses in future_of(run, references(run)).items()]
    assert (page, turn) == (3, 7)
    assert run.steps[0].observation[slice(*span)] == "the beta_file.py"


def test_pages_and_turns_are_those_of_a_process() -> None:
    for run in sample_of(None, 3).runs:
        future = future_of(run, references(run))
        with kilburn.open(":memory:", window=100_000, tokenizer="chars/4") as store:
            session = store.session("run")
            for step in run.steps:
                for role, text in (("assistant", step.thought), ("assistant", step.action), ("user", step.observation)):
                    session.append({"role": role, "content": text})
            pages = {page.id: page for page, _ in session.contents.pages()}
            shown = {
                (turn, session.recall(f"p{page}")[slice(*span)])
                for page, uses in future.items()
                for turn, spans in uses
                for span in spans
            }
            assert all(page.message == number for number, page in pages.items())
        for reference in references(run):
            assert any(turn == 3 * reference.step + 1 and reference.name in line for turn, line in shown)


def test_the_newest_output_serves_and_lines_are_shared() -> None:
    both = "first_name and other_name stand here"
    steps = (
        Step("", "", f"first_name\n{both}"),
        Step("", "", f"{both}\nother_name\nfirst_name far too long a line for it"),
        QUIET,
        Step("", "use other_name", ""),
        QUIET,
        Step("", "use first_name", ""),
    )
    run = Trajectory("r", (), steps)
    wanted = [Reference("r", 3, "other_name", (0, 1)), Reference("r", 5, "first_name", (0, 1))]
    text = steps[1].observation
    used = {turn: [text[slice(*span)] for span in spans] for turn, spans in future_of(run, wanted)[6]}
    assert used == {10: ["other_name"], 16: [both]}
    shared = [Reference("r", 3, "and", (1,)), Reference("r", 5, "first_name", (1,))]
    assert future_of(run, shared) == {6: ((16, ((0, len(both)),)),)}


def test_foreign_names_are_no_future() -> None:
    runs = sample_of(None, 6).runs
    mixed = shuffle_names([reference for run in runs for reference in references(run)], seed=1)
    for run in runs:
        assert future_of(run, [reference for reference in mixed if reference.run == run.id]) == {}
