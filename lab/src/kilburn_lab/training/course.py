"""A training run that can be killed: what it did is in a ledger of JSON lines, and it goes on where its last state stands.

Each step draws from chances that are made of the recipe, the arm, the seed and the step's number. So nothing of them need be
kept, and a run that was killed and goes on is bit for bit the run that was not.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn_lab.training import transformer
from kilburn_lab.training.adapter import adapt, save_adapter
from kilburn_lab.training.transformer import Transformer, TransformerShape
from kilburn_lab.training.words import WordTokenizer

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save as tensors_of
    from torch import Tensor, nn
    from torch.nn import Parameter
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error


class Chance:
    """What a step draws from: `worlds` makes tasks, `sampling` draws tokens.

    Args:
        name: the same name gives the same draws.
    """

    def __init__(self, name: str) -> None:
        self.worlds = random.Random(name)
        self.sampling = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


Step = Callable[[Transformer, Chance, float], tuple[Tensor, dict[str, float]]]
"""One step: the model, its chances, and how much of the arm is done, from 0 to 1. It gives the loss, and figures for the
ledger."""

StepTogether = Callable[[Mapping[str, Transformer], Chance, float], tuple[Tensor, dict[str, float]]]
"""The same with several models, by name."""


class TrainingRun:
    """The training of one recipe with one seed, in a folder.

    Args:
        reply: tokens of a reply, at most.
        smoke: whether this is the short version, for tests.
        heard: gets a line now and then, for people.
    """

    def __init__(
        self,
        recipe: str,
        folder: Path,
        words: WordTokenizer,
        shape: TransformerShape,
        *,
        reply: int,
        seed: int = 0,
        smoke: bool = False,
        heard: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.recipe, self.folder, self.words, self.shape = recipe, folder, words, shape
        self.reply, self.seed, self.smoke, self.heard = reply, seed, smoke, heard
        folder.mkdir(parents=True, exist_ok=True)

    def chance(self, what: str) -> Chance:
        """Chances for something of this seed, such as what is measured."""
        return Chance(f"{self.recipe}/{what}/{self.seed}")

    def checkpoint(self, arm: str) -> Path:
        """Where the trained weights of an arm are."""
        return self.folder / f"{arm}-{self.seed}.safetensors"

    def ledger(self, arm: str) -> Path:
        """Where the ledger of an arm is: a line a step."""
        return self.folder / f"{arm}-{self.seed}.jsonl"

    def train(
        self,
        arm: str,
        steps: int,
        step: Step,
        *,
        rate: float,
        begin: str = "",
        every: int = 20,
        decay: float = 0.1,
        rank: int = 0,
    ) -> Transformer:
        """Train an arm, or go on with it, or read it if it is done; its weights are exported.

        Args:
            rate: the highest learning rate, after the first twentieth of the steps.
            begin: the arm whose weights this one begins with; fresh ones where "".
            every: steps between two states that a killed run can go on from.
            decay: the share of the rate that is left at the end.
            rank: of an adapter that is trained in place of the weights, and exported alone; 0 for the weights.

        Raises:
            SpecError: the folder holds a run of other settings.
        """
        if begin:
            model, _, _ = transformer.load(self.checkpoint(begin))
        else:
            model = Transformer(len(self.words), self.shape, self.seed)
        if rank:
            adapt(model, rank, self.seed)
        setting = (steps, rate, begin, decay, rank)
        self._learn(arm, model, partial(step, model), steps, rate=rate, every=every, decay=decay, setting=setting)
        if rank:
            save_adapter(self.checkpoint(arm), model)
        else:
            self._export(arm, model)
        return model

    def train_together(
        self,
        arm: str,
        begins: Mapping[str, str],
        steps: int,
        step: StepTogether,
        *,
        rate: float,
        every: int = 20,
        decay: float = 0.1,
    ) -> dict[str, Transformer]:
        """Train several transformers by one loss; each is exported as an arm of its own, "ARM, NAME".

        A step may leave one of them alone: where none of its parameters has a gradient, it stays as it is.

        Args:
            begins: the arm whose weights each of them begins with, by its name. The rest is as for `train`.
        """
        models = {name: transformer.load(self.checkpoint(begin))[0] for name, begin in begins.items()}
        together, setting = nn.ModuleDict(models), (steps, rate, sorted(begins.items()), decay)
        self._learn(
            arm, together, lambda *given: step(models, *given), steps, rate=rate, every=every, decay=decay, setting=setting
        )
        for name, model in models.items():
            self._export(f"{arm}, {name}", model)
        return models

    def _export(self, arm: str, model: Transformer) -> None:
        transformer.save(self.checkpoint(arm), model, self.words, recipe=self.recipe, arm=arm, seed=self.seed, reply=self.reply)

    def _learn(
        self,
        arm: str,
        model: nn.Module,
        step: Callable[[Chance, float], tuple[Tensor, dict[str, float]]],
        steps: int,
        *,
        rate: float,
        every: int,
        decay: float,
        setting: tuple[object, ...],
    ) -> None:
        """All steps of an arm that are not done yet, with their ledger and their state."""
        learned = [part for part in model.parameters() if part.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        named = ("2", self.recipe, arm, self.seed, self.words.words, msgspec.to_builtins(self.shape), *setting)
        state = _State(self.folder / f"{arm}-{self.seed}.state", hashlib.sha256(repr(named).encode()).hexdigest())
        done, spent = state.read(model, optimizer)
        lines = self.ledger(arm).read_bytes().splitlines(keepends=True)[:done] if done else []
        self.ledger(arm).write_bytes(b"".join(lines))
        model.train()
        self.heard(f"{self.recipe} seed {self.seed}, {arm}: {steps - done} steps of training")
        began = time.process_time()
        with self.ledger(arm).open("ab") as ledger:
            for number in range(done, steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate * _warmth(number, steps, decay)
                loss, figures = step(Chance(f"{self.recipe}/{arm}/{self.seed}/{number}"), number / steps)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(learned, 1.0)
                optimizer.step()
                seconds = spent + time.process_time() - began
                told = {"step": number + 1, "loss": loss.item(), **figures, "seconds": round(seconds, 2)}
                ledger.write(msgspec.json.encode(told) + b"\n")
                if (number + 1) % every == 0 or number + 1 == steps:
                    ledger.flush()
                    os.fsync(ledger.fileno())
                    state.write(model, optimizer, number + 1, seconds)
                    left = seconds / (number + 1) * (steps - number - 1)
                    shown = ", ".join(f"{name} {value:.3f}" for name, value in {"loss": told["loss"], **figures}.items())
                    self.heard(
                        f"{self.recipe} seed {self.seed}, {arm}: step {number + 1} of {steps}, {shown}; "
                        f"{seconds:.0f} s of processor time, about {left:.0f} s to go"
                    )
        model.eval()

    def seconds(self) -> float:
        """The processor seconds that this seed's arms took, earlier parts of a killed run included."""
        return sum((float(lines[-1]["seconds"]) for arm in self.arms() if (lines := self.lines(arm))), 0.0)

    def arms(self) -> list[str]:
        """The arms of this seed that have begun, by name."""
        end = f"-{self.seed}.jsonl"
        return sorted(path.name.removesuffix(end) for path in self.folder.glob(f"*{end}"))

    def lines(self, arm: str) -> list[dict[str, Any]]:
        """The ledger of an arm."""
        return [msgspec.json.decode(line) for line in self.ledger(arm).read_bytes().splitlines()]


