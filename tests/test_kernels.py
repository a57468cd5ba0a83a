"""Every replaced kernel does what vLLM's Triton kernel does.

The independent answer is the original kernel under Triton's interpreter (one process for all launches of
this file), or plain PyTorch in float64 where numbers are compared.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scoring.vllm_extension import lora
from scoring.vllm_extension.kernels import REPLACEMENTS, logprob, sampling
from tests.kernel_oracle import as_passed

GPU = "vllm.v1.worker.gpu"
INF = float("inf")


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(low: int, high: int, shape: tuple[int, ...], seed: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=rng(seed), dtype=dtype)


def launch(kernel: str, grid: tuple[int, ...], *args: object, **kwargs: object) -> dict:
    return {"kernel": f"{GPU}.{kernel}", "grid": grid, "args": list(args), "kwargs": kwargs}


def cumulative(lengths: list[int]) -> torch.Tensor:
    """int32 [len + 1], starting at 0."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


# --- a batch of requests: B in the batch, SLOTS request slots, up to MAX_LEN tokens each
SLOTS, MAX_LEN = 7, 48


def batch(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """``lengths``: tokens of each request in the step. Slots are drawn without repetition."""
    slots = torch.randperm(SLOTS, generator=rng(seed))[: len(lengths)]
    computed = ints(0, 20, (SLOTS,), seed + 2)
    prefill = ints(5, 30, (SLOTS,), seed + 3)
    prefill[slots[0]] = computed[slots[0]] + lengths[0]  # the first request's prefill ends with this step
    return {
        "slots": slots,  # int64 [B]
        "starts": cumulative(lengths),  # int32 [B + 1]
        "tokens": ints(1, 2048, (SLOTS, MAX_LEN), seed + 1),  # int32 [SLOTS, MAX_LEN]
        "computed": computed,  # int32 [SLOTS]
        "prefill": prefill,  # int32 [SLOTS]
    }


LENGTHS = {"one_request": [5], "several": [3, 1, 9, 4], "decodes": [1, 1, 1], "full": [2, 7, 1, 1, 8, 3, 6]}


def prepare_prefill_inputs(lengths: list[int], seed: int, lookahead: int) -> dict:
    b = batch(lengths, seed)
    return launch(
        "input_batch._prepare_prefill_inputs_kernel",
        (len(lengths),),
        torch.full((64,), -7, dtype=torch.int32),
        torch.full((lookahead, SLOTS), -7, dtype=torch.int32),
        SLOTS,
        lookahead,
        b["slots"],
        b["starts"],
        b["tokens"],
        MAX_LEN,
        b["prefill"],
        b["computed"],
        BLOCK_SIZE=16,
        LOOKAHEAD_BLOCK=1 << (lookahead - 1).bit_length(),
    )


def prepare_pos_seq_lens(lengths: list[int], seed: int) -> dict:
    b = batch(lengths, seed)
    return launch(
        "input_batch._prepare_pos_seq_lens_kernel",
        (len(lengths) + 1,),
        torch.full((64,), -7, dtype=torch.int64),
        torch.full((SLOTS,), -7, dtype=torch.int32),
        b["slots"],
        b["starts"],
        b["computed"],
        SLOTS,
        BLOCK_SIZE=16,
    )


def combine(lengths: list[int], logits_per_request: list[int], new_tokens: int, seed: int) -> dict:
    b = batch(lengths, seed)
    cu_num_logits = cumulative(logits_per_request)
    seq_lens = b["computed"][b["slots"]] + torch.tensor(lengths, dtype=torch.int32)
    return launch(
        "input_batch._combine_sampled_and_draft_tokens_kernel",
        (len(lengths),),
        torch.full((64,), -7, dtype=torch.int32),
        b["slots"],
        ints(0, 2048, (SLOTS, 1), seed + 4, torch.int64),
        b["starts"],
        seq_lens,
        b["prefill"],
        ints(0, 2048, (SLOTS, 3), seed + 5, torch.int64),
        3,
        cu_num_logits,
        torch.full((int(cu_num_logits[-1]),), -7, dtype=torch.int64),
        BLOCK_SIZE=4,
        NUM_NEW_SAMPLED_TOKENS=new_tokens,
    )


def num_sampled_and_rejected(lengths: list[int], seed: int) -> dict:
    b = batch(lengths, seed)
    return launch(
        "input_batch._get_num_sampled_and_rejected_kernel",
        (len(lengths),),
        torch.ones(len(lengths), dtype=torch.int32),
        torch.full((len(lengths),), -7, dtype=torch.int32),
        b["computed"][b["slots"]] + torch.tensor(lengths, dtype=torch.int32),
        cumulative([1 + i % 3 for i in range(len(lengths))]),
        b["slots"],
        b["prefill"],
    )


def post_update(lengths: list[int], seed: int, *, counts: bool, starts: bool, skip: bool) -> dict:
    b = batch(lengths, seed)
    size = len(lengths)
    if skip:
        b["slots"][0] = -1
    return launch(
        "input_batch._post_update_kernel",
        (size,),
        b["slots"],
        b["computed"],
        ints(0, 50, (SLOTS, 1), seed + 4, torch.int64),
        ints(0, 9, (SLOTS, 50), seed + 5) if counts else None,
        50 if counts else 0,
        ints(0, 50, (size, 3), seed + 6, torch.int64),
        3,
        ints(0, 4, (size,), seed + 7),
        ints(0, 3, (size,), seed + 8),
        b["starts"] if starts else None,
        b["tokens"],
        MAX_LEN,
        ints(5, 40, (SLOTS,), seed + 9),
        num_warps=1,
    )


def post_update_num_computed_tokens(lengths: list[int], seed: int) -> dict:
    b = batch(lengths, seed)
    return launch(
        "input_batch._post_update_num_computed_tokens_kernel",
        (len(lengths),),
        b["slots"],
        b["computed"],
        b["starts"],
    )


def expand_idx_mapping(logits_per_request: list[int], seed: int) -> dict:
    total = sum(logits_per_request)
    return launch(
        "input_batch._expand_idx_mapping_kernel",
        (len(logits_per_request),),
        torch.randperm(SLOTS, generator=rng(seed))[: len(logits_per_request)],
        torch.full((total,), -7, dtype=torch.int64),
        torch.full((total,), -7, dtype=torch.int32),
        cumulative(logits_per_request),
        BLOCK_SIZE=16,
    )


def apply_write(shape: tuple[int, ...], dtype: torch.dtype, lengths: list[int], seed: int) -> dict:
    one_dimensional = len(shape) == 1
    return launch(
        "buffer_utils._apply_write_kernel",
        (len(lengths),),
        torch.zeros(shape, dtype=dtype),
        1 if one_dimensional else shape[1],
        torch.randperm(shape[0], generator=rng(seed))[: len(lengths)].to(torch.int32),
        torch.zeros(len(lengths), dtype=torch.int32) if one_dimensional else ints(0, 4, (len(lengths),), seed),
        ints(1, 2**20, (sum(lengths),), seed + 1).to(dtype),
        cumulative(lengths)[1:],
        None,
        BLOCK_SIZE=16,
        MULTI_GROUP=False,
    )


def apply_write_to_groups(lengths: list[int], seed: int) -> dict:
    widths = [40, 64]
    return launch(
        "buffer_utils._apply_write_kernel",
        (len(lengths),),
        {"tables": [torch.zeros((SLOTS, width), dtype=torch.int32) for width in widths]},
        torch.tensor(widths),
        torch.randperm(SLOTS, generator=rng(seed))[: len(lengths)].to(torch.int32),
        ints(0, 4, (len(lengths),), seed + 1),
        ints(1, 2**20, (sum(lengths),), seed + 2),
        cumulative(lengths)[1:],
        ints(0, 2, (len(lengths),), seed + 3),
        BLOCK_SIZE=16,
        MULTI_GROUP=True,
    )


def gather_block_tables(size: int, seed: int) -> dict:
    widths = [6, 10]
    return launch(
        "block_table._gather_block_tables_kernel",
        (len(widths), size),
        torch.randperm(SLOTS, generator=rng(seed))[:size],
        {"tables": [ints(1, 500, (SLOTS, width), seed + width) for width in widths]},
        {"tables": [torch.zeros((SLOTS, width), dtype=torch.int32) for width in widths]},
        torch.tensor(widths),
        ints(1, 7, (len(widths), SLOTS), seed + 1),
        SLOTS,
        size,
        BLOCK_SIZE=4,
    )


def compute_slot_mappings(lengths: list[int], seed: int, *, enabled: list[bool], dummy: bool) -> dict:
    b = batch(lengths, seed)
    block_sizes = [8, 16]
    widths = [MAX_LEN // size for size in block_sizes]
    positions = [
        int(b["computed"][slot]) + torch.arange(length) for slot, length in zip(b["slots"], lengths, strict=True)
    ]
    if dummy:
        b["slots"][-1] = -1
    return launch(
        "block_table._compute_slot_mappings_kernel",
        (2, len(lengths) + 1),
        64,
        b["slots"],
        b["starts"],
        torch.cat([*positions, torch.full((64,), -7)]),
        {"tables": [ints(1, 500, (SLOTS, width), seed + width) for width in widths]},
        torch.tensor(widths),
        torch.tensor(block_sizes, dtype=torch.int32),
        torch.tensor(enabled),
        torch.tensor([True, True]),
        torch.full((2, 64), 12345, dtype=torch.int64),
        64,
        0,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=16,
    )


def logits_of(rows: int, vocab: int, seed: int, *, stride: int | None = None, dtype=torch.float32):
    """Random logits [rows, vocab] whose rows lie ``stride`` apart in memory (the rest holds large values)."""
    whole = torch.full((rows, stride or vocab), 1e4, dtype=dtype)
    whole[:, :vocab] = (torch.randn(rows, vocab, generator=rng(seed)) * 4 + 3).to(dtype)
    return whole[:, :vocab]


def topk_log_softmax(rows: int, vocab: int, k: int, seed: int, stride: int | None = None) -> dict:
    logits = logits_of(rows, vocab, seed, stride=stride)
    return launch(
        "sample.logprob._topk_log_softmax_kernel",
        (rows,),
        torch.full((rows, k), 7.0),
        logits,
        logits.stride(0),
        ints(0, vocab, (rows, k), seed + 1, torch.int64),
        k,
        k,
        vocab,
        BLOCK_SIZE=1024,
        TOPK_BLOCK_SIZE=min(1 << (k - 1).bit_length(), 1024),
    )


def ranks(rows: int, vocab: int, seed: int, *, coarse: bool = False, stride: int | None = None) -> dict:
    logits = logits_of(rows, vocab, seed, stride=stride)
    if coarse:  # many ties
        logits = logits.round()
    return launch(
        "sample.logprob._ranks_kernel",
        (rows,),
        torch.full((rows,), -7, dtype=torch.int64),
        logits,
        logits.stride(0),
        ints(0, vocab, (rows,), seed + 1, torch.int64),
        vocab,
        BLOCK_SIZE=1024,
    )


def fill_logprob_token_ids(own_counts: list[int], num_topk: int, seed: int) -> dict:
    rows, columns = len(own_counts), max(num_topk, *own_counts)
    slots = torch.randperm(SLOTS, generator=rng(seed))[:rows]
    counts = torch.zeros(SLOTS, dtype=torch.int32)
    counts[slots] = torch.tensor(own_counts, dtype=torch.int32)
    own = ints(1, 2048, (SLOTS, 128), seed + 1)
    return launch(
        "sample.logprob._fill_logprob_token_ids_kernel",
        (rows,),
        torch.zeros((rows, 1 + columns), dtype=torch.int64),
        1 + columns,
        torch.zeros((rows, 1 + columns), dtype=torch.bool),
        1 + columns,
        ints(1, 2048, (rows,), seed + 2, torch.int64),
        ints(1, 2048, (rows, num_topk), seed + 3) if num_topk else own,
        num_topk or 128,
        slots,
        counts,
        own,
        128,
        NUM_TOPK=num_topk,
        PADDED_COLS=1 << (columns - 1).bit_length(),
    )


def prompt_logprobs_token_ids(lengths: list[int], seed: int) -> dict:
    b = batch(lengths, seed)
    return launch(
        "sample.prompt_logprob._prompt_logprobs_token_ids_kernel",
        (len(lengths),),
        torch.full((64,), -7, dtype=torch.int64),
        b["starts"],
        b["slots"],
        b["computed"],
        b["tokens"],
        MAX_LEN,
        BLOCK_SIZE=16,
    )


TEMPERATURES = torch.tensor([0.0, 1.0, 0.5, 0.7, 1.3, 2.0, 0.01])  # float32 [SLOTS]
MIN_PS = torch.tensor([0.0, 1.0, 0.5, 0.02, 0.1, 0.0, 1e-4])  # float32 [SLOTS]
SEEDS = torch.tensor([0, 1, -1, 7, 2**63 - 1, -(2**63), 123456789012345])  # int64 [SLOTS]


def temperature(vocab: int, seed: int, stride: int | None = None) -> dict:
    logits = logits_of(SLOTS, vocab, seed, stride=stride)
    return launch(
        "sample.gumbel._temperature_kernel",
        (SLOTS, -(-vocab // 1024)),
        logits,
        logits.stride(0),
        torch.randperm(SLOTS, generator=rng(seed)),
        TEMPERATURES,
        vocab,
        BLOCK_SIZE=1024,
    )


def min_p(vocab: int, seed: int, stride: int | None = None) -> dict:
    logits = logits_of(SLOTS, vocab, seed, stride=stride)
    return launch(
        "sample.min_p._min_p_kernel",
        (SLOTS,),
        logits,
        logits.stride(0),
        torch.randperm(SLOTS, generator=rng(seed)),
        MIN_PS,
        vocab,
        BLOCK_SIZE=1024,
    )


def gumbel(vocab: int, seed: int, *, fp64=False, divide=False, unmapped=False, stride=None) -> dict:
    logits = logits_of(SLOTS, vocab, seed, stride=stride)
    logits[:, ::3] = -INF  # as top-k and top-p leave them
    blocks = -(-vocab // 1024)
    slots = torch.randperm(SLOTS, generator=rng(seed))
    if unmapped:
        slots[2] = -1
    return launch(
        "sample.gumbel._gumbel_sample_kernel",
        (SLOTS, blocks),
        torch.full((SLOTS, blocks), -7, dtype=torch.int64),
        blocks,
        torch.full((SLOTS, blocks), 1e9, dtype=torch.float64 if fp64 else torch.float32),
        blocks,
        None,
        0,
        0,
        None,
        None,
        0,
        logits,
        logits.stride(0),
        slots,
        SEEDS,
        ints(0, 4096, (SLOTS,), seed + 1, torch.int64),
        TEMPERATURES,
        vocab,
        BLOCK_SIZE=1024,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=divide,
        USE_FP64=fp64,
        PER_TOKEN_COL=False,
    )


LAUNCHES = {
    **{f"prefill_inputs_{name}": prepare_prefill_inputs(n, 10, 1) for name, n in LENGTHS.items()},
    "prefill_inputs_looking_two_ahead": prepare_prefill_inputs([4, 12, 1], 11, 2),
    **{f"pos_seq_lens_{name}": prepare_pos_seq_lens(n, 20) for name, n in LENGTHS.items()},
    **{f"combine_{name}": combine(n, [1] * len(n), 1, 30) for name, n in LENGTHS.items()},
    "combine_draft_tokens": combine([4, 6, 5, 9], [4, 2, 1, 3], 1, 31),
    "combine_no_new_token": combine([4, 6, 5], [3, 2, 1], 0, 32),
    **{f"num_sampled_{name}": num_sampled_and_rejected(n, 40) for name, n in LENGTHS.items()},
    **{f"post_update_{name}": post_update(n, 50, counts=True, starts=True, skip=False) for name, n in LENGTHS.items()},
    "post_update_without_counts": post_update([2, 5, 1], 51, counts=False, starts=True, skip=False),
    "post_update_without_starts": post_update([2, 5, 1], 52, counts=True, starts=False, skip=False),
    "post_update_skipping_a_row": post_update([2, 5, 1], 53, counts=True, starts=True, skip=True),
    **{f"computed_tokens_{name}": post_update_num_computed_tokens(n, 60) for name, n in LENGTHS.items()},
    "expand_one_each": expand_idx_mapping([1, 1, 1], 70),
    "expand_ragged": expand_idx_mapping([3, 1, 4, 2], 71),
    "write_rows": apply_write((SLOTS, 64), torch.int32, [3, 40, 1, 7], 80),
    "write_one_row": apply_write((SLOTS, 64), torch.int64, [17], 81),
    "write_elements": apply_write((SLOTS,), torch.int32, [1, 1, 1, 1], 82),
    "write_floats": apply_write((SLOTS, 64), torch.float32, [5, 9], 83),
    "write_groups": apply_write_to_groups([3, 33, 1, 8, 5], 84),
    "gather_one_request": gather_block_tables(1, 90),
    "gather_all_requests": gather_block_tables(SLOTS, 91),
    **{
        f"slots_{name}": compute_slot_mappings(n, 100, enabled=[True, True], dummy=False) for name, n in LENGTHS.items()
    },
    "slots_one_group_disabled": compute_slot_mappings([3, 5], 101, enabled=[False, True], dummy=False),
    "slots_with_a_dummy_request": compute_slot_mappings([3, 5, 2], 102, enabled=[True, True], dummy=True),
    "log_softmax_one_row_one_id": topk_log_softmax(1, 2048, 1, 110),
    "log_softmax_one_token_vocabulary": topk_log_softmax(3, 1, 2, 111),
    "log_softmax_odd_vocabulary": topk_log_softmax(5, 1537, 16, 112),
    "log_softmax_long_rows_in_memory": topk_log_softmax(4, 1500, 20, 113, stride=2048),
    "log_softmax_whole_vocabulary": topk_log_softmax(3, 1300, 1300, 114),
    "ranks": ranks(6, 1537, 120),
    "ranks_with_ties": ranks(6, 1537, 121, coarse=True),
    "ranks_long_rows_in_memory": ranks(3, 1500, 122, stride=2048),
    "ids_of_requests": fill_logprob_token_ids([3, 128, 1], 0, 130),
    "ids_best_and_own_mixed": fill_logprob_token_ids([0, 4, 0, 1], 5, 131),
    "ids_best_wider_than_own": fill_logprob_token_ids([2, 0], 20, 132),
    **{f"prompt_ids_{name}": prompt_logprobs_token_ids(n, 140) for name, n in LENGTHS.items()},
    "temperature": temperature(1537, 150),
    "temperature_long_rows_in_memory": temperature(1500, 151, stride=2048),
    "min_p": min_p(1537, 160),
    "min_p_long_rows_in_memory": min_p(1500, 161, stride=2048),
    "gumbel": gumbel(2500, 170),
    "gumbel_small_vocabulary": gumbel(17, 171),
    "gumbel_dividing_by_temperature": gumbel(2500, 172, divide=True),
    "gumbel_row_without_a_request": gumbel(1500, 173, unmapped=True),
    "gumbel_float64": gumbel(2500, 174, fp64=True),
    "gumbel_long_rows_in_memory": gumbel(1500, 175, stride=2048),
}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, list]:
    """The arguments of every launch as vLLM's own kernel leaves them."""
    folder = tmp_path_factory.mktemp("kernels")
    torch.save(list(LAUNCHES.values()), folder / "launches.pt")
    command = [sys.executable, "-m", "tests.kernel_oracle", folder / "launches.pt", folder / "answers.pt"]
    repository = Path(__file__).parents[1]
    subprocess.run(command, cwd=repository, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=280)
    return dict(zip(LAUNCHES, torch.load(folder / "answers.pt"), strict=True))


def replaced(name: str) -> list:
    """The arguments of a launch as its replacement leaves them."""
    case = copy.deepcopy(LAUNCHES[name])
    REPLACEMENTS[case["kernel"]](*(as_passed(argument) for argument in case["args"]), **case["kwargs"])
    return case["args"]


SPECIAL = ("gather_", "gumbel")


@pytest.mark.parametrize("name", [name for name in LAUNCHES if not name.startswith(SPECIAL)])
def test_a_replacement_leaves_its_arguments_as_the_triton_kernel_does(name, upstream):
    for position, (ours, theirs) in enumerate(zip(replaced(name), upstream[name], strict=True)):
        if isinstance(theirs, dict):
            for our_table, their_table in zip(ours["tables"], theirs["tables"], strict=True):
                assert torch.equal(our_table, their_table), position
        elif isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        elif isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs), position


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name.startswith("gather_")])
def test_gathered_block_tables_hold_every_block_of_every_request(name, upstream):
    slots, _, ours, _, num_blocks, _, size = replaced(name)[:7]
    theirs = upstream[name][2]
    for group in range(2):
        for row in range(size):
            width = int(num_blocks[group, slots[row]])
            assert torch.equal(ours["tables"][group][row, :width], theirs["tables"][group][row, :width])


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name.startswith("gumbel")])
def test_gumbel_sampling_draws_the_tokens_that_the_triton_kernel_draws(name, upstream):
    def drawn(args: list) -> tuple[torch.Tensor, torch.Tensor]:
        token_of_block, best_of_block = args[0], args[2]  # as the caller of the kernel reduces them
        best, block = best_of_block.max(dim=1, keepdim=True)
        return token_of_block.gather(1, block), best

    (our_tokens, our_best), (their_tokens, their_best) = drawn(replaced(name)), drawn(upstream[name])
    assert torch.equal(our_tokens, their_tokens)
    torch.testing.assert_close(our_best, their_best, rtol=0, atol=1e-5)


