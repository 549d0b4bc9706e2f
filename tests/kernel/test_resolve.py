"""A spec names a policy, a model, a store or a press, and nothing else is ever called."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kilburn
from cli.terminal import kilburn as command
from effort import rounds
from kilburn.errors import KilburnError, SpecError
from kilburn.kernel.resolve import locate, names, resolve
from kilburn.models.echo import Echo
from kilburn.policies.fifo import Fifo
from kilburn.policies.lru import Lru

TRAP = '''
"""Whatever of this is called leaves a mark, and so does importing it."""
from pathlib import Path
from kilburn.policies.fifo import Fifo

HERE = Path(__file__).parent
HERE.joinpath("imported").touch()

def mark(*words, **named):
    HERE.joinpath("called").touch()

def factory():
    mark()
    return Fifo()

class Metaclass(type):
    def __call__(cls, *words):
        mark()
    def __getattr__(cls, name):
        return mark

class Sly(metaclass=Metaclass):
    pass

class Stranger:
    def __init__(self, *words):
        mark()
    def stream(self, method, url):
        """As a client of HTTP has it: this takes two."""
    def plan(self):
        pass
    def keep(self, seen):
        pass
    commit = mark

class Mine(Fifo):
    pass

fifo = Fifo()
partial = fifo.plan
class Inner:
    Deep = Mine
def __getattr__(name):
    mark()
    raise AttributeError(name)
'''


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Path]:
    """A module `trap` on the path."""
    (tmp_path / "trap.py").write_text(TRAP)
    sys.path.insert(0, str(tmp_path))
    try:
        yield tmp_path
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("trap", None)


PRESSES: list[str] = []
"""The kind of a package of its own, which need not be installed."""
if find_spec("kilburn_kv") is not None and find_spec("torch") is not None:
    PRESSES.append("kilburn_kv.presses")

KINDS = [
    "policies",
    "models",
    "backends",
    *PRESSES,
    "models.disciplines",
    "recursion.sandboxes",
    "memory",
    "search.rankings",
    "search.embedders",
]

WICKED = [
    "trap:mark",
    "trap:mark('id')",
    "trap:factory",
    "trap:factory()",
    "trap:Sly",
    "trap:Stranger",
    "trap:Stranger(1)",
    "trap:fifo",
    "trap:partial",
    "trap:Inner.Deep",
    "trap:Path.touch",
    "trap:HERE.joinpath",
    "trap.mark('x')",
    "trap:Mine.plan",
    "trap:Mine()()",
    "trap:__getattr__('x')",
    "trap:mark()(fifo)",
    "chain(trap:mark)",
    "chain(trap.mark())",
    "chain(trap:mark('x'),fifo)",
]


@pytest.mark.parametrize("spec", WICKED)
def test_nothing_that_is_not_of_the_kind_is_called(trap: Path, spec: str) -> None:
    for kind in KINDS:
        with pytest.raises(SpecError):
            resolve(kind, spec)
        # A name that a module lacks is asked of the module's own __getattr__; nothing else may run.
        assert not (trap / "called").exists(), kind


@pytest.mark.parametrize(
    "spec",
    [
        "os:system('touch ran')",
        'builtins:exec(\'open("ran", "w")\')',
        "subprocess:Popen(['touch', 'ran'])",
        "pathlib:Path.touch",
        "shutil:rmtree('.')",
        "kilburn.cli:main",
        "kilburn.cli.shell:main(['--version'])",
        "kilburn:open('ran')",
        "kilburn.backends.sqlite:Sqlite('ran')",
        "kilburn.policies.chain:Policy",
        "wheels",
        "text",
        "chain(wheels)",
        "chain(open('ran', 'w'))",
        'chain(exec(\'open("ran", "w")\'))',
    ],
)
def test_the_command_line_runs_nothing_either(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"role": "user", "content": "x"}\n')
    for words in (
        ("replay", talk, "--policy", spec),
        ("replay", talk, "--model", spec),
        ("chat", "--model", spec),
        ("demo", "--model", spec),
        ("mementos", talk, "--key", "content", "--model", spec),
    ):
        said = command(*words)
        assert (said.status, said.out) == (2, ""), words
        assert talk.exists()
        assert not (tmp_path / "ran").exists()


def test_what_is_of_the_kind_is_found(trap: Path) -> None:
    assert type(resolve("policies", "trap:Mine(spare=3)")).__name__ == "Mine"
    assert resolve("policies", " lru ") == Lru()
    assert resolve("policies", "chain(mask(keep=3), fifo(spare=-0))") is not None
    own = Fifo()
    assert resolve("policies", own) is own
    assert "trap" in sys.modules
    for kind in KINDS:
        assert all(locate(kind, name) is not None for name in names(kind))
    assert "sqlite" in names("backends")


@pytest.mark.parametrize("wrong", [7, object(), Fifo, True, b"fifo", Echo()])
def test_an_object_of_another_kind_is_refused(wrong: object) -> None:
    with pytest.raises(SpecError):
        kilburn.open(":memory:", policy=wrong)
    if not isinstance(wrong, Echo):
        with pytest.raises(SpecError):
            kilburn.open(":memory:", policy="fifo", model=wrong)


@pytest.mark.parametrize("spec", ["trap:Mine", "trap:mark", "chain(fifo, trap:Mine)"])
def test_foreign_paths_can_be_switched_off(trap: Path, spec: str) -> None:
    for kind in ("policy", "model"):
        with pytest.raises(SpecError):
            kilburn.open(":memory:", foreign=False, **{"policy": "fifo", kind: spec})
    assert not (trap / "imported").exists()
    with kilburn.open(":memory:", policy="chain(mask(keep=3), fifo)", model="echo", foreign=False) as store:
        assert store.session("a").render() == []


def test_entry_points_are_held_to_the_same(trap: Path) -> None:
    info = trap / "trap-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("[kilburn.policies]\nmine = trap:Mine\nbad = trap:mark\nfar-off = trap:Mine\n")
    with pytest.raises(SpecError):
        resolve("policies", "mine", foreign=False)
    with pytest.raises(SpecError):
        resolve("policies", "chain(mine)", foreign=False)
    assert not (trap / "imported").exists()
    assert type(resolve("policies", "mine(spare=1)")).__name__ == "Mine"
    assert type(resolve("policies", "far-off")).__name__ == "Mine"
    with pytest.raises(SpecError):
        resolve("policies", "bad('x')")
    assert not (trap / "called").exists()


PIECES = [
    *(
        "fifo",
        "lru",
        "chain",
        "mask",
        "(",
        ")",
        ",",
        "keep=3",
        "**{}",
        "*[1]",
        "os:system",
        ":",
        ".",
        "'x'",
        "9" * 5000,
        "{[]: 1}",
    ),
    *("lambda: 0", "\0", "\ud800", " ", "\n", "[", "]", "-1", "1e999", "__import__", "await x", "f'{1}'", "a-b", "(" * 300),
    "not " * 3000,
]


@settings(max_examples=rounds(40, 150), deadline=None)
@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=8).map("".join)))
@example("fifo(" + "(" * 5000)
@example("chain(" * 300 + "fifo" + ")" * 300)
@example("fifo(spare=10" + "0" * 4990 + ")")
def test_any_text_is_a_policy_or_a_typed_error(spec: str) -> None:
    try:
        said, made = "", resolve("policies", spec, foreign=False)
    except KilburnError as error:
        said, made = str(error), None
    assert len(said) < 3000
    assert said or callable(made.plan)


REQUIRED = {"model": "'m'", "dimensions": "64"}
SPECIFIED = ["policies", "memory", "search.rankings", "search.embedders", *PRESSES, "models.disciplines", "models"]
WRONG = {
    "int": ["'x'", "True", "1e999", "1.5", "[1]"],
    "float": ["'x'", "True", "1e999", "{}"],
    "bool": ["'x'", "1", "[]"],
    "str": ["7", "[1]", "True"],
}


def arguments(kind: str) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Every argument of every class of a kind that has a plain type, and the arguments that the class needs before it."""
    for name in names(kind):
        parameters = inspect.signature(locate(kind, name)).parameters.values()
        needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        if set(needed) <= set(REQUIRED) and name != "editing":
            before = "".join(f"{each}={REQUIRED[each]}, " for each in needed)
            for one in parameters:
                if one.default is not one.empty and str(one.annotation).removesuffix(" | None") in WRONG:
                    yield name, one, before


