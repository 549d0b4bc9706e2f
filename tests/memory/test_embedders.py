"""Embedders: what their vectors are, and what goes wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kilburn.errors import SpecError, Unavailable
from kilburn.memory.embedders.minilm import Minilm
from kilburn.models import weights
from kilburn.retrieval import Embedder

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
    from kilburn.memory.bert import parts_of

    tensors, _ = parts_of(weights.find("minilm", "safetensors"))
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
