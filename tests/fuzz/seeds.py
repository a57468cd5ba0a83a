"""Requests in safetensors, of every shape, from which the fuzzers begin."""

from __future__ import annotations

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead, wire


def seeds() -> list[tuple[wire.Kind, bytes]]:
    matrix = [
        MatrixRead([1, 2, 3], [4, 5], [[6, 7], [8, 9]], top_k=2, extras=("tail", "entropy")),
        MatrixRead([1], [2, 3, 4], [5, -1], rows=[2, 0], priority=-3, teacher="default"),
        MatrixRead([1], []),
        MatrixRead([1, 2], [3], rows=[True], unknown_candidates="-inf", expect_version=0),
    ]
    labels = [LabelRead([1, 2, 3], [4, 5]), LabelRead([7], [8], teacher="default", priority=9)]
    batches = [MatrixBatch.from_reads(matrix), MatrixBatch.from_reads(matrix[:1]), MatrixBatch.from_reads([])]
    batches += [LabelBatch.from_reads(labels), LabelBatch.from_reads(labels[:1]), LabelBatch.from_reads([])]
    return [
        (wire.kind_of(batch), wire.encode_batch(batch, timeout_s=timeout_s, return_exceptions=timeout_s is None))
        for batch in batches
        for timeout_s in (None, 5.0)
    ]
