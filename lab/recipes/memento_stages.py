"""Memento (Microsoft) in two stages: full attention first, then blocks masked once their memento is complete.

    python lab/recipes/memento_stages.py --out trained/memento_stages

The task is that of the implicit channel (docs/explanation/implicit-channel.md): each block states a fact, its memento names the
key and never the value, and a question at the end asks for a value. So once the blocks' keys and values are evicted, only the
mementos' keys and values can carry the answer. The first stage sees everything. The second goes on from there under the block
mask; the control goes on from there for as many steps with full attention. The weights have a LLaMA's form, and Kilburn's own
engine of the KV level evicts the blocks.
"""

from __future__ import annotations

import sys
from statistics import fmean

import msgspec
from torch import Tensor, arange
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from implicit_channel.curriculum import ALL, FULL, VALUES, Batch, Task
from kilburn.cli.shell import main
from kilburn_kv.engine import Engine
from kilburn_kv.weights import Weights, weights_of
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.transformer import EPSILON, Transformer, TransformerShape
from kilburn_lab.training.words import CONTROL, WordTokenizer

TASK = Task(blocks=3)
WORDS = WordTokenizer("memento", TASK.words)
FIRST = len(CONTROL)
"""The token of the task's first word."""


def staged(keep: int) -> Step:
    """Steps in which later tokens see what `keep` says: the loss is on the answers and, by half, on the mementos' words."""
    tasks = [msgspec.structs.replace(TASK, blocks=blocks) for blocks in range(TASK.blocks, 0, -1)]

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        task = chance.worlds.choice(tasks)
        ids = task.draw(48, chance.sampling, task.blocks).ids + FIRST
        scores = model.logits(model.hidden(ids, task.positions(task.blocks).expand_as(ids), task.seen(keep, task.blocks)))
        answers = task.answers(task.blocks)

        def told(at: Tensor) -> Tensor:
            return functional.cross_entropy(scores[:, at - 1].flatten(0, 1), ids[:, at].flatten())

        right = (scores[:, answers - 1].argmax(-1) == ids[:, answers]).float().mean().item()
        return told(answers) + 0.5 * told(task.told()), {"right": right}

    return step


def llama_of(model: Transformer) -> LlamaForCausalLM:
    """The same weights as a model of transformers, which the engine runs."""
    shape = model.shape
    config = LlamaConfig(
        vocab_size=model.embedding.num_embeddings,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.width * 5 // 2,
        max_position_embeddings=shape.context,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    held = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.last.weight}
    for number, block in enumerate(model.blocks):
        parts = dict(zip("qkv", block.qkv.weight.chunk(3), strict=True))
        layer = {f"self_attn.{name}_proj": part for name, part in parts.items()} | {"self_attn.o_proj": block.out.weight}
        layer |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), block.up.weight.chunk(2), strict=True))
        layer |= {"mlp.down_proj": block.down.weight, "input_layernorm": block.before.weight}
        layer |= {"post_attention_layernorm": block.between.weight}
        held |= {f"model.layers.{number}.{name}.weight": part for name, part in layer.items()}
    made = LlamaForCausalLM(config)
    missing = made.load_state_dict({name: part.detach().clone() for name, part in held.items()}, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise AssertionError(missing)
    made.tie_weights()
    return made.eval()


def answered(weights: Weights, batch: Batch, way: str) -> list[bool]:
    """Whether each first question is answered right by Kilburn's engine.

    Args:
        way: "full" for all blocks in the cache, "evicted" for mementos alone, "restarted" for the mementos' text read anew.
    """
    engine = Engine(weights, 512, size=4, share=False)
    last, found = TASK.questions + 2, []
    gone = [leaving for leaving, _ in TASK.leaving(ALL)]
    for ids in batch.ids.tolist():
        told = [token + FIRST for token in ids[:last]]
        sequence, fed = engine.open(), 0
        if way == "restarted":
            told = [token for at, token in enumerate(told) if not any(start <= at < stop for start, stop in gone)]
        elif way == "evicted":
            for (start, stop), at in TASK.leaving(ALL):
                engine.prefill(sequence, told[fed:at])
                engine.evict(sequence, start, stop)
                fed = at
        engine.prefill(sequence, told[fed:])
        values = sequence.logits[arange(VALUES) + FIRST + TASK.answer.start]
        found.append(int(values.argmax()) == ids[last] - TASK.answer.start)
        engine.free(sequence)
    return found


def measured(arm: str, model: Transformer, batch: Batch) -> Figures:
    """Right answers with the blocks, without them, and from the mementos' text alone."""
    weights = weights_of(llama_of(model))
    found = {way: fmean(answered(weights, batch, way)) for way in ("full", "evicted", "restarted")}
    figures = {(arm, f"right, {way}"): share for way, share in found.items()}
    return figures | {(arm, "lost by eviction"): found["full"] - found["evicted"]}


def train(course: TrainingRun) -> Figures:
    """Both stages and the control, each measured on the engine."""
    steps = 150 if course.smoke else 200
    batch = TASK.draw(40 if course.smoke else 200, course.chance("measure").sampling)
    first = course.train("stage 1", steps, staged(FULL), rate=4e-3)
    second = course.train("stage 2", steps, staged(ALL), rate=4e-3, begin="stage 1")
    control = course.train("stage 1 again", steps, staged(FULL), rate=4e-3, begin="stage 1")
    arms = {"stage 1": first, "stage 2": second, "stage 1 again": control}
    return {key: value for arm, model in arms.items() for key, value in measured(arm, model, batch).items()}


RECIPE = Recipe(
    name="memento_stages",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=96, smears=False),
    reply=1,
    train=train,
    drawn={"right": ("stage 1", "stage 2", "stage 1 again")},
    note="right: the share of answers, on Kilburn's engine; one in ten is chance. Curves: in training, each under its mask.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="memento_stages.py"))
