"""Secrets are found before anything else sees them, and nobody repeats them."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.errors import MissingExtra, QuotaExceeded, SecretFound, SpecError
from kilburn.memory import secrets
from kilburn.memory.quota import Quota
from kilburn.memory.view import MemoryView
from kilburn.message import Role
from kilburn.move import Add, Retire

TOKEN = "ghp_" + "a8Kd93hFk20skLq8xZpWm4NbV7cRt1YuIoP5"
KEY = (
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA1c7+9z5Pad7OejecsQ0bu3aumyEs5KcIk2NzFOKL7gVX\n-----END RSA PRIVATE KEY-----"
)
SECRETS = {
    TOKEN: f"my key is {TOKEN} ok",
    KEY: f"take this: {KEY}",
    "s3cr3tpass": "postgres://bob:s3cr3tpass@db.example.com/x",
    "wJalrXUtnFEMI7K8MDENGbPxRfiCYzUv3ABCDKEY": "aws_access_key_id=AKIAQ3EGVTLYZ4M7XW5N\n"
    "aws_secret_access_key=wJalrXUtnFEMI7K8MDENGbPxRfiCYzUv3ABCDKEY",
    "hunter2!x": "The password: hunter2!x",
    "4711": "my PIN is 4711",
    "sk-ant-api03-" + "b8Kd93hFk20s" * 3: "use sk-ant-api03-" + "b8Kd93hFk20s" * 3,
    "abcdef0123456789abcdef0123456789": "Authorization: Bearer abcdef0123456789abcdef0123456789",
}
SECRETS |= {number: f"charge {number}, please" for number in ("4111 1111 1111 1111", "5555-5555-5555-4444", "378282246310005")}
HARMLESS = [
    "order 4111111111111112",
    "0.4111111111111111",
    "4111 1111-1111 1111",
    "41111111111111111111",
    "",
    "the password is wrong",
    "my PIN is short",
    "see http://a.b:8080/x@y",
    "I was born in 1984.",
    "sk-learn is a library",
]


@pytest.fixture(autouse=True)
def scanner() -> None:
    pytest.importorskip("betterleaks")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_cut_out_or_refused_and_never_repeated(secret: str) -> None:
    text = SECRETS[secret]
    clean, found = secrets.screen(text, "redact")
    assert found
    assert secret not in clean
    assert "[secret: " in clean
    assert secret not in repr(found)
    with pytest.raises(SecretFound) as refused:
        secrets.screen(text, "refuse")
    assert refused.value.rules
    assert secret not in str(refused.value)
    assert secrets.screen(clean, "refuse") == (clean, [])


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_harmless_stays(text: str) -> None:
    assert secrets.screen(text, "redact") == (text, [])


@pytest.mark.parametrize(
    "around", ["a\0b {} c", "{} # gitleaks:allow", "{} #betterleaks : ALLOW", "\ud800 {}", "é😀\n\n{}\n", "[secret: {}]"]
)
def test_nothing_hides_one(around: str) -> None:
    clean, found = secrets.screen(around.format(TOKEN), "redact")
    assert TOKEN not in clean
    assert found
    assert clean.replace("[secret: github-pat]", TOKEN) == around.format(TOKEN)


def test_a_mark_inside_a_secret_hides_nothing() -> None:
    text = KEY.replace("MIIE", "[secret: x]MIIE")
    with pytest.raises(SecretFound):
        secrets.screen(text, "refuse")


def test_every_place_of_a_secret_is_found() -> None:
    clean, found = secrets.screen(f"{TOKEN} and again {TOKEN}, {TOKEN}", "redact")
    assert clean == "[secret: github-pat] and again [secret: github-pat], [secret: github-pat]"
    assert [secret.rule for secret in found] == ["github-pat"] * 3


@given(
    st.lists(
        st.sampled_from([*SECRETS.values(), "[secret: x]", "[secret: ", "password=", "]", '"', "\n", " ", "é", "token: "]),
        max_size=8,
    )
)
def test_what_was_redacted_holds_no_secret(parts: list[str]) -> None:
    try:
        clean, _ = secrets.screen("".join(parts), "redact")
    except SecretFound:
        return
    assert secrets.screen(clean, "refuse") == (clean, [])
    assert TOKEN not in clean


class Counting(str):
    """A text that counts the characters that were looked at."""

    looked = 0

    def __getitem__(self, key: object) -> str:
        found = super().__getitem__(key)  # type: ignore[index]
        Counting.looked += len(found)
        return found

    def find(self, *_: object) -> int:
        raise AssertionError("a search for each value by itself")


@pytest.mark.parametrize("same", [True, False])
def test_places_are_found_in_one_pass_however_many_there_are(same: bool) -> None:
    looked = []
    for many in (500, 1000, 2000):
        values = [f"ghp_{0 if same else number:032d}" for number in range(many)]
        text = Counting(" ".join(values))
        Counting.looked = 0
        assert len(list(secrets.find_values(values, text))) == many
        looked.append(Counting.looked)
    assert looked[2] < 2.5 * looked[1] < 6.25 * looked[0]


def test_many_secrets_in_one_line_are_cut_out() -> None:
    """With the pieces that the scanner gets, and one pass for the places, 2,000 of them take no longer than they are long."""
    text = "key=Zx81kfkQp29dkslLw0 " * 2000
    clean, found = secrets.screen(text, "redact")
    assert len(found) == 2000
    assert "Zx81" not in clean


@given(st.lists(st.text(alphabet="ab \n", max_size=20_000), max_size=5))
def test_pieces_cover_a_text_and_overlap(parts: list[str]) -> None:
    text = "".join(parts) * 3
    pieces = secrets.overlapping_pieces(text)
    assert (pieces[0][0], pieces[-1][1]) == (0, len(text))
    assert all(stop - start <= secrets.PIECE_CHARS + 100 for start, stop in pieces)
    assert all(before[1] - after[0] >= min(secrets.OVERLAP_CHARS, len(text)) for before, after in pairwise(pieces))
    assert len(pieces) <= 2 + len(text) // (secrets.PIECE_CHARS - secrets.OVERLAP_CHARS - 100)


@pytest.mark.parametrize(
    "at",
    [
        secrets.PIECE_CHARS - 20,
        secrets.PIECE_CHARS - secrets.OVERLAP_CHARS - 20,
        2 * secrets.PIECE_CHARS - secrets.OVERLAP_CHARS - 10,
    ],
)
@pytest.mark.parametrize("filler", ["x", "word "])
def test_a_cut_between_pieces_hides_none(at: int, filler: str) -> None:
    text = (filler * at)[:at] + f" {TOKEN} " + filler * 20_000
    clean, _ = secrets.screen(text, "redact")
    assert TOKEN not in clean


def test_nothing_is_looked_at_unless_it_is_asked_for() -> None:
    assert secrets.screen(TOKEN, None) == (TOKEN, [])
    with pytest.raises(SpecError, match="refuse"):
        secrets.screen("x", "hide")  # type: ignore[arg-type]


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "betterleaks", None)
    with pytest.raises(MissingExtra, match=r"pip install.*\[secrets\]"):
        secrets.screen("x", "refuse")


class Witness:
    """A policy that keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def plan(self, view: MemoryView) -> list[Add | Retire]:
        self.shown += [said.text for said in (*view.new, *view.earlier)]
        return [Add(text=said.text, cites=(said.cite,)) for said in view.new if said.role is Role.USER]


