"""What a prefill must compute at least, in floating-point operations: the ideal that reuse of prefixes is held to.

Of a dense decoder with L layers, hidden size H, intermediate size I, A heads and G key/value heads of size D, and a
vocabulary of V, counting a multiplication and an addition as two:

    body, per token:                         2 L (H D (2 A + 2 G) + 3 H I)
    attention, per token with p before it:   4 L A D (p + 1)
    head, per scored row:                    2 H V

The log-softmax, the norms and everything outside the engine are left out, on both sides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Decoder:
    """The sizes of a model, as its config.json names them."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: str | Path) -> Decoder:
        config = json.loads((Path(checkpoint) / "config.json").read_text())
        heads = config["num_attention_heads"]
        config = {"head_dim": config["hidden_size"] // heads, **{k: v for k, v in config.items() if v is not None}}
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    def prefill(self, cached: int, end: int, rows: int) -> int:
        """Operations for positions `cached` to `end` of a sequence, of which `rows` are scored."""
        heads = self.num_attention_heads * self.head_dim
        projections = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        body = 2 * self.num_hidden_layers * (projections + 3 * self.hidden_size * self.intermediate_size)
        keys = (end * (end + 1) - cached * (cached + 1)) // 2  # over all positions, the keys each one looks at
        attention = 4 * self.num_hidden_layers * heads * keys
        return body * (end - cached) + attention + 2 * self.hidden_size * self.vocab_size * rows


def ideal_reuse(model: Decoder, prompt: int, response: int, group: int, block: int, cold: bool) -> float:
    """How many times fewer operations a group of responses to one prompt takes with its prompt computed once.

    What is reused are whole blocks before the first scored row, which is the prompt's last position. Cold, the first
    of the group computes the prompt.
    """
    end, cached = prompt + response, (prompt - 1) // block * block
    without = group * model.prefill(0, end, response)
    first = model.prefill(0 if cold else cached, end, response)
    return without / (first + (group - 1) * model.prefill(cached, end, response))
