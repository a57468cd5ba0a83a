"""vLLM's Triton kernels for Model Runner V2, as functions on CPU tensors.

One file per vLLM module. A function has the parameters of its kernel, in order, with tensors where the
kernel has pointers; launch grids are dropped by vLLM's dispatcher, so sizes come from the tensors. Block
sizes and strides belong to Triton's signature and are ignored where a tensor says the same.

``REPLACEMENTS`` covers matrix and label reads, ``prompt_logprobs``, and sampling with temperature, top-k,
top-p and min-p. Penalties, logit bias, bad words, grammars and speculative decoding have no replacement;
``scoring.vllm_extension.guard`` refuses requests that would launch them.
"""

from collections.abc import Callable

from scoring.vllm_extension.kernels import block_table, input_batch, logprob, sampling, staged_writes

_GPU = "vllm.v1.worker.gpu"

# The kernel's full name in vLLM -> what runs in its place.
REPLACEMENTS: dict[str, Callable[..., None]] = {
    f"{_GPU}.block_table._gather_block_tables_kernel": block_table.gather_block_tables,
    f"{_GPU}.block_table._compute_slot_mappings_kernel": block_table.compute_slot_mappings,
    f"{_GPU}.buffer_utils._apply_write_kernel": staged_writes.apply_write,
    f"{_GPU}.input_batch._prepare_prefill_inputs_kernel": input_batch.prepare_prefill_inputs,
    f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel": input_batch.prepare_pos_seq_lens,
    f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": (input_batch.combine_sampled_and_draft_tokens),
    f"{_GPU}.input_batch._get_num_sampled_and_rejected_kernel": input_batch.get_num_sampled_and_rejected,
    f"{_GPU}.input_batch._post_update_kernel": input_batch.post_update,
    f"{_GPU}.input_batch._post_update_num_computed_tokens_kernel": (input_batch.post_update_num_computed_tokens),
    f"{_GPU}.input_batch._expand_idx_mapping_kernel": input_batch.expand_idx_mapping,
    f"{_GPU}.sample.logprob._topk_log_softmax_kernel": logprob.topk_log_softmax,
    f"{_GPU}.sample.logprob._ranks_kernel": logprob.ranks,
    f"{_GPU}.sample.logprob._fill_logprob_token_ids_kernel": logprob.fill_logprob_token_ids,
    f"{_GPU}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": logprob.prompt_logprobs_token_ids,
    f"{_GPU}.sample.gumbel._temperature_kernel": sampling.temperature,
    f"{_GPU}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{_GPU}.sample.min_p._min_p_kernel": sampling.min_p,
}
