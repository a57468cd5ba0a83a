"""The main job, start to end: start the service, score a good and a bad answer three ways, show what came back.

`make demo` runs it; `MODEL=path make demo` on another checkpoint. It starts its own Ray and stops it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import ray
import yaml

from deployments.actor import NAMESPACE
from deployments.client import ScoringClient
from deployments.config import DEMO_MODEL, AppConfig
from deployments.router import APP_NAME
from examples import service
from examples.service import step
from scoring import LabelRead, MatrixRead, MatrixScore
from scoring.demo_teacher import demo_teacher
from scoring.http_client import HttpScoringClient
from scoring.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"
GOOD = "The capital of France is Paris."
BAD = "The capital of France is Berlin, a town in Italy."
ALTERNATIVES = " Paris Lyon London Rome Madrid city the a ."  # further candidates at every position


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL, help="folder of a Hugging Face checkpoint (default: SmolLM2)")
    parser.add_argument(
        "--config", type=Path, default=ROOT / "serve_config.yaml", help="a Serve YAML (default: serve_config.yaml)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the picture (default: out)")
    options = parser.parse_args()

    began = time.monotonic()
    with step("preparing the checkpoint"):
        path = str(demo_teacher("bfloat16")) if options.model == DEMO_MODEL else os.path.abspath(options.model)
        tokenizer = Tokenizer(path)
    try:
        with step("starting Ray, Serve and the replicas"):
            url = start(options.config, path, own_dtype=options.model != DEMO_MODEL)
        prompt = as_prompt(tokenizer, QUESTION)
        answers = {name: as_ids(tokenizer, text) for name, text in (("good", GOOD), ("bad", BAD))}
        candidates = candidate_rows(tokenizer, answers)
        reads = [MatrixRead(prompt, ids, candidates[name]) for name, ids in answers.items()]

        with ScoringClient() as client:
            teacher = next(t for t in client.teachers().values() if t["default"])
            with step("scoring both answers through ScoringClient"):
                scores = client.read_matrix(reads)
            with step("the same through the named actor"):
                actor = ray.get_actor(APP_NAME, namespace=NAMESPACE)
                by_actor = ray.get(actor.read_matrix.remote(reads))
            with step("the same over HTTP"), HttpScoringClient(url) as http:
                by_http = http.read_matrix(reads)
            apart = largest_difference(scores, by_actor, by_http)
            # A number depends slightly on what the engine computed it with, in bf16 the more so.
            if apart > (1e-4 if teacher["dtype"] == "float32" else 0.1):
                raise SystemExit(f"FAILED: client, actor and HTTP differ by {apart}")
            with step("one yes/no label read"):
                verdict = ask_yes_no(client, tokenizer)

        for read, score, (name, text) in zip(reads, scores, (("good", GOOD), ("bad", BAD)), strict=True):
            print(f"\nThe {name} answer: {text}\n")
            print(table(tokenizer, read, score))
        total = [float(s.response_logprobs.sum()) for s in scores]
        print(f"\nlog p(answer | question): good {total[0]:.2f}, bad {total[1]:.2f}")
        judge = " (a model of 135M parameters is no judge; the read is exact all the same)"
        print(
            f"label read: is the good answer right?  p(yes) / (p(yes) + p(no)) = {verdict:.3f}"
            + (judge if options.model == DEMO_MODEL else "")
        )
        picture = options.out / "demo.png"
        with step(f"drawing {picture}"):
            draw(tokenizer, reads, scores, picture)
        if total[0] <= total[1] and options.model == DEMO_MODEL:
            print("FAILED: the teacher prefers the bad answer", file=sys.stderr)
            return 1
        print(f"\nclient, actor and HTTP agree: their numbers differ by {apart:.1g} at most")
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    finally:
        with step("stopping everything"):
            service.stop()
    print(f"done in {time.monotonic() - began:.1f} s; the picture is {picture}")
    return 0


def start(config: Path, model: str, own_dtype: bool) -> str:
    """Start Ray and the application of a Serve YAML with `model` as its default teacher. Returns the HTTP address.

    With `own_dtype` the model runs in the dtype its checkpoint names, not in the YAML's.
    """
    settings = yaml.safe_load(config.read_text())
    app = AppConfig.model_validate(settings["applications"][0]["args"])
    teacher = app.teachers[app.default_teacher]
    teacher.model = model
    if own_dtype:
        teacher.dtype = "auto"
    longest = teacher.engine_args.get("max_model_len")
    if longest and longest > positions(model):
        teacher.engine_args["max_model_len"] = positions(model)
    return service.start(app, settings["http_options"]["port"])


def positions(model: str) -> int:
    """Tokens the model was made for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    return getattr(config, "max_position_embeddings", 2**31)


