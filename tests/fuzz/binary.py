"""Feeds requests in safetensors, more and less broken, to everything that touches them before an engine does.

    python -m tests.fuzz.binary --seconds 20 --seed 1 --folder out/fuzz

Whatever the bytes are, they are refused by a `ScoringError`, or they are reads that can be answered: no other
exception, no more than seconds, no memory that their size does not explain. What breaks that lies in the folder
afterwards; a test in tests/test_wire.py keeps it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["scoring", "deployments.http_door"]):
    from scoring import wire
    from scoring.errors import ScoringError

from tests.fuzz.seeds import seeds
from tests.stand_in_router import BATCH_LIMITS, StandInRouter

_LONGEST = 4096
_EVERY = 500  # inputs between two reports


class Fuzzed:
    """One input at a time, and how far they came: "inputs", "parsed" (whole requests), "answered" (reads)."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._router = StandInRouter()
        self._loop = asyncio.new_event_loop()
        self.counts = dict.fromkeys(("inputs", "parsed", "answered"), 0)

    def __call__(self, data: bytes) -> None:
        self.counts["inputs"] += 1
        try:
            self._request(data)
        except ScoringError as error:
            assert json.dumps(wire.error_to_json(error), allow_nan=False)
        if self.counts["inputs"] % _EVERY == 0:
            self._report.write_text(json.dumps(self.counts))

    def _request(self, data: bytes) -> None:
        kind = "label" if data[:1] == b"\x01" else "matrix"
        batch, _ = wire.decode_batch(kind, data[1:])
        BATCH_LIMITS.check(batch)
        self.counts["parsed"] += 1
        ask = self._router.read_matrix if kind == "matrix" else self._router.read_labels
        scores = self._loop.run_until_complete(ask(batch, return_exceptions=True))
        self._router.calls.clear()
        answer = wire.decode_scores(kind, wire.encode_scores(scores))
        wire.check_answer(batch, answer)
        self.counts["answered"] += len(answer) - len(answer.errors)


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """Now and then by libFuzzer's own ways; else by someone who knows what safetensors is."""
    chance = random.Random(seed)
    if chance.random() < 0.2:
        return atheris.Mutate(data, most)
    if chance.random() < 0.5 or (parts := _parts(data)) is None:  # what is broken already stays so, and teaches little
        data = chance.choice(_SEEDS)
        parts = _parts(data)
    header, body = parts
    for _ in range(chance.randint(1, 2)):
        chance.choice((_change_header, _change_array, _change_array, _change_metadata))(chance, header, body)
    text = json.dumps(header).encode()
    return (data[:1] + len(text).to_bytes(8, "little") + text + bytes(body))[:most]


def _parts(data: bytes) -> tuple[dict, bytearray] | None:
    """The header and what comes after it; None where there is no header."""
    length = int.from_bytes(data[1:9], "little")
    try:
        header = json.loads(data[9 : 9 + length])
    except (ValueError, RecursionError):
        return None
    return (header, bytearray(data[9 + length :])) if isinstance(header, dict) else None


_ODD = [
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63,
    2**64,
    -(2**63),
    0.5,
    1e308,
    None,
    True,
    "",
    [],
    {},
]


def _change_header(chance: random.Random, header: dict, body: bytearray) -> None:
    """Another dtype, shape, place or name of an array."""
    arrays = [name for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
    if not arrays:
        return
    name = chance.choice(arrays)
    entry = header[name]
    match chance.randrange(5):
        case 0:
            entry["dtype"] = chance.choice(["U8", "I32", "I64", "F32", "F64", "BOOL", "BF16", "I8", 5, None])
        case 1:
            entry["shape"] = [chance.choice(_ODD) for _ in range(chance.randrange(3))]
        case 2:
            offsets = entry.get("data_offsets")
            if isinstance(offsets, list) and offsets:
                at = chance.randrange(len(offsets))
                offsets[at] = chance.choice([*_ODD, len(body), len(body) + 1, chance.randrange(64)])
        case 3:
            header[chance.choice([*arrays, "other", ""])] = header.pop(name)
        case 4:
            other = chance.choice(arrays)
            header[name], header[other] = header[other], header[name]


def _change_array(chance: random.Random, header: dict, body: bytearray) -> None:
    """Other numbers in an array, of four bytes or eight."""
    if len(body) < 8:
        return
    width = chance.choice((4, 8))
    at = chance.randrange(0, len(body) - width + 1, 4) if chance.random() < 0.9 else chance.randrange(len(body) - width)
    value = chance.choice([0, 1, 2, 3, -1, -2, 2047, 2048, 2**31 - 1, -(2**31), chance.randrange(64)])
    body[at : at + width] = value.to_bytes(width, "little", signed=True)


def _change_metadata(chance: random.Random, header: dict, body: bytearray) -> None:
    """Other teachers, options, form or version."""
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        return
    value = chance.choice([*_ODD, ["default", "math", None], ["\ud800"], {"timeout_s": chance.choice(_ODD)}, {"x": 1}])
    name = chance.choice([*metadata, "other"])
    metadata[name] = chance.choice([json.dumps(value), "[" * 2000, "NaN", "9" * 5000, "1e999", value])


_SEEDS = [bytes([kind == "label"]) + data for kind, data in seeds()]  # the byte in front chooses the route


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--without-bounds", action="store_true", help="switch a check off, to see that it is missed")
    options = parser.parse_args()
    corpus = options.folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(_SEEDS):
        (corpus / f"seed-{i}").write_bytes(data)
    if options.without_bounds:
        wire._naturals = lambda value, count: isinstance(value, list) and len(value) == count
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arguments = [
        f"-max_total_time={options.seconds}",
        f"-seed={options.seed}",
        f"-max_len={_LONGEST}",
        f"-artifact_prefix={options.folder}/",
        "-timeout=5",
        "-rss_limit_mb=2048",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *arguments], Fuzzed(options.folder / "counts.json"), custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
