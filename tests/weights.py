"""Other weights for the teachers of the tests, and how an engine that runs in a process of its own takes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from scoring.weights import Weights

if TYPE_CHECKING:
    from scoring.engine import TeacherEngine


async def take_weights(engine: TeacherEngine, path: Path, version: int, self_test: bool = True) -> str:
    """Have an engine load the weights in a folder as this version; their hash."""
    checked = await engine.check_weights(str(path))
    whole = engine.self_test
    if not self_test:
        engine.self_test = _nothing
    try:
        await engine.hold()
        await engine.load_weights(Weights(version, str(path), checked.checkpoint), checked)
    finally:
        engine.release()
        engine.self_test = whole
    return checked.checkpoint


async def _nothing() -> None:
    pass


def changed_checkpoint(path: Path, of: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint, with `change` made to its tensors, in place."""
    shutil.copytree(of, path)
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
