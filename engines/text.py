"""Text to token ids and back, by the tokenizer in a model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.api import HarnessError, LocalModel

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Text:
    """A model's tokenizer. Raises HarnessError where the folder has none, or one that cannot be read."""

    def __init__(self, model: LocalModel) -> None:
        from transformers import AutoTokenizer

        folder = Path(model.path)
        # without these files transformers makes up an empty tokenizer for some architectures
        if not any((folder / name).is_file() for name in _FILES):
            raise HarnessError(f"{folder} holds no tokenizer ({', '.join(_FILES)}); text needs one")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as exc:  # whatever a tokenizer's parser raises, bare Exception included
            raise HarnessError(f"the tokenizer in {folder} cannot be read: {exc}") from exc
        self._vocab = model.shape.vocab

    def problem(self) -> str:
        """In what the tokenizer and the model disagree; empty if in nothing."""
        if (known := len(self._tokenizer)) > self._vocab:
            return f"the tokenizer knows {known} tokens, the model {self._vocab}: prompts with the others are refused"
        return ""

    def encode(self, prompt: str) -> tuple[int, ...]:
        """With the special tokens that the model expects around a text."""
        return tuple(self._tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """By the model's chat template, up to where the answer begins. Raises HarnessError."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise HarnessError("messages need a chat template, and this model's tokenizer has none; give a prompt")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as exc:  # a template is a program, and refuses in its own words
            raise HarnessError(f"the model's chat template refuses these messages: {exc}") from exc
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens such as the end of a sequence."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token(self, token: int) -> str:
        """One token's own text."""
        return str(self._tokenizer.decode([token]))
