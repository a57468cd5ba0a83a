"""LoRA adapters of the tests, as PEFT saves them, and the same change made to a model's own weights."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ALPHA = 16


def make_adapter(path: Path, model: PreTrainedModel, modules: tuple[str, ...], rank: int = 4, seed: int = 0) -> Path:
    """Save an adapter of random matrices for every module of `model` whose name ends so."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in modules:
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / 8
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 8
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A copy of `model` with the adapter added to its weights: W + alpha / rank * B A."""
    from safetensors.torch import load_file

    tensors, model = load_file(path / "adapter_model.safetensors"), copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                b = tensors[f"base_model.model.{name}.lora_B.weight"]
                module.weight += ALPHA / len(a) * (b @ a)
    return model
