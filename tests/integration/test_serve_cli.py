"""`harness serve` as a process: where it listens, how it ends, and what it refuses before it loads anything."""

import http.client
import json
import re
import signal
import socket

import pytest

from tests.integration.conftest import end


@pytest.fixture
def server(cli):
    """A running server of the fake engine, slow enough to be met while it works, and its port."""
    process = cli.start("serve", "--model", "fake", "--engine", "fake", "--port", "0", "--set", "options.sleep_s=0.02",
                        "--memory", "1GiB")  # fmt: skip
    told = read_to(process, "is served at")
    address = re.search(r"served at http://127\.0\.0\.1:(\d+)/v1, requests of up to 4096 tokens", told)
    assert address, told
    yield process, int(address[1])
    end(process)


def read_to(process, words):
    """The line of stderr that holds these words."""
    return next(line for line in process.stderr if words in line)


def stream(port, tokens):
    """The response of a stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(asked))
    response = connection.getresponse()
    return response, response.readline()


def test_a_signal_lets_running_requests_end(server):
    process, port = server
    response, first = stream(port, 60)
    process.send_signal(signal.SIGTERM)
    read_to(process, "1 requests have 30 s to end; again to end at once")
    text = (first + response.read()).decode()
    assert text.count("data: ") == 62 and text.endswith("data: [DONE]\n\n")
    assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/health")


def test_a_second_signal_does_not_wait(server):
    process, port = server
    stream(port, 4000)
    process.send_signal(signal.SIGINT)
    read_to(process, "again to end at once")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()


def test_what_cannot_be_served_is_one_line(cli):
    fake = ("serve", "--model", "fake", "--engine", "fake", "--memory", "1GiB")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = cli(*fake, "--port", str(taken.getsockname()[1]), code=2).stderr
        assert re.search(r"cannot listen on 127.0.0.1 port \d+: Address already in use; choose another", told)
    assert "context has 4096 tokens" in cli(*fake, "--port", "0", "--max-sequence", "5000", code=2).stderr
    assert "a job has no 'workload'" in cli(*fake, "--set", "workload.gen_len=3", code=2).stderr
    assert "nowhere.invalid" in cli(*fake, "--host", "nowhere.invalid", code=2).stderr


def test_streams_that_the_drain_does_not_wait_for_are_told(cli):
    process = cli.start("serve", "--model", "fake", "--engine", "fake", "--port", "0", "--set", "options.sleep_s=0.02",
                        "--memory", "1GiB", "--drain", "0.3")  # fmt: skip
    try:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", read_to(process, "is served at"))[1])
        streams = [stream(port, 4000)[0] for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        for response in streams:
            last = response.read().decode().strip().rsplit("\n\n", 1)[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()
    finally:
        end(process)