def _warmth(step: int, steps: int, decay: float) -> float:
    """The share of the learning rate at a step: it rises for a twentieth of the steps, and then falls in a line."""
    first = max(1, steps // 20)
    if step < first:
        return (step + 1) / first
    return 1.0 - (1.0 - decay) * (step - first) / max(1, steps - first)


def _learned(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    return ((name, part) for name, part in model.named_parameters() if part.requires_grad)


MOMENTS = {"n": "step", "m": "exp_avg", "v": "exp_avg_sq"}
"""What the optimiser keeps of a parameter: how it is named in a state, and by the optimiser."""


class _State:
    """The file that a killed run goes on from: weights and the optimiser's moments as safetensors, never pickle."""

    def __init__(self, path: Path, setting: str) -> None:
        self.path, self.setting = path, setting

    def write(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
        tensors = {f"w.{name}": part.detach().contiguous() for name, part in model.state_dict().items()}
        for name, part in _learned(model):
            if kept := optimizer.state.get(part):
                tensors |= {f"{short}.{name}": kept[long].contiguous() for short, long in MOMENTS.items()}
        said = {"step": str(step), "seconds": repr(seconds), "setting": self.setting}
        with write_file(self.path, force=True) as file:
            file.write(tensors_of(tensors, said))

    def read(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """The steps that are done, and the seconds that they took; the model and its optimiser are then as they were."""
        if not self.path.exists():
            return 0, 0.0
        with safe_open(self.path, "pt") as file:
            said = file.metadata()
            if said.get("setting") != self.setting:
                raise SpecError(f"{self.path} is of a run with other settings", advice="give another folder, or remove this one")
            step = int(said["step"])
            model.load_state_dict({name: file.get_tensor(f"w.{name}") for name in model.state_dict()})
            there = set(file.keys())
            for name, part in _learned(model):
                # What no step has touched yet has no moments.
                if f"m.{name}" in there:
                    optimizer.state[part] = {long: file.get_tensor(f"{short}.{name}") for short, long in MOMENTS.items()}
        return step, float(said["seconds"])
