"""LoRA on a CPU: reads of the base model beside reads of an adapter.

vLLM marks a token without an adapter by the index -1. Its PyTorch operators take that as the last slot, and add
whatever adapter lies there to reads of the base model, without a word. The first of the two products is replaced here:
it is zero for such tokens, and so is then what the second one adds.
"""

import torch


def bgmv_shrink(
    inputs: torch.Tensor,  # [T, columns]
    lora_a_weights: torch.Tensor,  # [slots, 1, rank, columns], or [slots, rank, columns]
    output_tensor: torch.Tensor,  # [T, rank or more], written
    lora_indices_tensor: torch.Tensor,  # int64 [T], -1 where a token has no adapter
    scaling: float = 1.0,
) -> None:
    """Write ``scaling * A x`` of each token's own adapter, and 0 for a token without one."""
    rank, columns = lora_a_weights.shape[-2:]
    output_tensor[:, :rank] = 0
    for slot in lora_indices_tensor.unique().tolist():
        if slot < 0:
            continue
        tokens = lora_indices_tensor == slot  # bool [T]
        weights = lora_a_weights[slot].reshape(rank, columns).to(output_tensor.dtype)
        output_tensor[tokens, :rank] = scaling * (inputs[tokens].to(output_tensor.dtype) @ weights.T)


def replace_operators() -> None:
    """Put ``bgmv_shrink`` in vLLM's place, in this process: where vLLM's other operator calls it, and where its CPU
    wrapper does."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink
