"""The URL of a history's database: parsed, and shown without what may be a secret in it."""

from collections.abc import Iterator
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from harness.api import HIDDEN, HarnessError, is_secret

_EXAMPLE = "such as sqlite:///results/history.db or postgresql+psycopg://user@host/benchmarks"


def parse_url(text: str) -> sa.URL:
    """The URL in `text`. Raises HarnessError, which shows none of it: anything in what is no URL may be a password."""
    try:
        text.encode()  # what is not UTF-8 in a command line arrives as lone surrogates, which no URL has
        url = sa.make_url(text)
    except (SQLAlchemyError, ValueError, TypeError):
        raise HarnessError(f"history: --db takes a URL {_EXAMPLE}; this is none") from None
    if "@" in (url.host or ""):
        raise HarnessError("history: the URL of --db has several @; write one in a password as %40")
    return url


def shown(url: sa.URL) -> str:
    """A URL without its password, and without its query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def without_secrets_of(url: sa.URL, text: str) -> str:
    """What a driver says of `url`, with `***` for each secret of it, as it is or encoded."""
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _secrets(url: sa.URL) -> Iterator[str]:
    """The password, and parameters that may be one or, as a connection string, hold one."""
    values = [str(url.password)] if url.password else []
    for name, value in url.query.items():
        texts = [value] if isinstance(value, str) else value
        values += [text for text in texts if text and (is_secret(name) or "=" in text)]
    for value in values:
        yield from {value, quote(value, safe=""), quote_plus(value)}
