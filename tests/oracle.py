"""What a causal language model says, computed by Hugging Face: the independent answer of the tests."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def hf_logprobs(
    path_or_model: str | Path | PreTrainedModel, ids: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Log-probabilities float32 [T, V]: row t is the distribution of token t + 1 given ``ids[: t + 1]``.

    ``dtype`` is that of the weights and the forward pass when a path is given (a model keeps its own); the
    log-softmax is always taken in float32.
    """
    model = path_or_model
    if not isinstance(model, PreTrainedModel):
        model = AutoModelForCausalLM.from_pretrained(path_or_model, dtype=dtype)
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids])).logits[0]  # [T, V] in the model's dtype
    return logits.float().log_softmax(dim=-1)
