"""Web pages of other sites: a browser sends their requests to this machine, and they are refused."""

import pytest

from harness.serve.origins import is_foreign, is_loopback


@pytest.mark.parametrize(
    ("host", "origin", "loopback", "foreign"),
    [
        ("127.0.0.1:8000", None, True, False),
        ("localhost:8000", None, True, False),
        ("[::1]:8000", None, True, False),
        ("", None, True, False),  # HTTP/1.0
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True, False),
        ("127.0.0.1:8000", "http://evil.example", True, True),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", True, True),
        ("127.0.0.1:8000", "null", True, True),
        ("127.0.0.1:8000", "", True, True),
        ("evil.example:8000", "http://evil.example:8000", True, True),  # whose name is made to stand for 127.0.0.1
        ("evil.example:8000", None, True, True),
        ("127.0.0.1.evil.example", None, True, True),
        ("[::1", None, True, True),
        ("box:8000", None, False, False),
        ("box:8000", "http://box:8000", False, False),
        ("box:8000", "http://evil.example", False, True),
    ],
)
def test_which_requests_a_page_of_another_site_may_have_sent(host, origin, loopback, foreign):
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    assert is_foreign(headers, loopback) is foreign


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_where_only_programs_of_this_machine_ask(host, loopback):
    assert is_loopback(host) is loopback
