"""Replacements for the kernels of ``vllm.v1.worker.gpu.sample.logprob`` and ``.prompt_logprob``.

B rows of logits over a vocabulary of V tokens, in the head's dtype; a row may be longer than V in memory.
"""

from collections.abc import Iterator

import numpy as np
import torch

from scoring.vllm_extension.kernels.input_batch import tokens_of_requests

# Rows are worked on in pieces of about this many bytes (as float32) a thread: the second and third pass over
# a piece then find it in the core's own cache. Measured on one thread: 0.5 to 6 MiB are within a tenth of
# each other at V = 2,048 to 151,936; all 1,024 rows of V = 49,152 at once take 2.2 times as long.
PIECE_BYTES_PER_THREAD = 1 << 20


def pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices over the rows in order, each of about PIECE_BYTES_PER_THREAD a thread, at least one row."""
    rows = max(1, PIECE_BYTES_PER_THREAD * torch.get_num_threads() // (4 * vocab_size))
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def topk_log_softmax(
    output_ptr: torch.Tensor,  # float32 [B, K], written
    logits_ptr: torch.Tensor,  # [B, V]
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,  # int64 [B, K], in [0, V)
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Log-probabilities of K tokens a row, in float32 whatever the dtype of the logits.

    Padding (-1) does not reach this point: the caller scores token 0 there and sets -inf afterwards.
    """
    scratch = None
    for rows in pieces(len(output_ptr), vocab_size):
        logits = logits_ptr[rows]  # [rows, V]
        if scratch is None:
            scratch = torch.empty(logits.shape, dtype=torch.float32)  # float32 [rows of a whole piece, V]
        shifted = scratch[: len(logits)]  # float32 [rows, V]
        chosen = logits.gather(1, topk_ids_ptr[rows]).float()  # float32 [rows, K]
        if logits.dtype != torch.float32:
            logits = shifted.copy_(logits)
        maximum = logits.amax(dim=1, keepdim=True)  # float32 [rows, 1]
        torch.sub(logits, maximum, out=shifted)
        log_sum = shifted.exp_().sum(dim=1, keepdim=True).log_()  # float32 [rows, 1]
        # In this order, as upstream: maximum + log_sum would be rounded at the size of the logits.
        torch.sub(chosen.sub_(maximum), log_sum, out=output_ptr[rows])


def ranks(
    output_ptr: torch.Tensor,  # int64 [B], written
    logits_ptr: torch.Tensor,  # [B, V]
    logits_stride: int,
    token_ids_ptr: torch.Tensor,  # int64 [B]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """The rank of one token a row: how many tokens have a logit at least as large (so 1 is the best)."""
    for rows in pieces(len(output_ptr), vocab_size):
        logits = logits_ptr[rows]  # [rows, V]
        own = logits.gather(1, token_ids_ptr[rows].unsqueeze(1))  # [rows, 1]
        output_ptr[rows] = (logits >= own).sum(dim=1, dtype=torch.int32)


def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,  # int64 [B, 1 + C], zeros, written
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,  # bool [B, 1 + C], false, written
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,  # int64 [B]
    topk_indices_ptr: torch.Tensor,  # int32 [B, NUM_TOPK]; not read when NUM_TOPK is 0
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,  # int64 [B]
    num_per_req_token_ids_ptr: torch.Tensor,  # int32 [S]
    per_req_token_ids_ptr: torch.Tensor,  # int32 [S, widest request allowed]
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """List the tokens whose log-probabilities a row returns: the sampled one, then its request's own ids.

    A row whose request has no ids of its own lists the NUM_TOPK best instead.
    """
    token_ids = out_token_ids_ptr.numpy()  # int64 [B, 1 + C]
    valid = out_valid_mask_ptr.numpy()  # bool [B, 1 + C]
    token_ids[:, 0] = sampled_token_ids_ptr.numpy()
    valid[:, 0] = True
    slots = expanded_idx_mapping_ptr.numpy()  # int64 [B]
    num_own = num_per_req_token_ids_ptr.numpy()[slots]  # int32 [B]
    for row in np.flatnonzero(num_own > 0):
        width = num_own[row]
        token_ids[row, 1 : 1 + width] = per_req_token_ids_ptr.numpy()[slots[row], :width]
        valid[row, 1 : 1 + width] = True
    if NUM_TOPK > 0:
        best = num_own == 0  # bool [B]
        token_ids[best, 1 : 1 + NUM_TOPK] = topk_indices_ptr.numpy()[best]
        valid[best, 1 : 1 + NUM_TOPK] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,  # int64 [T], written
    query_start_loc_ptr: torch.Tensor,  # int32 [B + 1 or more]
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    num_computed_tokens_ptr: torch.Tensor,  # int32 [S]
    all_token_ids_ptr: torch.Tensor,  # int32 [S, max_model_len]
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """For each token of the step, the token that follows it in its request."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    owner, offset = tokens_of_requests(query_start_loc_ptr.numpy()[: len(slots) + 1])
    position = num_computed_tokens_ptr.numpy()[slots][owner] + 1 + offset  # int64 [T]
    # The row of a request's very last token predicts nothing and is thrown away by the caller; it may lie
    # one past the end of the table.
    flat = slots[owner] * all_token_ids_stride + position  # int64 [T]
    prompt_logprobs_token_ids_ptr.numpy()[: len(owner)] = np.take(
        all_token_ids_ptr.numpy().reshape(-1), flat, mode="clip"
    )
