"""Text to token ids and back, by the tokenizer in a model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.api import HarnessError, LocalModel, UnsupportedError, first_line

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path, need: str) -> Any:
    """transformers' tokenizer of a model folder; `need` says what for. Raises UnsupportedError where it has none."""
    from transformers import AutoTokenizer

    # without these files transformers makes up an empty tokenizer for some architectures
    found = [name for name in _FILES if (folder / name).is_file()]
    if not found:
        raise UnsupportedError(f"{folder} holds no tokenizer ({', '.join(_FILES)}); {need}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # whatever a tokenizer's parser raises, bare Exception included
        hint = "; tokenizer.model alone needs pip install sentencepiece" if found == ["tokenizer.model"] else ""
        raise HarnessError(f"the tokenizer in {folder} cannot be read: {first_line(exc)}{hint}") from exc


class Text:
    """A model's tokenizer. Raises HarnessError where the folder has none, or one that cannot be read."""

    def __init__(self, model: LocalModel) -> None:
        self._tokenizer = load_tokenizer(Path(model.path), "text needs one")
        self._vocab = model.shape.vocab

    def problem(self) -> str:
        """In what the tokenizer and the model disagree; empty if in nothing."""
        if (known := len(self._tokenizer)) > self._vocab:
            return f"the tokenizer knows {known} tokens, the model {self._vocab}: prompts with the others are refused"
        return ""

    @property
    def begin(self) -> int:
        """What stands before a text without a context: the beginning of a sequence, else its end; as in lm-eval."""
        known = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        found = next((token for token in known if token is not None), None)
        if found is None:
            raise HarnessError("the model's tokenizer has neither a first token of a sequence nor a last one")
        return int(found)

    @property
    def end(self) -> int:
        """The end of a sequence."""
        found = self._tokenizer.eos_token_id
        if found is None:
            raise HarnessError("the model's tokenizer has no token for the end of a sequence")
        return int(found)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Without special tokens."""
        return self._ids(text, add_special_tokens=False)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """With the special tokens that the model expects around a text."""
        return self._ids(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """By the model's chat template, up to where the answer begins. Raises HarnessError."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise HarnessError("messages need a chat template, and this model's tokenizer has none; give a prompt")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as exc:  # a template is a program, and refuses in its own words
            raise HarnessError(f"the model's chat template refuses these messages: {first_line(exc)}") from exc
        return self._ids(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens such as the end of a sequence."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token(self, token: int) -> str:
        """One token's text as in the middle of others, or its name where it is only a part of a character."""
        before = str(self._tokenizer.decode(self._letter))
        text = str(self._tokenizer.decode([*self._letter, token])).removeprefix(before)
        return str(self._tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text

    @cached_property
    def _letter(self) -> tuple[int, ...]:
        """What goes before a token, as decoders drop the space that a text begins with."""
        try:
            return self._ids("a", add_special_tokens=False)[-1:]
        except HarnessError:
            return ()

    def _ids(self, text: str, **options: Any) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer(text, **options)["input_ids"])
        except Exception as exc:  # such as a word that is unknown, where no token stands for unknown words
            raise HarnessError(f"the model's tokenizer refuses this text: {first_line(exc)}") from exc
