"""Embedders: what their vectors are, and what goes wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilburn.errors import ModelError, Overlong, RateLimited, Refused, SpecError, Unavailable
from kilburn.kernel.resolve import resolve
from kilburn.models import weights
from kilburn.models.retry import Retry
from kilburn.retrieval import Embedder
from kilburn.search.bert import read_tensors
from kilburn.search.embedders.hashing import Hashing
from kilburn.search.embedders.minilm import Minilm
from kilburn.search.embedders.remote import Remote
from models.loopback import STALL, Answer, loopback

SENTENCES = [
    "The parser fails on an empty file since the last release.",
    "An empty input makes the parser crash.",
    "Ana moved from Porto to Lisbon and works for Galp now.",
    "Where does Ana live?",
    "Oh, thank you.",
    "Okay!",
    "",
    "日本語のテキスト 😀🎉",
    "word " * 2000,
    "def test_empty(): assert parse('') == []",
]


@pytest.fixture(scope="module")
def minilm() -> Minilm:
    weights.pull("minilm")
    return Minilm()


@pytest.mark.model
def test_minilm_makes_the_vectors_of_the_reference(minilm: Minilm) -> None:
    """Beside the same weights in float32, in torch, one text at a time."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tensors, _ = read_tensors(weights.find("minilm", "safetensors"))
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    known = {name: torch.from_numpy(value.copy()) for name, value in tensors.items() if not name.startswith("pooler")}
    missing, unexpected = model.load_state_dict(known, strict=False)
    assert not unexpected
    assert {name.rpartition(".")[2] for name in missing} <= {"position_ids", "token_type_ids"}
    _, tokenizer = minilm._load()
    vectors = minilm.embed(SENTENCES)
    for text, vector in zip(SENTENCES, vectors, strict=True):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([tokenizer.encode(text).ids])).last_hidden_state
        wanted = states.mean(1)[0].numpy()
        assert vector @ wanted / np.linalg.norm(wanted) > 0.985, text


@pytest.mark.model
def test_minilm_gives_a_text_the_same_vector_in_any_batch(minilm: Minilm) -> None:
    vectors = minilm.embed(SENTENCES)
    assert isinstance(minilm, Embedder)
    assert vectors.shape == (len(SENTENCES), minilm.dimensions)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = np.concatenate([minilm.embed([text]) for text in SENTENCES])
    assert (vectors * alone).sum(1).min() > 0.9999
    assert vectors[2] @ vectors[3] > vectors[2] @ vectors[0] + 0.3
    assert minilm.embed([]).shape == (0, 384)
    assert minilm.embed(["half a pair \ud83d"]).shape == (1, 384)


