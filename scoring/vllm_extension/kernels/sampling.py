"""Replacements for the kernels of ``vllm.v1.worker.gpu.sample.gumbel`` and ``.min_p``.

B rows of logits over a vocabulary of V tokens; ``expanded_idx_mapping`` int64 [B] maps a row to its request
slot, of which there are S.
"""

from functools import lru_cache

import numpy as np
import torch


def temperature(
    logits_ptr: torch.Tensor,  # [B, V], read and written
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,  # int64 [B]
    temperature_ptr: torch.Tensor,  # float32 [S]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row by its request's temperature; 0 (greedy) and 1 leave the row as it is."""
    divisors = temperature_ptr[expanded_idx_mapping_ptr]  # float32 [B]
    divisors = divisors.masked_fill(divisors == 0.0, 1.0)
    logits_ptr.copy_(logits_ptr.float() / divisors.unsqueeze(1))


def min_p(
    logits_ptr: torch.Tensor,  # [B, V], read and written
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,  # int64 [B]
    min_p_ptr: torch.Tensor,  # float32 [S]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Set to -inf every token less probable than its request's min_p times the row's best."""
    shares = min_p_ptr[expanded_idx_mapping_ptr]  # float32 [B]
    # log(0) is -inf, below which nothing lies: rows without min_p stay as they are.
    thresholds = logits_ptr.amax(dim=1).float() + shares.log()  # float32 [B]
    logits_ptr.masked_fill_(logits_ptr.float() < thresholds.unsqueeze(1), float("-inf"))


def gumbel_sample(
    local_argmax_ptr: torch.Tensor,  # int64 [B, blocks], written
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,  # float32 or float64 [B, blocks], written
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,  # [B, V]
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,  # int64 [B], negative: no request, taken greedily
    seeds_ptr: torch.Tensor,  # int64 [S]
    pos_ptr: torch.Tensor,  # int64 [B]
    temp_ptr: torch.Tensor,  # float32 [S]
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Sample one token a row: the argmax of logits plus Gumbel noise, or of the logits at temperature 0.

    The noise is upstream's own, a hash of (seed, position, token), so a seeded request draws the same
    tokens as on a GPU. Upstream keeps the best of each block of 1,024 tokens and lets the caller choose
    among them; here the first block holds the row's answer and the others -inf.

    Raises:
        NotImplementedError: speculative decoding, which alone drafts or keeps a cache of logits.
    """
    if IS_DRAFTING or logits_cache_ptr is not None:
        raise NotImplementedError(
            "speculative decoding samples through a kernel that has no replacement on a CPU; "
            "leave speculative_config unset"
        )
    slots = expanded_idx_mapping_ptr.numpy()  # int64 [B]
    temperatures = np.where(slots >= 0, temp_ptr.numpy()[slots], 0.0)  # float32 [B]
    local_max_ptr[:, 1:] = float("-inf")
    greedy = torch.from_numpy(np.flatnonzero(temperatures == 0.0))  # int64 [greedy rows]
    if len(greedy) == len(slots):
        best, token = logits_ptr.max(dim=1)
        local_max_ptr[:, 0] = best
        local_argmax_ptr[:, 0] = token
        return
    best, token = logits_ptr[greedy].max(dim=1)
    local_max_ptr[greedy, 0] = best.to(local_max_ptr.dtype)
    local_argmax_ptr[greedy, 0] = token
    noise_of = gumbel_noise64 if USE_FP64 else gumbel_noise32
    for row in np.flatnonzero(temperatures != 0.0):
        logits = logits_ptr[row].float()  # float32 [V]
        if APPLY_TEMPERATURE:
            logits = logits / float(temperatures[row])
        noise = noise_of(int(seeds_ptr[slots[row]]), int(pos_ptr[row]), vocab_size)
        noised = logits.to(noise.dtype) + noise  # float32 or float64 [V]
        best, token = noised.max(dim=0)
        local_max_ptr[row, 0] = best
        local_argmax_ptr[row, 0] = token


def gumbel_noise32(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel noise float32 [V] for one draw: -log(-log(1 - u)) with u a hash of 32 bits."""
    bits = torch.from_numpy(murmur3(seed, position, vocab_size).astype(np.float64))  # float64 [V]
    uniform = bits.add_(0.5).mul_(2.0**-32).float()  # float32 [V]
    # Values that round to 1 would give a noise of -inf, and a token that is certain could lose its draw.
    uniform.clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise64(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel noise float64 [V] for one draw: -log(-log(u)) with u a hash of 53 bits."""
    low = murmur3(seed, position, vocab_size).astype(np.uint64)  # uint64 [V]
    high = murmur3(seed, position, vocab_size, domain=0x9E3779B9).astype(np.uint64)  # uint64 [V]
    bits = ((high << np.uint64(32)) | low) >> np.uint64(11)  # uint64 [V]
    uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)  # float64 [V]
    # The largest midpoint rounds to 1, whose noise would be infinite.
    uniform.clamp_(max=1.0 - 2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def murmur3(seed: int, position: int, vocab_size: int, domain: int = 0) -> np.ndarray:
    """MurmurHash3 (32 bits) of (seed, position, token) for every token: uint32 [V].

    The words hashed are the low and the high half of the seed, the low half of the position, and the
    token id; ``domain`` starts a second, independent stream.
    """
    state = domain
    for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position & 0xFFFFFFFF):
        state ^= _scrambled(word)
        state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
        state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
    h = _scrambled_tokens(vocab_size) ^ np.uint32(state)  # uint32 [V]
    h = (h << np.uint32(13)) | (h >> np.uint32(19))
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)  # the length of the input in bytes
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def _scrambled(word: int) -> int:
    word = (word * 0xCC9E2D51) & 0xFFFFFFFF
    word = ((word << 15) | (word >> 17)) & 0xFFFFFFFF
    return (word * 0x1B873593) & 0xFFFFFFFF


@lru_cache(maxsize=4)
def _scrambled_tokens(vocab_size: int) -> np.ndarray:
    """``_scrambled`` of every token id: uint32 [V], the same for every draw."""
    tokens = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    tokens = (tokens << np.uint32(15)) | (tokens >> np.uint32(17))
    return tokens * np.uint32(0x1B873593)
