"""Keeps Serve's log of a replica alive while vLLM's engine starts."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator


@contextlib.contextmanager
def serve_log_kept() -> Iterator[None]:
    """Give the handlers of Serve's logger their targets back at the end.

    vLLM configures logging when it is imported and when it makes an engine's configuration, and
    `logging.config.dictConfig` closes every handler of the process.
    Serve's hands its records on to a file; closed, it has no target. The records then pile up in it, and a controller
    that was started anew takes the replica for broken: it asks for the file's path, and gets an exception.
    """
    buffers = [h for h in logging.getLogger("ray.serve").handlers if isinstance(h, logging.handlers.MemoryHandler)]
    targets = [buffer.target for buffer in buffers]
    try:
        yield
    finally:
        for buffer, target in zip(buffers, targets, strict=True):
            buffer.setTarget(target)
