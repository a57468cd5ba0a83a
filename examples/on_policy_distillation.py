"""On-policy distillation through the service: a student writes, the teacher scores what it wrote, the student learns.

`make distil` runs it. The trainer is a Ray actor that holds the handle of the service's named actor. While the teacher
scores one batch the student writes the next, which is therefore a step old when it is learned from. A run that was
killed goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor
from transformers.utils import logging as hf_logging

from deployments.config import AppConfig
from examples import service
from examples.evaluation import Evaluator, checks
from examples.losses import forward_kl_loss, micro_batches, reverse_kl_loss
from examples.plot import draw
from examples.service import step
from examples.student import Samples, Student, sample
from examples.tasks import task
from examples.teacher import PendingScores, Teacher
from examples.times import shares
from scoring.demo_teacher import demo_teacher
from scoring.divergence import token_mean
from tests.tiny_teacher import make_tiny_teacher

ROOT = Path(__file__).resolve().parent.parent


class Trainer:
    """One run, as a Ray actor.

    Args:
        name: of the task.
        folder: for the checkpoint; one that is there is gone on from.
        shuffled: whether the teacher's scores are dealt to other tokens than those they are for. A control: what the
            teacher says of a text is lost, and only how it speaks in general is left.
    """

    def __init__(self, name: str, folder: Path, shuffled: bool = False) -> None:
        self.teacher = Teacher()
        self.task = task(name, self.teacher.model)
        self.student = Student(self.task.student(), self.task.learning_rate)
        self.next_rollout: Samples | None = None  # what the next step learns from, where it is written already
        self.log: dict[str, Any] = {
            "task": name,
            "settings": self.task.fingerprint,
            "teacher": self.teacher.checkpoint,
            "shuffled": shuffled,
            "warm_steps": self.task.warm_steps,
            "all_steps": self.task.warm_steps + self.task.steps,
            "steps": [],
            "evaluations": [],
        }
        self.file = folder / "checkpoint.pt"
        self._writer: Any = None  # the teacher's own model, for as long as it writes
        self._evaluator: Evaluator | None = None

    def begin(self) -> dict[str, Any]:
        """Go on from the checkpoint, if there is one. Returns the log so far, which ends with an evaluation at least.

        Raises:
            ValueError: the checkpoint is of another run, or cannot be read.
        """
        fixed = self._restore() if self.file.exists() else None
        self._evaluator = Evaluator(self.task, self.teacher, fixed)
        if not self.log["evaluations"]:
            self._evaluate()
        return self.log

    def step(self) -> dict[str, Any]:
        """Learn from one batch, and write the next while the teacher scores. Returns the log so far."""
        now = len(self.log["steps"])
        samples = self.next_rollout if self.next_rollout is not None else self.rollout(now)
        began = time.monotonic()
        pending = self.ask(now, samples)
        asked = time.monotonic()
        ahead = self.rollout(now + 1) if now + 1 < self.log["all_steps"] else None
        written = time.monotonic()
        scores = pending.result()
        here = time.monotonic()
        learned = self.learn(now, samples, scores)
        marks = [("score", asked, pending.came), ("sample", asked, written), ("wait", written, here)]
        marks.append(("learn", here, time.monotonic()))
        self.log["steps"].append(
            {**learned, "tokens": int(samples.mask.sum())}
            | {name: [round(a - began, 4), round(b - began, 4)] for name, a, b in marks}
        )
        self.next_rollout = ahead
        self._look_and_save(now + 1)
        return self.log

    def rollout(self, now: int) -> Samples:
        """The text of a step: by its seed, the same whenever the same weights write it."""
        prompts, warm = self.task.of_step(now), self._is_warm_up(now)
        if warm and self._writer is None:
            self._writer = self.task.teacher()
        elif not warm:
            self._writer = None
        return sample(
            self._writer if warm else self.student.model,
            [prompt.teacher if warm else prompt.student for prompt in prompts],
            tokens=self.task.tokens,
            candidates=self.task.candidates,
            end=self.task.end,
            seed=1000 + now,
        )

    def ask(self, now: int, samples: Samples) -> PendingScores:
        """Of the student's own text its likeliest tokens and the one it took; of the teacher's the teacher's own."""
        prompts = [prompt.teacher for prompt in self.task.of_step(now)]
        return self.teacher.ask(prompts, samples, top_k=self.task.candidates if self._is_warm_up(now) else 0)

    def learn(self, now: int, samples: Samples, scores: dict[str, Tensor]) -> dict[str, float]:
        """One step of the optimiser. Returns the loss, a mean over tokens in nats, and the gradient's norm."""
        if self.log["shuffled"] and not self._is_warm_up(now):
            scores = _shuffled(scores, seed=now)
        prompts = [prompt.student for prompt in self.task.of_step(now)]
        loss, mean = forward_kl_loss if self._is_warm_up(now) else reverse_kl_loss, 0.0
        for part in micro_batches(loss, self.student, prompts, samples, scores):
            share = token_mean(part, torch.ones_like(part, dtype=torch.bool), count=int(samples.mask.sum()))
            share.backward()
            mean += float(share.detach())
        norm = self.student.step(self.task.warm_learning_rate if self._is_warm_up(now) else self.task.learning_rate)
        return {"loss": mean, "grad_norm": norm}

    def save_student(self, folder: Path) -> None:
        """Save the student as Hugging Face does, or its adapter as PEFT does, which the service can serve."""
        self.student.model.save_pretrained(folder)

    def _is_warm_up(self, now: int) -> bool:
        """Whether a step learns from the teacher's own text, before the student's."""
        return now < self.log["warm_steps"]

    def _look_and_save(self, done: int) -> None:
        turns = (self.log["warm_steps"], self.log["all_steps"])
        if done % self.task.evaluate_every == 0 or done in turns:
            self._evaluate()
        if done % self.task.save_every == 0 or done in turns:
            self._save()

    def _evaluate(self) -> None:
        self.log["evaluations"].append({"step": len(self.log["steps"]), **self._evaluator(self.student)})

    def _save(self) -> None:
        """Everything that the rest of the run depends on."""
        rollout = None if self.next_rollout is None else vars(self.next_rollout)
        kept = {"student": self.student.state(), "next_rollout": rollout, "fixed": self._evaluator.fixed}
        replace_file(self.file, lambda file: torch.save({"log": self.log, **kept}, file))

    def _restore(self) -> dict[str, Any]:
        """Returns what the evaluator goes on with."""
        kept = read_checkpoint(self.file, {what: self.log[what] for what in ("settings", "shuffled", "teacher")})
        self.student.restore(kept["student"])
        self.log = kept["log"]
        self.next_rollout = Samples(**kept["next_rollout"]) if kept["next_rollout"] else None
        return kept["fixed"]


