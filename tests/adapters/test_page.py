"""Every snippet of docs/howto/adapters.md runs as it is shown; those of a framework where that is installed.

`tests/test_docs.py` runs the page's blocks too, without those that need a framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.errors import MissingExtra
from kilburn.testing.upstream import Upstream, serving

pytest.importorskip("uvicorn", reason="the extra serve is not installed")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "adapters.md").read_text(encoding="utf-8")
ROWS: list[tuple[str, str]] = re.findall(r"^\| (.+?) \| `[a-z-]+` \| `(.+?)` \| ", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"^```python[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FRAMEWORKS = ("agents", "anthropic", "claude_agent_sdk", "langchain", "langgraph", "llama_index", "openai", "pydantic_ai")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a program of the page has: a store and a session in an empty folder, and a provider that answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    with serving(Upstream(otherwise="Hello.")) as url, kilburn.open("agent.db", window=8000, embedder=None) as store:
        for name, value in {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}.items():
            monkeypatch.setenv(name, value)
        yield {"kilburn": kilburn, "store": store, "session": store.session("ana-1"), "tools": [], "__name__": "__main__"}


def given(framework: str, code: str, names: dict[str, Any]) -> None:
    """The names of a row that are the program's own."""
    if framework.startswith(("`openai`", "`anthropic`")):
        library = pytest.importorskip(framework.split("`")[1])
        names["client"] = library.OpenAI() if framework.startswith("`openai`") else library.Anthropic(api_key="none")
    elif framework == "pydantic-ai":
        names["Agent"] = pytest.importorskip("pydantic_ai").Agent
        names["model"] = "test"
    elif framework == "LangChain, LangGraph":
        names["create_agent"] = pytest.importorskip("langchain.agents").create_agent
        names["model"] = pytest.importorskip("langchain_core.language_models.fake_chat_models").ParrotFakeChatModel()
    elif framework == "LangGraph's store":
        names["builder"] = pytest.importorskip("langgraph.graph").StateGraph(dict)
        names["builder"].add_node("a", lambda state: state)
        names["builder"].set_entry_point("a")
    elif framework == "Claude Agent SDK":
        names["ClaudeAgentOptions"] = pytest.importorskip("claude_agent_sdk").ClaudeAgentOptions
    else:
        assert framework in ("OpenAI Agents SDK", "LlamaIndex"), f"say here what {code} needs"


@pytest.mark.parametrize(("framework", "code"), ROWS, ids=[framework for framework, _ in ROWS])
def test_a_line_of_the_table_runs(framework: str, code: str, names: dict[str, Any]) -> None:
    given(framework, code, names)
    try:
        exec(compile(code, str(PAGE[:20]), "exec", dont_inherit=True), names)
    except MissingExtra as error:
        pytest.skip(f"{error.module} is not installed")
    assert "kilburn.adapters" in code
    if "client" in names:
        names["client"].close()


def test_the_table_is_read() -> None:
    assert len(ROWS) == 8
    assert all("kilburn.adapters." in code for _, code in ROWS)


@pytest.mark.parametrize("code", BLOCKS, ids=[str(at) for at in range(len(BLOCKS))])
def test_a_block_runs(code: str, names: dict[str, Any]) -> None:
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if module in FRAMEWORKS:
            pytest.importorskip("agents.run" if module == "agents" else module, reason=f"{module} is not installed")
    if "langgraph" in code:
        pytest.importorskip("langgraph", reason="LangGraph is not installed")
    if "store = " in code:
        names["store"].close()
    exec(compile(code, "adapters.md", "exec", dont_inherit=True), names)
    assert "kilburn" in code
    for name in ("client", "store"):
        if hasattr(names.get(name), "close"):
            names[name].close()
