"""The same scores without vLLM, in a process bound to one core: Hugging Face's forward pass and a gather, and a floor.

The floor is what independent code takes that does no more than it must: the model's body as transformers has it, the
output head in chunks of rows, and the log-sum-exp of a few rows at a time, while they are in the core's cache. It is
given every advantage: sequences of one length, no padding, nothing to receive and to send.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

BATCHES = (4, 8, 16)
_HEAD_ROWS = 1024
_PIECE_BYTES = 1 << 20  # of float32 logits that stay in a core's cache


@contextlib.asynccontextmanager
async def hosted_model(settings: tuple[str, str, int]) -> AsyncIterator[HuggingFace]:
    """For `EngineProcess`; the settings are checkpoint, dtype and core."""
    yield HuggingFace(*settings)


class HuggingFace:
    """A causal language model of transformers on one core."""

    def __init__(self, checkpoint: str, dtype: str, core: int) -> None:
        os.sched_setaffinity(0, {core})
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()

    def forward_and_gather(self, ids: np.ndarray, columns: np.ndarray, batch: int) -> tuple[float, np.ndarray]:
        """Seconds, and the log-probabilities (float32 [N, rows, C]) of `columns` (int32 [N, rows, C]) in the last
        `rows` positions of `ids` (int32 [N, T]), as one writes it down."""
        import torch

        def scores(ids: Any, columns: Any) -> Any:
            logits = self.model(ids, use_cache=False).logits[:, -1 - columns.shape[1] : -1]
            return logits.float().log_softmax(-1).gather(-1, columns)

        return _in_batches(torch, scores, ids, columns, batch)

    def floor(self, ids: np.ndarray, columns: np.ndarray, batch: int) -> tuple[float, np.ndarray]:
        """The same, with nothing computed or written to memory that need not be."""
        import torch

        head = self.model.get_output_embeddings().weight  # [V, H]
        piece = max(1, _PIECE_BYTES // (4 * len(head)))

        def scores(ids: Any, columns: Any) -> Any:
            rows = columns.shape[1]
            hidden = self.model.base_model(ids, use_cache=False).last_hidden_state[:, -1 - rows : -1]
            hidden, wanted = hidden.reshape(-1, hidden.shape[-1]), columns.reshape(-1, columns.shape[-1])
            out = torch.empty(wanted.shape)  # float32
            for start in range(0, len(hidden), _HEAD_ROWS):
                logits = hidden[start : start + _HEAD_ROWS] @ head.T  # [rows of a chunk, V]
                total = torch.cat([some.float().logsumexp(1, keepdim=True) for some in logits.split(piece)])
                chosen = logits.gather(1, wanted[start : start + _HEAD_ROWS]).float()
                out[start : start + _HEAD_ROWS] = chosen - total
            return out.view(columns.shape)

        return _in_batches(torch, scores, ids, columns, batch)


def _in_batches(torch: Any, scores: Any, ids: np.ndarray, columns: np.ndarray, batch: int) -> tuple[float, np.ndarray]:
    started = time.perf_counter()
    with torch.inference_mode():
        parts = [
            scores(torch.from_numpy(ids[i : i + batch]).long(), torch.from_numpy(columns[i : i + batch]).long())
            for i in range(0, len(ids), batch)
        ]
    return time.perf_counter() - started, torch.cat(parts).numpy()
