"""`prompt_logprobs`: the log-probability of every token of a prompt, and of the likeliest ones in its place.

A matrix read answers it: the prompt's first token is the read's prompt and the others its response, with `top_k` and
the rank of each token. So it is sharded, retried, bounded and reuses prefixes like any other read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

import numpy as np

from deployments.router import Router
from deployments.vllm_http.dialect import Refusal
from scoring.limits import BatchLimits
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import NO_TOKEN, MatrixScore, MatrixScores
from scoring.tokenizer import Tokenizer

MOST = 20
"""Likeliest tokens a position at most: what vLLM's server gives out unless it is started with another bound."""

_IMPOSSIBLE = -9999.0  # what vLLM writes for -inf
_ENTRY_BYTES = 80  # of one token's entry in JSON, about


def check_count(count: Any, bound: int = MOST) -> None:
    """Refuse what is no number of likeliest tokens, by vLLM's rules."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise Refusal(f"`prompt_logprobs` is {short(count)}; it must be an integer.", "prompt_logprobs")
    if count < -1:
        raise Refusal(f"`prompt_logprobs` is {count}; it must be a positive value.", "prompt_logprobs")
    if not 0 <= count <= bound:
        asked = "the whole vocabulary" if count == -1 else count
        raise Refusal(
            f"Requested prompt logprobs of {asked}, which is greater than max allowed: {bound}", "prompt_logprobs"
        )


def json_bytes(tokens: int, count: int) -> int:
    """Size of the answer for so many tokens in JSON, about."""
    return tokens * (count + 1) * _ENTRY_BYTES


def check_size(tokens: int, count: int, limits: BatchLimits) -> None:
    """
    Raises:
        BatchTooLarge: the answer would have more than `max_answer_bytes` in JSON.
    """
    if (size := json_bytes(tokens, count)) > limits.max_answer_bytes:
        raise limits.exceeded("max_answer_bytes", size)


def read_of(ids: np.ndarray, count: int, candidates: np.ndarray | None = None, **options: Any) -> MatrixRead:
    """The read that answers `prompt_logprobs=count` for a prompt.

    Args:
        ids: int32 [T].
        candidates: int32 [T - 1, K], scored beside.
        options: further fields of the read.
    """
    return MatrixRead(ids[:1], ids[1:], candidates, top_k=count, extras="rank", **options)


async def ask(
    router: Router, reads: Sequence[MatrixRead], trace: Mapping[str, str] | None
) -> tuple[MatrixScores, list[int]]:
    """The answers to such reads, and the token that follows each prompt.

    Raises:
        ScoringError: of the first read that failed, with its index.
    """
    scores = await router.read_matrix(reads, trace_headers=trace)
    following = [score.meta.next_token for score in scores]
    # A prompt of one token has no rows, so no engine has seen it.
    unseen = [i for i, token in enumerate(following) if token == NO_TOKEN]
    if unseen:
        labels = [
            LabelRead(reads[i].prompt_ids, reads[i].prompt_ids, teacher=reads[i].teacher, priority=reads[i].priority)
            for i in unseen
        ]
        for i, answer in zip(unseen, await router.read_labels(labels, trace_headers=trace), strict=True):
            following[i] = answer.meta.next_token
    return scores, following


def as_json(score: MatrixScore, ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """vLLM's `prompt_logprobs` of a prompt: null for its first token, and for each other one an object with the token
    itself, first, and the likeliest ones: `{"<id>": {"logprob", "rank", "decoded_token"}}`.

    Written position by position, so that no single call holds every other thread up.

    Args:
        score: the answer to `read_of(ids, ...)`.
        tokenizer: without one, `decoded_token` is null, as vLLM writes it then.
    """
    own_ids, own, ranks = ids[1:].tolist(), score.response_logprobs.tolist(), score.rank.tolist()
    nothing: Sequence[Any] = [()] * len(own_ids)
    top_ids = nothing if score.top_ids is None else score.top_ids.tolist()
    top = nothing if score.top_ids is None else score.top_logprobs.tolist()
    positions = ["null"]
    for r, own_id in enumerate(own_ids):
        tokens, logprobs = [own_id, *top_ids[r]], [own[r], *top[r]]
        texts = [None] * len(tokens)
        if tokenizer is not None:
            texts = tokenizer.decoded_tokens(tokens, own_ids[max(0, r - 4) : r])
        entries: dict[int, Mapping[str, Any]] = {}
        for token, logprob, rank, text in zip(
            tokens, logprobs, (int(ranks[r]), *range(1, len(tokens))), texts, strict=True
        ):
            entries[token] = {"logprob": max(logprob, _IMPOSSIBLE), "rank": rank, "decoded_token": text}
        positions.append(json.dumps(entries, allow_nan=False))
    return f"[{', '.join(positions)}]"
