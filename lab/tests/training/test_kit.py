"""The kit for training: a tokenizer of a small world, weights, losses, and runs that can be killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from kilburn.errors import Overlong, SpecError
from kilburn.model import Request, complete
from kilburn.testing import check_model
from kilburn_lab.training.adapter import adapt, load_adapter, merged, save_adapter
from kilburn_lab.training.course import Chance, TrainingRun
from kilburn_lab.training.model import Toy
from kilburn_lab.training.report import Figure, Trained
from kilburn_lab.training.steps import advantages, conversation_loss, log_probabilities, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate, load, save
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, UNKNOWN, USER, WordTokenizer

WORLD = WordTokenizer("test", ["a", "b", "c", "k1", "k12", "<IS>", "</IS>"], {"next": (), "read": ("key",)})
SMALL = TransformerShape(layers=2, width=16, heads=2, context=48)


def ids(*words: str) -> list[int]:
    return [WORLD.ids[word] for word in words]


def test_the_longer_word_is_read_and_what_is_of_no_world_is_unknown() -> None:
    assert WORLD.encode("k12 k1 <IS>a</IS> zebra !") == [*ids("k12", "k1", "<IS>", "a", "</IS>"), UNKNOWN, UNKNOWN]
    assert WORLD.count("") == 0


def test_a_prompt_is_roles_words_calls_and_handles() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "read", "arguments": '{"key": "k1"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "[p3-p4 out: 2 pages, 30 tokens]"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "c"},
    ]
    assert WORLD.prompt(messages) == [
        *(USER, *ids("a")),
        *(USER, GAP),
        *(AGENT, *ids("b", "read", "k1"), END),
        *(TOOL, *ids("c")),
        AGENT,
    ]


def test_a_reply_is_a_call_only_with_as_many_words_as_the_tool_has_arguments() -> None:
    assert WORLD.split("a b read k1") == ("a b", "read", '{"key":"k1"}')
    assert WORLD.split("next") == ("", "next", "{}")
    for reply in ("a read", "a read k1 k12", "a next b", "a b"):
        assert WORLD.split(reply) == (reply, "", "")


@pytest.mark.parametrize("smears", [True, False])
def test_decoding_in_a_batch_is_decoding_one_by_one_and_what_a_whole_pass_says(smears: bool) -> None:
    model = Transformer(20, TransformerShape(layers=2, width=16, heads=2, context=48, smears=smears), seed=3)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith("smear"):
                part.normal_(generator=torch.Generator().manual_seed(1))
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [17]]
    together = generate(model, prompts, 10)
    assert together == [generate(model, [prompt], 10)[0] for prompt in prompts]
    for prompt, reply in zip(prompts, together, strict=True):
        scores = model.logits(model.hidden(torch.tensor([prompt + reply])))[0]
        assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == reply
    assert len({tuple(reply) for reply in together}) > 1


def test_log_probabilities_are_those_of_the_replies_and_padding_changes_none() -> None:
    model = Transformer(20, SMALL, seed=1)
    rows = [([7, 8], [9, 10, END]), ([7, 8, 11, 12, 13], [END])]
    together, owners = log_probabilities(model, rows)
    assert owners.tolist() == [0, 0, 0, 1]
    alone = torch.cat([log_probabilities(model, [row])[0] for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)
    assert (together < 0).all()


def test_a_conversation_teaches_what_its_rows_teach() -> None:
    model = Transformer(20, SMALL, seed=1)
    first = ([7, 8], [9, 10, END])
    rows = [first, ([7, 8, 9, 10, END, 11, 12], [13, END])]
    alone = -torch.cat([log_probabilities(model, [row])[0] for row in rows]).mean()
    assert conversation_loss(model, [rows]).item() == pytest.approx(alone.item(), abs=1e-5)
    with pytest.raises(SpecError, match="something left"):
        conversation_loss(model, [[first, ([7, 11, 12], [13, END])]])


def test_advantages_are_within_a_group() -> None:
    found = advantages([0, 1, 0, 1, 1, 1, 1, 1], 4)
    assert found[:4] == pytest.approx([-1, 1, -1, 1], abs=1e-4)
    assert found[4:] == [0, 0, 0, 0]


def test_a_step_makes_what_was_rewarded_likelier_and_the_rest_less_likely() -> None:
    model = Transformer(20, SMALL, seed=2)
    rows = [([7], [8, END]), ([7], [9, END])]
    before = [float(log_probabilities(model, [row])[0].sum().detach()) for row in rows]
    loss = policy_loss(model, rows, [1.0, -1.0])
    loss.backward()
    with torch.no_grad():
        for part in model.parameters():
            part -= 0.1 * part.grad
    after = [float(log_probabilities(model, [row])[0].sum().detach()) for row in rows]
    assert after[0] > before[0]
    assert after[1] < before[1]


RUN = """
    import os, signal, sys
    from pathlib import Path
    from test_kit import course, learn

    course(Path(sys.argv[1])).train("copy", 12, lambda *given: learn(*given, kill=9), rate=1e-2, every=4)
