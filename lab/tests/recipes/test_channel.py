"""What a memento's keys and values carry: a toy is trained here, and its cache is really cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM

from channel import app
from cli.terminal import Said, kilburn
from implicit_channel.curriculum import ALL, FULL, Shape, Stage, Task, build, save, train
from implicit_channel.evicted import CASES, ask
from implicit_channel.measurement import Setting, answers, gap, measure, probe, shares
from implicit_channel.shares import Share
from implicit_channel.slices import Slices
from kilburn.errors import InvalidRange, SpecError
from kilburn_kv.engine import Engine
from kilburn_kv.weights import load, weights_of
from kilburn_lab.evals.intervals import wilson

TASK = Task(blocks=3)
SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, inner=192)
TINY = Shape(layers=2, hidden=16, heads=2, kv_heads=1, inner=16)


def channel(*words: object) -> Said:
    """Run the recipe in this process."""
    return kilburn(*words, commands=app, name="channel.py")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than they give at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def toy() -> LlamaForCausalLM:
    """A small toy, trained under the mask until it can answer."""
    model = build(TASK, SMALL, 0)
    stage = Stage(keep=ALL, steps=240, rate=4e-3)
    train(model, TASK, stage, torch.Generator().manual_seed(0))
    return model


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def of(found: list[Share], way: str, keep: int = ALL, distance: int | None = None) -> Share:
    return next(one for one in found if (one.way, one.keep, one.distance) == (way, keep, distance))


@pytest.mark.slow
def test_evicted_blocks_are_answered_through_mementos_that_do_not_say_it(toy: LlamaForCausalLM) -> None:
    batch = TASK.draw(400, seeded(1))
    found = shares("toy", toy, TASK, batch)
    evicted, masked, restarted = (of(found, way) for way in ("evict", "mask", "restart"))
    assert evicted.low > 0.5
    assert evicted.right == masked.right
    assert restarted.low < 0.1 < restarted.high or restarted.share < 0.15
    assert [of(found, "evict", distance=distance).low > 0.4 for distance in range(3)] == [True] * 3


def test_eviction_is_masking_and_a_restart_is_not(toy: LlamaForCausalLM) -> None:
    batch = TASK.draw(64, seeded(2))
    for keep in (ALL, 1, 2):
        measured = gap("toy", toy, TASK, batch, keep)
        assert measured.evict <= 1e-3
        assert measured.restart > 1


def test_the_paged_engine_carries_the_channel_too(toy: LlamaForCausalLM) -> None:
    """The same toy on Kilburn's own engine: blocks are evicted for real, and the answers are those of the mask."""
    task = TASK
    batch = task.draw(48, seeded(77))
    ask = task.questions + 2
    expected = answers(toy, task, batch, "mask")
    before = toy.config._attn_implementation
    engine = Engine(weights_of(toy), 256, size=4, share=False)
    right = 0
    for row, ids in enumerate(batch.ids[:, :ask].tolist()):
        sequence = engine.open()
        fed = 0
        for (start, stop), at in task.leaving(ALL):
            engine.prefill(sequence, ids[fed:at])
            engine.evict(sequence, start, stop)
            fed = at
        engine.prefill(sequence, ids[fed:])
        assert sequence.logits is not None
        assert float((sequence.logits - expected[row]).abs().max()) <= 1e-3
        right += int(sequence.logits[task.answer].argmax()) == int(expected[row][task.answer].argmax())
        engine.free(sequence)
    toy.set_attn_implementation(before)
    assert right == 48


def test_a_probe_finds_the_value_in_its_memento_and_not_before_it(toy: LlamaForCausalLM) -> None:
    found = {(one.memento, one.layer): one for one in probe("toy", toy, TASK, TASK.draw(900, seeded(3)), 0)}
    assert set(found) == {(memento, layer) for memento in (-1, 0, 1) for layer in (1, 2)}
    assert found[0, 2].low > 0.5
    for place in ((-1, 1), (-1, 2), (0, 1), (1, 1)):
        assert found[place].low < 0.14, place


def test_a_toy_that_never_trained_answers_by_chance() -> None:
    found = shares("untrained", build(TASK, TINY, 0), TASK, TASK.draw(400, seeded(4)))
    assert all(one.low < 0.1 < one.high for one in found if one.distance is None), found