@pytest.mark.parametrize("how", ["redact", "refuse"])
def test_no_policy_sees_a_secret(how: str) -> None:
    witness = Witness()
    with kilburn.open(":memory:", tokenizer="chars/4") as store:
        session = store.session("s")
        for text in ("I live in Porto", f"my token is {TOKEN}", "I like tea"):
            session.append({"role": "user", "content": text}, {"role": "assistant", "content": f"noted: {text}"})
        learned = store.memory().learn("s", witness, secrets=how)  # type: ignore[arg-type]
        assert TOKEN not in repr(witness.shown)
        facts = [store.memory().collection.contents.text(page.id) for page, _ in store.memory().pages()]
        assert TOKEN not in repr(facts)
        if how == "redact":
            assert facts == ["I live in Porto", "my token is [secret: github-pat]", "I like tea"]
            assert learned.refused == ()
        else:
            assert facts == ["I live in Porto", "I like tea"]
            assert learned.refused == ("p3", "p4")
        assert store.memory().learn("s", witness, secrets=how).stored == ()  # type: ignore[arg-type]


def test_a_quota_holds_for_what_is_learned() -> None:
    with kilburn.open(":memory:", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append({"role": "user", "content": "I live in Porto"}, {"role": "user", "content": "I like tea"})
        with pytest.raises(QuotaExceeded):
            store.memory().learn("s", Witness(), quota=Quota(facts=1))
        assert list(store.memory().pages()) == []
        assert store.memory().learn("s", Witness(), quota=Quota(facts=2)).stored == ("f1", "f2")
        session.append({"role": "user", "content": "I like coffee"})
        assert store.memory().learn("s", Witness(), quota=Quota(facts=2, evict=True)).stored == ("f3",)
        assert len(list(store.memory().pages())) == 2


def test_what_follows_an_untrusted_text_evicts_nothing() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    with kilburn.open(":memory:", tokenizer="chars/4") as store:
        store.memory().collection.add("Ana's own fact")
        session = store.session("s")
        session.append(
            {"role": "user", "content": "read it"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "spam"},
            {"role": "assistant", "content": "spam"},
        )
        with pytest.raises(QuotaExceeded):
            store.memory().learn("s", Repeater(), quota=Quota(facts=2, evict=True))
        assert [store.memory().collection.contents.text(page.id) for page, _ in store.memory().pages()] == [
            "Ana's own fact",
            "read it",
        ]


class Repeater:
    """A policy that takes everything for a fact."""

    def plan(self, view: MemoryView) -> list[Add | Retire]:
        return [Add(text=said.text, cites=(said.cite,)) for said in view.new]