def read_checkpoint(file: Path, due: dict[str, Any]) -> dict[str, Any]:
    """What a run goes on from.

    Args:
        due: what its log must say.

    Raises:
        ValueError: the checkpoint is of another run, or cannot be read.
    """
    try:
        kept = torch.load(file, weights_only=True)
        there = {what: kept["log"][what] for what in due}
    except Exception as error:  # whatever a damaged file makes of itself
        raise ValueError(f"{file} cannot be read ({type(error).__name__}); --fresh begins anew") from error
    for what, value in there.items():
        if value != due[what]:
            raise ValueError(
                f"{file} is of a run with {what} {value!r}, and this is {due[what]!r}; --fresh begins anew, --out "
                "takes another folder"
            )
    return kept


def _shuffled(scores: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same rows, each at another token."""
    others = torch.randperm(len(scores["response_logprobs"]), generator=torch.Generator().manual_seed(seed))
    return {name: rows[others] for name, rows in scores.items()}


def replace_file(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """A file that is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.on_policy_distillation", description=__doc__.splitlines()[0]
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tiny", dest="name", action="store_const", const="tiny", help="a random model, in a minute")
    which.add_argument(
        "--small", dest="name", action="store_const", const="small", help="a student of a third of the layers: longer"
    )
    parser.add_argument("--shuffled", action="store_true", help="the control: the teacher's scores of other tokens")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever checkpoint there is")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "distillation", help="folder (default: out/distillation)"
    )
    options = parser.parse_args()
    name, out = options.name or "hint", options.out.absolute()
    folder = out / (name + "-shuffled" * options.shuffled)
    file = folder / "checkpoint.pt"
    hf_logging.disable_progress_bar()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")  # for as long as this process lives
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if options.fresh:
            file.unlink(missing_ok=True)
        with step("preparing the checkpoint"):
            model = str(make_tiny_teacher(out / "tiny-teacher") if name == "tiny" else demo_teacher("bfloat16"))
        what = task(name, model)
        log = None
        if file.exists():
            log = read_checkpoint(file, {"settings": what.fingerprint, "shuffled": options.shuffled})["log"]
            done = len(log["steps"])
            print(
                "finished already" if done == log["all_steps"] else f"going on after step {done} of {log['all_steps']}"
            )
    except BlockingIOError:
        print(f"FAILED: another run is using {folder}; --out takes another folder", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if log is None or len(log["steps"]) < log["all_steps"] or not (folder / "student").exists():
        log, code = run(name, model, folder, options.shuffled)
        if code:
            goes_on = f"the same command{' without --fresh' * options.fresh} goes on from {file}"
            print(goes_on if file.exists() else "no checkpoint has been written yet")
            return code
    found = checks(log, what)
    for sentence, holds in found:
        print(f"{'ok    ' if holds else 'FAILED'} {sentence}")
    log = {**log, "time": shares(log["steps"]), "checks": found, "machine": service.machine()}
    replace_file(folder / "log.json", lambda file: file.write(json.dumps(log, indent=1).encode() + b"\n"))
    draw([out / name / "log.json", out / f"{name}-shuffled" / "log.json"], out / f"{name}.png")
    print(f"{folder / 'log.json'} and {out / f'{name}.png'} have it all; --fresh begins anew")
    return 0 if all(holds for _, holds in found) else 1


def run(name: str, model: str, folder: Path, shuffled: bool) -> tuple[dict[str, Any] | None, int]:
    """Start the service, and have a trainer learn to the end. Returns its log, and an exit code that is not 0 where it
    did not get there."""
    began, log = time.monotonic(), None
    try:
        with step("starting Ray, Serve and the teacher"):
            settings = {"model": model, "dtype": "auto", "engine_args": {"max_model_len": 512}}
            service.start(AppConfig(teachers={"default": settings}))
        cores = service.trainer_cores()  # Ray has PyTorch use as many threads
        trainer = ray.remote(Trainer).options(num_cpus=cores).remote(name, folder, shuffled)
        with step("making the student, and evaluating it"):
            log = ray.get(trainer.begin.remote())
        print(latest(log), flush=True)
        while len(log["steps"]) < log["all_steps"]:
            log = ray.get(trainer.step.remote())
            print(latest(log), flush=True)
        ray.get(trainer.save_student.remote(folder / "student"))
    except KeyboardInterrupt:
        print("interrupted")
        return log, 130
    except RayError as error:
        print(f"FAILED: {getattr(error, 'cause', None) or error}", file=sys.stderr)
        return log, 1
    finally:
        with step("stopping everything"):
            service.stop()
    print(f"done in {time.monotonic() - began:.0f} s")
    return log, 0


def latest(log: dict[str, Any]) -> str:
    """The last step in a line, and below it the evaluation, where there was one after that step."""
    lines = []
    if log["steps"]:
        made = log["steps"][-1]
        took = ", ".join(f"{what} {made[what][1] - made[what][0]:.2f} s" for what in ("sample", "score", "learn"))
        count = f"{len(log['steps'])}/{log['all_steps']}"
        lines.append(f"step {count}: loss {made['loss']:.3f} over {made['tokens']} tokens; {took}")
    found = log["evaluations"][-1]
    if found["step"] == len(log["steps"]):
        names = ("forward_kl", "distinct_2", "tokens")
        lines.append(
            f"  held out: reverse_kl {found['reverse_kl']:.3f} +- {found['reverse_kl_error']:.3f}, "
            + ", ".join(f"{name} {found[name]:.3f}" for name in names)
        )
        lines.append(f"  it says: {found['answer']!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
