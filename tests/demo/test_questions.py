"""Questions are made from the sources, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

from kilburn.demo.library import read_lines
from kilburn.demo.questions import KINDS, questions


def covered(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): len(read_lines(path)) for path in root.rglob("*.py")}


def test_a_seed_fixes_the_questions(shared_tree: Path) -> None:
    files = covered(shared_tree)
    first = questions(shared_tree, files, number=20, seed=1)
    assert first == questions(shared_tree, dict(reversed(files.items())), number=20, seed=1)
    assert first != questions(shared_tree, files, number=20, seed=2)
    assert len({question.question for question in first}) == 20


def test_all_kinds_are_asked_in_turn(shared_tree: Path) -> None:
    asked = questions(shared_tree, covered(shared_tree), number=10, seed=1)
    assert [question.kind for question in asked] == [*KINDS, *KINDS]


def test_answers_stand_in_the_sources_where_they_say(shared_tree: Path) -> None:
    for question in questions(shared_tree, covered(shared_tree), number=60, seed=5):
        path, number = question.where.rsplit(":", 1)
        lines = (shared_tree / path).read_text(encoding="utf-8").split("\n")
        assert lines[int(number) - 1] == question.evidence
        assert question.expected in "\n".join(lines) or question.expected == path


def test_only_what_was_read_is_asked(shared_tree: Path) -> None:
    lines = (shared_tree / "shlex.py").read_text().split("\n")
    half = next(number for number, line in enumerate(lines, start=1) if line.startswith("def "))
    asked = questions(shared_tree, {"shlex.py": half - 1, "bisect.py": 1}, number=30, seed=1)
    assert asked
    for question in asked:
        path, number = question.where.rsplit(":", 1)
        assert int(number) <= {"shlex.py": half - 1, "bisect.py": 1}[path]


def test_a_library_with_nothing_in_it_gives_no_questions(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("# x\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    assert questions(tmp_path, covered(tmp_path), number=5, seed=0) == []