@pytest.mark.parametrize("kind", SPECIFIED)
def test_an_argument_of_another_type_is_refused_by_its_name(kind: str) -> None:
    seen = 0
    for name, one, before in arguments(kind):
        for value in WRONG[one.annotation.removesuffix(" | None")]:
            with pytest.raises(SpecError, match=rf"{one.name} is {re.escape(one.annotation)}, not ") as raised:
                resolve(kind, f"{name}({before}{one.name}={value})")
            assert f"{name} takes " in raised.value.advice
            seen += 1
        with pytest.raises(SpecError, match="unexpected keyword argument 'nothing'"):
            resolve(kind, f"{name}({before}nothing=1)")
    assert seen


@pytest.mark.parametrize("kind", [kind for kind in SPECIFIED if kind != "models"])
def test_a_number_that_cannot_be_is_refused(kind: str) -> None:
    for name, one, before in arguments(kind):
        if one.annotation.removesuffix(" | None") in ("int", "float"):
            with pytest.raises(SpecError):
                resolve(kind, f"{name}({before}{one.name}=-1000000)")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lru(spare='x')", "spare is int | None, not 'x'"),
        ("chain(fifo, 3)", "policies is Policy, not 3"),
        ("mask(exclude='read')", "exclude is Sequence[str], not 'read'"),
        ("mask(exclude=['read', 3])", "exclude is Sequence[str], not ['read', 3]"),
        ("lru(1, 2)", "too many positional arguments"),
        ("lru(spar=1)", "lru takes spare: int | None = None"),
    ],
)
def test_a_wrong_argument_is_said_when_a_store_is_opened(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        kilburn.open(":memory:", policy=spec)


def test_a_foreign_class_need_not_be_annotated(trap: Path) -> None:
    (trap / "trap.py").write_text(
        "from kilburn.policies.fifo import Fifo\n"
        "class Plain(Fifo):\n    def __init__(self, a, b='x', *c, **d): pass\n"
        "class Odd(Fifo):\n    def __init__(self, a: 'Nowhere'): pass\n"
        "class Many(Fifo):\n    def __init__(self, *a: int, **b: str): pass\n"
    )
    for spec in ("trap:Plain(1, [2], 3, e=4)", "trap:Odd('x')", "trap:Many(1, 2, c='x')"):
        assert callable(resolve("policies", spec).plan)
    for spec in ("trap:Plain()", "trap:Many(1, 'x')", "trap:Many(c=1)"):
        with pytest.raises(SpecError):
            resolve("policies", spec)
