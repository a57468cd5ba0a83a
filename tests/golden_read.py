"""One fixed read of the tiny teacher and its 60 scores as Hugging Face computes them, kept as data.

    python -m tests.golden_read

writes `golden_read.json` anew. When the numbers no longer come out, the teacher's weights, Hugging Face's model
or the engine has changed. The weights come from PyTorch's seeded generator, in the order in which Transformers
initialises the model: hence both versions in the file. They are the same bits with AVX2 and AVX-512; without AVX
they differ by up to 5e-7 and the scores by up to 1.4e-5, which the tests' tolerance of 5e-5 allows.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.oracle import hf_logprobs
from tests.tiny_teacher import make_tiny_teacher

FILE = Path(__file__).with_suffix(".json")
PROMPT, RESPONSE, CANDIDATES = list(range(10, 20)), list(range(20, 40)), [1, 2, 3]


def compute() -> list[list[float]]:
    """log p of every candidate at every response position, [20, 3]."""
    with tempfile.TemporaryDirectory() as folder:
        table = hf_logprobs(make_tiny_teacher(folder), PROMPT + RESPONSE)  # float32 [30, V]
    return table[len(PROMPT) - 1 : -1, CANDIDATES].tolist()


if __name__ == "__main__":
    record = {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "prompt_ids": PROMPT,
        "response_ids": RESPONSE,
        "candidate_ids": CANDIDATES,
    }
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    rows = ",\n    ".join(json.dumps([round(x, 6) for x in row]) for row in compute())
    fields.append(f'"logprobs": [\n    {rows}\n  ]')
    FILE.write_text("{\n  " + ",\n  ".join(fields) + "\n}\n")
