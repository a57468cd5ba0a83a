"""What a read is, and the engine that answers it. Never imports Ray; vLLM only in `engine` and `vllm_extension`."""

from scoring.batches import SCHEMA_VERSION, LabelBatch, MatrixBatch
from scoring.errors import ScoringError
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScore, LabelScores, MatrixScore, MatrixScores, ReadMeta

__all__ = [
    "SCHEMA_VERSION",
    "LabelBatch",
    "LabelRead",
    "LabelScore",
    "LabelScores",
    "MatrixBatch",
    "MatrixRead",
    "MatrixScore",
    "MatrixScores",
    "ReadMeta",
    "ScoringError",
]
