from __future__ import annotations

from kilburn.wire.trajectory import HeadMessage, Step, Trajectory
from kilburn_lab.evals.references import copies, names, references, shuffle_names
from kilburn_lab.evals.trajectories import braided, synthetic


def run_of(*steps: tuple[str, str, str], head: str = "") -> Trajectory:
    return Trajectory("r", (HeadMessage("user", head),), tuple(Step(*step) for step in steps))


OLD = ("look", "ls", "alpha_file.py\nbeta_file.py")
NEXT = ("hm", "pwd", "nothing")


def found(*steps: tuple[str, str, str], head: str = "") -> list[str]:
    return [reference.name for reference in references(run_of(*steps, head=head))]


def test_a_name_from_an_older_output_is_a_reference() -> None:
    [reference] = references(run_of(OLD, NEXT, ("the second", "open beta_file.py", "")))
    assert (reference.step, reference.name, reference.origins) == (2, "beta_file.py", (0,))


def test_what_the_agent_could_have_from_elsewhere_is_none() -> None:
    act = ("so", "open beta_file.py", "")
    assert found(OLD, act) == []  # from the last output
    assert found(OLD, NEXT, act, head="see beta_file.py") == []
    assert found(OLD, ("beta_file.py is it", "pwd", "nothing"), act) == []
    assert found(OLD, ("hm", "cat beta_file.py", "nothing"), act) == []
    assert found(OLD, ("hm", "pwd", "beta_file.py"), act) == []
    assert found(NEXT, NEXT, act) == []


def test_it_counts_once_and_the_thought_beside_it_does_not_take_it_away() -> None:
    act = ("open beta_file.py", "open beta_file.py beta_file.py", "")
    assert found(OLD, NEXT, act, NEXT, act) == ["beta_file.py"]


def test_names_are_whole_and_long_enough() -> None:
    assert names("a.b foo bar_baz /src/x.py self.node, (quux)") == {"bar_baz", "/src/x.py", "self.node"}
    assert found(("", "", "beta_file.py"), NEXT, ("", "open beta_file", "")) == []


def test_shuffled_names_come_from_other_runs() -> None:
    listed = [reference for run in synthetic(6, seed=2) for reference in references(run)]
    own = {(reference.run, reference.name) for reference in listed}
    mixed = shuffle_names(listed, seed=1)
    assert len(mixed) == len(listed)
    assert not own & {(reference.run, reference.name) for reference in mixed}
    assert mixed == shuffle_names(listed, seed=1)


def test_copies_are_lines_and_values() -> None:
    text = "  41:    raise ValueError('no lines')\nversion 3.11.7, commit a3f91c22; 120 of 4096 kB in parser_file.py"
    assert copies(text) == {
        "raise ValueError('no lines')",
        "version 3.11.7, commit a3f91c22; 120 of 4096 kB in parser_file.py",
        "3.11.7",
        "a3f91c22",
        "120",
        "4096",
    }


def test_a_copied_line_is_a_reference_and_its_line_number_does_not_matter() -> None:
    old = ("look", "open a.py", "12:    return len(lines) - 1\n13:")
    run = run_of(old, NEXT, ("so", "edit 12:12\nreturn len(lines) - 1\nend_of_edit", ""))
    assert [(one.name, one.origins) for one in references(run, "copy")] == [("return len(lines) - 1", (0,))]


def test_before_a_reply_its_thought_counts_too() -> None:
    run = run_of(OLD, NEXT, ("beta_file.py is next", "open alpha_file.py", ""))
    assert [one.name for one in references(run)] == ["alpha_file.py"]
    assert [one.name for one in references(run, reply=True)] == ["alpha_file.py", "beta_file.py"]


def test_braided_runs_keep_their_steps_and_refer_to_their_own_outputs_only() -> None:
    runs = list(synthetic(12, seed=3))
    sessions = list(braided(runs, 4000, seed=1))
    assert 1 < len(sessions) < 12
    told = [step for session in sessions for step in session.steps if not step.user]
    assert len(told) == sum(len(run.steps) for run in runs)
    for run in runs:
        own = [step for step in told if step.task == run.id]
        assert [(step.thought, step.action, step.observation) for step in own] == [
            (step.thought, step.action, step.observation) for step in run.steps
        ]
        assert [step.observation for session in sessions for step in session.steps if step.user and step.task == run.id]
    for session in sessions:
        for one in references(session):
            assert {session.steps[at].task for at in one.origins} == {session.steps[one.step].task}
    assert sessions == list(braided(runs, 4000, seed=1))
