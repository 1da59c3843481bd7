"""Secrets, found by the names of variables and options and by the form of URLs: neither recorded nor shown."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Stands for a value that is not shown.
HIDDEN = "***"
_WORDS = ("TOKEN", "KEY", "SECRET", "PASS", "PWD", "CREDENTIAL", "AUTH")
#: Words in the name of an option that holds one. Not parts of words, as for variables: `max_tokens` is none.
_OPTION_WORDS = frozenset({
    "apikey", "apitoken", "auth", "authorization", "bearer", "credential", "credentials", "key", "passphrase",
    "passwd", "password", "pwd", "secret", "token",
})  # fmt: skip
#: Of these, those whose value is a secret even where it is a number.
_EVEN_NUMBERS = frozenset({"apikey", "passphrase", "passwd", "password", "pwd", "secret"})
#: With one of these words it is a token of a vocabulary.
_VOCABULARY = frozenset({"bos", "cls", "eos", "mask", "pad", "sep", "stop", "unk"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: With one slash, too: paths have no empty parts. A scheme is looked for where a word begins: in the middle of one that
#: is long, at each of its letters, would take hours.
_URL = re.compile(r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z0-9+.-]+:/{1,2})(?P<rest>[^\s\"'<>]+)")
#: After the scheme of a URL: who logs in, and each parameter.
_LOGIN = re.compile(r"^[^/?#]*@")
_PARAMETER = re.compile(r"(?<=[?&;#])([^=?&;#]+)=([^&;#]+)")
#: A shorter value is no secret worth its name, and to replace it everywhere would garble texts.
_SHORTEST = 4


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret, such as a password, a token or a key."""
    return any(word in name.upper() for word in _WORDS)


def is_secret_option(name: str, value: object) -> bool:
    """Whether the value of an option of this name may be a secret: a text as `api_key` or `hfToken`, not `max_tokens`;
    a number as `password`."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return False
    words = {word.lower() for word in _WORD.findall(name)}
    return bool(words & (_OPTION_WORDS if isinstance(value, str) else _EVEN_NUMBERS)) and not words & _VOCABULARY


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with `***` for each value that may be a secret, or for the part of it that is a URL's."""
    return {name: HIDDEN if is_secret(name) else without_logins(value) for name, value in variables.items()}


def without_secret_options(options: Any, name: str = "") -> Any:
    """Plain data with `***` for each value that may be a secret by the name that it, or what holds it, stands under."""
    if isinstance(options, Mapping):
        return {key: without_secret_options(value, f"{name} {key}") for key, value in options.items()}
    if isinstance(options, list | tuple):
        return type(options)(without_secret_options(item, name) for item in options)
    if is_secret_option(name, options):
        return HIDDEN
    return without_logins(options) if isinstance(options, str) else options


def without_logins(text: str) -> str:
    """A text with `***` for the login of each URL in it, or its password alone, and for parameters with secrets."""
    return _URL.sub(_without_login, text) if ":/" in text else text


def secrets_in(variables: Mapping[str, str], options: Any, *texts: str) -> frozenset[str]:
    """The secrets themselves, of variables, options and URLs in `texts`, as far as a text can be searched for them."""
    named = [value for name, value in variables.items() if is_secret(name)]
    found = (*named, *_secret_texts(options, ""), *_logins((*variables.values(), *_texts(options), *texts)))
    return frozenset(text for text in found if len(text) >= _SHORTEST)


def without_these(text: str, secrets: frozenset[str]) -> str:
    """A text with `***` for each of these secrets; the longest first, as one may hold another."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _secret_texts(options: Any, name: str) -> Iterator[str]:
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _secret_texts(value, f"{name} {key}")
    elif isinstance(options, list | tuple):
        for item in options:
            yield from _secret_texts(item, name)
    elif is_secret_option(name, options):
        yield str(options)


def _texts(options: Any) -> Iterator[str]:
    if isinstance(options, Mapping | list | tuple):
        for item in options.values() if isinstance(options, Mapping) else options:
            yield from _texts(item)
    elif isinstance(options, str):
        yield options


def _logins(texts: Iterable[str]) -> Iterator[str]:
    """What `without_logins` hides of texts."""
    for url in (url for text in texts for url in _URL.finditer(text)):
        if login := _LOGIN.match(url["rest"]):
            user, colon, password = login.group().removesuffix("@").partition(":")
            if colon or _is_site(url):
                yield password if colon else user
        yield from (value for name, value in _PARAMETER.findall(url["rest"]) if _is_parameter(name))


def _without_login(url: re.Match[str]) -> str:
    def login(found: re.Match[str]) -> str:
        user, colon, _ = found.group().removesuffix("@").partition(":")
        if colon:
            return f"{user}:{HIDDEN}@"
        return f"{HIDDEN}@" if _is_site(url) else found.group()

    def parameter(found: re.Match[str]) -> str:
        return f"{found.group(1)}={HIDDEN}" if _is_parameter(found.group(1)) else found.group()

    return url["scheme"] + _PARAMETER.sub(parameter, _LOGIN.sub(login, url["rest"]))


def _is_site(url: re.Match[str]) -> bool:
    """Whether a name alone before the host is a token; for a database it is a user."""
    return url["scheme"].lower().rstrip(":/").endswith(("http", "https"))


def _is_parameter(name: str) -> bool:
    return is_secret(name) or name.lower() == "sig" or "signature" in name.lower()