"""


def course(folder: Path) -> TrainingRun:
    return TrainingRun("copying", folder, WORLD, SMALL, reply=4, seed=1)


def learn(model: Transformer, chance: Chance, done: float, kill: int = 0) -> tuple[torch.Tensor, dict[str, float]]:
    """Say what was said; the process dies before the step `kill`."""
    if kill and round(done * 12) == kill:
        import os

        os.kill(os.getpid(), signal.SIGKILL)
    words = [chance.worlds.choice(ids("a", "b", "c")) for _ in range(8)]
    drawn = float(torch.rand(1, generator=chance.sampling))
    return sft_loss(model, [([USER, word, AGENT], [word, END]) for word in words]), {"drawn": drawn}


def test_a_killed_run_goes_on_and_is_bit_for_bit_the_run_that_was_not(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = course(tmp_path / "whole")
    whole.train("copy", 12, learn, rate=1e-2, every=4)
    program = textwrap.dedent(RUN)
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{program}", str(killed)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not course(killed).checkpoint("copy").exists()
    rest = course(killed)
    seen = []
    rest.train("copy", 12, lambda *given: (seen.append(given[2]), learn(*given))[1], rate=1e-2, every=4)
    assert len(seen) == 4
    assert rest.checkpoint("copy").read_bytes() == whole.checkpoint("copy").read_bytes()
    plain = [[{key: line[key] for key in ("step", "loss", "drawn")} for line in each.lines("copy")] for each in (whole, rest)]
    assert plain[0] == plain[1]
    assert [line["step"] for line in plain[0]] == list(range(1, 13))
    assert rest.lines("copy")[-1]["loss"] < rest.lines("copy")[0]["loss"] / 2


def test_models_that_are_trained_together_go_on_bit_for_bit_and_who_is_left_alone_stays(tmp_path: Path) -> None:
    def step(
        models: Mapping[str, Transformer], chance: Chance, done: float, stop: int = 0
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The first one alone in the first half, then by turns; the third never."""
        number = round(done * 12)
        if number == stop > 0:
            raise InterruptedError
        return learn(models["two" if number > 6 and number % 2 else "one"], chance, done)

    torch.set_num_threads(1)
    begins = {"one": "copy", "two": "copy", "three": "copy"}
    runs = [course(tmp_path / name) for name in ("whole", "killed")]
    for run in runs:
        run.train("copy", 2, learn, rate=1e-2)
    runs[0].train_together("both", begins, 12, step, rate=1e-2, every=4)
    for stop in (6, 11):
        with pytest.raises(InterruptedError):
            runs[1].train_together("both", begins, 12, partial(step, stop=stop), rate=1e-2, every=4)
    assert not runs[1].checkpoint("both, one").exists()
    runs[1].train_together("both", begins, 12, step, rate=1e-2, every=4)
    weights = {name: [run.checkpoint(f"both, {name}").read_bytes() for run in runs] for name in begins}
    assert all(one == other for one, other in weights.values())
    before = runs[0].checkpoint("copy").read_bytes()
    assert [name for name, (after, _) in weights.items() if after == before] == ["three"]
    assert weights["one"] != weights["two"]


