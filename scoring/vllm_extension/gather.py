"""The candidate gather inside vLLM's workers: what its own gather of prompt log-probabilities does not answer.

vLLM's own (`PromptLogprobsWorker.compute_prompt_token_id_logprobs`) scores given ids, with one product with the output
head per request and step. A request that carries `asked_for(...)` in its `extra_args` is answered here instead: with
all columns of `scoring.columns`, for rows that have ids, and its rows of one step may share the head's product with
those of other requests. Other requests stay vLLM's. Where nothing is asked for but given ids, vLLM's kernel scores
them here too.

This is the one file that leans on that class. Its source file is the same text in vLLM 0.32.0 and 0.33.0; where it is
another, nothing is replaced and the worker does not start.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scoring.columns import Columns
from scoring.vllm_extension.fill import fill
from scoring.vllm_extension.version import ENGINE_SERIES

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

KEY = "teacher_scoring"  # in SamplingParams.extra_args
SOURCE = "97a0ff853485b4dc1323e139ffe515e0891ec18b397cc37b4b13b7851da81cdf"  # sha256 of vLLM's file
PRODUCT_ROWS = 1024  # of one product with the head at most, as upstream: its logits lie in memory at once
PRODUCT_ROWS_CPU = 256  # there its logits are still in a cache when they are gathered


def asked_for(columns: Columns, share_head: bool) -> dict[str, Any] | None:
    """The `extra_args` of a request whose answer has these columns; None where vLLM's own gather answers it.

    The ids that the request brings are int32 [rows, 1 + K], as upstream's are: the response's own token and the
    candidates. The answer is float32 [rows, columns.width].
    """
    if columns.plain and not share_head:
        return None
    return {KEY: {"columns": asdict(columns), "share_head": share_head}}


@cache
def replace_gather() -> None:
    """Answer requests of this project in this process's workers. May be called repeatedly.

    Raises:
        RuntimeError: vLLM's file has changed in a version that this project runs on. (With any other version no
            `TeacherEngine` starts, so there is nothing to answer.)
    """
    import vllm

    if not str(vllm.__version__).startswith(ENGINE_SERIES):
        return
    from vllm.v1.worker.gpu.sample import prompt_logprob

    file = Path(inspect.getsourcefile(prompt_logprob))
    if hashlib.sha256(file.read_bytes()).hexdigest() != SOURCE:
        raise RuntimeError(
            f"{file} of vLLM {vllm.__version__} is not the file that this project's gather extends "
            "(that of vLLM 0.32.0 and 0.33.0): scores could be wrong. Install one of these versions."
        )
    worker = prompt_logprob.PromptLogprobsWorker
    add, remove, compute = worker.add_request, worker.remove_request, worker.compute_prompt_token_id_logprobs

    @wraps(add)
    def add_request(self: "PromptLogprobsWorker", req_id: str, req_idx: int, sampling_params: "SamplingParams") -> None:
        asked = (sampling_params.extra_args or {}).get(KEY)
        if asked is None:
            add(self, req_id, req_idx, sampling_params)
            return
        # What upstream does where no `prompt_logprobs` are asked for, without its copies of the ids on the device.
        self.uses_prompt_logprobs[req_idx] = False
        self.num_prompt_logprobs[req_idx] = 0
        _gather_of(self).add(req_id, sampling_params, **asked)

    @wraps(remove)
    def remove_request(self: "PromptLogprobsWorker", req_id: str) -> None:
        remove(self, req_id)
        _gather_of(self).reads.pop(req_id, None)

    @wraps(compute)
    def compute_prompt_token_id_logprobs(
        self: "PromptLogprobsWorker",
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        input_batch: "InputBatch",
        prompt_lens: np.ndarray,
    ) -> dict[str, torch.Tensor]:
        step = (logits_fn, hidden_states, input_batch, prompt_lens)
        return compute(self, *step) | _gather_of(self).compute(*step)

    worker.add_request = add_request
    worker.remove_request = remove_request
    worker.compute_prompt_token_id_logprobs = compute_prompt_token_id_logprobs


def _gather_of(worker: "PromptLogprobsWorker") -> "Gather":
    """The state that belongs to one of vLLM's workers."""
    if not hasattr(worker, "teacher_scoring"):
        as_logits = worker.logprobs_mode in ("raw_logits", "processed_logits")
        worker.teacher_scoring = Gather(worker.device, as_logits)
    return worker.teacher_scoring


@dataclass
class _Read:
    """A request under way. Of its rows only the n that have ids are computed.

    Attributes:
        rows: int64 [n], where they lie among all rows, rising.
        ids: int64 [n, 1 + K], -1 is a pad; on the device.
        answer: float32 [all rows, width]: on the device, the rest -inf; None before the first chunk.
    """

    columns: Columns
    start: int  # the prompt position of row 0
    share_head: bool
    count: int  # all rows
    rows: np.ndarray
    ids: torch.Tensor
    answer: torch.Tensor | None = None


