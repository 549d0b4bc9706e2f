"""What gateways let in together: never more than one alone would, and nothing for ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kilburn.backends.counting import LEASE, Demand, FileTurnstile, Ruling, Turnstile
from kilburn.errors import StoreError

YES = Ruling()


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


Gateways = Callable[[], Turnstile]
Pass = Callable[[float], None]


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def gateways(tmp_path: Path, clock: Time) -> Iterator[Gateways]:
    """Makes gateways that count together."""
    with ExitStack() as stack:

        def made() -> Turnstile:
            counter = FileTurnstile(tmp_path / "counted", clock)
            stack.callback(counter.close)
            return counter

        yield made


@pytest.fixture
def now(clock: Time) -> Callable[[], float]:
    """What time it is."""
    return clock


@pytest.fixture
def passes(clock: Time) -> Pass:
    """Lets so many seconds pass."""

    def step(seconds: float) -> None:
        clock.now += seconds

    return step


def test_together_they_let_in_what_one_would(gateways: Gateways, passes: Pass, now: Callable[[], float]) -> None:
    three = [gateways() for _ in range(3)]
    demand, began = Demand(b"ana", 40, 0), now()
    said = [three[number % 3].count([[demand]], {})[0] for number in range(15)]
    assert said[:10] == [YES] * 10, "a quarter of a minute's at once"
    assert said.count(YES) <= 10 + (now() - began) * 40 / 60, "and then as many as come in the time that goes by"
    assert all(one.refused == 0 and 0 < one.wait <= 1.5 for one in said if one != YES)
    passes(60.0)
    began = now()
    said = [three[2 - number % 3].count([[demand]], {})[0] for number in range(15)]
    assert 10 <= said.count(YES) <= 10 + (now() - began) * 40 / 60
    assert three[0].count([[Demand(b"bob", 40, 0)]], {}) == [YES], "nobody else pays"


def test_at_once_they_answer_what_one_would(gateways: Gateways) -> None:
    one, other = gateways(), gateways()
    demand = Demand(b"ana", 0, 3)
    assert one.count([[demand], [demand]], {}) == [YES, YES]
    assert other.count([[demand], [demand]], {}) == [YES, Ruling(0)]
    assert one.count([[demand]], {b"ana": 1}) == [YES], "one is over, so there is room for one"
    assert other.count([[demand]], {}) == [Ruling(0)]
    assert other.count([[demand]], {b"ana": 0, b"nobody": 0}) == [YES]
    assert one.count([], {b"ana": 2}) == []
    assert one.count([[demand]], {b"ana": 2}) == [Ruling(0)], "said twice is said once"


def test_a_request_takes_all_of_its_demands_or_none(gateways: Gateways) -> None:
    one, other = gateways(), gateways()
    key, user = Demand(b"key", 400, 10), Demand(b"user", 0, 1)
    assert one.count([[key, user]], {}) == [YES]
    for _ in range(120):
        [said] = other.count([[key, user]], {})
        assert said.refused == 1
    assert other.count([[key]] * 12, {}) == [YES] * 9 + [Ruling(0)] * 3, "what a user was refused costs its key nothing"


def test_a_gateway_that_is_gone_holds_nothing_for_ever(gateways: Gateways, passes: Pass) -> None:
    gone, there = gateways(), gateways()
    demand = Demand(b"ana", 0, 1)
    assert gone.count([[demand]], {}) == [YES]
    passes(LEASE / 2)
    gone.count([], {})
    passes(LEASE * 0.75)
    assert there.count([[demand]], {}) == [Ruling(0)], "it said that it is there"
    passes(LEASE / 2)
    assert there.count([[demand]], {}) == [YES]
    assert gone.count([[demand]], {}) == [Ruling(0)], "it was away, and has its request still"
    assert gone.count([[demand]], {b"ana": 0}) == [Ruling(0)], "the other has it"


def test_one_that_closes_gives_back_what_it_has(gateways: Gateways) -> None:
    leaving, there = gateways(), gateways()
    demand = Demand(b"ana", 0, 1)
    assert leaving.count([[demand]], {}) == [YES]
    assert there.count([[demand]], {}) == [Ruling(0)]
    leaving.close()
    assert there.count([[demand]], {}) == [YES]


def test_any_order_of_requests_lets_in_no_more_than_the_limits(gateways: Gateways, now: Callable[[], float]) -> None:
    began, chance, four = now(), random.Random(7), [gateways() for _ in range(4)]
    names = (b"a", b"b", b"c")
    held = [dict.fromkeys(names, 0) for _ in four]
    came = dict.fromkeys(names, 0)
    for _ in range(120):
        at = chance.randrange(4)
        asked = [
            [Demand(name, 60, 5) for name in chance.sample(names, chance.randint(1, 3))] for _ in range(chance.randint(0, 3))
        ]
        left = {name: chance.randint(0, count) for name, count in held[at].items() if count}
        held[at].update(left)
        for demands, said in zip(asked, four[at].count(asked, left), strict=True):
            for demand in demands if said == YES else ():
                held[at][demand.name] += 1
                came[demand.name] += 1
        for name in names:
            assert sum(each[name] for each in held) <= 5
    assert all(15 <= count <= 15 + now() - began for count in came.values()), came


def test_a_place_that_cannot_be_counted_in_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        FileTurnstile(tmp_path / "nowhere" / "counted").count([], {})
