"""The recipe of Memento's two stages: the engine evicts, and only the second stage makes up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kilburn_lab.training.transformer import Transformer
from memento_stages import FIRST, RECIPE, TASK, WORDS, llama_of


def test_the_weights_are_a_llama() -> None:
    """What the engine runs gives the logits of what was trained."""
    model = Transformer(len(WORDS), RECIPE.shape, seed=4).eval()
    ids = TASK.draw(4, torch.Generator().manual_seed(0)).ids + FIRST
    with torch.inference_mode():
        ours, theirs = model.logits(model.hidden(ids)), llama_of(model)(ids, use_cache=False).logits
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(ours.std()) > 0.1


@pytest.mark.slow
def test_the_loss_by_eviction_is_closed_by_the_second_stage_alone(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    for arm in ("stage 1", "stage 1 again"):
        assert report.figure(arm, "right, full").mean > 0.9
        assert report.figure(arm, "right, evicted").mean < 0.3
    assert report.figure("stage 2", "right, evicted").mean > 0.9
    assert report.figure("stage 2", "right, restarted").mean < 0.3, "the words of the mementos do not say it"
