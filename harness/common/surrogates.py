"""Finds half surrogate pairs: JSON's escapes can hold them, UTF-8 and tokenizers cannot."""


def lone_surrogate(text: str) -> str:
    r"""The first half of a surrogate pair that stands alone in a text, as an escape such as \ud800; empty for none."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return f"\\u{ord(text[exc.start]):04x}"
    return ""
