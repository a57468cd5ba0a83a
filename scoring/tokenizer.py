"""A checkpoint's tokenizer: text to ids and back, where people and clients hold text.

Scores are asked by ids, and no engine here has a tokenizer. Only what stands outside has one: the text routes over
HTTP, the command line, the demo. Ids and token strings are those of vLLM's own server, which loads the same folder with
the same class of Transformers. Nothing is fetched, and no code of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from scoring.checkpoint import tokenizer_hash
from scoring.errors import NoTokenizer


class Tokenizer:
    """The tokenizer in the folder of a checkpoint. Loading one takes up to a few seconds; threads may share it.

    Args:
        path: the folder.

    Attributes:
        hash: names the tokenizer, as `scoring.checkpoint.tokenizer_hash` does, and a teacher's `tokenizer`.

    Raises:
        NoTokenizer: there is no such folder on this machine, or no tokenizer in it that can be loaded.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        if not folder.is_dir():
            raise NoTokenizer(f"{str(path)!r} is no folder on this machine, so text cannot be tokenised here: send ids")
        self.hash = tokenizer_hash(folder)
        if self.hash is None:
            raise NoTokenizer(f"the checkpoint {str(path)!r} has no tokenizer: send ids")
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever is wrong with its files
            reason = " ".join(str(error).split())[:300]
            raise NoTokenizer(f"the tokenizer of {str(path)!r} could not be loaded ({reason}): send ids") from error
        # Turns off what truncation and padding its file asks for. From now on nothing in it changes.
        self._tokenizer.encode("")

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
            options: whatever else the template reads (`tools`, `continue_final_message`, ...).

        Raises:
            NoTokenizer: the checkpoint has no chat template.
        """
        if not self.has_chat_template:
            raise NoTokenizer("the checkpoint's tokenizer has no chat template: send the text as the model expects it")
        return self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **options
        )

    @cached_property
    def most_characters(self) -> int:
        """Of a token's text: a text of n tokens has at most n times as many characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _size(self) -> int:
        return len(self._tokenizer)
