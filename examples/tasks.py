"""What is learned: the prompts as each side sees them, and the student as it begins.

- `hint`: the student is the teacher's own model with a LoRA adapter. The teacher sees three answered questions before
  each question, short and plain; the student does not, and learns to answer as if it did (self-distillation with a
  hint: context distillation, Snell et al. 2022, arXiv 2209.15189).
- `small`: the student lacks the middle third of the teacher's layers (which are missed least: Gromov et al. 2024, arXiv
  2403.17887), all of it is trained, and both see the same.
- `tiny`: the student is a tiny random teacher whose norms are rescaled at random, and learns these alone; its prompts
  are random too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.student import Ids
from scoring.tokenizer import Tokenizer

HINT = (
    ("What is rain?", "Rain is water that falls from clouds in small drops."),
    ("Why do cats purr?", "Cats purr mostly when they feel calm and safe."),
    ("What is a bank?", "A bank is a place that keeps people's money safe and lends it out."),
)
FORMS = ("What is {}?", "Tell me about {}.", "Can you explain {} to me?", "What should I know about {}?")
TOPICS = (
    "a volcano", "honey", "gravity", "a mortgage", "jazz", "the moon", "a bicycle", "sleep", "paper", "an earthquake",
    "chocolate", "the heart", "a rainbow", "democracy", "a computer", "yeast", "a violin", "the desert", "electricity",
    "a library", "soap", "a glacier", "chess", "a vaccine", "the ocean", "a shadow", "bread", "a telescope", "taxes",
    "a spider", "glass", "a poem", "the wind", "a battery", "cheese", "a compass", "photosynthesis", "a museum",
    "salt", "a robot", "the sun", "a bridge", "tea", "a fossil", "football", "an orchestra", "steel", "a hurricane",
    "a dictionary", "the brain", "coffee", "a submarine", "cotton", "a calendar", "magnets", "a theatre", "rice",
    "an elevator", "a contract", "coral",
)  # fmt: skip
HELD_OUT = 16  # of the topics


@dataclass(frozen=True)
class Prompt:
    """One question, as the student sees it and as the teacher does."""

    student: Ids
    teacher: Ids


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        student: makes the student's model.
        teacher: makes the teacher's, to write with: the service scores, and writes nothing.
        train, held_out: prompts to learn on, and to be evaluated on.
        end: the id that ends a response; None where nothing does.
        steps, learning_rate: on the student's own text.
        warm_steps, warm_learning_rate: on the teacher's own text, before.
        prompts, samples: of one step: so many prompts, with so many responses each.
        tokens: of a response, at most.
        candidates: the author's likeliest tokens that are scored at each position.
        evaluate_every, save_every: steps.
        due: the share of the reverse KL that is to go.
        text: of ids, for people.
    """

    student: Callable[[], PreTrainedModel]
    teacher: Callable[[], PreTrainedModel]
    train: list[Prompt]
    held_out: list[Prompt]
    end: int | None
    steps: int
    learning_rate: float
    warm_steps: int = 0
    warm_learning_rate: float = 0.0
    prompts: int = 8
    samples: int = 2
    tokens: int = 32
    candidates: int = 64
    evaluate_every: int = 6
    save_every: int = 4
    due: float = 0.2
    text: Callable[[Ids], str] = str

    def of_step(self, step: int) -> list[Prompt]:
        """The prompts of one step, each as often as it is answered; every step has its own, whatever came before."""
        drawn = random.Random(step).sample(self.train, self.prompts)
        return [prompt for prompt in drawn for _ in range(self.samples)]

    @property
    def fingerprint(self) -> str:
        """Tells apart what a checkpoint must not go on with."""
        plain = {name: value for name, value in vars(self).items() if not callable(value)}
        return hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest()[:16]


def task(name: str, teacher: str) -> Task:
    """The task `name` for a teacher whose checkpoint lies in the folder `teacher`."""
    return {"hint": _hint, "small": _small, "tiny": _tiny}[name](teacher)


def _hint(teacher: str) -> Task:
    return Task(
        student=lambda: with_adapter(load(teacher)),
        teacher=lambda: load(teacher),
        **_questions(teacher, HINT),
        steps=24,
        learning_rate=1e-3,
    )


def _small(teacher: str) -> Task:
    def student() -> PreTrainedModel:
        model = load(teacher)
        layers = model.model.layers
        third = len(layers) // 3
        model.model.layers = torch.nn.ModuleList([*layers[:third], *layers[-third:]])
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = i  # its place in the cache of keys and values
        model.config.num_hidden_layers = len(model.model.layers)
        return model

    return Task(
        student=student,
        teacher=lambda: load(teacher),
        **_questions(teacher, ()),
        warm_steps=16,
        warm_learning_rate=3e-4,
        steps=48,
        evaluate_every=16,
        save_every=16,
        learning_rate=1e-4,
    )


def _tiny(teacher: str) -> Task:
    drawn = random.Random(0)
    prompts = [[drawn.randrange(2000) for _ in range(drawn.randint(4, 12))] for _ in range(48)]
    both = [Prompt(student=prompt, teacher=prompt) for prompt in prompts]

    def student() -> PreTrainedModel:
        model, noise = load(teacher), torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.requires_grad_(weight.ndim == 1)
            if weight.requires_grad:
                weight.data *= torch.exp(0.2 * torch.randn(weight.shape, generator=noise))
        return model

    return Task(
        student=student,
        teacher=lambda: load(teacher),
        train=both[16:],
        held_out=both[:16],
        end=None,
        steps=32,
        learning_rate=1e-2,
        candidates=32,
        evaluate_every=16,
        due=0.5,
    )


def with_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) that changes nothing yet, and alone is trained."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def load(folder: str) -> PreTrainedModel:
    """float32 whatever its checkpoint holds: small steps are lost in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def _questions(teacher: str, hint: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Prompts to learn on, those to be evaluated on, which share no topic with them, and the id that ends an answer."""
    tokenizer = Tokenizer(teacher)
    before = [
        {"role": role, "content": text}
        for question, answer in hint
        for role, text in (("user", question), ("assistant", answer))
    ]

    def prompt(topic: str, form: str) -> Prompt:
        asked = [{"role": "user", "content": form.format(topic)}]
        student, whole = (
            tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False) for messages in (asked, before + asked)
        )
        return Prompt(student=student, teacher=whole)

    return {
        "train": [prompt(topic, form) for topic in TOPICS[HELD_OUT:] for form in FORMS],
        "held_out": [prompt(topic, FORMS[i % len(FORMS)]) for i, topic in enumerate(TOPICS[:HELD_OUT])],
        "end": tokenizer.eos_id,
        "text": tokenizer.decode,
    }