def test_the_text_of_a_memento_does_not_depend_on_the_value() -> None:
    task = Task(blocks=4, content=9, keys=5)
    batch = task.draw(300, seeded(5))
    words = task.words
    for row, asked in zip(batch.ids, batch.asked, strict=True):
        said = [words[token] for token in row]
        facts = {}
        for span in task.spans:
            block, memento = said[span.start : span.memento], said[span.memento : span.stop]
            assert (block[0], block[-1]) == ("<|block_start|>", "<|block_end|>")
            (fact,) = (word for word in block if "=" in word)
            key, value = fact.split("=")
            assert memento == ["<|summary_start|>", key, "note", "<|summary_end|>"]
            facts[key] = value
        assert said[task.questions] == "what"
        assert said[task.questions + 2] == facts[said[task.questions + 1]]
        assert list(facts)[asked[0]] == said[task.questions + 1]


@given(blocks=st.integers(1, 5), content=st.integers(2, 5), keep=st.integers(FULL, 4), questions=st.integers(1, 5))
def test_what_is_seen_is_what_the_rules_say(blocks: int, content: int, keep: int, questions: int) -> None:
    task = Task(blocks=blocks, content=content)
    questions = min(questions, blocks)
    seen = task.seen(keep, questions)
    place: list[tuple[str, int]] = [("open", 0)]
    for block in range(blocks):
        place += [("block", block)] * (content + 2) + [("memento", block)] * 4
    for question in range(questions):
        place += [("question", question)] * 3
    assert len(seen) == len(place)
    for at, (kind, number) in enumerate(place):
        done = blocks if kind == "question" else number
        for other, (what, which) in enumerate(place):
            visible = other <= at
            if keep != FULL and what == "block" and which < done:
                visible = False
            if keep > 0 and what == "memento" and which + keep < done:
                visible = False
            if kind == what == "question" and which != number:
                visible = False
            assert seen[at, other] == visible, (place[at], place[other])


@settings(max_examples=15)
@given(data=st.data())
def test_cuts_are_masks(data: st.DataObject) -> None:
    """Whatever ranges are cut between feeds, the logits are those of a mask on the whole."""
    model = build(TASK, TINY, 1)
    parts = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    ids = torch.randint(len(TASK.words), (2, sum(parts)), generator=seeded(data.draw(st.integers(0, 99))))
    seen = torch.ones(sum(parts), sum(parts), dtype=torch.bool).tril()
    slices, fed = Slices(model), 0
    logits = torch.empty(0)
    for size in parts:
        logits = slices.feed(ids[:, fed : fed + size])
        fed += size
        held = slices.logical
        if fed < sum(parts) and len(held) > 1:
            start = data.draw(st.sampled_from(held[:-1]))
            stop = start + 1
            while stop in held[:-1] and data.draw(st.booleans()):
                stop += 1
            assert slices.cut(start, stop) == stop - start
            seen[fed:, start:stop] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    assert (logits - whole[:, -parts[-1] :]).abs().max() <= 1e-4
    assert slices.bytes == len(slices.logical) * 2 * 2 * 2 * 8 * 4


def test_a_cut_of_what_is_not_held_changes_nothing() -> None:
    slices = Slices(build(TASK, TINY, 0))
    with pytest.raises(InvalidRange):
        slices.cut(0, 1)
    with pytest.raises(InvalidRange, match="a row for each"):
        slices.feed(torch.zeros(1, 0, dtype=torch.long))
    slices.feed(torch.arange(10)[None])
    slices.cut(2, 5)
    for start, stop in ((4, 6), (2, 5), (7, 7), (9, 11), (-1, 1)):
        with pytest.raises(InvalidRange):
            slices.cut(start, stop)
        with pytest.raises(InvalidRange):
            slices.held(start, stop)
    with pytest.raises(InvalidRange):
        slices.feed(torch.arange(10).reshape(2, 5))
    assert slices.logical == [0, 1, 5, 6, 7, 8, 9]
    assert [part.shape for part in slices.held(6, 8)] == [(1, 2 * 2 * 8)] * 2


def test_the_same_seed_gives_the_same_toy() -> None:
    one, other = (build(TASK, TINY, 7) for _ in range(2))
    heard: list[tuple[int, float, float]] = []
    for model in (one, other):
        train(model, TASK, Stage(keep=1, steps=4, rows=4), seeded(7), lambda *told: heard.append(told))
    assert heard[:2] == heard[2:]
    assert [step for step, _, _ in heard[:2]] == [1, 4]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_saved_toy_is_a_folder_of_transformers(tmp_path: Path) -> None:
    model = build(TASK, TINY, 0)
    save(model, TASK, tmp_path / "toys" / "one")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "toys" / "one", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "toys" / "one", local_files_only=True)
    row = TASK.draw(1, seeded(0)).ids
    text = " ".join(TASK.words[token] for token in row[0])
    assert tokenizer.encode(text, add_special_tokens=False) == row[0].tolist()
    with torch.inference_mode():
        assert torch.equal(again(row).logits, model(row).logits)
    weights = load(tmp_path / "toys" / "one")
    assert weights.tokens(text) == row[0].tolist()
    assert weights.shape.layers == TINY.layers


