"""Addresses that `harness serve` cannot listen on are refused in a line."""

import pytest

from harness.api import HarnessError

pytest.importorskip("uvicorn")
from harness.serve.server import _listen


@pytest.mark.parametrize("host", ["256.0.0.1", "x" * 64, ".", "caf\udce9", "a\0b", "fe80::1%nowhere", "8.8.8.8"])
def test_an_address_that_is_none_of_ours_is_refused_in_a_line(host):
    with pytest.raises(
        HarnessError, match=r"\Acannot listen on [^\n]* port 0: [^\n]*; choose another --host or --port\Z"
    ):
        _listen(host, 0)
