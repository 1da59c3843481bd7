"""Suggestions for mistyped names in error messages."""

import difflib
from collections.abc import Collection

_LONGEST = 64  # characters of an unknown word to compare


def nearest(word: str, known: Collection[str], otherwise: str = "") -> str:
    """`did you mean 'x'?`; where nothing is near, `otherwise` or the list of known names."""
    if close := difflib.get_close_matches(word[:_LONGEST], known, n=1):
        return f"did you mean {close[0]!r}?"
    return otherwise or f"known: {', '.join(known)}"
