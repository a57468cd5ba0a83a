"""LoRA adapters: teachers that are a few low-rank matrices over a base teacher, whose replicas they share."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from scoring.errors import InvalidAdapter

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The head's logits of scored rows are computed where vLLM applies no adapter, and an adapted embedding is not supported
# there at all.
_NOT_APPLIED = ("lm_head", "embed_tokens")


@dataclass(frozen=True)
class Adapter:
    """An adapter as the service knows it.

    Attributes:
        path: its folder, the same on every node, kept for as long as the adapter is served.
        serial: a number that no other adapter of the application has had: one added anew under an old name, or changed
            in place and added again, is another adapter.
    """

    path: str
    serial: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def weights_stamp(path: str | Path) -> tuple[int, int]:
    """What changes when an adapter's weights are written anew: the time of their file in ns, and its size in bytes.

    Raises:
        InvalidAdapter: the file cannot be found.
    """
    try:
        found = (Path(path) / _WEIGHTS).stat()
    except OSError as error:
        raise InvalidAdapter(
            f"{path} cannot be read ({error}); an adapter's folder must stay as it is for as long as it is served"
        ) from error
    return found.st_mtime_ns, found.st_size


def check_adapter(path: str | Path, max_rank: int, modules: Collection[str] | None = None) -> None:
    """Refuse an adapter that the engine could not apply exactly.

    Args:
        path: a folder as PEFT saves it.
        max_rank: `max_lora_rank` of the engine.
        modules: `lora_target_modules` of the engine, the modules it applies adapters to; None are all.

    Raises:
        InvalidAdapter: says what is wrong, and what changes it.
    """
    folder = Path(path)
    try:
        config = json.loads((folder / _CONFIG).read_text())
        with safe_open(folder / _WEIGHTS, framework="np") as weights:
            names = list(weights.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidAdapter(
            f"{folder} is no LoRA adapter as PEFT saves it ({_CONFIG} and {_WEIGHTS}): {error}"
        ) from error
    touched = sorted({part for part in _NOT_APPLIED for name in names if part in name.split(".")})
    if touched or config.get("modules_to_save"):
        what = ", ".join([*touched, *(config.get("modules_to_save") or ())])
        raise InvalidAdapter(f"{folder} changes {what}; in scores vLLM would leave that out: train without it")
    changed = {name.split(".lora_")[0].split(".")[-1] for name in names}
    if modules is not None and (left_out := changed - {module.split(".")[-1] for module in modules}):
        raise InvalidAdapter(
            f"{folder} changes {', '.join(sorted(left_out))}, which in scores vLLM would leave out; allowed are "
            f"{', '.join(modules)} (engine_args.lora_target_modules of its base teacher)"
        )
    if config.get("use_dora"):
        raise InvalidAdapter(f"{folder} is a DoRA adapter (use_dora); vLLM applies plain LoRA only")
    rank = max([config.get("r") or 0, *(config.get("rank_pattern") or {}).values()])
    if rank > max_rank:
        raise InvalidAdapter(
            f"{folder} has rank {rank}; at most {max_rank} is taken (engine_args.max_lora_rank of its base teacher)"
        )
    if not math.isfinite(config.get("lora_alpha") or 0):
        raise InvalidAdapter(f"{folder} has lora_alpha {config['lora_alpha']}; a finite number is needed")