def as_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def as_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """The question as the model's chat template writes it; plain text for a model without one."""
    if tokenizer.has_chat_template:
        return as_ids(tokenizer, tokenizer.chat([{"role": "user", "content": question}]))
    return tokenizer.encode(f"Question: {question}\nAnswer: ")


def candidate_rows(tokenizer: Tokenizer, answers: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Per answer int32 [R, K]: at each position its own token first, then every other token in play."""
    pool = dict.fromkeys([*answers["good"], *answers["bad"], *as_ids(tokenizer, ALTERNATIVES)])
    return {
        name: np.array([[own, *(i for i in pool if i != own)] for own in ids], dtype=np.int32)
        for name, ids in answers.items()
    }


def largest_difference(scores, by_actor: dict, by_http) -> float:
    """Between the numbers of the three ways in, over all reads. Shapes that differ are an error."""
    pairs = []
    for name in ("logprobs", "response_logprobs"):
        pairs += [(getattr(s, name), other) for s, other in zip(scores, by_actor[name], strict=True)]
        pairs += [(getattr(s, name), getattr(other, name)) for s, other in zip(scores, by_http, strict=True)]
    for one, other in pairs:
        if one.shape != other.shape:
            raise SystemExit(f"FAILED: the three ways in answer with shapes {one.shape} and {other.shape}")
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def ask_yes_no(client: ScoringClient, tokenizer: Tokenizer) -> float:
    """p(yes) among yes and no, for the good answer."""
    prompt = as_prompt(tokenizer, f"Question: {QUESTION} Answer: {GOOD} Is the answer right? Say only Yes or No.")
    yes, no = (as_ids(tokenizer, word)[0] for word in ("Yes", "No"))
    logprobs = client.read_labels([LabelRead(prompt, [yes, no])])[0].logprobs
    return float(1 / (1 + np.exp(logprobs[1] - logprobs[0])))


def table(tokenizer: Tokenizer, read: MatrixRead, score: MatrixScore) -> str:
    """One line per response token: the token, its log-probability, the best candidate and its log-probability."""
    lines = [f"  {'token':<14}{'log p':>9}   best candidate"]
    best = score.logprobs.argmax(axis=1)  # int64 [R]
    for r, token in enumerate(read.response_ids):
        winner = read.candidate_ids[r, best[r]]
        name = "(the token itself)" if winner == token else repr(tokenizer.decode([int(winner)]))
        lines.append(
            f"  {tokenizer.decode([int(token)])!r:<14}{score.response_logprobs[r]:>9.3f}   "
            f"{name:<20}{score.logprobs[r, best[r]]:>9.3f}"
        )
    return "\n".join(lines)


def draw(tokenizer: Tokenizer, reads, scores, path: Path) -> None:
    """A heat map per answer: response tokens across, candidates down, colour = log-probability."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    order = sorted(set(reads[0].candidate_ids[0].tolist()))
    figure, panels = pyplot.subplots(1, len(reads), figsize=(15, 7), constrained_layout=True, sharey=True)
    for panel, read, score, name in zip(panels, reads, scores, ("good", "bad"), strict=True):
        columns = np.argsort(read.candidate_ids, axis=1)  # int64 [R, K]: candidates in rising order of id
        matrix = np.take_along_axis(score.logprobs, columns, axis=1).T  # float32 [K, R]
        image = panel.imshow(matrix, aspect="auto", cmap="viridis", vmin=-20, vmax=0)
        own = [order.index(int(i)) for i in read.response_ids]
        panel.scatter(
            range(len(own)), own, marker="s", s=90, facecolors="none", edgecolors="red", label="its own token"
        )
        labels = [tokenizer.decode([int(i)]) for i in read.response_ids]
        panel.set_xticks(range(len(labels)), labels, rotation=60, ha="right")
        panel.set_yticks(range(len(order)), [repr(tokenizer.decode([i])) for i in order])
        panel.set_title(f"the {name} answer: log p = {float(score.response_logprobs.sum()):.1f}")
        panel.set_xlabel("response position")
    panels[0].set_ylabel("candidate")
    panels[0].legend(loc="upper left")
    figure.colorbar(image, ax=panels, label="log-probability given the text before")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