def test_the_measurement_has_every_toy_and_way() -> None:
    lines: list[str] = []
    setting = Setting(steps=(2, 2, 2), samples=60, rows=4, task=TASK, shape=TINY, seed=3)
    report = measure(setting, heard=lines.append)
    assert {one.toy for one in report.shares} == {"untrained", "full", "memento", "handing on"}
    assert (
        report.share("memento", "evict", 1, 2).asked
        + sum(report.share("memento", "evict", 1, distance).asked for distance in (0, 1))
        == 60
    )
    assert json.loads(report.to_json())["parameters"] == report.parameters
    assert all(one.evict <= 1e-3 for one in report.gaps)
    assert report.table().count("handing on") == 1 + 2 + 3 + 2
    assert any(line.startswith("memento: step 1 of 2") for line in lines)
    with pytest.raises(KeyError):
        report.share("memento", "mask", 1)


def test_a_model_is_asked_about_evicted_notes() -> None:
    """An untrained model with a tokenizer of single characters: nothing is known, all of it is counted."""

    class Letters:
        bos_token_id = 0

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1 + ord(letter) % 95 for letter in text]

    model = build(Task(keys=40, fillers=40), TINY, 0)
    told: list[tuple[int, int]] = []
    report = ask(model, Letters(), name="letters", done=lambda *both: told.append(both))
    assert told[-1] == (len(CASES), len(CASES))
    assert [len(report.of(way, kind)) for way in ("full", "evict", "restart") for kind in ("owner", "password")] == [8] * 6
    assert report.gap <= 1e-3
    assert not any(one.exact for one in report.answers)
    assert all(-20 < one.logprob < 0 for one in report.answers)
    assert "letters" in report.table()
    assert len(json.loads(report.to_json())["answers"]) == 48
    with pytest.raises(SpecError, match="tokenizer"):
        ask(model, None)


@pytest.mark.parametrize(("right", "asked", "low", "high"), [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (5, 10, 0.2366, 0.7634)])
def test_intervals_are_wilsons(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == pytest.approx((low, high), abs=1e-4)


def test_what_means_nothing_is_refused() -> None:
    for wrong in (
        lambda: wilson(1, 0),
        lambda: wilson(3, 2),
        lambda: Task(blocks=0),
        lambda: Task(blocks=9, keys=8),
        lambda: Task(content=0),
        lambda: Shape(hidden=100, heads=3),
        lambda: Shape(kv_heads=3),
        lambda: Shape(layers=0),
        lambda: Stage(keep=-2, steps=1),
        lambda: Stage(keep=0, steps=0),
        lambda: Stage(keep=0, steps=1, rate=float("nan")),
        lambda: Setting(samples=3),
        lambda: Setting(task=Task(blocks=2)),
        lambda: Setting(steps=(1, 0, 1)),
        lambda: Setting(seed=-1),
        lambda: TASK.seen(-2),
        lambda: TASK.draw(0, seeded(0)),
        lambda: TASK.draw(1, seeded(0), questions=4),
        lambda: answers(None, TASK, TASK.draw(1, seeded(0)), "sideways"),
    ):
        with pytest.raises(SpecError):
            wrong()


def test_the_verb_refuses_what_it_cannot_do() -> None:
    assert channel("--steps", 1, "--steps", 2).status == 2
    assert channel("--model", "smollm2", "--steps", 2).status == 2
    assert channel("--steps", 0).status == 2
    assert channel("--model", "no-such-model").status == 2


def test_the_verb_trains_measures_and_writes(tmp_path: Path) -> None:
    done = channel("--steps", 1, "--samples", 20, "--save", tmp_path / "toys", "--json")
    assert done.status == 0, done.err
    assert done.json["layers"] == 4
    assert 790_000 < done.json["parameters"] < 830_000
    assert {one["toy"] for one in done.json["probes"]} == {"untrained", "full", "memento", "handing on"}
    assert sorted(path.name for path in (tmp_path / "toys").iterdir()) == ["full", "handing-on", "memento"]
    assert load(tmp_path / "toys" / "handing-on").shape.layers == 4
