"""The parts of the benchmark that a mistake would mislead by: the arithmetic ideal, and the look at the answers."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.arithmetic import Decoder, ideal_reuse
from benchmarks.rows import Row, table, take_turns
from benchmarks.workloads import Reads

ROW = Row("row", "a", "this", "that", "something", due=2.0)


def test_a_prefill_takes_the_operations_that_pytorch_counts(tiny_path):
    """PyTorch counts each query against all keys; half of those, and the diagonal, are what a causal model needs."""
    tokens = 24
    model = AutoModelForCausalLM.from_pretrained(tiny_path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        model(torch.arange(tokens)[None])
    square = 4 * 2 * 4 * 32  # a query and a key: 2 layers x 4 heads x 32
    due = counted.get_total_flops() - square * (tokens**2 - tokens * (tokens + 1) // 2)
    assert Decoder.of(tiny_path).prefill(0, tokens, rows=tokens) == due
    # Cut anywhere, the pieces take as much as the whole.
    pieces = [Decoder.of(tiny_path).prefill(*piece) for piece in ((0, 10, 4), (10, tokens, 20))]
    assert sum(pieces) == due


def test_the_ideal_of_a_group_counts_its_prompt_once():
    """Without attention and head to speak of, it is a matter of tokens."""
    model = Decoder(1, 1000, 1_000_000, 1, 1, 1, 1)
    tokens = 8 * 1152
    assert ideal_reuse(model, 1024, 128, 8, 32, cold=True) == pytest.approx(tokens / (1152 + 7 * 160), rel=1e-3)
    assert ideal_reuse(model, 1024, 128, 8, 32, cold=False) == pytest.approx(tokens / (8 * 160), rel=1e-3)


def test_a_round_that_warms_up_is_not_counted_and_ratios_are_within_a_round():
    turns = take_turns(
        {"ours": lambda n: (1.0 + n, None), "theirs": lambda n: (100.0 if n == 0 else 4.0 * n, None)},
        rounds=3,
        limit=0,
    )
    result = turns.result(ROW, "ours", "theirs")
    assert result.ratios == [4 / 2, 8 / 3, 12 / 4]
    assert (result.ratio, result.holds) == (8 / 3, True)
    assert "2.67" in table([result])


def test_a_side_that_answers_other_scores_ends_the_comparison():
    scores = np.zeros((2, 3, 4), np.float32)
    wrong = scores.copy()
    wrong[1, :, 0] = 1.0  # one column of one read
    ways = {"ours": lambda n: (1.0, scores), "theirs": lambda n: (1.0, wrong[..., :2])}
    with pytest.raises(AssertionError, match=r"'theirs' answers other scores than 'ours'.*0\.5 apart"):
        take_turns(ways, rounds=1, limit=0.4)
    turns = take_turns(ways, rounds=1, limit=0.5)
    assert turns.result(ROW, "ours", "theirs").notes["apart"] == {"ours": 0.0, "theirs": 0.5}


def test_both_sides_get_the_same_reads_and_every_round_others():
    shape = (100, 3, 4, 5, 6)
    one, again, other = Reads(*shape, seed=1), Reads(*shape, seed=1), Reads(*shape, seed=2)
    for i, read in enumerate(one.batch()):
        assert [*read.prompt_ids, *read.response_ids] == again.ids[i].tolist()
        np.testing.assert_array_equal(np.column_stack([read.response_ids, read.candidate_ids]), again.columns[i])
    assert (one.ids != other.ids).any()
    assert (one.columns[..., 1:] != other.columns[..., 1:]).any()
    group = Reads(*shape, seed=1, shared_prompt=True)
    assert (group.ids[:, :4] == group.ids[0, :4]).all()
    assert (group.ids[1:, 4:] != group.ids[0, 4:]).any()