def test_a_run_of_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    course(tmp_path).train("copy", 4, learn, rate=1e-2)
    with pytest.raises(SpecError, match="other settings"):
        course(tmp_path).train("copy", 5, learn, rate=1e-2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "toy.safetensors"
    save(path, Transformer(len(WORLD), SMALL, seed=5), WORLD, recipe="test", arm="none", seed=0, reply=8)
    return path


def test_a_checkpoint_is_a_model_of_the_product(checkpoint: Path) -> None:
    check_model(lambda: Toy(str(checkpoint)))
    reply = complete(Toy(str(checkpoint)), Request(messages=[{"role": "user", "content": "a b"}]))
    assert reply.usage is not None
    assert reply.usage.prompt == 4


def test_a_prompt_that_does_not_fit_is_overlong(checkpoint: Path) -> None:
    with pytest.raises(Overlong):
        complete(Toy(str(checkpoint)), Request(messages=[{"role": "user", "content": "a " * 60}]))


@pytest.mark.parametrize("damage", ["weights", "words", "empty", "none"])
def test_a_damaged_checkpoint_is_refused(checkpoint: Path, damage: str) -> None:
    if damage == "weights":
        checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    elif damage in ("words", "empty"):
        described = json.loads(checkpoint.with_suffix(".json").read_text(encoding="utf-8"))
        described["words"].append("more" if damage == "words" else "")
        checkpoint.with_suffix(".json").write_text(json.dumps(described), encoding="utf-8")
    else:
        checkpoint.unlink()
    with pytest.raises(SpecError, match=r"no checkpoint|empty word"):
        Toy(str(checkpoint))


def test_figures_are_given_with_the_interval_over_seeds() -> None:
    figure = Figure.of("rl", "reward", [0.5, 0.6, 0.7])
    assert (figure.low, figure.high) == (pytest.approx(0.6 - 0.2484, abs=1e-3), pytest.approx(0.6 + 0.2484, abs=1e-3))
    report = Trained(recipe="x", seeds=3, parameters=10, seconds=1.0, rows=(figure,))
    assert "0.352 to 0.848" in report.table()
    assert report.figure("rl", "reward").mean == pytest.approx(0.6)
    with pytest.raises(KeyError):
        report.figure("sft", "reward")


def test_a_reply_has_no_blank_within_quotation_marks_or_at_the_edge_of_a_line() -> None:
    world = WordTokenizer("code", ["a", "b", '{"x": "', '", "y": "', '"}', "```repl\n", "\n```"])
    said = '{"x": "a b", "y": "b"}'
    assert world.decode(world.reply(said)) == said
    assert world.decode(world.reply("```repl\na b\n```")) == "```repl\na b\n```"


def test_a_brief_world_reads_a_run_of_foreign_words_as_one() -> None:
    brief = WordTokenizer("brief", ["a", "b"], brief=True)
    assert brief.encode("You are to look: a zebra, then b.") == [UNKNOWN, brief.ids["a"], UNKNOWN, brief.ids["b"], UNKNOWN]


def parted(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in model.state_dict().items()}


def test_an_adapter_learns_beside_frozen_weights_and_leaves_them_as_they_were_to_the_bit(tmp_path: Path) -> None:
    course(tmp_path).train("copy", 12, learn, rate=1e-2)
    kept = course(tmp_path).checkpoint("copy").read_bytes()
    trained = course(tmp_path).train("low", 30, learn, rate=2e-2, begin="copy", rank=2)
    lines = course(tmp_path).lines("low")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert course(tmp_path).checkpoint("copy").read_bytes() == kept
    path = course(tmp_path).checkpoint("low")
    model, _, _ = load(course(tmp_path).checkpoint("copy"))
    before, ids = parted(model), torch.tensor([[USER, 7, AGENT]])
    alone = model.hidden(ids)
    with merged(model, load_adapter(path, model)):
        assert not torch.equal(model.hidden(ids), alone)
        assert torch.allclose(model.hidden(ids), trained.hidden(ids), atol=1e-5)
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    with pytest.raises(RuntimeError, match="stop"), merged(model, load_adapter(path, model)):
        raise RuntimeError("stop")
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())


def test_a_killed_adapter_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for folder in ("whole", "cut"):
        course(tmp_path / folder).train("copy", 4, learn, rate=1e-2)
    course(tmp_path / "whole").train("low", 12, learn, rate=1e-2, begin="copy", rank=2, every=4)

    def cut(model: Transformer, chance: Chance, done: float) -> tuple[torch.Tensor, dict[str, float]]:
        if done > 0.6:
            raise KeyboardInterrupt
        return learn(model, chance, done)

    with pytest.raises(KeyboardInterrupt):
        course(tmp_path / "cut").train("low", 12, cut, rate=1e-2, begin="copy", rank=2, every=4)
    course(tmp_path / "cut").train("low", 12, learn, rate=1e-2, begin="copy", rank=2, every=4)
    one, two = (course(tmp_path / folder).checkpoint("low").read_bytes() for folder in ("whole", "cut"))
    assert one == two


def test_an_adapter_of_other_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    course(tmp_path).train("copy", 2, learn, rate=1e-2)
    course(tmp_path).train("low", 2, learn, rate=1e-2, begin="copy", rank=2)
    low = course(tmp_path).checkpoint("low")
    assert Toy(str(checkpoint), adapter=str(low)).name.endswith("+adapter")
    other = tmp_path / "other.safetensors"
    save(
        other,
        Transformer(len(WORLD), TransformerShape(layers=1, width=8, heads=2, context=48)),
        WORLD,
        recipe="t",
        arm="o",
        seed=0,
        reply=8,
    )
    for path in (other, tmp_path / "none.safetensors", checkpoint):
        with pytest.raises(SpecError, match="no adapter"):
            Toy(str(other), adapter=str(path) if path != other else str(low))


def test_an_adapter_is_merged_for_a_reply_and_then_taken_out(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)[0]
    adapt(model, 2)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith(".b"):
                part.normal_(generator=torch.Generator().manual_seed(1))
    low = tmp_path / "low.safetensors"
    save_adapter(low, model)
    request = Request(messages=[{"role": "user", "content": "a b c"}])
    plain, adapted = Toy(str(checkpoint)), Toy(str(checkpoint), adapter=str(low))
    assert complete(plain, request).text != complete(adapted, request).text
    assert all(torch.equal(part, plain.weights[name]) for name, part in adapted.weights.items())
