"""Text of token ids is what transformers makes of them, whichever way it is asked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from engines.adapters.fake import MODEL
from engines.common.text import Text

WORDS = {"<s>": 0, "it": 1, "'s": 2, "here": 3, ".": 4, "<unk>": 5}


def _shouted(self: Any, *given: object, **named: object) -> str:
    return str(transformers.PreTrainedTokenizerFast._decode(self, *given, **named)).upper()


#: A tokenizer with a way of its own to write text.
Shouts = type("Shouts", (transformers.PreTrainedTokenizerFast,), {"_decode": _shouted})


@pytest.mark.parametrize(
    ("kind", "cleans", "expected"),
    [
        (transformers.PreTrainedTokenizerFast, False, "it 's here ."),
        (transformers.PreTrainedTokenizerFast, True, "it's here."),
        (Shouts, False, "IT 'S HERE ."),
    ],
)
def test_text_is_without_special_tokens_and_as_the_tokenizer_s_own_code_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, cleans: bool, expected: str
) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = kind(tokenizer_object=words, bos_token="<s>", unk_token="<unk>", clean_up_tokenization_spaces=cleans)
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    text = Text(replace(MODEL, path=str(tmp_path)))
    assert text.decode((0, 1, 2, 3, 4)) == expected
    assert text.decode(()) == ""