def test_every_replacement_is_launched_by_this_file():
    assert {case["kernel"] for case in LAUNCHES.values()} == set(REPLACEMENTS)


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The replacement's answer, float32 [rows, K]."""
    out = torch.full(ids.shape, 7.0)
    logprob.topk_log_softmax(
        out, logits, logits.stride(0), ids, ids.stride(0), ids.shape[1], logits.shape[1], 1024, 1024
    )
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocab", "k", "stride"), [(1, 7, 1, 7), (300, 2048, 16, 2048), (37, 49152, 64, 49280)]
)
def test_log_probabilities_are_within_float32_rounding_of_float64(rows, vocab, k, stride, dtype):
    logits = logits_of(rows, vocab, 200, stride=stride, dtype=dtype)
    ids = ints(0, vocab, (rows, k), 201, torch.int64)
    exact = logits.double().log_softmax(1).gather(1, ids)
    # A log-probability of magnitude 16 to 32 has a spacing of 1.9e-6 in float32.
    torch.testing.assert_close(log_probabilities(logits, ids).double(), exact, rtol=0, atol=3e-6)


def test_log_probabilities_of_masked_tokens_are_minus_infinity_and_others_stay_exact():
    logits = logits_of(4, 3000, 210)
    logits[:, 5::7] = -INF
    ids = torch.tensor([[5, 6, 12]]).repeat(4, 1)
    exact = logits.double().log_softmax(1).gather(1, ids)
    answer = log_probabilities(logits, ids)
    assert torch.equal(answer == -INF, torch.tensor([[True, False, True]]).repeat(4, 1))
    torch.testing.assert_close(answer.double(), exact, rtol=0, atol=3e-6)


