"""What a user of `counter_for` relies on: names, exactness where promised, and safety elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import toktok
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from effort import each_value
from kilburn.budget import Counter
from kilburn.errors import SpecError
from kilburn.models.scripted import Scripted
from kilburn.tokens.choice import counter_for
from kilburn.tokens.claude import Claude, model_generation
from kilburn.tokens.encodings import Encoding
from kilburn.tokens.estimate import ANY_MODEL, OPEN, Characters, Estimate

STDLIB = Path(sysconfig.get_path("stdlib"))
NAMES = [
    "chars/4",
    "auto",
    "gpt-5",
    "gpt-4",
    "qwen3.5-4b",
    "llama-3.1-8b",
    "gemini-3-pro",
    "claude-3-opus-20240229",
    "claude-opus-4-8",
]
ANY_TEXT = st.text(st.characters(), max_size=300)
"""Lone surrogates included."""


def pages() -> list[str]:
    """Pages of real text: code, prose in docstrings, data, a log and a table of numbers."""
    found = []
    for name in ["argparse.py", "ast.py", "tarfile.py", "statistics.py", "this.py", "keyword.py", "pydoc_data/topics.py"]:
        text = (STDLIB / name).read_text(encoding="utf-8")
        found += [text[at : at + 3000] for at in range(0, min(len(text), 60_000), 3000)]
    found.append(json.dumps([{"id": n, "name": f"row {n}", "share": n / 7} for n in range(80)], indent=2))
    found.append(
        "\n".join(f"2025-03-{n % 28 + 1:02} 12:0{n % 10}:11,{n:03} INFO worker-{n}: done in {n * 7} ms" for n in range(60))
    )
    found.append("\n".join(f"{n * 7919 % 65521:04x}{n * 104729 % 65521:04x}, {n * n}" for n in range(200)))
    found.append("Всё хорошо, спасибо. Как дела у вас сегодня? " * 20)
    found.append("今日はとても良い天気ですね。散歩に行きましょう。" * 20)
    found.append("मुझे आज बहुत काम करना है। नमस्ते दुनिया। " * 20)
    found.append("👍🎉 all done 🚀👩‍👩‍👧 " * 40)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_counter_is_found_again_by_its_own_name(name: str) -> None:
    counter = counter_for(name)
    assert isinstance(counter, Counter)
    assert counter.name == name
    assert counter_for(counter.name).count("a page of text") == counter.count("a page of text")
    assert counter_for(counter) is counter
    assert counter.count("") == 0
    assert counter.envelope == 0 if name == "chars/4" else 3 <= counter.envelope <= 8


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("gpt-5", "o200k_base"),
        ("gpt-5.1-codex-mini", "o200k_base"),
        ("gpt-4o-2024-08-06", "o200k_base"),
        ("openai/gpt-4.1-mini", "o200k_base"),
        ("o1", "o200k_base"),
        ("o3-mini", "o200k_base"),
        ("o4-mini-2025-04-16", "o200k_base"),
        ("chatgpt-4o-latest", "o200k_base"),
        ("gpt-oss-20b", "o200k_base"),
        ("ft:gpt-4o:acme::1", "o200k_base"),
        ("gpt-4", "cl100k_base"),
        ("gpt-4-turbo", "cl100k_base"),
        ("gpt-3.5-turbo-16k", "cl100k_base"),
        ("gpt-35-turbo", "cl100k_base"),
        ("Qwen/Qwen3.5-4B", "qwen3.5"),
    ],
)
def test_models_with_a_public_vocabulary_are_counted_exactly(name: str, encoding: str) -> None:
    counter = counter_for(name)
    assert isinstance(counter, Encoding)
    text = (STDLIB / "textwrap.py").read_text(encoding="utf-8")
    assert [counter.count(text)] == toktok.batch_count([text], encoding)


def test_known_counts() -> None:
    assert counter_for("gpt-5").count("hello world") == 2
    assert counter_for("chars/4").count("hello") == 2
    assert counter_for("chars/1").count("héllo") == 5


@pytest.mark.parametrize(
    "name", ["mistral-large", "gpt-6", "gpt-2", "smollm2", "o1x", "some model", "llama-2-7b", "deepseek-r1-distill-qwen-7b"]
)
def test_an_unknown_model_gets_an_estimate(name: str) -> None:
    assert isinstance(counter_for(name), Estimate)


@pytest.mark.parametrize("name", ["nope", "chars", "gtp-5", "my tokenizer", "charactersgpt"])
def test_a_name_that_a_person_gives_is_known_or_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"no tokenizer named .* \(give \"auto\".* \"chars/4\", .* gemini, .* qwen"):
        kilburn.open(":memory:", tokenizer=name)
    with kilburn.open(":memory:", model=Scripted(tokenizer=name), embedder=None) as store:
        assert isinstance(store.counter, Estimate), "a model may be called anything"


@pytest.mark.parametrize("name", ["mistral-large", "gpt-6", "smollm2", "gemini-3-pro", "us.amazon.nova-pro-v1:0", *NAMES])
def test_a_model_of_a_known_family_is_counted(name: str) -> None:
    with kilburn.open(":memory:", tokenizer=name, embedder=None) as store:
        assert store.counter.name == name
        with kilburn.open(":memory:", tokenizer=store.counter, embedder=None) as other:
            assert other.counter is store.counter


@pytest.mark.parametrize("name", ["", "  ", "chars/", "chars/0", "chars/x", "chars/-4", 7, None, b"auto"])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(SpecError):
        counter_for(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("claude-2.1", "old"),
        ("claude-3-5-sonnet-20241022", "old"),
        ("claude-sonnet-4-20250514", "old"),
        ("claude-opus-4-6", "old"),
        ("eu.anthropic.claude-sonnet-4-5-20250929-v1:0", "old"),
        ("claude-opus-4-7", "new"),
        ("anthropic/claude-opus-4.8", "new"),
        ("claude-sonnet-5", "new"),
        ("claude-opus-4-10", "new"),
        ("claude-latest", "new"),
    ],
)
def test_claude_generations(name: str, generation: str) -> None:
    assert model_generation(name) == generation
    assert isinstance(counter_for(name), Claude)


def test_newer_claude_costs_more() -> None:
    text = (STDLIB / "argparse.py").read_text(encoding="utf-8")
    o200k, old, new = (counter_for(name).count(text) for name in ("gpt-5", "claude-3-opus", "claude-opus-4-8"))
    assert o200k < old < new < 2.6 * o200k


@pytest.mark.parametrize("encoding", ["o200k_base", "cl100k_base", "qwen3.5"])
@pytest.mark.parametrize("name", ["auto", "smollm2"])
def test_an_estimate_is_above_real_tokenizers_on_real_text(name: str, encoding: str) -> None:
    counter, texts = counter_for(name), pages()
    for text, true in zip(texts, toktok.batch_count(texts, encoding), strict=True):
        assert counter.count(text) >= true, text[:80]


CHINESE = (
    "数据库升级计划已经通过评审，我们将在星期六凌晨两点开始迁移。请各部门提前备份重要文件，并在周五下班之前关闭所有长时间"
    "运行的任务。如果迁移过程中出现任何问题，值班工程师会立即回滚到旧版本，并通过短信通知大家。"
)
JAPANESE = (
    "来週の会議では、新しい料金プランとサポート体制について説明します。資料は金曜日までに共有フォルダーへ入れておいてください。"
    "なお、当日は電車の遅れが予想されるため、少し早めに出発することをお勧めします。ご不明な点があれば、いつでもご連絡ください。"
)
KOREAN = (
    "이번 주 배포는 목요일 저녁 여덟 시에 진행됩니다. 배포 전에 데이터베이스를 백업하고, 문제가 생기면 바로 이전 버전으로 되돌려 "
    "주세요. 담당자는 메신저로 진행 상황을 공유하고, 고객 문의가 들어오면 친절하게 안내해 주시기 바랍니다."
)


@pytest.mark.parametrize(
    ("name", "chinese", "japanese", "korean"),
    [
        ("qwen3-32b", 220, 320, 332),
        ("meta-llama/Llama-3.1-70B-Instruct", 296, 340, 300),
        ("deepseek/deepseek-chat", 216, 328, 348),
        ("google/gemini-3-pro", 244, 252, 348),
    ],
)
def test_a_familys_estimate_is_near_its_tokenizer_and_above_it(name: str, chinese: int, japanese: int, korean: int) -> None:
    """The counts of the real tokenizers (see `kilburn.tokens.families`) for each text, four times."""
    counter = counter_for(name)
    for text, true in ((CHINESE, chinese), (JAPANESE, japanese), (KOREAN, korean)):
        assert true <= counter.count(text * 4) <= 1.5 * true


def test_an_older_qwen_counts_no_less_than_a_newer_one() -> None:
    texts = pages()
    counter = counter_for("qwen3-32b")
    assert all(counter.count(text) >= true for text, true in zip(texts, toktok.batch_count(texts, "qwen3.5"), strict=True))


def test_an_estimate_is_of_use() -> None:
    code = [(STDLIB / name).read_text(encoding="utf-8") for name in ("argparse.py", "tarfile.py", "pydoc_data/topics.py")]
    true = sum(toktok.batch_count(code, "o200k_base"))
    assert sum(map(counter_for("llama-3.1-8b").count, code)) < 1.8 * true
    assert sum(map(counter_for("auto").count, code)) < 2.2 * true


@given(ANY_TEXT)
@pytest.mark.parametrize("name", NAMES)
def test_any_text_is_counted(name: str, text: str) -> None:
    counted = counter_for(name).count(text)
    assert (counted == 0) == (text == "")
    assert counted <= 10 * len(text) + 2


@given(ANY_TEXT, ANY_TEXT, st.integers(1, 9))
def test_a_ruler_is_nearly_additive(one: str, two: str, per_token: int) -> None:
    ruler = Characters(per_token)
    apart, whole = ruler.count(one) + ruler.count(two), ruler.count(one + two)
    assert apart - 1 <= whole <= apart


@given(ANY_TEXT, ANY_TEXT, st.sampled_from([Estimate("auto", ANY_MODEL), Estimate("open", OPEN)]))
def test_an_estimate_grows_with_the_text_and_hides_nothing_at_a_seam(one: str, two: str, estimate: Estimate) -> None:
    whole = estimate.count(one + two)
    assert estimate.count(one) <= whole <= estimate.count(one) + estimate.count(two) + estimate.seam


UNITS = ["a", "-", " ", "\n", "\0", "<|endoftext|>", "漢", "👩‍👩‍👧", "e\u0301", "\ud800", "\U0010ffff", "aB1", " -"]


@pytest.mark.parametrize(("name", "unit"), each_value(NAMES, UNITS), ids=repr)
def test_long_runs_are_counted(name: str, unit: str) -> None:
    """And one that goes back in them would take minutes. Ten times the text has ten times the tokens."""
    counter = counter_for(name)
    short, long = (unit * (size // len(unit)) for size in (30_000, 300_000))
    assert counter.count(long) >= len(long) / 200
    assert counter.count(long) == pytest.approx(10 * counter.count(short), rel=0.02)


def test_text_that_looks_like_a_special_token_counts_as_text() -> None:
    assert counter_for("gpt-5").count("<|endoftext|>") > 1


@pytest.mark.parametrize("name", NAMES)
def test_threads_agree(name: str) -> None:
    counter, text = counter_for(name), (STDLIB / "textwrap.py").read_text(encoding="utf-8")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(counter.count, [text] * 64)) == {counter.count(text)}


def test_importing_the_counters_loads_no_vocabulary() -> None:
    code = "import sys; from kilburn.tokens.choice import counter_for as c\n"
    code += "c('gpt-5'), c('claude-3'); print('toktok' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_the_wheel_models_are_estimated() -> None:
    code = (
        "import sys; sys.modules['toktok'] = None\n"
        "from kilburn.tokens.choice import counter_for as c\n"
        "print(*(type(c(n)).__name__ for n in ('gpt-5', 'gpt-4', 'qwen3.5-4b', 'claude-opus-4-8')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Estimate"] * 4


@pytest.mark.skipif(find_spec("ctok") is None, reason="ctok needs Python 3.12")
@pytest.mark.parametrize(("version", "estimate"), [("3.0", "claude-3-opus"), ("4.8", "claude-opus-4-8")])
def test_the_estimate_for_claude_is_above_ctok(version: str, estimate: str) -> None:
    from ctok import token_count  # type: ignore[import-not-found, unused-ignore]

    above = counter_for(estimate)
    for text in pages():
        tokens = token_count(text, version) - token_count("", version)
        assert tokens <= above.count(text) <= 2.5 * tokens
