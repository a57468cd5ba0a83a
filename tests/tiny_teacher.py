"""The teacher of the tests: a random Qwen3 of a few hundred thousand weights, made in a second."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def make_tiny_teacher(path: str | Path, **overrides: object) -> Path:
    """Save the tiny teacher's checkpoint (config and float32 safetensors, no tokenizer) under ``path``.

    ``overrides`` replace fields of the Qwen3 configuration, and ``seed`` and ``dtype`` (a torch dtype) the
    seed of the weights and what they are stored as. The same arguments give the same weights.
    """
    seed = overrides.pop("seed", 0)
    dtype = overrides.pop("dtype", torch.float32)
    fields = {
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
    config = Qwen3Config(**{**fields, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.to(dtype).save_pretrained(path)
    return Path(path)
