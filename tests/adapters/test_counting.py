"""How much of the window a wrapped client uses: by the named model's tokenizer, and by what the provider reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.model import Tokens
from kilburn.testing import check_laws
from kilburn.testing.upstream import Upstream, serving

openai = pytest.importorskip("openai", reason="the extra openai is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from kilburn.adapters.clients import wrap  # noqa: E402

CHINESE = "数据库升级计划已经通过评审，我们将在星期六凌晨两点开始迁移。请各部门提前备份重要文件。"


def talk(url: str, session: kilburn.Session, *models: str, turns: int = 1, text: str = "Valve 7 is closed. ") -> None:
    history: list[Any] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = wrap(plain, session)
        for turn in range(turns):
            for model in models:
                history.append({"role": "user", "content": f"{turn}: " + text * 12})
                reply = client.chat.completions.create(model=model, messages=history)
                history.append({"role": "assistant", "content": reply.choices[0].message.content})
        client.close()


def test_the_named_models_tokenizer_counts_and_the_next_models_too() -> None:
    with kilburn.open(":memory:", window=2000, policy="lru", embedder=None) as store, serving(Upstream()) as url:
        session = store.session("a")
        talk(url, session, "gpt-5", "claude-opus-4-8", "gpt-5", turns=2)
        assert session.counter.name == "gpt-5"
        assert session.prompts.use == sum(page.tokens for page in session.window.resident())
        branch = session.fork("Look on.")
        assert branch.counter is session.counter
        check_laws(session)
        check_laws(branch)


@pytest.mark.parametrize("tokenizer", ["chars/4", "qwen3-32b"])
def test_a_tokenizer_that_the_caller_chose_stays(tokenizer: str) -> None:
    with kilburn.open(":memory:", tokenizer=tokenizer, embedder=None) as store, serving(Upstream()) as url:
        talk(url, store.session("a"), "gpt-5")
        assert store.session("a").counter is store.counter


def test_a_session_goes_on_with_the_counter_of_its_last_model(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with serving(Upstream()) as url:
        with kilburn.open(path, embedder=None) as store:
            talk(url, store.session("a"), "gpt-5")
            costs = [page.tokens for page in store.session("a").window.resident()]
        with kilburn.open(path, embedder=None) as store:
            assert store.session("a").counter.name == "gpt-5"
            assert [page.tokens for page in store.session("a").window.resident()] == costs
            assert store.session("b").counter.name == "auto"


def test_what_was_reported_about_another_count_is_not_used() -> None:
    with kilburn.open(":memory:", window=4000, policy="lru", embedder=None) as store:
        session = store.session("a")
        session.append({"role": "user", "content": "Valve 7 is closed. " * 100})
        session.prompts.observe(Tokens(prompt=2000), counted=1000)
        assert session.prompts.capacity < 2000
        session.prompts.count_for("gpt-5")
        assert session.prompts.capacity == 4000
        session.prompts.observe(Tokens(prompt=1100), counted=1000)
        assert session.prompts.capacity == pytest.approx(4000 / 1.1 / 1.05, abs=1)
        check_laws(session)


def test_a_correction_is_of_all_that_is_sent() -> None:
    with kilburn.open(":memory:", window=4000, policy="lru", embedder=None) as store:
        session = store.session("a")
        session.edits.resize(kilburn.Budget(4000, 0, 1000))
        session.prompts.observe(Tokens(prompt=2000), counted=1000)
        assert session.prompts.capacity + 1000 == pytest.approx(4000 / 2 / 1.05, abs=1)


@pytest.mark.parametrize("model", ["qwen3-32b", "llama-3.1-8b", "deepseek-chat", "gemini-3-pro"])
def test_chinese_fills_the_window_also_where_nothing_is_reported(model: str) -> None:
    """The counts of the real tokenizers for the text: see `kilburn.tokens.families`."""
    with kilburn.open(":memory:", window=4000, policy="lru", embedder=None) as store:
        session = store.session("a")
        session.prompts.count_for(model)
        most = 0
        for turn in range(40):
            session.append({"role": "user", "content": f"{turn}: {CHINESE * 6}"}, {"role": "assistant", "content": "好的。"})
            most = max(most, sum(str(message["content"]).count(CHINESE) for message in session.render()))
        real = {"qwen3-32b": 23, "llama-3.1-8b": 31, "deepseek-chat": 22, "gemini-3-pro": 26}[model]
        assert 0.6 * 4000 <= most * real <= 4000
