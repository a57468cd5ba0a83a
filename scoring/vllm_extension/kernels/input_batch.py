"""Replacements for the kernels of ``vllm.v1.worker.gpu.input_batch``.

B requests in the batch, S request slots (``max_num_reqs``), T tokens of the step. ``idx_mapping`` int64 [B]
maps a place in the batch to its slot. All of this is bookkeeping on a few integers a token, done in numpy
on the tensors' own memory.
"""

import numpy as np
import torch


def tokens_of_requests(query_start_loc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each token of the step, its request's place in the batch and its offset within the request.

    ``query_start_loc`` is int32 [B + 1] starting at 0; both answers are int64 [T].
    """
    lengths = np.diff(query_start_loc)  # int32 [B]
    owner = np.repeat(np.arange(len(lengths)), lengths)  # int64 [T]
    return owner, np.arange(query_start_loc[-1]) - query_start_loc[owner]


def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,  # int32 [T or more], written
    next_prefill_tokens_ptr: torch.Tensor,  # int32 [num_lookahead, S], written
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    query_start_loc_ptr: torch.Tensor,  # int32 [B + 1 or more]
    all_token_ids_ptr: torch.Tensor,  # int32 [S, max_model_len]
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,  # int32 [S]
    num_computed_tokens_ptr: torch.Tensor,  # int32 [S]
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled tokens of requests still in prefill into the step's input.

    Also stores the tokens that follow them (0 past the end of the prefill). Other requests are untouched.
    """
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    starts = query_start_loc_ptr.numpy()[: len(slots) + 1]  # int32 [B + 1]
    all_token_ids = all_token_ids_ptr.numpy()  # int32 [S, max_model_len]
    prefill_lens = prefill_lens_ptr.numpy()[slots]  # int32 [B]
    computed = num_computed_tokens_ptr.numpy()[slots]  # int32 [B]
    in_prefill = computed < prefill_lens  # bool [B]

    owner, offset = tokens_of_requests(starts)
    if not in_prefill.all():
        wanted = in_prefill[owner]
        tokens = np.flatnonzero(wanted)  # int64 [tokens of requests in prefill]
        owner, offset = owner[wanted], offset[wanted]
    else:
        tokens = slice(0, len(owner))
    input_ids_ptr.numpy()[tokens] = all_token_ids[slots[owner], computed[owner] + offset]

    next_tokens = next_prefill_tokens_ptr.numpy()  # int32 [num_lookahead, S]
    filling = slots[in_prefill]  # int64 [requests in prefill]
    position = (computed + np.diff(starts))[in_prefill]  # int32 [requests in prefill]
    for ahead in range(num_lookahead):
        inside = position + ahead < prefill_lens[in_prefill]
        next_tokens[ahead, filling] = np.where(inside, all_token_ids[filling, np.where(inside, position + ahead, 0)], 0)


def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,  # int64 [T or more], written
    seq_lens_ptr: torch.Tensor,  # int32 [S], written
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    query_start_loc_ptr: torch.Tensor,  # int32 [B + 1 or more]
    num_computed_tokens_ptr: torch.Tensor,  # int32 [S]
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write every token's position and every request's length after the step; unused lengths are 0."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    starts = query_start_loc_ptr.numpy()[: len(slots) + 1]  # int32 [B + 1]
    computed = num_computed_tokens_ptr.numpy()[slots]  # int32 [B]
    seq_lens = seq_lens_ptr.numpy()  # int32 [S]
    seq_lens[: len(slots)] = computed + np.diff(starts)
    seq_lens[len(slots) : max_num_reqs] = 0
    owner, offset = tokens_of_requests(starts)
    np.add(computed[owner], offset, out=pos_ptr.numpy()[: len(owner)])


def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,  # int32 [T or more], written
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    last_sampled_tokens_ptr: torch.Tensor,  # int64 [S, 1]
    query_start_loc_ptr: torch.Tensor,  # int32 [B + 1 or more]
    seq_lens_ptr: torch.Tensor,  # int32 [B or more]
    prefill_len_ptr: torch.Tensor,  # int32 [S]
    draft_tokens_ptr: torch.Tensor,  # int64 [S, draft steps]
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,  # int32 [B + 1]
    logits_indices_ptr: torch.Tensor,  # int64 [cu_num_logits[-1]], written
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Say which rows of the step get logits, and feed decoding requests their last (and draft) tokens."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    batch = len(slots)
    ends = query_start_loc_ptr.numpy()[1 : batch + 1]  # int32 [B]
    cu_num_logits = cu_num_logits_ptr.numpy()[: batch + 1]  # int32 [B + 1]
    num_logits = np.diff(cu_num_logits)  # int32 [B]
    owner, offset = tokens_of_requests(cu_num_logits)
    logits_starts = ends - num_logits  # int32 [B]
    np.add(logits_starts[owner], offset, out=logits_indices_ptr.numpy()[: len(owner)])

    seq_lens = seq_lens_ptr.numpy()[:batch]  # int32 [B]
    prefill_lens = prefill_len_ptr.numpy()[slots]  # int32 [B]
    decoding = seq_lens > prefill_lens  # bool [B]
    if not decoding.any():
        return
    input_ids = input_ids_ptr.numpy()  # int32 [T or more]
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A first row still inside the prompt keeps its prompt token.
        generated = decoding & (seq_lens - num_logits >= prefill_lens)
        last_sampled = last_sampled_tokens_ptr.view(-1).numpy()  # int64 [S]
        input_ids[logits_starts[generated]] = last_sampled[slots[generated]]
    num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS  # int32 [B]
    for request in np.flatnonzero(decoding & (num_drafts > 0)):
        drafts = num_drafts[request]
        input_ids[ends[request] - drafts : ends[request]] = draft_tokens_ptr.numpy()[slots[request], :drafts]


def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,  # int32 [B], read and written
    num_rejected_ptr: torch.Tensor,  # int32 [B], written
    seq_lens_ptr: torch.Tensor,  # int32 [B or more]
    cu_num_logits_ptr: torch.Tensor,  # int32 [B + 1]
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    prefill_len_ptr: torch.Tensor,  # int32 [S]
) -> None:
    """Set both counts to 0 for requests whose prefill goes on; elsewhere rejected = logits - sampled."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    batch = len(slots)
    prefill_goes_on = seq_lens_ptr.numpy()[:batch] < prefill_len_ptr.numpy()[slots]  # bool [B]
    num_sampled = num_sampled_ptr.numpy()  # int32 [B]
    num_sampled[:batch][prefill_goes_on] = 0
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: batch + 1])  # int32 [B]
    num_rejected_ptr.numpy()[:batch] = np.where(prefill_goes_on, 0, num_logits - num_sampled[:batch])


def post_update(
    idx_mapping_ptr: torch.Tensor,  # int64 [B], negative: skip the row
    num_computed_tokens_ptr: torch.Tensor,  # int32 [S], read and written
    last_sampled_tokens_ptr: torch.Tensor,  # int64 [S, 1], written
    output_bin_counts_ptr: torch.Tensor | None,  # int32 [S, vocabulary], read and written
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,  # int64 [B, draft steps + 1]
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,  # int32 [B]
    num_rejected_ptr: torch.Tensor,  # int32 [B]
    query_start_loc_ptr: torch.Tensor | None,  # int32 [B + 1 or more]; None: no token was computed
    all_token_ids_ptr: torch.Tensor,  # int32 [S, max_model_len], written
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,  # int32 [S], read and written
    num_warps: int = 1,
) -> None:
    """Add the step's sampled tokens to their requests and advance the computed counts."""
    batch = len(idx_mapping_ptr)
    rows = np.flatnonzero(idx_mapping_ptr.numpy() >= 0)  # int64 [rows that are not skipped]
    slots = idx_mapping_ptr.numpy()[rows]  # int64 [rows]
    sampled_tokens = sampled_tokens_ptr.numpy()[rows]  # int64 [rows, draft steps + 1]
    num_sampled = num_sampled_ptr.numpy()[rows]  # int32 [rows]
    total_len = total_len_ptr.numpy()  # int32 [S]
    old_len = total_len[slots]  # int32 [rows]
    for step in range(int(num_sampled.max(initial=0))):
        has = num_sampled > step  # bool [rows]
        tokens = sampled_tokens[has, step]
        all_token_ids_ptr.numpy()[slots[has], old_len[has] + step] = tokens
        last_sampled_tokens_ptr.view(-1).numpy()[slots[has]] = tokens
        if output_bin_counts_ptr is not None:
            output_bin_counts_ptr.numpy()[slots[has], tokens] += 1
    total_len[slots] = old_len + num_sampled

    advance = -num_rejected_ptr.numpy()[rows]  # int32 [rows]
    if query_start_loc_ptr is not None:
        advance += np.diff(query_start_loc_ptr.numpy()[: batch + 1])[rows]
    num_computed_tokens_ptr.numpy()[slots] += advance


def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    num_computed_tokens_ptr: torch.Tensor,  # int32 [S], read and written
    query_start_loc_ptr: torch.Tensor,  # int32 [B + 1 or more]
) -> None:
    """Advance the computed counts by the step's tokens, for steps that sample nothing."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    num_computed_tokens_ptr.numpy()[slots] += np.diff(query_start_loc_ptr.numpy()[: len(slots) + 1])


def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,  # int64 [B]
    expanded_idx_mapping_ptr: torch.Tensor,  # int64 [cu_num_logits[-1]], written
    expanded_local_pos_ptr: torch.Tensor,  # int32 [cu_num_logits[-1]], written
    cu_num_logits_ptr: torch.Tensor,  # int32 [B + 1]
    BLOCK_SIZE: int,
) -> None:
    """Repeat each request's slot once per logits row, and number the rows within each request."""
    slots = idx_mapping_ptr.numpy()  # int64 [B]
    owner, offset = tokens_of_requests(cu_num_logits_ptr.numpy()[: len(slots) + 1])
    expanded_idx_mapping_ptr.numpy()[: len(owner)] = slots[owner]
    expanded_local_pos_ptr.numpy()[: len(owner)] = offset