def test_log_probabilities_survive_logits_of_large_magnitude():
    logits = torch.tensor([[3e4, 3e4 - 1, -3e4], [-3e4, -3e4, -3e4]])
    exact = logits.double().log_softmax(1)
    answer = log_probabilities(logits, torch.arange(3).repeat(2, 1))
    torch.testing.assert_close(answer.double(), exact, rtol=1e-7, atol=1e-6)


def test_log_probabilities_of_no_rows_are_empty():
    assert log_probabilities(torch.zeros(0, 9), torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_duplicate_ids_score_the_same():
    answer = log_probabilities(logits_of(3, 500, 220), torch.tensor([[4, 4, 9, 4]]).repeat(3, 1))
    assert torch.equal(answer[:, 0], answer[:, 1]) and torch.equal(answer[:, 0], answer[:, 3])


def test_an_id_outside_the_vocabulary_raises_rather_than_reading_other_memory():
    with pytest.raises(RuntimeError, match="out of bounds"):
        log_probabilities(logits_of(1, 500, 230), torch.tensor([[500]]))


@pytest.mark.parametrize("rows", [1, 2, 1023, 1024])
@pytest.mark.parametrize("vocab", [1, 2048, 49152, 10_000_000])
def test_pieces_cover_every_row_once_in_order(rows, vocab):
    covered = [row for piece in logprob.pieces(rows, vocab) for row in range(piece.start, piece.stop)]
    assert covered == list(range(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_counts_the_logits_at_least_as_large_as_the_tokens_own(dtype):
    # The interpreter is wrong for bfloat16, so the answer is counted here in float64.
    logits = logits_of(300, 2048, 240, dtype=dtype)
    ids = ints(0, 2048, (300,), 241, torch.int64)
    answer = torch.full((300,), -7)
    logprob.ranks(answer, logits, logits.stride(0), ids, 2048, 8192)
    exact = logits.double()
    assert torch.equal(answer, (exact >= exact.gather(1, ids[:, None])).sum(1))
    assert answer.min() >= 1


def test_a_prompt_that_ends_at_the_very_end_of_the_table_still_gets_its_ids():
    tokens = ints(1, 2048, (2, 6), 250)
    out = torch.full((6,), -7, dtype=torch.int64)
    zeros = torch.zeros(2, dtype=torch.int32)
    logprob.prompt_logprobs_token_ids(
        out, torch.tensor([0, 6], dtype=torch.int32), torch.tensor([1]), zeros, tokens, 6, 1024
    )
    assert torch.equal(out[:5], tokens[1, 1:].long())


def sampled(logits: torch.Tensor, temperature_value: float, seed: int, position: int) -> int:
    blocks = -(-logits.shape[1] // 1024)
    token, best = torch.full((1, blocks), -7), torch.zeros(1, blocks)
    sampling.gumbel_sample(
        token, blocks, best, blocks, None, 0, 0, None, None, 0, logits, logits.stride(0),
        torch.tensor([0]), torch.tensor([seed]), torch.tensor([position]), torch.tensor([temperature_value]),
        logits.shape[1], 1024, False, False, False, False,
    )  # fmt: skip
    return int(token.gather(1, best.argmax(1, keepdim=True)))


def test_greedy_sampling_takes_the_first_of_equal_logits():
    logits = torch.zeros(1, 3000)
    logits[0, [700, 1800, 2999]] = 5.0
    for dtype in (torch.float32, torch.bfloat16):
        assert sampled(logits.to(dtype), 0.0, seed=1, position=1) == 700


def test_sampling_draws_each_token_as_often_as_its_probability_says():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    logits = probabilities.log()[None, :]
    draws = torch.tensor([sampled(logits, 1.0, seed=3, position=i) for i in range(4000)])
    shares = torch.bincount(draws, minlength=5) / 4000
    assert shares[4] == 0
    # Four standard deviations of a share of one half over 4,000 draws.
    torch.testing.assert_close(shares, probabilities, rtol=0, atol=0.032)


def test_the_same_seed_and_position_draw_the_same_token_and_another_position_may_not():
    logits = torch.zeros(1, 2048)
    draws = [sampled(logits, 1.0, seed=5, position=position) for position in (1, 1, 2, 3, 4)]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1


@pytest.mark.parametrize("bits", [0, 1, 0xFFFFFFFE, 0xFFFFFFFF])
@pytest.mark.parametrize("noise_of", [sampling.gumbel_noise32, sampling.gumbel_noise64])
def test_noise_is_finite_for_the_smallest_and_the_largest_hash(noise_of, bits, monkeypatch):
    # The largest hashes round to a uniform value of 1, whose noise would be infinite.
    monkeypatch.setattr(sampling, "murmur3", lambda *_, **__: np.full(3, bits, dtype=np.uint32))
    assert torch.isfinite(noise_of(11, 12, 3)).all()


def test_speculative_decoding_is_refused_by_the_sampling_kernel():
    case = copy.deepcopy(LAUNCHES["gumbel"])
    case["kwargs"]["IS_DRAFTING"] = True
    with pytest.raises(NotImplementedError, match="speculative_config"):
        REPLACEMENTS[case["kernel"]](*case["args"], **case["kwargs"])


def test_context_parallelism_is_refused_by_the_slot_mapping_kernel():
    case = copy.deepcopy(LAUNCHES["slots_one_request"])
    case["kwargs"]["CP_SIZE"] = 2
    with pytest.raises(NotImplementedError, match="context parallelism of 2"):
        REPLACEMENTS[case["kernel"]](*(as_passed(argument) for argument in case["args"]), **case["kwargs"])


def test_a_token_without_an_adapter_gets_none():
    """Against the sum written out token by token; -1 is no adapter, not the last one."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 5, generator=generator)
    weights = torch.randn(3, 1, 2, 5, generator=generator)
    indices = torch.tensor([-1, 0, 2, 2, -1, 1])
    written = torch.full((6, 4), 7.0)
    lora.bgmv_shrink(inputs, weights, written, indices, scaling=0.5)
    for token, slot in enumerate(indices.tolist()):
        for rank in range(2):
            right = (
                0.0 if slot < 0 else 0.5 * sum(float(inputs[token, i] * weights[slot, 0, rank, i]) for i in range(5))
            )
            assert written[token, rank].item() == pytest.approx(right, abs=1e-6)
    assert (written[:, 2:] == 7.0).all()
