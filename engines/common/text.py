"""Encodes text to token ids and decodes it, with the tokenizer of a model folder."""

import base64
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.common.chat_template import ChatTemplate
from harness.api import HarnessError, LocalModel, UnsupportedError, first_line
from harness.common.packages import install
from harness.common.surrogates import lone_surrogate

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: A key of a normalizer: what SentencePiece replaces characters by, as base64 of a table with its size before it.
_CHARSMAP = "precompiled_charsmap"


def load_tokenizer(folder: Path, need: str) -> Any:
    """Loads a model folder's transformers tokenizer. Raises UnsupportedError, which ends with `need`, where there is
    none, and HarnessError where it cannot be read."""
    from transformers import AutoTokenizer

    # without any of these files transformers builds an empty tokenizer for some architectures
    files = [name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise UnsupportedError(f"{folder} holds no tokenizer ({', '.join(_FILES)}); {need}")
    try:
        _require_charsmaps(folder / _FILES[0])
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a tokenizer's parser raises anything, and a panic in Rust is no Exception
        hint = f"; tokenizer.model alone needs {install('sentencepiece')}" if files == ["tokenizer.model"] else ""
        raise HarnessError(f"the tokenizer in {folder} cannot be read: {first_line(exc)}{hint}") from exc


def _require_charsmaps(file: Path) -> None:
    """Raises ValueError for a tokenizer.json with a map of characters that says it is larger than it is: tokenizers
    takes as much memory before it looks, and ends the process where there is not so much."""
    if not file.is_file() or _CHARSMAP.encode() not in (content := file.read_bytes()):
        return
    normalizer = json.loads(content).get("normalizer") or {}
    for part in (normalizer, *(normalizer.get("normalizers") or ())):
        charsmap = base64.b64decode(part.get(_CHARSMAP) or "")
        if charsmap and int.from_bytes(charsmap[:4], "little") > len(charsmap) - 4:
            raise ValueError(f"its {_CHARSMAP} is cut off")


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """What writes text without special tokens.

    Where transformers adds nothing to what the tokenizer in Rust writes, that one is asked: a stream decodes with every
    token, and transformers' checks take twice as long as the decoding.
    """
    from transformers import TokenizersBackend

    if (
        isinstance(tokenizer, TokenizersBackend)
        and type(tokenizer).decode is TokenizersBackend.decode
        and type(tokenizer)._decode is TokenizersBackend._decode
        and not tokenizer.clean_up_tokenization_spaces
    ):
        rust = tokenizer.backend_tokenizer
        return lambda tokens: str(rust.decode(tokens, skip_special_tokens=True))
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


class Text:
    """A model's tokenizer. Raises HarnessError (UnsupportedError where the folder has none)."""

    def __init__(self, model: LocalModel) -> None:
        self._tokenizer = load_tokenizer(Path(model.path), "text needs one")
        self._decode = _decoder(self._tokenizer)
        self._vocab = model.shape.vocab
        self._token_texts: dict[int, str] = {}
        self._chat_template: ChatTemplate | None = None  # from the first chat on
        self._one_chat = threading.Lock()  # a server encodes in many threads, and one process renders

    def close(self) -> None:
        """Ends the process that renders chats, if one runs; another chat would start a new one. Idempotent."""
        if self._chat_template is not None:
            self._chat_template.close()

    def problem(self) -> str:
        """How the tokenizer and the model disagree; empty where they agree."""
        if (size := len(self._tokenizer)) > self._vocab:
            return (
                f"the tokenizer has {size} tokens, the model {self._vocab}: prompts with ids at or above {self._vocab} "
                "are refused"
            )
        return ""

    @property
    def begin(self) -> int:
        """The id that stands for an empty context: beginning of sequence, else end of sequence, as in lm-eval."""
        ids = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        begin = next((token for token in ids if token is not None), None)
        if begin is None:
            raise HarnessError("the model's tokenizer has neither a beginning-of-sequence nor an end-of-sequence token")
        return int(begin)

    @property
    def end(self) -> int:
        """The end-of-sequence id."""
        if self._tokenizer.eos_token_id is None:
            raise HarnessError("the model's tokenizer has no end-of-sequence token")
        return int(self._tokenizer.eos_token_id)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Token ids without special tokens."""
        return self._ids(text, add_special_tokens=False)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids with the special tokens that the model expects around a text."""
        return self._ids(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids by the model's chat template, with the generation prompt. Raises HarnessError."""
        with self._one_chat:
            if self._chat_template is None:
                self._chat_template = self._new_chat_template()
            rendered = self._chat_template.render(messages)
        return self._ids(rendered, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens such as the end of sequence."""
        return self._decode(list(tokens))

    def token(self, token: int) -> str:
        """A token's text as it reads inside a sequence, or its vocabulary entry where it is part of a character."""
        if token not in self._token_texts:  # at most the vocabulary; log-probabilities name the same tokens often
            self._token_texts[token] = self._token_text(token)
        return self._token_texts[token]

    def _token_text(self, token: int) -> str:
        before = str(self._tokenizer.decode(self._letter))
        text = str(self._tokenizer.decode([*self._letter, token])).removeprefix(before)
        return str(self._tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text

    def _new_chat_template(self) -> ChatTemplate:
        if not getattr(self._tokenizer, "chat_template", None):
            raise HarnessError("messages need a chat template, and this model's tokenizer has none; give a prompt")
        try:
            template = self._tokenizer.get_chat_template()
        except (ValueError, NotImplementedError) as exc:  # several templates and no default; mistral-common's own code
            raise HarnessError(f"the model's tokenizer has no chat template to choose: {first_line(exc)}") from exc
        return ChatTemplate(template, self._tokenizer.special_tokens_map)

    @cached_property
    def _letter(self) -> tuple[int, ...]:
        """A token to decode before another one, since decoders strip the leading space of a text."""
        try:
            return self._ids("a", add_special_tokens=False)[-1:]
        except HarnessError:
            return ()

    def _ids(self, text: str, **options: Any) -> tuple[int, ...]:
        if escape := lone_surrogate(text):
            raise HarnessError(f"the text is not Unicode: {escape} is half of a surrogate pair")
        try:
            return tuple(self._tokenizer(text, **options)["input_ids"])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # such as an unknown word without a token for it; a panic in Rust is no Exception
            raise HarnessError(f"the model's tokenizer refuses this text: {first_line(exc)}") from exc
