"""Replacement for the kernel of ``vllm.v1.worker.gpu.buffer_utils``."""

import torch

from scoring.vllm_extension.kernels.addressed import int32_at


def apply_write(
    output_ptr: torch.Tensor,  # [rows] or [rows, columns], written; MULTI_GROUP: uint64 [G] addresses
    output_stride: int | torch.Tensor,  # of a row, in elements; MULTI_GROUP: int64 [G]
    write_indices_ptr: torch.Tensor,  # int32 [W], the row of each write
    write_starts_ptr: torch.Tensor,  # int32 [W], its first column
    write_contents_ptr: torch.Tensor,  # [cu_lens[-1]], in the dtype of the output
    write_cu_lens_ptr: torch.Tensor,  # int32 [W], end of each write within the contents
    write_group_ids_ptr: torch.Tensor | None,  # int32 [W], MULTI_GROUP only
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Apply W staged writes, each a run of values within one row, in the order they were staged."""
    contents = write_contents_ptr.numpy()  # [cu_lens[-1]]
    ends = write_cu_lens_ptr.tolist()
    rows = write_indices_ptr.tolist()
    first_columns = write_starts_ptr.tolist()
    begin = 0
    if MULTI_GROUP:
        addresses = output_ptr.tolist()
        strides = output_stride.tolist()
        groups = write_group_ids_ptr.tolist()
        for group, row, column, end in zip(groups, rows, first_columns, ends, strict=True):
            start = addresses[group] + 4 * (row * strides[group] + column)
            int32_at(start, (end - begin,))[:] = contents[begin:end]
            begin = end
        return
    output = output_ptr.view(-1).numpy()  # [rows * columns]
    for row, column, end in zip(rows, first_columns, ends, strict=True):
        start = row * output_stride + column
        output[start : start + end - begin] = contents[begin:end]
        begin = end
