"""Label reads as a reward: the probability of "yes" under a rubric, for sentences that a student writes.

The student writes a few sentences on every topic. One label read each says how likely the teacher finds a "Yes" after
the rubric and the sentence, beside a "No". The rubric asks whether a sentence is happy, and the student, a LoRA
adapter over the teacher's own model, learns to write happier ones: REINFORCE, where each sentence is compared with the
others on its topic (leave-one-out; Ahmadian et al. 2024, arXiv 2402.14740). Nothing holds the student to its old
language, so a long run ends in whatever the rubric likes best; trainers add a divergence from the student as it began.

    python -m examples.label_reward        # four minutes; it starts and stops the service itself
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from deployments.client import ScoringClient
from deployments.config import AppConfig
from examples import service
from examples.losses import micro_batches
from examples.service import step
from examples.student import Ids, Samples, Student, sample
from examples.tasks import load, with_adapter
from scoring import LabelRead
from scoring.demo_teacher import demo_teacher
from scoring.divergence import policy_gradient_loss, token_mean
from scoring.tokenizer import Tokenizer

RUBRIC = """\
Sentence: I love the sunny morning.
Is it happy? Yes

Sentence: He lost his job and is in pain.
Is it happy? No

Sentence: She laughed and danced with joy.
Is it happy? Yes

Sentence: The funeral was cold and lonely.
Is it happy? No

Sentence: {}
Is it happy?"""
LABELS = (" Yes", " No")
TOPICS = ("a letter", "the sea", "an old house", "a journey", "the rain", "a dog", "school", "a meal")
SAMPLES = 4  # sentences on a topic, which are compared
TOKENS = 20
JUDGED_FROM = 16  # rounds; fewer are noise


def rewards(client: ScoringClient, prompts: Sequence[Ids], labels: tuple[int, int]) -> Tensor:
    """float32 [N]: p(first label) / (p(first label) + p(second label)) as the next token after each prompt."""
    scores = client.read_labels([LabelRead(prompt, labels) for prompt in prompts])
    return torch.stack([torch.from_numpy(score.logprobs.copy()).softmax(dim=0)[0] for score in scores])


def leave_one_out(rewards: Tensor) -> Tensor:
    """Advantages [prompts, n] of rewards [prompts, n]: how much better a response is than the others to its prompt."""
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def train(
    client: ScoringClient,
    student: Student,
    prompts: Sequence[Ids],
    rubric: Callable[[Ids], Ids],
    labels: tuple[int, int],
    *,
    tokens: int = TOKENS,
    end: int | None,
) -> Iterator[tuple[Samples, Tensor]]:
    """For ever: writes, asks for the rewards, and learns from them; then gives responses and rewards [prompts x n].

    Args:
        rubric: what the teacher is asked about a response, up to where a label is the next token.
        labels: ids of yes and of no.
    """
    each = [prompt for prompt in prompts for _ in range(SAMPLES)]
    for seed in itertools.count():
        samples = sample(student.model, each, tokens=tokens, candidates=0, end=end, seed=seed)
        reward = rewards(client, [rubric(samples.response(i)) for i in range(len(each))], labels)
        per_token = leave_one_out(reward.reshape(-1, SAMPLES)).reshape(-1, 1).expand(samples.mask.shape)
        scores = {"advantages": per_token[samples.mask]}
        for loss in micro_batches(_loss, student, each, samples, scores):
            token_mean(loss, torch.ones_like(loss, dtype=torch.bool), count=int(samples.mask.sum())).backward()
        student.step()
        yield samples, reward


def _loss(logits: Tensor, samples: Samples, scores: dict[str, Tensor]) -> Tensor:
    own = logits.log_softmax(dim=-1).gather(-1, samples.responses[:, None])[:, 0]
    return policy_gradient_loss(own, samples.logprobs, scores["advantages"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.label_reward", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="rounds of writing and learning (default: 16)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is {steps}; at least 1")

    model = str(demo_teacher("bfloat16"))
    tokenizer = Tokenizer(model)

    def ids(text: str) -> Ids:
        return tokenizer.encode(text, add_special_tokens=False)

    def sentence(response: Ids) -> str:
        return " ".join(tokenizer.decode(response, skip_special_tokens=True).split())

    prompts = [
        ids(tokenizer.chat([{"role": "user", "content": f"Write one sentence about {topic}."}])) for topic in TOPICS
    ]
    (yes,), (no,) = map(ids, LABELS)  # one token each
    torch.set_num_threads(service.trainer_cores())
    try:
        with step("starting Ray, Serve and the teacher"):
            settings = {"model": model, "engine_args": {"max_model_len": 512}}
            service.start(AppConfig(teachers={"default": settings}))
        student = Student(with_adapter(load(model)), learning_rate=1e-3)
        means = []
        with ScoringClient() as client:
            rounds = train(
                client,
                student,
                prompts,
                rubric=lambda response: ids(RUBRIC.format(sentence(response))),
                labels=(yes, no),
                end=tokenizer.eos_id,
            )
            for number, (samples, reward) in enumerate(itertools.islice(rounds, steps), 1):
                means.append(float(reward.mean()))
                print(f"round {number}: reward {means[-1]:.2f} on average", flush=True)
                for what, i in (("best", int(reward.argmax())), ("worst", int(reward.argmin()))):
                    print(f"  {what:<5} {reward[i]:.2f}  {sentence(samples.response(i))}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    finally:
        with step("stopping everything"):
            service.stop()
    if steps < JUDGED_FROM:
        return 0
    some = steps // 4
    first, last = sum(means[:some]) / some, sum(means[-some:]) / some
    rose = last > first
    print(f"{'ok    ' if rose else 'FAILED'} reward {first:.2f} in the first {some} rounds, {last:.2f} in the last")
    return 0 if rose else 1


if __name__ == "__main__":
    sys.exit(main())
