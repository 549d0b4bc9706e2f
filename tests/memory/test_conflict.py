"""What a new statement does to what is in force: the order of brief 002, both times, and what must never retire what."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings, strategies

from kilburn.backend import State
from kilburn.claims import contested, contradict, is_speaker, plain_name, same_claim, together, topic
from kilburn.memory.conflict import HALF_LIFE, Settled, Standing, settle, weight
from kilburn.message import Kind, Role, Trust
from kilburn.move import Add, Retire
from kilburn.page import Claim, Page, Place

DAY = 86_400.0
Known = list[tuple[Page, State]]


def claim(object: str, subject: str = "Ana", relation: str = "lives in", **fields: object) -> Claim:
    return msgspec.structs.replace(Claim(subject=subject, relation=relation, object=object), **fields)


def page(number: int, said: Claim, since: float, trust: Trust = Trust.USER, until: float | None = None) -> tuple[Page, State]:
    made = Page(
        id=number,
        digest="d",
        kind=Kind.FACT,
        role=Role.USER,
        message=1,
        tokens=5,
        time=since,
        trust=trust,
        claim=said,
        until=until,
    )
    return made, State()


def put(said: Claim, since: float | None = None, until: float | None = None) -> Add:
    return Add(text=f"{said.subject} {said.relation} {said.object}", claim=said, since=since, until=until)


def one(said: Claim, standing: Known, since: float, trust: Trust = Trust.USER, until: float | None = None) -> Settled:
    return settle([(put(said, since, until), trust)], standing, now=since)


def test_an_update_closes_what_it_supersedes_where_it_begins() -> None:
    settled = one(claim("Braga"), [page(-1, claim("Porto"), 0.0)], DAY)
    assert settled.standings == (Standing.SUPERSEDES,)
    added, retired = settled.moves
    assert isinstance(added, Add)
    assert added.since == DAY
    assert retired == Retire((-1,), refers=0, until=DAY, why="superseded")
    assert settled.rivals == ((-1,),)


def test_a_correction_says_that_the_other_was_never_true() -> None:
    settled = one(claim("Braga", correction=True), [page(-1, claim("Porto"), 0.0)], DAY)
    added, retired = settled.moves
    assert isinstance(added, Add)
    assert isinstance(retired, Retire)
    assert (added.since, retired.until, retired.why) == (0.0, 0.0, "corrected")


def test_the_latest_correction_wins() -> None:
    standing = [page(-1, claim("Porto", correction=True), 0.0)]
    assert one(claim("Braga", correction=True), standing, DAY).standings == (Standing.SUPERSEDES,)
    assert one(claim("Braga", correction=True), standing, -DAY).standings == (Standing.CONTESTED,)


def test_a_repeated_statement_is_no_conflict_and_is_not_written_again() -> None:
    settled = one(claim("  the PORTO. "), [page(-1, claim("Porto"), 0.0)], DAY)
    assert settled == Settled((Standing.SAME,), (), ((-1,),))


def test_what_a_tool_said_is_written_again_when_the_user_says_it() -> None:
    settled = one(claim("Porto"), [page(-1, claim("Porto"), 0.0, Trust.TOOL)], DAY)
    assert [type(move) for move in settled.moves] == [Add, Retire]
    assert one(claim("Porto"), [page(-1, claim("Porto"), 0.0)], DAY, Trust.TOOL).moves == ()


@pytest.mark.parametrize("correction", [False, True])
def test_lower_trust_never_retires_higher(correction: bool) -> None:
    settled = one(claim("Braga", correction=correction), [page(-1, claim("Porto"), 0.0)], DAY, Trust.TOOL)
    assert settled.standings == (Standing.CONTESTED,)
    assert [type(move) for move in settled.moves] == [Add]


def test_several_objects_may_coexist() -> None:
    assert one(claim("tea", relation="likes", many=True), [page(-1, claim("jazz", relation="likes"), 0.0)], DAY).standings == (
        Standing.NEW,
    )
    assert one(claim("tea", relation="likes"), [page(-1, claim("jazz", relation="likes", many=True), 0.0)], DAY).standings == (
        Standing.NEW,
    )


@pytest.mark.parametrize("other", [claim("Porto", subject="Bea"), claim("Porto", relation="works in")])
def test_unrelated_facts_do_not_retire_each_other(other: Claim) -> None:
    assert one(claim("Braga"), [page(-1, other, 0.0)], DAY).standings == (Standing.NEW,)


def test_confidence_times_recency_decides_between_equals() -> None:
    doubtful = claim("Braga", confidence=0.4)
    standing = [page(-1, claim("Porto"), 0.0)]
    assert one(doubtful, standing, DAY).standings == (Standing.CONTESTED,)
    assert one(doubtful, standing, 2 * HALF_LIFE).standings == (Standing.SUPERSEDES,)
    assert weight(1.0, HALF_LIFE) == 0.5
    assert weight(1.0, -5.0) == 1.0


def test_two_statements_at_one_time_are_both_kept() -> None:
    settled = one(claim("Braga"), [page(-1, claim("Porto"), DAY)], DAY)
    assert settled.standings == (Standing.CONTESTED,)
    assert [type(move) for move in settled.moves] == [Add]


def test_two_statements_in_one_message() -> None:
    both = settle([(put(claim("Porto")), Trust.USER), (put(claim("Braga")), Trust.USER)], [], now=5.0)
    assert both.standings == (Standing.NEW, Standing.CONTESTED)
    corrected = settle([(put(claim("Porto")), Trust.USER), (put(claim("Braga", correction=True)), Trust.USER)], [], now=5.0)
    first, second = corrected.moves
    assert isinstance(first, Add)
    assert isinstance(second, Add)
    assert (first.since, first.until) == (5.0, 5.0), "it is history, and true at no time"
    assert second.until is None
    twice = settle([(put(claim("Porto")), Trust.USER), (put(claim("porto")), Trust.USER)], [], now=5.0)
    assert len(twice.moves) == 1


def test_the_place_in_the_plan_counts_only_what_is_written() -> None:
    new = [(put(claim("Porto")), Trust.USER), (put(claim("Ana", subject="Bea", relation="knows")), Trust.USER)]
    new.append((put(claim("Lyon", subject="Bea")), Trust.USER))
    standing = [page(-1, claim("Porto"), 0.0), page(-2, claim("Nice", subject="Bea"), 0.0)]
    settled = settle(new, standing, now=DAY, offset=3)
    assert settled.standings == (Standing.SAME, Standing.NEW, Standing.SUPERSEDES)
    assert settled.moves[-1] == Retire((-2,), refers=4, until=DAY, why="superseded")


def test_there_and_back_makes_no_circle() -> None:
    porto, braga = page(-1, claim("Porto"), 0.0), page(-2, claim("Braga"), DAY)
    retired = (porto[0], State(at=Place.RETIRED, until=DAY))
    settled = one(claim("Porto"), [retired, braga], 2 * DAY)
    assert settled.standings == (Standing.SUPERSEDES,)
    assert settled.moves[-1] == Retire((-2,), refers=0, until=2 * DAY, why="superseded")


def test_what_is_learned_late_is_closed_at_birth() -> None:
    settled = one(claim("Porto"), [page(-1, claim("Braga"), DAY)], 0.0)
    (added,) = settled.moves
    assert settled.standings == (Standing.EARLIER,)
    assert isinstance(added, Add)
    assert (added.since, added.until) == (0.0, DAY)


def test_what_has_been_so_for_long_and_is_said_now_is_no_old_news() -> None:
    braga = (put(claim("Braga"), since=0.0), Trust.USER)
    settled = settle([braga], [page(-1, claim("Porto"), DAY)], now=9 * DAY, said_times=[8 * DAY])
    assert settled.standings == (Standing.SUPERSEDES,)
    assert settled.moves[-1] == Retire((-1,), refers=0, until=0.0, why="superseded")


def test_a_statement_for_a_time_only_retires_nothing_lasting() -> None:
    settled = one(claim("Berlin"), [page(-1, claim("Porto"), 0.0)], DAY, until=8 * DAY)
    assert settled.standings == (Standing.CONTESTED,)
    assert [type(move) for move in settled.moves] == [Add]
    assert one(claim("Berlin"), [page(-1, claim("Porto"), 0.0, until=DAY)], DAY).standings == (Standing.NEW,)


def test_one_side_of_an_open_contradiction_said_again_decides_nothing() -> None:
    standing = [page(-1, claim("Porto"), DAY), page(-2, claim("Braga"), DAY)]
    assert one(claim("Braga"), standing, DAY).standings == (Standing.SAME,)
    decided = one(claim("Braga", correction=True), standing, 2 * DAY)
    assert decided.moves == (Retire((-1,), by=-2, until=DAY, why="corrected"),)


@pytest.mark.parametrize("place", [Place.PROPOSED, Place.RETIRED, Place.DROPPED])
def test_what_is_not_in_force_does_not_count(place: Place) -> None:
    quarantined = (page(-1, claim("Porto"), 0.0)[0], State(at=place))
    assert one(claim("Braga"), [quarantined], DAY).standings == (Standing.NEW,)


def test_a_note_without_a_claim_is_new() -> None:
    assert settle([(Add(text="x"), Trust.USER)], [page(-1, claim("Porto"), 0.0)], now=1.0).moves == (Add(text="x"),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Beatles", "beatles"),
        ("Ana’s", "ana"),
        ("lives_in", "Lives  in"),
        ("  'Porto'! ", "porto"),
        ("ＡＮＡ", "ana"),
        ("A", "a"),
    ],
)
def test_names_that_are_the_same(one: str, other: str) -> None:
    assert plain_name(one) == plain_name(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("C++", "C"), ("C#", "C"), ("3.5", "35"), ("Ana", "Anna"), ("🎸", "🎹"), ("São Paulo", "Sao Paulo"), ("?", "!")],
)
def test_names_that_are_not(one: str, other: str) -> None:
    assert plain_name(one) != plain_name(other)


def test_the_speaker_is_another_in_each_memory() -> None:
    assert is_speaker(" I ")
    assert not is_speaker("Ida")
    assert topic(claim("x", subject="I"), 3) == topic(claim("y", subject="user"), 3) != topic(claim("y", subject="user"), 4)
    found = contested(
        [(1, claim("Porto", subject="user")), (2, claim("Braga", subject="user")), (3, None), (1, claim("Rome", subject="I"))]
    )
    assert found == [(3,), (), (), (0,)]


def test_contested_marks_both_sides_and_not_the_same_twice() -> None:
    found = contested(
        [("", claim("Porto")), ("", claim("Braga")), ("", claim("porto")), ("", claim("x", relation="likes", many=True))]
    )
    assert found == [(1,), (0, 2), (1,), ()]
    assert together(found) == [0, 1, 2, 3]
    assert together([(3,), (), (), (0,)]) == [0, 3, 1, 2]
    assert together([]) == []
    assert contradict(claim("Porto"), claim("Braga"))
    assert not contradict(claim("", relation=""), claim("Braga"))
    assert same_claim(claim("Porto"), claim("the porto"))


SAID = strategies.builds(
    put,
    strategies.builds(
        Claim,
        subject=strategies.sampled_from(["Ana", "Bea"]),
        relation=strategies.sampled_from(["lives in", "works in"]),
        object=strategies.sampled_from(["Porto", "Braga", "the porto"]),
        confidence=strategies.sampled_from([0.2, 0.9, 1.0]),
        correction=strategies.booleans(),
        many=strategies.sampled_from([False, False, False, True]),
    ),
    since=strategies.none() | strategies.integers(0, 9).map(float),
    until=strategies.none() | strategies.integers(5, 20).map(float),
)
BOTH = (Trust.TOOL, Trust.USER)
PLANS = strategies.lists(
    strategies.tuples(
        strategies.lists(strategies.tuples(SAID, strategies.sampled_from(list(Trust))), max_size=4), strategies.floats(0, 12)
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(PLANS)
@example([([(put(claim("Porto"), 0.0), Trust.USER)], 1.0), ([(put(claim("Braga"), 2.0), trust) for trust in BOTH], 3.0)])
def test_whatever_is_said_nothing_unrelated_is_retired_and_nothing_twice(
    plans: list[tuple[list[tuple[Add, Trust]], float]],
) -> None:
    held: dict[int, tuple[Page, State]] = {}
    for told, now in plans:
        # The same may be said twice, with another trust: each is known by its number.
        new = [(msgspec.structs.replace(one, why=str(at)), trust) for at, (one, trust) in enumerate(told)]
        settled = settle(new, held.values(), now=now)
        adds = [move for move in settled.moves if isinstance(move, Add)]
        retired = [move for move in settled.moves if isinstance(move, Retire)]
        assert len(settled.standings) == len(settled.rivals) == len(new)
        assert len(adds) <= len(new) - settled.standings.count(Standing.SAME)
        assert list(settled.moves) == [*adds, *retired], "an Add comes before what refers to it"
        assert len({page for move in retired for page in move.pages}) == sum(len(move.pages) for move in retired)
        places = {}
        for add in adds:
            number = -1 - len(held)
            said = new[int(add.why)][1]
            held[number] = page(number, add.claim, now if add.since is None else add.since, said, add.until)  # type: ignore[arg-type]
            places[len(places)] = number
        for move in retired:
            by = held[places[move.refers] if move.refers is not None else move.by][0]
            for number in move.pages:
                old, state = held[number]
                assert state.at is not Place.RETIRED
                assert old.claim is not None
                assert by.claim is not None
                assert topic(old.claim) == topic(by.claim)
                assert by.trust >= old.trust
                held[number] = (old, State(at=Place.RETIRED, until=move.until))
