"""TRL: the client that its trainers ask for a teacher behind a server (`ServerDistillationTrainer` and its kin).

    trainer = ServerDistillationTrainer(model, ServerDistillationConfig(teacher_model_server_url=URL, ...), ...)
    trainer.teacher_client = TeacherClient(URL)  # URL = "http://127.0.0.1:8000"

(The trainer first makes a client of its own, which asks `/health` and `/v1/models`; the service answers both.)

Written against TRL 1.16.0: `VLLMClient.get_sequence_logprobs` of `trl/generation/vllm_client.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.trainers.service import check_temperature
from scoring.errors import InvalidRead
from scoring.http_client import HttpScoringClient
from scoring.reads import MatrixRead


class TeacherClient:
    """Answers `get_sequence_logprobs` from the service.

    Args:
        base_url: of the service.
        teacher: which one answers; None is the default teacher.
        options: further ones of `HttpScoringClient`: `token`, `timeout_s`.
    """

    def __init__(self, base_url: str, teacher: str | None = None, **options: Any) -> None:
        self._client = HttpScoringClient(base_url, **options)
        self._teacher = teacher

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        **_: Any,
    ) -> dict[str, list]:
        """Log-probabilities of completions, as TRL's trainers take them.

        Args:
            sequences: N lists of ids, prompt and completion.
            prompt_lengths: N, at least 1 each.
            top_logprobs: how many of the teacher's likeliest tokens.
            temperature: 1; the trainer divides the student's logits by it.

        How TRL cuts and encodes requests (`chunk_size`, `max_concurrent_requests`, `use_binary`) has no meaning here.

        Returns:
            Lists by sequence and completion position: `logprobs` and `logprob_token_ids`, [top_logprobs] each, the
            likeliest first; `actual_logprobs` and `actual_token_ids`, [1] each, of the completion's own tokens, which
            are there whether or not they are among the likeliest.

        Raises:
            ScoringError: of the first sequence that could not be scored; InvalidRead for another temperature.
        """
        check_temperature(temperature, "temperature")
        if len(sequences) != len(prompt_lengths):
            raise InvalidRead(f"has {len(prompt_lengths)} for {len(sequences)} sequences", field="prompt_lengths")
        reads = [
            MatrixRead(ids[:length], ids[length:], top_k=top_logprobs, teacher=self._teacher)
            for ids, length in zip(sequences, prompt_lengths, strict=True)
        ]
        scores = list(self._client.read_matrix(reads))
        nothing = [[[]] * len(read.response_ids) for read in reads]
        return {
            "logprobs": [s.top_logprobs.tolist() for s in scores] if top_logprobs else nothing,
            "logprob_token_ids": [s.top_ids.tolist() for s in scores] if top_logprobs else nothing,
            "actual_logprobs": [s.response_logprobs[:, None].tolist() for s in scores],
            "actual_token_ids": [read.response_ids[:, None].tolist() for read in reads],
        }
