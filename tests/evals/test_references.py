from __future__ import annotations

from kilburn.evals.references import names, references, shuffle_names
from kilburn.evals.trajectories import HeadMessage, Step, Trajectory, synthetic


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
