"""Secrets are found before anything else sees them, and nobody repeats them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import MissingExtra, SecretFound, SpecError
from kilburn.memory import secrets

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
HARMLESS = [
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


def test_nothing_is_looked_at_unless_it_is_asked_for() -> None:
    assert secrets.screen(TOKEN, None) == (TOKEN, [])
    with pytest.raises(SpecError, match="refuse"):
        secrets.screen("x", "hide")  # type: ignore[arg-type]


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "betterleaks", None)
    with pytest.raises(MissingExtra, match=r"kilburn\[secrets\]"):
        secrets.screen("x", "refuse")
