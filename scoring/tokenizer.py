"""A checkpoint's tokenizer: text to ids and back, where people and clients hold text.

Scores are asked by ids, and no engine here has a tokenizer. Only what stands outside has one: the text routes over
HTTP, the command line, the demo. Ids and texts are those of vLLM's own server, which loads the same folder with the
same class of Transformers. Nothing is fetched, and no code of a checkpoint is run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from scoring.checkpoint import tokenizer_hash
from scoring.errors import NoTokenizer

_UNFINISHED = "\ufffd"  # what decoding writes for bytes that are no whole character
_LONGEST_CHARACTER = 4  # bytes, so as many tokens at most


class Tokenizer:
    """The tokenizer in the folder of a checkpoint. Loading one takes up to a few seconds; threads may share it.

    Args:
        path: the folder.

    Attributes:
        hash: names the tokenizer, as `scoring.checkpoint.tokenizer_hash` does, and a teacher's `tokenizer`.

    Raises:
        NoTokenizer: there is no such folder on this machine, or no tokenizer in it that can be loaded. Its details say
            `path`, and the `reason` where there is one.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path)
        if not self._folder.is_dir():
            raise NoTokenizer("the checkpoint's folder is not on this machine: send ids", path=str(path))
        self.hash = tokenizer_hash(self._folder)
        if self.hash is None:
            raise NoTokenizer("the checkpoint has no tokenizer: send ids", path=str(path))
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # whatever is wrong with its files
            reason = " ".join(str(error).split())[:300]
            raise NoTokenizer(
                "the checkpoint's tokenizer could not be loaded: send ids", path=str(path), reason=reason
            ) from error
        # Turns off what truncation and padding its file asks for. From now on nothing in it changes.
        self._tokenizer.encode("")
        self._size = len(self._tokenizer)
        self._alone: dict[int, str] = {}  # texts of single ids

    def __len__(self) -> int:
        """Number of ids it knows, added ones included."""
        return self._size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, all of them: nothing is cut off.

        Args:
            add_special_tokens: with those that the tokenizer puts around a text (often a BOS token in front).
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. Ids that the tokenizer does not know are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        """Each id as the vocabulary writes it (`Ġthe`), None where the tokenizer does not know it."""
        return self._tokenizer.convert_ids_to_tokens(list(ids))

    def decoded_tokens(self, ids: Sequence[int], before: Sequence[int]) -> list[str]:
        """The text of each of `ids` by itself, as vLLM writes it beside log-probabilities: leading spaces kept, and
        where one ends within a character, whatever text it completes together with the tokens before it.

        Args:
            ids: alternatives to one another, at one position.
            before: the tokens before that position; the last four are looked at.
        """
        texts = [self._text_alone(token) for token in ids]
        return [
            self._completed(token, before) if text.endswith(_UNFINISHED) else text
            for token, text in zip(ids, texts, strict=True)
        ]

    def next_text(self, ids: Sequence[int], token: int, skip_special_tokens: bool = True) -> str:
        """What a token adds to the text of the ids before it, "" where it ends within a character."""
        if self._tokenizer.is_fast:
            from tokenizers.decoders import DecodeStream

            backend = self._tokenizer.backend_tokenizer
            try:
                stream = DecodeStream(ids=list(ids), skip_special_tokens=skip_special_tokens)
                return stream.step(backend, token) or ""
            except Exception:  # the text of the ids is no beginning of the text with the token: then it is taken alone
                return DecodeStream(skip_special_tokens=skip_special_tokens).step(backend, token) or ""
        before = list(ids)[-2 * _LONGEST_CHARACTER :]
        known, text = (self.decode(part, skip_special_tokens) for part in (before, [*before, token]))
        return "" if text.endswith(_UNFINISHED) else text[len(known) :]

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written as text."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any) -> str:
        """A conversation as text, by the checkpoint's chat template. Encode it with `add_special_tokens=False`: the
        template writes them.

        Args:
            messages: `{"role", "content"}` each.
            add_generation_prompt: whether the text ends where the assistant begins to speak.
            options: whatever else the template reads.

        Raises:
            NoTokenizer: the checkpoint has no chat template.
            ValueError: the template refuses the conversation.
        """
        if not self.has_chat_template:
            raise NoTokenizer("the checkpoint's tokenizer has no chat template: send the text as the model expects it")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **options
            )
        except Exception as error:  # raised by the template's own text, of whatever class
            raise ValueError(str(error)) from error

    @cached_property
    def most_characters(self) -> int:
        """Of a token's text: a text of n tokens has at most n times as many characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text."""
        return self._tokenizer.eos_token_id

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Further ids that end a text, by the checkpoint's generation_config.json (or its config.json)."""
        for name in ("generation_config.json", "config.json"):
            if (file := self._folder / name).exists():
                ids = json.loads(file.read_text()).get("eos_token_id")
                return frozenset([ids] if isinstance(ids, int) else ids or ()) - {self.eos_id}
        return frozenset()

    def _text_alone(self, token: int) -> str:
        if token not in self._alone:
            text = self.decode([token])
            if self._space:  # decoding drops the space in front of a text
                written = self.token_strings([token])[0] or ""
                spaces = len(written) - len(written.lstrip(self._space))
                text = " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text
            self._alone[token] = text
        return self._alone[token]

    def _completed(self, token: int, before: Sequence[int]) -> str:
        """The text of a token that ends within a character, taken together with those before it."""
        for count in range(1, min(len(before), _LONGEST_CHARACTER) + 1):
            context = list(before[-count:])
            text = self.decode([*context, token])
            if text.endswith(_UNFINISHED):
                continue
            # Tokens just before that are unfinished too have had no text of their own: it is counted here.
            while context and self.decode(context[-1:]).endswith(_UNFINISHED):
                context.pop()
            known = self.decode(context) if context else ""
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False))
            return text[len(list(same)) :]
        return ""

    @cached_property
    def _space(self) -> str | None:
        """How the vocabulary writes a space, where decoding drops the first one of a text (SentencePiece's)."""
        if not self._tokenizer.is_fast:
            return None
        before = json.loads(self._tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer") or {}
        for step in (before, *before.get("pretokenizers", ())):
            if step.get("type") == "Metaspace":
                return step.get("replacement", "▁")
        return None