@pytest.mark.model
def test_a_damaged_graph_is_made_again_and_damaged_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm: Minilm
) -> None:
    source = weights.find("minilm", "safetensors").read_bytes()
    wanted = minilm.embed(["hello"])
    monkeypatch.setenv("KILBURN_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="kilburn models pull minilm"):
        Minilm()
    home = tmp_path / "models"
    home.mkdir()
    (home / "all-MiniLM-L6-v2.weights").write_bytes(source)
    Minilm().embed(["hello"])
    [graph] = home.glob("*.onnx")
    whole = graph.read_bytes()
    graph.write_bytes(whole[:1000] + bytes(1000) + whole[2000:])
    assert np.allclose(Minilm().embed(["hello"]), wanted, atol=1e-6)
    assert hashlib.sha256(graph.read_bytes()).digest() == hashlib.sha256(whole).digest()
    graph.unlink()
    (home / "all-MiniLM-L6-v2.weights").write_bytes(source[: 10**7] + bytes(10) + source[10**7 + 10 :])
    with pytest.raises(Unavailable, match="damaged"):
        Minilm().embed(["hello"])


def test_an_embedder_is_no_language_model() -> None:
    with pytest.raises(SpecError, match="embedder"):
        weights.find("minilm")
    with pytest.raises(SpecError, match="language model"):
        weights.find("smollm2", "safetensors")


def test_hashing_is_the_same_everywhere() -> None:
    embedder = Hashing(16)
    vectors = embedder.embed(["The parser fails", "the PARSER fails", "", "!?", "日本語 \ud83d"])
    assert isinstance(embedder, Embedder)
    assert vectors.shape == (5, 16)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.allclose(vectors[0], vectors[1])
    assert np.allclose(vectors[2], np.eye(16)[0])
    assert hashlib.sha256(np.rint(vectors * 100).astype("<i2").tobytes()).hexdigest()[:8] == "19ac07a8"
    assert resolve("search.embedders", embedder.name).name == embedder.name
    for wrong in (
        "hashing(0)",
        "hashing('a')",
        "minilm(version=2)",
        "remote('m', 0)",
        "remote('m', 3, 'http://me:secret@host/v1')",
    ):
        with pytest.raises(SpecError):
            resolve("search.embedders", wrong)


def answer_of(*rows: Any) -> Answer:
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in rows]
    return Answer(body={"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}})


def test_an_endpoint_gets_batches_and_may_answer_in_any_order() -> None:
    with loopback(answer_of((1, [0, 2, 0]), (0, [3, 0, 0])), answer_of((0, [0, 0, 5]))) as server:
        with Remote("m", 3, server.url, batch=2) as remote:
            vectors = remote.embed(["one", "", "three \ud83d"])
            assert remote.embed([]).shape == (0, 3)
        assert np.allclose(vectors, np.eye(3))
        assert vectors.dtype == np.float32
        assert [(asked.path, asked.body["input"]) for asked in server.asked] == [
            ("/embeddings", ["one", " "]),
            ("/embeddings", ["three ?"]),
        ]
        made = resolve("search.embedders", remote.name)
        assert (made.name, made.dimensions) == (remote.name, 3)
        made.close()


@pytest.mark.parametrize(
    "answer",
    [
        answer_of((0, [1, 0])),
        answer_of((0, [1, 0, 0, 0])),
        answer_of((0, [1, 0, 0]), (1, [1, 0, 0])),
        answer_of(),
        answer_of((1, [1, 0, 0])),
        answer_of((0, [0, 0, 0])),
        answer_of((0, [1e308, 0, 0])),
        answer_of((0, ["a", 0, 0])),
        answer_of((0, None)),
        Answer(body={"object": "list"}),
        Answer(body={"data": None}),
        Answer(body={"data": "none"}),
        Answer(body=b"<html>"),
        Answer(body=b""),
    ],
)
def test_an_endpoint_that_sends_something_else_is_named(answer: Answer) -> None:
    with loopback(answer, forever=True) as server, Remote("m", 3, server.url, retry=Retry(attempts=1)) as remote:
        with pytest.raises(ModelError, match="m") as failure:
            remote.embed(["one"])
        assert "remote('m', 3" in str(failure.value)


STATUSES = [(400, Refused), (401, Refused), (413, Overlong), (429, RateLimited), (500, Unavailable), (503, Unavailable)]
ONCE = Retry(attempts=1)


@pytest.mark.parametrize(("status", "error"), STATUSES)
def test_what_an_endpoint_refuses_is_typed(status: int, error: type[ModelError]) -> None:
    said = Answer(status=status, body={"error": {"message": "no"}})
    with loopback(said, forever=True) as server, Remote("m", 3, server.url, retry=ONCE) as remote, pytest.raises(error):
        remote.embed(["one"])


def test_a_passing_failure_is_tried_again_and_silence_ends() -> None:
    busy = Answer(status=503, body={"error": {"message": "busy"}})
    with loopback(busy, answer_of((0, [1, 0, 0]))) as server, Remote("m", 3, server.url, retry=Retry(first=0.01)) as remote:
        assert remote.embed(["one"]).shape == (1, 3)
    with loopback(Answer(events=[STALL]), forever=True) as server, Remote("m", 3, server.url, timeout=0.2, retry=ONCE) as remote:
        with pytest.raises(Unavailable, match="in time"):
            remote.embed(["one"])
        assert server.gone.wait(600)
    with Remote("m", 3, server.url, retry=ONCE) as remote, pytest.raises(Unavailable):
        remote.embed(["nobody listens"])


def test_an_endpoint_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(Refused, match="OPENAI_API_KEY"):
        Remote("m", 3)
