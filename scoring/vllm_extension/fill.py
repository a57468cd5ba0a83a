"""The columns of an answer (`scoring.columns`), from logits.

All columns come from one pass over each piece of the logits that fits a core's cache. Nothing here knows of vLLM; the
same PyTorch operations run on a CPU and on a GPU.
"""

import math
from collections.abc import Iterator

import torch

from scoring.columns import Columns
from scoring.vllm_extension.kernels import logprob

PIECE_BYTES_GPU = 1 << 26  # of one piece's logits as float32, where no core's cache matters

# exp of it is 0 in float32, as that of -inf is; and 0 times it is 0, where 0 times -inf would be NaN.
_FAINTEST = -200.0

# Below this share of the most probable token, exponentials have lost digits (the smallest is 1e-38).
_FAINT = 1e-20


def fill(
    out: torch.Tensor,  # float32 [n, columns.width], written
    logits: torch.Tensor,  # [n, V], in the head's dtype
    ids: torch.Tensor,  # int64 [n, 1 + K] in [-1, V): the response's own token, then the candidates; -1 is a pad
    columns: Columns,
    as_logits: bool = False,
) -> None:
    """Write the answer of n rows; everything is computed in float32.

    A pad scores -inf. The tail is the logarithm of the probability of all tokens that are no candidates, summed over
    just these: -inf when the candidates are the whole vocabulary, 0 without any. The teacher's best come in the order
    of their logits, of equal ones the smaller id first. The rank of the response's own token is how many logits are at
    least as large as its own, as upstream counts. A row with a NaN among its logits has NaN in every column but those
    of ids, of ranks and of pads.

    Args:
        columns: needs `top_k <= V`.
        as_logits: logits in the place of log-probabilities; then there is no tail and no entropy.
    """
    scratch = None
    for rows in _pieces(logits):
        scratch = _Scratch(logits[rows], columns.top_k) if scratch is None else scratch
        _fill_piece(out[rows], logits[rows], ids[rows], columns, scratch, as_logits)
    out[:, : ids.shape[1]].masked_fill_(ids < 0, -torch.inf)


