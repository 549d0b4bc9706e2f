"""The tuning of a small language model by a recipe: TRL's trainers, and an adapter (LoRA) of PEFT.

The examples are calls out of a ledger, in the model's own chat template. Only the adapter learns. It is merged at the end, and
the folder that comes of it is a model of transformers. On a GPU the model is held in bfloat16 and the adapter in float32; on a
CPU both are in float32.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn.models.weights import find
from kilburn_lab.training.calls import ModelCall
from kilburn_lab.training.course import Chance
from kilburn_lab.training.small import ABOUT, ChatTokenizer, ExportedModel, Small, about

try:
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    from kilburn_kv.weights import Weights, load
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "trl", "trl") from error

RANK = 8
"""Of the adapter beside each matrix."""


class Tuning:
    """The tuning of one small model with one seed, in a folder; an arm that is done is not trained again.

    Args:
        base: a name of the catalogue ("smollm2"), a GGUF file, or a folder of transformers.
        tools: the arguments of each tool. reply: tokens of a reply, at most.
        steps: of an arm. smoke: whether this is the short version.
        heard: gets a line now and then, for people.
    """

    def __init__(
        self,
        recipe: str,
        folder: Path,
        base: str,
        *,
        tools: dict[str, tuple[str, ...]],
        reply: int,
        steps: int,
        seed: int = 0,
        smoke: bool = False,
        heard: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.recipe, self.folder, self.base, self.tools, self.reply = recipe, folder, base, tools, reply
        self.steps, self.seed, self.smoke, self.heard = steps, seed, smoke, heard
        self.gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        self.parameters = self.learned = 0
        folder.mkdir(parents=True, exist_ok=True)

    def chance(self, what: str) -> Chance:
        """Chances for something of this seed."""
        return Chance(f"{self.recipe}/{what}/{self.seed}")

    def exported(self, arm: str) -> Path:
        """The folder of an arm: merged weights, tokenizer, and below `adapter` what was learned alone."""
        return self.folder / f"{arm}-{self.seed}"

    @cached_property
    def source(self) -> Path:
        """Where the weights are that an arm without another one begins with."""
        return Path(self.base) if Path(self.base).is_dir() else find(self.base)

    @cached_property
    def counter(self) -> ChatTokenizer:
        """The tokens of the model, for the sessions of demonstrators."""
        return ChatTokenizer(load(self.source).words, self.base, self.tools)

    def sft(self, arm: str, calls: Iterable[ModelCall], steps: int, *, rate: float, batch: int) -> Path:
        """Train on what a demonstrator said, of which prompts teach nothing; the exported folder."""
        rows = [{"prompt": self.counter.plain(call.prompt), "completion": self.counter.plain(call.completion)} for call in calls]

        def trainer(weights: Weights, place: Path) -> Any:
            setting = SFTConfig(
                **self._shared(place, steps, rate, batch),
                max_length=None,  # nothing of an example is cut off
                completion_only_loss=True,
            )
            return SFTTrainer(
                weights.model,
                setting,
                train_dataset=Dataset.from_list(rows),
                processing_class=weights.words,
                peft_config=_adapter(),
            )

        return self._trained(arm, "", (rows, steps, rate, batch), trainer)

    def grpo(
        self,
        arm: str,
        prompts: Sequence[Sequence[dict[str, Any]]],
        reward: Callable[[int, str], float],
        steps: int,
        *,
        rate: float,
        group: int,
        batch: int,
        ahead: int = 1,
        begin: str,
    ) -> Path:
        """Train on what the model itself says to prompts of a ledger, paid within groups; the exported folder.

        Args:
            reward: of a reply to the prompt of this number.
            group: replies to one prompt. batch: prompts of a step. ahead: steps whose replies are written together, which takes
                a GPU little longer than those of one.
            begin: the arm whose weights this one begins with.

        Raises:
            SpecError: fewer prompts than are answered at once; TRL would end without a step.
        """
        if len(prompts) < batch * ahead:
            raise SpecError(f"{len(prompts)} prompts, of which {batch * ahead} are answered at once", advice="give more prompts")
        rows = [{"prompt": self.counter.plain(prompt), "number": number} for number, prompt in enumerate(prompts)]

        def paid(completions: list[Any], number: list[int], **rest: Any) -> list[float]:
            return [reward(at, said[0]["content"].strip()) for at, said in zip(number, completions, strict=True)]

        def trainer(weights: Weights, place: Path) -> Any:
            setting = GRPOConfig(
                **self._shared(place, steps, rate, group * batch),
                num_generations=group,
                steps_per_generation=ahead,
                max_completion_length=self.reply,
                temperature=1.0,
            )
            return GRPOTrainer(
                weights.model,
                paid,
                setting,
                train_dataset=Dataset.from_list(rows),
                processing_class=weights.words,
                peft_config=_adapter(),
            )

        return self._trained(arm, begin, (rows, steps, rate, group, batch, ahead), trainer)

    def model(self, arm: str, temperature: float = 0.0) -> Small:
        """An arm as a model of the product."""
        return Small(str(self.exported(arm)), temperature, self.seed)

    def lines(self, arm: str) -> list[dict[str, Any]]:
        """The ledger of an arm: what TRL tells of each step."""
        return [msgspec.json.decode(line) for line in self._ledger(arm).read_bytes().splitlines()]

    def seconds(self) -> float:
        """The processor seconds that the arms took."""
        return sum(float(self.lines(path.name.rpartition("-")[0])[-1]["seconds"]) for path in self.folder.glob(f"*-{self.seed}"))

    def _ledger(self, arm: str) -> Path:
        return self.folder / f"{arm}-{self.seed}.jsonl"

    def _shared(self, place: Path, steps: int, rate: float, batch: int) -> dict[str, Any]:
        return {
            "output_dir": str(place),
            "max_steps": steps,
            "learning_rate": rate,
            "warmup_steps": steps // 20,
            "per_device_train_batch_size": batch,
            "gradient_checkpointing": False,
            "bf16": self.gpu,
            "use_cpu": not self.gpu,
            "dataloader_pin_memory": self.gpu,
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "report_to": "none",
            "seed": self.seed,
        }

    def _trained(self, arm: str, begin: str, setting: Any, trainer_of: Callable[[Weights, Path], Any]) -> Path:
        source = self.exported(begin) if begin else self.source
        before = about(source).setting if begin else self.base
        whole = (self.recipe, arm, self.seed, self.reply, self.tools, RANK, before, setting)
        digest = hashlib.sha256(msgspec.json.encode(whole)).hexdigest()
        place = self.exported(arm)
        if place.exists():
            if about(place).setting != digest:
                raise SpecError(f"{place} is of a run with other settings", advice="give another folder, or remove this one")
            return place
        began = time.process_time()
        weights = load(source, dtype="bfloat16", device="cuda") if self.gpu else load(source)
        set_seed(self.seed)
        disable_progress_bars()
        scratch = place.with_name(f"{place.name}.scratch")
        shutil.rmtree(scratch, ignore_errors=True)
        self.parameters = weights.model.num_parameters()
        trainer = trainer_of(weights, scratch)
        self.learned = sum(part.numel() for part in trainer.model.parameters() if part.requires_grad)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Told(f"{self.recipe} seed {self.seed}, {arm}", self.heard))
        trainer.train()
        trainer.model.save_pretrained(scratch / "adapter", save_embedding_layers=False)
        # Merged in float32: bfloat16 would round away a part of what was learned.
        merged = trainer.model.to("cpu", torch.float32).merge_and_unload()
        merged.save_pretrained(scratch)
        weights.words.save_pretrained(scratch)
        told = ExportedModel(recipe=self.recipe, arm=arm, seed=self.seed, reply=self.reply, tools=self.tools, setting=digest)
        (scratch / ABOUT).write_bytes(msgspec.json.encode(told))
        with write_file(self._ledger(arm), force=True) as file:
            for line in trainer.state.log_history:
                file.write(msgspec.json.encode(line | {"seconds": round(time.process_time() - began, 2)}) + b"\n")
        scratch.rename(place)
        return place


def _adapter() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")


class _Told(TrainerCallback):
    """Says how the training goes."""

    def __init__(self, what: str, heard: Callable[[str], None]) -> None:
        self.what, self.heard, self.began = what, heard, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """A line for each step that has a loss."""
        if not logs or "loss" not in logs:
            return
        shown = ", ".join(f"{name} {float(logs[name]):.3f}" for name in ("loss", "reward") if name in logs)
        left = (time.monotonic() - self.began) / state.global_step * (state.max_steps - state.global_step)
        self.heard(f"{self.what}: step {state.global_step} of {state.max_steps}, {shown}; about {left:.0f} s to go")
