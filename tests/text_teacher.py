"""A tiny teacher that reads text: a tiny checkpoint with a byte-level tokenizer, made in a second."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny_teacher import make_tiny_teacher

VOCABULARY = 416
_TEXT = """A teacher reads what a student has just written, and says of every word how likely it was. The student
learns from these numbers, word by word, and writes again. Naïve façades, 12 rows, 34 columns; yes or no? Yes. No."""
_CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_text_teacher(path: str | Path) -> Path:
    """The tiny teacher with a vocabulary of 416 and a tokenizer of fewer ids, which splits rare characters into bytes,
    puts a BOS token in front of a text, knows an EOS token, and has a chat template.
    """
    return save_text_tokenizer(make_tiny_teacher(path, vocab_size=VOCABULARY))


def save_text_tokenizer(folder: Path) -> Path:
    """Its tokenizer, into a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    return folder
