"""What vLLM leaves undone when a worker loads other weights in place.

On a CPU, vLLM packs the weights of a layer for its kernels once they are loaded. An output head that shares the
embedding's weights has none loaded under its own name, so a reload in place leaves it packed as it was: every score
would come from the old head over the new body, without a word. (On other devices the kernels read the shared weights
themselves.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


class CheckpointWorker:
    """A method that vLLM's workers get beside their own (`worker_extension_cls`), for the engine to call."""

    def load_checkpoint(self: Worker, path: str) -> None:
        """Load the weights in a folder in the place of those that are loaded. The model is unusable if it fails."""
        self.reload_weights(weights_path=path)
        if current_platform.is_cpu():
            for layer in self.get_model().modules():
                method = getattr(layer, "quant_method", None)
                if isinstance(method, UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(layer)
