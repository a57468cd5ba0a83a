"""The teachers of the tests: a random Qwen3 of a few hundred thousand weights, made in a second, and one of experts."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_FIELDS = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    # Ten times the usual spread: the log-probabilities of different tokens are then far apart.
    "initializer_range": 0.2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_tiny_teacher(path: str | Path, **overrides: object) -> Path:
    """Save the tiny teacher's checkpoint (config and float32 safetensors, no tokenizer) under ``path``.

    ``overrides`` replace fields of the Qwen3 configuration, and ``seed`` and ``dtype`` (a torch dtype) the
    seed of the weights and what they are stored as. The same arguments give the same weights.
    """
    seed = overrides.pop("seed", 0)
    dtype = overrides.pop("dtype", torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**_FIELDS, **overrides}))
    model.to(dtype).save_pretrained(path)
    return Path(path)


def make_tiny_experts(path: str | Path) -> Path:
    """Save a tiny teacher of eight experts a layer, of which two answer for a token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_FIELDS, **experts))
    model.save_pretrained(path)
    return Path(path)
