"""A teacher of experts scores what Hugging Face says, whoever else is in the step."""

import numpy as np

from scoring import MatrixRead
from tests.oracle import hf_logprobs

TINY = 3e-5  # float32, nats


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2048, count).tolist()


def test_neighbours_and_order_do_not_change_a_score_of_experts(experts_without_reuse, experts_model):
    engine = experts_without_reuse
    reads = [MatrixRead(ids(20 + 7 * i, i), ids(60 - 3 * i, 50 + i), ids(16, i)) for i in range(16)]
    alone = [engine.read_matrix([read])[0].logprobs for read in reads]
    for read, found in zip(reads, alone, strict=True):
        table = hf_logprobs(experts_model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()]).numpy()
        due = table[len(read.prompt_ids) - 1 : -1, read.candidate_ids]
        np.testing.assert_allclose(found, due, rtol=0, atol=TINY)
    for order in (range(16), reversed(range(16))):
        order = list(order)
        for i, score in zip(order, engine.read_matrix([reads[i] for i in order]), strict=True):
            np.testing.assert_allclose(score.logprobs, alone[i], rtol=0, atol=1e-5)
