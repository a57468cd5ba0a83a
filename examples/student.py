"""A student that samples and learns: a Hugging Face causal language model on the CPU, ids in and ids out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

Ids = list[int]


@dataclass(frozen=True, eq=False)
class Samples:
    """Responses to B prompts as a model wrote them, padded on the right.

    Attributes:
        responses: int64 [B, R].
        mask: bool [B, R], False beyond a response's end.
        candidates: int64 [B, R, K], the likeliest tokens at each position by the model that wrote it.
        logprobs: float32 [B, R], of the response's own tokens by that model, at temperature 1.
    """

    responses: Tensor
    mask: Tensor
    candidates: Tensor
    logprobs: Tensor

    def __getitem__(self, some: slice) -> Samples:
        return Samples(**{f.name: getattr(self, f.name)[some] for f in fields(self)})

    def response(self, i: int) -> Ids:
        """The i-th one, without padding."""
        return self.responses[i][self.mask[i]].tolist()

    def packed(self) -> Samples:
        """The same end to end, without padding: [sum n], [sum n, K]."""
        return Samples(**{f.name: getattr(self, f.name)[self.mask] for f in fields(self)})


def sample(
    model: PreTrainedModel, prompts: Sequence[Ids], *, tokens: int, candidates: int, end: int | None, seed: int
) -> Samples:
    """One response of at most `tokens` tokens to each prompt, from the model's whole distribution at temperature 1.

    The logits of all positions are in memory at once, 4 x R x B x V bytes; for long responses keep of each position
    what is needed, as it comes.

    Args:
        candidates: K.
        end: the id that ends a response, and is its last token; None where nothing does.
    """
    ids, real = _padded_left(prompts)
    how = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        eos_token_id=end,
        pad_token_id=0 if end is None else end,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _without_defaults(model):
        torch.manual_seed(seed)
        written = model.generate(input_ids=ids, attention_mask=real, generation_config=how)
    responses = written.sequences[:, ids.shape[1] :]  # int64 [B, R]
    ends = torch.zeros_like(responses) if end is None else (responses == end).long()
    best, own = [], []
    for position, logits in enumerate(written.logits):  # R of [B, V]
        best.append(logits.topk(candidates).indices)
        own.append(logits.float().log_softmax(dim=-1).gather(-1, responses[:, position, None])[:, 0])
    return Samples(
        responses=responses,
        mask=ends.cumsum(dim=1) - ends == 0,
        candidates=torch.stack(best, dim=1),
        logprobs=torch.stack(own, dim=1),
    )


class Student:
    """A model that learns.

    Args:
        model: what of it asks for gradients is trained.
        learning_rate: of AdamW.
        max_grad_norm: gradients are scaled down to it.
    """

    def __init__(self, model: PreTrainedModel, learning_rate: float, max_grad_norm: float = 1.0) -> None:
        self.model = model.eval()  # no dropout: what is trained is what samples
        self._learning_rate, self._max_grad_norm = learning_rate, max_grad_norm
        self._optimizer = torch.optim.AdamW(self._trained().values(), lr=learning_rate, weight_decay=0.0)

    def logits(self, prompts: Sequence[Ids], samples: Samples) -> Tensor:
        """[sum n, V], with gradients: the rows that predict the responses' tokens, end to end without padding."""
        before, real = _padded_left(prompts)
        ids = torch.cat([before, samples.responses], dim=1)
        real = torch.cat([real, samples.mask.long()], dim=1)
        logits = self.model(
            input_ids=ids,
            attention_mask=real,
            position_ids=(real.cumsum(dim=1) - 1).clamp(min=0),
            # The last token of the prompt predicts the response's first; its last predicts nothing here.
            logits_to_keep=samples.responses.shape[1] + 1,
            use_cache=False,
        ).logits
        return logits[:, :-1][samples.mask]

    def step(self, learning_rate: float | None = None) -> float:
        """Move by the gradients that have come together, at another learning rate where one is given. Returns their
        norm.

        Raises:
            RuntimeError: a gradient is not finite; nothing has moved.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._trained().values(), self._max_grad_norm, error_if_nonfinite=True)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate if learning_rate is None else learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, Any]:
        """What training has changed, for a checkpoint."""
        weights = {name: weight.detach() for name, weight in self._trained().items()}
        return {"weights": weights, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self._trained().items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}


@contextmanager
def _without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """`generate` fills what its caller leaves open (penalties, min_p, an end of its own) from the checkpoint's
    generation_config; log-probabilities would then not be those of what was sampled."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # below PEFT's wrapper
    kept, base.generation_config = base.generation_config, GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = kept


def _padded_left(prompts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """int64 [B, P] twice: the ids, and 1 where they are real."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, real