class _Scratch:
    """Room for what is computed on the way, made once for all pieces.

    Attributes:
        block: columns of one block, for the search for the best.
        values: float32 [n, whole blocks], at least V wide; beyond V it holds -inf.
        shares: float32 [n, V].
    """

    def __init__(self, logits: torch.Tensor, top_k: int) -> None:
        n, vocabulary = logits.shape
        # The blocks' maxima, and the members of the best `top_k` blocks: together fewest near the square root.
        per_best = vocabulary // max(top_k, 1)
        self.block = min(per_best, 1 << math.isqrt(per_best).bit_length())
        width = -(-vocabulary // self.block) * self.block
        self.values = logits.new_full((n, width), -torch.inf, dtype=torch.float32)
        self.shares = logits.new_empty((n, vocabulary), dtype=torch.float32)


def _fill_piece(
    out: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    columns: Columns,
    scratch: _Scratch,
    as_logits: bool,
) -> None:
    blocks = scratch.values[: len(logits)]  # float32 [n, whole blocks]
    values = blocks[:, : logits.shape[1]].copy_(logits)  # float32 [n, V]
    scores = [(out[:, : ids.shape[1]], values.gather(1, ids.clamp_min(0)))]  # where to write, and what
    if columns.top_k:
        best = _best(blocks, columns.top_k, scratch.block)  # int64 [n, top_k]
        out[:, columns.top_ids_at] = best
        scores.append((out[:, columns.top_logprobs_at], values.gather(1, best)))
    if columns.rank:
        out[:, columns.rank_at] = (values >= values.gather(1, ids[:, :1].clamp_min(0))).sum(dim=1, dtype=torch.int32)
    if as_logits:
        for place, chosen in scores:
            place.copy_(chosen)
        return
    maximum = values.amax(dim=1, keepdim=True)  # float32 [n, 1]
    shifted = values.sub_(maximum)
    shares = torch.exp(shifted, out=scratch.shares[: len(logits)])  # of the most probable token's probability
    total = shares.sum(dim=1, keepdim=True)  # float32 [n, 1]
    log_total = total.log()
    for place, chosen in scores:
        # In this order, as upstream: maximum + log_total would be rounded at the size of the logits.
        torch.sub(chosen.sub_(maximum), log_total, out=place)
    if columns.entropy:
        mean = shifted.clamp_(min=_FAINTEST).mul_(shares).sum(dim=1, keepdim=True).div_(total)
        out[:, columns.entropy_at] = (log_total - mean).squeeze(1)
    if columns.tail:
        out[:, columns.tail_at] = _tail(logits, ids[:, columns.candidates_at], maximum, shares, log_total).squeeze(1)


def _tail(
    logits: torch.Tensor,  # [n, V]
    candidates: torch.Tensor,  # int64 [n, K]
    maximum: torch.Tensor,  # float32 [n, 1], of the logits
    shares: torch.Tensor,  # float32 [n, V], exp(logits - maximum); overwritten
    log_total: torch.Tensor,  # float32 [n, 1], the logarithm of their sum
) -> torch.Tensor:
    """float32 [n, 1]: the logarithm of the probability outside the candidates."""
    at, pads = candidates.clamp_min(0), candidates < 0
    # A pad stands at token 0 and multiplies its share by 1.
    outside = shares.scatter_reduce_(1, at, pads.float(), "prod").sum(dim=1, keepdim=True)
    tail = outside.log() - log_total
    faint = (outside < _FAINT).squeeze(1)
    if faint.any():
        at, pads = at[faint], pads[faint]
        rest = logits[faint].float()
        rest.scatter_reduce_(1, at, torch.where(pads, torch.inf, -torch.inf).to(rest), "amin")
        highest = rest.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(rest.dtype).min)  # finite, also of nothing
        rest = rest.sub_(highest).exp_().sum(dim=1, keepdim=True).log_()
        tail[faint] = (highest - maximum[faint]) + rest - log_total[faint]
    return tail.clamp_(max=0.0)


def _best(blocks: torch.Tensor, top_k: int, block: int) -> torch.Tensor:
    """int64 [n, top_k]: the ids of the largest values, in falling order, of equal ones the smaller id first.

    Args:
        blocks: float32 [n, whole blocks of `block` columns], at least `top_k` blocks.

    In two stages, since a search over the whole width is slow: whatever is among the best lies in one of the `top_k`
    blocks that come first when they are ordered by their largest value, of equal ones the earlier block first. (Any
    block before that of a value x holds a value that comes before x, so with `top_k` such blocks x is not among the
    best.)
    """
    n, width = blocks.shape
    blocks = blocks.view(n, width // block, block)
    maxima = blocks.amax(dim=2)
    chosen = _first(maxima, torch.arange(maxima.shape[1], device=blocks.device), top_k).unsqueeze(2)
    members = blocks.gather(1, chosen.expand(-1, -1, block)).view(n, top_k * block)
    members_ids = (chosen * block + torch.arange(block, device=blocks.device)).view(n, top_k * block)
    return _first(members, members_ids, top_k)


def _first(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [n, count]: ids of the largest of `values` (float32 [n, m]), in falling order, of equal ones the smaller id
    first.

    By integers that have just this order: a float's bits above, in which those of a negative one are turned around, and
    less its id below. A NaN counts as infinity.
    """
    values = torch.where(values.isnan(), torch.inf, values) + 0.0  # -0.0 + 0.0 is 0.0, to which it is equal
    bits = values.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.long() << 32) - ids
    return -keys.topk(count, dim=1).values & 0xFFFFFFFF


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows, each of a size that is worked on at once."""
    if logits.device.type == "cpu":
        return logprob.pieces(*logits.shape)
    rows = max(1, PIECE_BYTES_GPU // (4 * logits.shape[1]))
    return (slice(start, min(start + rows, len(logits))) for start in range(0, len(logits), rows))
