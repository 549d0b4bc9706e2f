"""A small language model in the place of a recipe's toy: what it is trained on, what changes, and that the export speaks."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("trl", reason='needs TRL: pip install "trl>=1.16" "peft>=0.21"')
pytest.importorskip("peft", reason='needs PEFT: pip install "trl>=1.16" "peft>=0.21"')

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import SpecError
from kilburn.model import Reply, Request
from kilburn_kv.weights import load
from kilburn_lab.training.small import ChatTokenizer, Small
from kilburn_lab.training.tuning import RANK, Tuning
from mem1 import RECIPE, ROOM, WORDS, demonstrated, draw, played, spoken, tool_of
from waiting import until

# Those of the trainers and of what they import, whatever their versions are.
pytestmark = pytest.mark.filterwarnings("ignore")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers: two layers of random weights, a token for each byte, and a chat template."""
    folder = tmp_path_factory.mktemp("base")
    known = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_alone = Tokenizer(models.BPE({word: number for number, word in enumerate(known)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tuning(folder: Path, base: Path, heard: list[str]) -> Tuning:
    return Tuning("mem1", folder, str(base), tools=WORDS.tools, reply=8, steps=1, smoke=True, heard=heard.append)


def test_a_step_changes_the_adapter_alone_and_the_export_speaks_through_a_session(tmp_path: Path, base: Path) -> None:
    heard: list[str] = []
    run = tuning(tmp_path, base, heard)
    task = draw(random.Random(0), 2)
    calls = spoken(task, random.Random(1), run.counter)
    folder = run.sft("sft", calls, 1, rate=1e-2, batch=2)
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    learned = load_file(folder / "adapter" / "adapter_model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    matrices = {name for name in before if name.endswith("_proj.weight")}
    assert before.keys() == after.keys()
    assert changed == matrices
    for name in matrices:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        added = learned[f"{stem}.lora_B.weight"] @ learned[f"{stem}.lora_A.weight"] * 2
        torch.testing.assert_close(after[name], before[name] + added)
    assert len(learned) == 2 * len(matrices)
    assert run.learned == sum(RANK * sum(before[name].shape) for name in matrices)
    assert math.isfinite(run.lines("sft")[0]["loss"])
    assert len(heard) == 1
    assert "step 1 of 1" in heard[0]
    assert run.sft("sft", calls, 1, rate=1e-2, batch=2) == folder
    assert len(heard) == 1, "what is done is not trained again"
    with pytest.raises(SpecError, match="other settings"):
        run.sft("sft", calls, 1, rate=2e-2, batch=2)

    model = f"kilburn_lab.training.small:Small({str(folder)!r})"
    with kilburn.open(":memory:", window=ROOM, policy="mem1", tokenizer=run.counter, embedder=None) as store:
        said = Agent(model, [tool_of(task)], store.session("s"), limits=Limits(steps=1), memory=False).run(task.question)
        assert said.text == store.session("s").contents.messages()[1]["content"]
    prompt = run.counter.prompt([{"role": "user", "content": task.question}])
    assert played(Small(str(folder)), task, window=ROOM).sizes[0] == len(prompt)


def test_a_step_of_reward_goes_on_from_the_first_arm(tmp_path: Path, base: Path) -> None:
    run = tuning(tmp_path, base, [])
    task = draw(random.Random(0), 2)
    calls = spoken(task, random.Random(1), run.counter)
    first = run.sft("sft", calls, 1, rate=1e-3, batch=2)
    said: list[str] = []

    def reward(number: int, reply: str) -> float:
        assert number == 0
        said.append(reply)
        return float(len(said) % 2)

    second = run.grpo("grpo", [calls[-1].prompt], reward, 1, rate=1e-2, group=2, batch=1, begin="sft")
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert len(said) == 2
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("_proj.weight")
    }
    assert run.lines("grpo")[0]["reward"] == 0.5
    assert run.seconds() > 0


def test_what_is_trained_on_is_what_the_kernel_shows(base: Path) -> None:
    """The demonstrator's calls have the replies of the toy's training, and prompts out of which all but the state has left."""
    tokens = ChatTokenizer(load(base).words, "bytes", WORDS.tools)
    task = draw(random.Random(2), 3)
    rows = demonstrated(task, random.Random(3))
    calls = spoken(task, random.Random(3), tokens)
    assert [tokens.plain(call.completion)[0]["content"] for call in calls] == [WORDS.decode(reply) for _, reply in rows]
    assert [WORDS.prompt(call.prompt) for call in calls] == [prompt for prompt, _ in rows]
    plain = tokens.plain(calls[-1].prompt)
    assert [each["role"] for each in plain] == ["user", "user", "assistant", "user"]
    assert plain[0]["content"] == task.question
    assert "out:" in plain[1]["content"]
    assert plain[2]["content"].endswith("</IS> next")
    assert plain[3]["content"] == "end"


def test_replies_that_threads_await_together_are_those_of_each_alone(tmp_path: Path, base: Path) -> None:
    run = tuning(tmp_path, base, [])
    run.sft("sft", spoken(draw(random.Random(0), 2), random.Random(1), run.counter), 1, rate=1e-2, batch=2)
    model = run.model("sft")
    asked = ["a", "ask k1 k2", "a longer one, of more tokens than the others"]

    def reply(text: str) -> tuple[str, int]:
        *_, last = model.stream(Request(messages=[{"role": "user", "content": text}], max_tokens=4 + len(text) % 3))
        assert isinstance(last, Reply)
        return last.text, last.usage.reply

    alone = [reply(text) for text in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        with model._alone:
            found = [threads.submit(reply, text) for text in asked]
            until(lambda: len(model._awaited) == len(asked))
        assert [each.result() for each in found] == alone
    assert model._awaited == []


def test_fewer_prompts_than_are_answered_at_once_are_refused(tmp_path: Path, base: Path) -> None:
    prompt = [{"role": "user", "content": "a"}]
    with pytest.raises(SpecError, match="1 prompts, of which 6"):
        tuning(tmp_path, base, []).grpo(
            "grpo", [prompt], lambda number, reply: 0.0, 1, rate=1e-3, group=2, batch=2, ahead=3, begin="sft"
        )


def test_a_folder_that_no_recipe_exported_is_refused(base: Path) -> None:
    with pytest.raises(SpecError, match="no tuned model"):
        Small(str(base))


def test_a_recipe_without_such_a_training_says_so(tmp_path: Path) -> None:
    from agentfold import RECIPE as OTHER

    assert RECIPE.tune is not None
    with pytest.raises(SpecError, match="toy alone"):
        OTHER.run_tuning(tmp_path, "smollm2")
