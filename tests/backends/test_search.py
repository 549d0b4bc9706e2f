"""What search finds: names and their parts, rare words before common ones, whatever the query holds."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import rounds
from kilburn.backend import Batch
from kilburn.backends.passages import BY_USER, SIZE, TOKENIZER, add_name_parts, passages
from kilburn.backends.ranked import CLASS_LENGTH, K1, MAX_TERMS, RARE_PER_HIT, ROWS, B, length_class
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.message import Role
from kilburn.testing.stores import batch_of

ANY = st.text(st.characters(exclude_categories=["Cs"]))


def store_of(*texts: str) -> Sqlite:
    backend = Sqlite(":memory:")
    info = backend.segment("s", time=1.0)
    assert info is not None
    backend.commit(info.number, batch_of(0, dict(enumerate(texts, 1))))
    return backend


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("call getUserName now", "username user_name name"),
        ("HTTPServerError raised", "server"),
        ("the MAX_RETRY_COUNT value", "retry"),
        ("in src/kilburn/backends/sqlite.py, line 40", "sqlite.py"),
        ("in src/kilburn/backends/sqlite.py, line 40", "kilburn/stores"),
        ("import os.path.join", "os.path.join"),
        ("C:\\Users\\me\\notes.txt", "notes.txt"),
        ("he was running", "runs"),
        ("Crème brûlée", "creme brulee"),
        ("ÜBER", "über"),
        ("東京都に行く", "京都"),
        ("sha 3f2a9c1d done", "3f2a9c1d"),
        ("version v2beta", "beta"),
        ("a well-known fact", "known"),
        ("__init__ and __main__", "init"),
    ],
)
def test_names_are_found_whole_and_by_their_parts(text: str, query: str) -> None:
    with store_of("something else entirely", text) as backend:
        assert [hit.page for hit in backend.words.search(query)] == [2]


def test_a_whole_name_outranks_its_parts_elsewhere() -> None:
    with store_of(
        "stores and kilburn and src, and a py here",
        "sqlite py",
        "see src/kilburn/backends/sqlite.py",
        "src stores sqlite kilburn",
    ) as backend:
        assert backend.words.search("src/kilburn/backends/sqlite.py")[0].page == 3


@pytest.mark.parametrize(
    "path", ["/repo/django/contrib/syndication/views.py", "/repo/größe/beiträge/ansichten.py", "/проект/вклад/синдикация/виды.py"]
)
def test_a_rare_name_outranks_a_message_that_only_names_the_path(path: str) -> None:
    opening = f"Let me open {path} to look at it."
    code = (
        "    def get_feed(self, obj, request):\n        current_site = get_current_site(request)\n"
        + "        feed.add(item)\n" * 20
    )
    with store_of(opening, opening.replace("open", "read"), code, "nothing of the kind") as backend:
        hits = backend.words.search(f"the last argument of `get_feed` in {path}")
        assert hits[0].page == 3


def test_a_long_path_leaves_room_for_the_other_words() -> None:
    long = "/".join(f"part{number}" for number in range(200))
    with store_of("zebra crossing", "nothing of the kind") as backend:
        assert [hit.page for hit in backend.words.search(f"zebra in {long}")] == [1]


def test_a_sentence_without_blanks_is_no_part_of_the_path_in_it() -> None:
    with store_of("登录错误的修复方法", "see src/kilburn/backend.py", "nothing of the kind") as backend:
        assert backend.words.search("在src/kilburn/other.py中修复登录错误")[0].page == 1


def test_of_equal_passages_the_newer_comes_first() -> None:
    with store_of("same words", "same words", "same words") as backend:
        assert [hit.page for hit in backend.words.search("same words")] == [3, 2, 1]


def test_the_newest_with_every_word_are_found_however_many_have_one_of_them() -> None:
    with store_of(
        "Ana lives in Porto", *(f"person{n} lives in Porto" for n in range(99)), "Ana lived in Braga", "Ana sings"
    ) as backend:
        found = backend.words.newest(
            1, [("Ana lives", ""), ("lives", ""), ("lives", "Braga Ana"), ("nobody lives", ""), ("", "Ana")], 3
        )
        assert [[hit.page for hit in hits] for hits in found] == [[101, 1], [101, 100, 99], [101, 1], [], []]
        assert backend.words.newest(7, [("Ana", "")]) == [[]]


def test_a_search_of_the_user_reads_no_other_passages_however_many_there_are() -> None:
    with Sqlite(":memory:") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        texts = {1: "the harbour is closed"} | dict.fromkeys(range(2, ROWS), "harbour report") | {ROWS: f"{BY_USER} harbour"}
        batch = batch_of(0, texts)
        batch.pages = [msgspec.structs.replace(page, role=Role.USER if page.id == 1 else Role.TOOL) for page in batch.pages]
        backend.commit(info.number, batch)
        search = backend.words.search
        assert [hit.page for hit in search("harbour", by_user=True)] == [1]
        assert [hit.page for hit in search("harbour", segments=[info.number], limit=9, by_user=True)] == [1]
        # A text cannot pretend to be the user's.
        assert search(BY_USER) == search(f"report {BY_USER}", by_user=True) == []
        assert inspect_store(backend) == []
        backend.commit(info.number, Batch(head=backend.segments()[0].head, erase=[1]))
        assert search("harbour", by_user=True) == []
        assert inspect_store(backend) == []


def test_stop_words_count_only_where_there_is_nothing_else() -> None:
    with store_of("the what and the who", "fox") as backend:
        assert [hit.page for hit in backend.words.search("what is the fox")] == [2]
        assert [hit.page for hit in backend.words.search("what is the")] == [1]


@pytest.mark.parametrize("words", [1, 12, 36], ids=["one word", "question", "long query"])
def test_a_rare_word_is_found_in_a_large_session_whatever_stands_around_it(words: int) -> None:
    chance = random.Random(1)
    common = [f"common{letter}{other}" for letter in "abcdef" for other in "abcdef"]
    texts = [" ".join(chance.choices(common, k=60)) for _ in range(3000)]
    texts[17] += " theneedle"
    with store_of(*texts) as backend:
        query = " ".join([*common[: words - 1], "theneedle"])
        assert backend.words.search(query, limit=5)[0].page == 18


def by_the_book(texts: Sequence[str], words: Sequence[str], limit: int) -> list[tuple[int, float]]:
    """The best pages and their scores, worked out from every word of every text."""
    count, mean = len(texts), sum(map(len, texts)) / len(texts)
    rarities = dict.fromkeys(range(1, count + 1), 0.0)
    for word in words:
        having = [page for page, text in enumerate(texts, 1) if word in text.split()]
        for page in having:
            rarities[page] += math.log(1 + (count - len(having) + 0.5) / (len(having) + 0.5))
    lengths = {page: CLASS_LENGTH[length_class(len(text))] for page, text in enumerate(texts, 1)}
    scores = {
        page: rarity * (K1 + 1) / (1 + K1 * (1 - B + B * lengths[page] / mean)) for page, rarity in rarities.items() if rarity
    }
    best = sorted(scores, key=lambda page: (-round(scores[page], 9), -page))
    return [(page, scores[page]) for page in best[:limit]]


@settings(max_examples=rounds(20, 40), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(0, 3))
def test_the_best_are_those_by_the_book_though_common_words_are_looked_for_among_few(seed: int, limit: int, common: int) -> None:
    chance = random.Random(seed)
    names = [f"w{one}{other}x" for one in "bdfgkmpt" for other in "bdfgkmpt"]
    chance.shuffle(names)
    everywhere, rare, others = names[:common], names[common:MAX_TERMS], names[MAX_TERMS:]
    texts = [[*everywhere, *chance.choices(others, k=chance.choice([0, 20, 130]))] for _ in range(600)]
    assert len(texts) > ROWS // MAX_TERMS, "so the words that all texts have are not looked through"
    for word in rare:
        for text in chance.sample(texts, chance.choice([0, 1, 5, 20, 60, 200])):
            text.append(word)
    said = [" ".join(text) or "-" for text in texts]
    query = [*everywhere, *rare]
    chance.shuffle(query)
    # Fewer are wanted than would make the index look at texts that have common words only.
    there = sum(text.count(word) for word in rare for text in texts)
    distinct = sum(not set(rare).isdisjoint(text) for text in texts)
    wanted = min(limit, distinct, there // RARE_PER_HIT)
    with store_of(*said) as backend:
        found = backend.words.search(" ".join(query), limit=wanted)
    expected = by_the_book(said, query, wanted)
    assert [hit.page for hit in found] == [page for page, _ in expected]
    assert [hit.score for hit in found] == pytest.approx([score for _, score in expected])


def test_long_texts_with_the_rarest_word_do_not_close_the_list_to_short_ones_without_it() -> None:
    long, short = ["walrus " + "and so on " * 75] * 20, ["a kettle"] * 40
    texts = [*long, *short, *["nothing of it"] * 500]
    with store_of(*texts) as backend:
        found = backend.words.search("walrus kettle", limit=20)
    assert [(hit.page, hit.score) for hit in found] == [
        (page, pytest.approx(score)) for page, score in by_the_book(texts, ["walrus", "kettle"], 20)
    ]
    assert {texts[hit.page - 1] for hit in found} == {"a kettle"}


def test_spans_lead_to_the_words(tmp_path: Path) -> None:
    text = "\n".join(f"line {number} says word{number}" for number in range(500)) + "y" * 3000 + " lastword"
    with store_of(text) as backend:
        for word in ("word0", "word77", "word499", "lastword"):
            (hit, *_) = backend.words.search(word)
            assert word in text[slice(*hit.span)]


@given(ANY)
def test_passages_cover_all_but_blanks_in_order(text: str) -> None:
    spans = passages(text, 20)
    assert all(0 < stop - start <= 20 for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    covered = {at for start, stop in spans for at in range(start, stop)}
    assert all(text[at].isspace() for at in range(len(text)) if at not in covered)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes, base64.urlsafe_b64encode])
def test_base64_within_a_text_is_in_no_passage(encode: Callable[[bytes], bytes]) -> None:
    encoded = encode(bytes(range(256)) * 8).decode()
    text = f"The screenshot of the harbour:\n{encoded}\nand the pier."
    whole = "".join(text[slice(*span)] for span in passages(text))
    assert whole.split() == ["The", "screenshot", "of", "the", "harbour:", "and", "the", "pier."]
    names = " ".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(20)) + "/a/path/of/many/parts" * 20
    assert "".join(names[slice(*span)] for span in passages(names)) == names


def test_passages_follow_lines() -> None:
    text = "\n".join("word " * 20 for _ in range(100))
    assert all(text[stop - 1] == "\n" for _, stop in passages(text)[:-1])
    assert max(stop - start for start, stop in passages(text)) <= SIZE


@settings(max_examples=rounds(60, 200), deadline=None)
@given(ANY, ANY)
def test_any_text_goes_in_is_found_and_comes_out(text: str, query: str) -> None:
    with store_of(text + " needle") as backend:
        backend.words.search(query)
        assert backend.words.search(query + " needle")
        assert inspect_store(backend) == []


@given(ANY)
def test_searchable_keeps_the_text_and_adds_words(text: str) -> None:
    assert add_name_parts(text).startswith(text.replace("\0", " "))


def test_the_splitter_is_the_index_s_own() -> None:
    db = apsw.Connection(":memory:")
    split = db.fts5_tokenizer(TOKENIZER[1], list(TOKENIZER[2:]))
    words = split("Foo_Bar é-x".encode(), apsw.FTS5_TOKENIZE_QUERY, None, include_offsets=False, include_colocated=False)
    assert words == ["foo_bar", "e", "x"]
    db.close()


def test_long_data_is_no_name() -> None:
    data = "iVBORw0KGgo/" * 2000
    assert len(add_name_parts(data)) < 2 * len(data)
