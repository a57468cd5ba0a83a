"""A checkpoint's tokenizer, held against vLLM's own: loader, texts beside log-probabilities, detokenizer."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.logprobs import create_prompt_logprobs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from scoring.checkpoint import tokenizer_hash
from scoring.errors import NoTokenizer
from scoring.tokenizer import Tokenizer
from tests.text_teacher import save_text_tokenizer
from tests.tiny_teacher import make_tiny_teacher

TEXTS = ["", "A teacher reads.", "  two spaces", "naïve 🙂 façade 漢字", "line\nline\ttab", "<s>special</s>", "🙂" * 9]
CORPUS = ["A teacher reads what a student has just written, word by word, two by two. Naïve façades; yes or no?"] * 3


def save_sentencepiece(folder: Path) -> Path:
    """A tokenizer of SentencePiece's kind: spaces are "▁", and what it does not know is spelt in bytes."""
    rust = Rust(models.BPE(byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.normalizer = normalizers.NFC()
    spelling = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"])
    rust.train_from_iterator(CORPUS, trainer)
    described = json.loads(rust.to_str())
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = vocabulary | {byte: len(vocabulary) + i for i, byte in enumerate(spelling)}
    rust = Rust.from_str(json.dumps(described))
    PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["byte-level", "SentencePiece", "SmolLM2", "words"])
def folder(request, tmp_path_factory) -> Path:
    match request.param:
        case "byte-level":
            return save_text_tokenizer(tmp_path_factory.mktemp("text"))
        case "SentencePiece":
            return save_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))
        case "SmolLM2":
            return request.getfixturevalue("smollm2_path")
        case _:
            return request.getfixturevalue("tiny_path")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return get_tokenizer(str(folder))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_texts_are_vllms(tokenizer, theirs, text, special):
    ids = tokenizer.encode(text, special)
    assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == theirs.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.token_strings(ids) == theirs.convert_ids_to_tokens(ids)


def test_its_size_ends_and_longest_token_are_vllms(tokenizer, theirs):
    assert len(tokenizer) == len(theirs)
    assert tokenizer.eos_id == theirs.eos_token_id
    assert tokenizer.most_characters == theirs.max_chars_per_token


def test_texts_beside_log_probabilities_are_vllms(tokenizer, theirs):
    """Also where a token begins or goes on with a character, and for alternatives that do."""
    rng = np.random.default_rng(0)
    sequence = tokenizer.encode(" ".join(TEXTS)) + rng.integers(0, len(tokenizer), 200).tolist()
    alternatives = rng.integers(0, len(tokenizer), (len(sequence) - 1, 6)).tolist()
    rows = [[own, *others] for own, others in zip(sequence[1:], alternatives, strict=True)]
    processor = LogprobsProcessor(
        tokenizer=theirs,
        logprobs=None,
        prompt_logprobs=create_prompt_logprobs(False),
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=6,
    )
    numbers = torch.zeros(len(rows), 7)
    processor._update_prompt_logprobs(LogprobsTensors(torch.tensor(rows), numbers, torch.ones(len(rows), dtype=int)))
    for r, (row, due) in enumerate(zip(rows, processor.prompt_logprobs[1:], strict=True)):
        given = dict(zip(row, tokenizer.decoded_tokens(row, sequence[1 : 1 + r]), strict=True))
        assert given == {token: entry.decoded_token for token, entry in due.items()}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_text_of_the_next_token_is_vllms(tokenizer, theirs, skip_special_tokens):
    random = np.random.default_rng(0).integers(0, len(tokenizer), 100).tolist()
    sequence = tokenizer.encode(" ".join(TEXTS)) + random
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    for end in range(1, len(sequence)):
        request = SimpleNamespace(sampling_params=params, prompt_token_ids=sequence[:end], request_id="r")
        detokenizer = IncrementalDetokenizer.from_new_request(theirs, request)
        detokenizer.update([sequence[end]], stop_terminated=False)
        due = detokenizer.get_next_output_text(finished=True, delta=False)
        assert tokenizer.next_text(sequence[:end], sequence[end], skip_special_tokens) == due


def test_its_hash_is_the_checkpoints(folder, tokenizer):
    assert tokenizer.hash == tokenizer_hash(folder)


def test_threads_may_share_it(tokenizer):
    texts = [f"{text} {i}" for i in range(40) for text in TEXTS]

    async def encode_all():
        return await asyncio.gather(*(asyncio.to_thread(tokenizer.encode, text) for text in texts))

    assert asyncio.run(encode_all()) == [tokenizer.encode(text) for text in texts]


def test_a_file_that_asks_for_truncation_does_not_get_it(tmp_path):
    folder = save_text_tokenizer(tmp_path)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(described | {"truncation": cut}))
    assert Tokenizer(folder).encode(TEXTS[1]) == Tokenizer(save_text_tokenizer(tmp_path)).encode(TEXTS[1])
    assert len(Tokenizer(folder).encode(TEXTS[1])) > 4


def test_a_conversation_is_written_by_the_checkpoints_template(tmp_path):
    tokenizer = Tokenizer(save_text_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "Yes?"}]
    assert tokenizer.chat(messages) == "<s><|user|>Yes?\n<|assistant|>"
    assert tokenizer.chat(messages, add_generation_prompt=False, shout=True) == "<s><|user|>Yes?\n!"
    with pytest.raises(ValueError, match="continue_final_message"):
        tokenizer.chat(messages, continue_final_message=True)


def test_a_checkpoint_without_a_template_has_no_conversations(tiny_path):
    tokenizer = Tokenizer(tiny_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(NoTokenizer, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "Yes?"}])


def test_ids_that_end_a_text_are_those_of_the_checkpoints_files(tmp_path):
    folder = save_text_tokenizer(tmp_path)
    assert (Tokenizer(folder).eos_id, Tokenizer(folder).stop_ids) == (1, set())
    (folder / "config.json").write_text('{"eos_token_id": 7, "model_type": "qwen3"}')
    assert Tokenizer(folder).stop_ids == {7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert Tokenizer(folder).stop_ids == {5}


def test_what_cannot_be_loaded_is_a_sentence(tmp_path):
    with pytest.raises(NoTokenizer, match="folder is not on this machine"):
        Tokenizer(tmp_path / "nothing")
    bare = make_tiny_teacher(tmp_path / "bare")  # Transformers would make an empty tokenizer up
    with pytest.raises(NoTokenizer, match="has no tokenizer: send ids"):
        Tokenizer(bare)
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(NoTokenizer, match="could not be loaded"):
        Tokenizer(bare)