@dataclass
class _Part:
    """Rows [begin, end) of a read that one step computes, and where their hidden states lie in it."""

    read: _Read
    begin: int
    end: int
    positions: np.ndarray  # int64 [end - begin]


@dataclass
class Gather:
    """The requests of one worker that are answered here, each from `add` to its last chunk (or to its removal)."""

    device: torch.device
    as_logits: bool
    reads: dict[str, _Read] = field(default_factory=dict)

    @property
    def product_rows(self) -> int:
        return PRODUCT_ROWS_CPU if self.device.type == "cpu" else PRODUCT_ROWS

    def add(self, req_id: str, sampling_params: "SamplingParams", columns: dict[str, Any], share_head: bool) -> None:
        """Take a request on. One that comes again after a preemption begins anew."""
        ids = sampling_params.prompt_logprob_token_ids  # int32 [all rows, 1 + K]
        rows = np.flatnonzero((ids >= 0).any(axis=1))
        self.reads[req_id] = _Read(
            Columns(**columns),
            sampling_params.prompt_logprob_start or 0,
            share_head,
            len(ids),
            rows,
            self._to_device(ids[rows].astype(np.int64)),
        )

    def compute(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,  # [tokens of the step, hidden size]
        input_batch: "InputBatch",
        prompt_lens: np.ndarray,
    ) -> dict[str, torch.Tensor]:
        """Score the rows of one step. Answers float32 [rows, width] by request, where the step was its last chunk."""
        if not self.reads:
            return {}
        parts, finished = self._parts(input_batch, prompt_lens)
        for together in _products(parts, self.product_rows):
            positions = self._to_device(np.concatenate([part.positions for part in together]))
            self._score(together, logits_fn, hidden_states[positions])
        return {req_id: self._whole(self.reads.pop(req_id)) for req_id in finished}

    def _parts(self, input_batch: "InputBatch", prompt_lens: np.ndarray) -> tuple[list[_Part], list[str]]:
        """What this step computes, and the requests whose prompts end with it. As upstream does, it drops a request
        whose prefill began beyond its first row: without an answer, the engine's caller learns of it."""
        parts, finished = [], []
        for i, req_id in enumerate(input_batch.req_ids):
            read = self.reads.get(req_id)
            if read is None:
                continue
            prompt_len = int(prompt_lens[input_batch.idx_mapping_np[i]])
            begin = int(input_batch.num_computed_prefill_tokens_np[i])
            end = begin + int(input_batch.num_scheduled_tokens[i])
            answered = begin >= prompt_len or prompt_len < input_batch.prefill_len_np[i]
            if answered or (read.answer is None and begin > read.start):
                del self.reads[req_id]
                continue
            if read.answer is None:
                size = (len(read.rows), read.columns.width)
                read.answer = torch.empty(size, dtype=torch.float32, device=self.device)
            # The last token's row predicts the token to be made.
            first, last = np.searchsorted(read.rows, [begin - read.start, min(end, prompt_len - 1) - read.start])
            base = int(input_batch.query_start_loc_np[i]) - begin + read.start
            for a in range(first, last, self.product_rows):
                b = min(a + self.product_rows, last)
                parts.append(_Part(read, a, b, base + read.rows[a:b]))
            if end >= prompt_len:
                finished.append(req_id)
        return parts, finished

    def _score(
        self, together: list[_Part], logits_fn: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> None:
        """Score what one product with the head covers. Its logits are gone afterwards, before the next one's come."""
        logits = logits_fn(hidden)  # [rows of the product, V]
        of_part = logits.split([part.end - part.begin for part in together])
        for part, part_logits in zip(together, of_part, strict=True):
            self._fill(part, part_logits)

    def _fill(self, part: _Part, logits: torch.Tensor) -> None:
        columns = part.read.columns
        ids, answer = part.read.ids[part.begin : part.end], part.read.answer[part.begin : part.end]
        if columns.plain and not self.as_logits:
            from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

            answer.copy_(compute_token_logprobs(logits, ids.clamp_min(0)).masked_fill_(ids < 0, -torch.inf))
        else:
            fill(answer, logits, ids, columns, self.as_logits)

    def _whole(self, read: _Read) -> torch.Tensor:
        """float32 [all rows, width]: the answer, with -inf in the rows that were left out."""
        if len(read.rows) == read.count:
            return read.answer
        whole = torch.full((read.count, read.columns.width), -torch.inf, dtype=torch.float32, device=self.device)
        whole[self._to_device(read.rows)] = read.answer
        return whole

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        from vllm.utils.torch_utils import async_tensor_h2d

        return async_tensor_h2d(array, self.device)


def _products(parts: list[_Part], most: int) -> Iterator[list[_Part]]:
    """The parts of a step, in order, in lists of at most so many rows that are multiplied by the head at once."""
    together: list[_Part] = []
    size = 0  # rows of what is together
    for part in parts:
        size += len(part.positions)
        alone = not (part.read.share_head and together and together[-1].read.share_head)
        if together and (alone or size > most):
            yield together
            together, size = [], len(part.positions)
        together.append(part)
    if together:
        yield together
