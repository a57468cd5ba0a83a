"""Replacements for the kernels of ``vllm.v1.worker.gpu.block_table``.

B requests in the batch, G KV-cache groups, T tokens of the step. A group's block table is
int32 [max_num_reqs, stride] and arrives as an address.
"""

import numpy as np
import torch

from scoring.vllm_extension.kernels.addressed import int32_at


def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,  # int64 [B]
    src_block_table_ptrs: torch.Tensor,  # uint64 [G]
    dst_block_table_ptrs: torch.Tensor,  # uint64 [G]
    block_table_strides: torch.Tensor,  # int64 [G]
    num_blocks_ptr: torch.Tensor,  # int32 [G, max_num_reqs]
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the block ids of the batch's requests, in batch order, to the front of the input tables.

    Columns past a request's own count hold leftovers, as upstream: the sequence length bounds every read.
    Rows past the batch are not zeroed: they exist only for padded CUDA graphs.
    """
    requests = batch_idx_to_req_idx.numpy()  # int64 [B]
    if num_reqs == 0:
        return
    widths = num_blocks_ptr.numpy()[:, requests].max(axis=1)  # int32 [G]
    table_rows = int(requests.max()) + 1
    groups = zip(src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist(), strict=True)
    for group, (source_address, target_address) in enumerate(groups):
        stride = int(block_table_strides[group])
        width = widths[group]
        source = int32_at(source_address, (table_rows, stride))
        target = int32_at(target_address, (num_reqs, stride))
        target[:, :width] = source[requests, :width]


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # int64 [B], -1 marks a dummy request
    query_start_loc: torch.Tensor,  # int32 [B + 1]
    pos: torch.Tensor,  # int64 [T or more]
    block_table_ptrs: torch.Tensor,  # uint64 [G]
    block_table_strides: torch.Tensor,  # int64 [G]
    block_sizes: torch.Tensor,  # int32 [G]
    slot_mapping_enabled: torch.Tensor,  # bool [G]
    dcp_sharded: torch.Tensor,  # bool [G]
    slot_mappings_ptr: torch.Tensor,  # int64 [G, max_num_tokens], written
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write the KV-cache slot of each token of the step; everything past the last token becomes PAD_ID.

    Raises:
        NotImplementedError: context parallelism (``CP_SIZE`` other than 1), which vLLM's CPU attention
            does not have either.
    """
    if CP_SIZE != 1:
        raise NotImplementedError(
            f"context parallelism of {CP_SIZE} was asked for; on a CPU decode_context_parallel_size and "
            "prefill_context_parallel_size must be 1"
        )
    requests = idx_mapping.numpy()  # int64 [B]
    starts = query_start_loc.numpy()[: len(requests) + 1]  # int32 [B + 1]
    num_tokens = int(starts[-1])
    token_request = np.repeat(requests, np.diff(starts))  # int64 [T]
    positions = pos.numpy()[:num_tokens]  # int64 [T]
    is_real = token_request >= 0  # bool [T]
    if not is_real.all():
        token_request = np.where(is_real, token_request, 0)
    table_rows = int(requests.max(initial=0)) + 1
    slot_mappings = slot_mappings_ptr.numpy()  # int64 [G, max_num_tokens]
    slot_mappings[:, num_tokens:max_num_tokens] = PAD_ID
    for group, address in enumerate(block_table_ptrs.tolist()):
        slots = slot_mappings[group, :num_tokens]  # int64 [T]
        if not slot_mapping_enabled[group]:
            slots[:] = PAD_ID
            continue
        block_size = int(block_sizes[group])
        table = int32_at(address, (table_rows, int(block_table_strides[group])))
        block, offset = np.divmod(positions, block_size)
        if not is_real.all():
            block = np.where(is_real, block, 0)
        slots[:] = table[token_request, block].astype(np.int64) * block_size + offset
        slots[~is_real] = PAD_ID
