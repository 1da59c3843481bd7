"""Which requests come from a web page of another site: any page can make the browser of this machine send some."""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens on `host`."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def is_foreign(headers: Mapping[str, str], loopback: bool) -> bool:
    """Whether a page of another site may have sent a request, by its `headers`.

    Browsers say in Origin whose page asks. A page may also have the name of its own site stand for this machine's
    address (DNS rebinding); a `loopback` server is asked by its address or as localhost.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return True
    return loopback and bool(host) and not _names_this_machine(host)


@lru_cache(maxsize=64)
def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
