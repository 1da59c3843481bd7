"""Files and batches of a server on the fake engine, asked by OpenAI's own client and by raw HTTP."""

import json
import resource
import signal
from dataclasses import asdict, replace

import openai
import pytest

from harness.api import HarnessError
from harness.serve import batches as batches_module
from harness.serve.batch_store import Batch, BatchStore
from harness.serve.file_store import FileStore
from tests.serving import NOTES, SETTINGS, alone, ask, serving, until


def client_of(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


def line(i, url="/v1/completions", **body):
    body = {"model": "fake", "prompt": f"prompt {i}", "max_tokens": 3 + i % 4, "seed": i, **body}
    return {"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body}


def upload(client, lines):
    content = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)
    return client.files.create(file=("requests.jsonl", content), purpose="batch")


def begin(client, lines, endpoint="/v1/completions"):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def ended(client, batch):
    def over():
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "cancelled")

    until(over)
    return batch


def rows(client, file_id):
    return (
        {}
        if file_id is None
        else {r["custom_id"]: r for r in map(json.loads, client.files.content(file_id).iter_lines())}
    )


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with serving(folder=tmp_path_factory.mktemp("files")) as (number, _):
        yield number


@pytest.fixture
def client(port):
    return client_of(port)


def test_a_batch_is_answered_line_by_line(client):
    batch = begin(client, [line(i, n=1 + i % 2) for i in range(20)])
    assert (batch.status, batch.endpoint, batch.object) == ("validating", "/v1/completions", "batch")
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = rows(client, batch.output_file_id)
    assert len(answers) == 20
    for i in range(20):
        response = answers[f"line-{i}"]["response"]
        choices = response["body"]["choices"]
        assert response["status_code"] == 200 and response["body"]["model"] == "fake"
        assert choices[0]["text"] == alone(f"prompt {i}".encode(), 3 + i % 4, seed=i)
        assert len(choices) == 1 + i % 2
    assert len({row["id"] for row in answers.values()}) == 20


def test_a_batch_of_chats(client):
    chats = [line(i, "/v1/chat/completions", messages=[{"role": "user", "content": f"{i}"}]) for i in range(3)]
    for chat in chats:
        del chat["body"]["prompt"]
    batch = ended(client, begin(client, chats, "/v1/chat/completions"))
    answers = rows(client, batch.output_file_id)
    for i in range(3):
        body = answers[f"line-{i}"]["response"]["body"]
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"]["content"] == alone(f"user: {i}\n".encode(), 3 + i % 4, seed=i)


def test_lines_that_cannot_be_run_are_in_a_file_of_their_own(client):
    bad = [
        line(0), line(1, model="other"), line(2, max_tokens=5000), b"{\n", line(4, temperature="hot"), line(0),
        line(6, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}]),
    ]  # fmt: skip
    del bad[6]["body"]["prompt"]
    batch = ended(client, begin(client, bad))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 1, 6)
    assert list(rows(client, batch.output_file_id)) == ["line-0"]
    refused = [json.loads(row) for row in client.files.content(batch.error_file_id).iter_lines()]
    why = {row["error"]["line"]: row["error"]["message"] for row in refused}
    for number, words in (
        (2, "no model 'other' here"), (3, "4096"), (4, "is not JSON"), (5, "temperature"), (6, "was used on line 1"),
        (7, "is a chat"),
    ):  # fmt: skip
        assert words in why[number], why
    assert all(row["response"] is None for row in refused)


@pytest.mark.parametrize("content", [[], [b"\n\n"]])
def test_a_file_without_requests_fails(client, content):
    batch = ended(client, begin(client, content))
    assert batch.status == "failed" and "holds no requests" in batch.errors.data[0].message
    assert batch.failed_at and batch.output_file_id is None


def test_files_are_listed_described_fetched_and_deleted(client):
    first, second = upload(client, [line(0)]), upload(client, [line(1)])
    assert (first.filename, first.purpose, first.object) == ("requests.jsonl", "batch", "file")
    assert client.files.content(first.id).read() == json.dumps(line(0)).encode() + b"\n"
    assert client.files.retrieve(first.id).bytes == first.bytes == len(json.dumps(line(0))) + 1
    listed = [file.id for file in client.files.list(purpose="batch", limit=1)]  # all pages
    assert {first.id, second.id} <= set(listed) and len(listed) == len(set(listed))
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(first.id)


def test_batches_are_listed_in_pages(client):
    made = [begin(client, [line(i)]).id for i in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert set(made) <= set(listed) and len(listed) == len(set(listed))
    for id_ in made:
        ended(client, client.batches.retrieve(id_))


FORM = "multipart/form-data; boundary=x"


def form(*parts):
    body = "".join(
        f'--x\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n' for name, more, value in parts
    )
    return f"{body}--x--\r\n".encode()


FILE = ("file", '; filename="a.jsonl"', "{}")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{}", "application/json", "file: expected a file"),
        (b"", FORM, "file: expected a file"),
        (form(("file", "", "text"), ("purpose", "", "batch")), FORM, "file: expected a file"),
        (form(FILE), FORM, "purpose: "),
        (form(FILE, ("purpose", "", "fine-tune")), FORM, "purpose: "),
        (form(FILE, ("purpose", "", "batch"), ("expires_after[seconds]", "", "3600")), FORM, "expires_after"),
        (form(FILE, FILE), FORM, "Too many files"),
        (b"nonsense", FORM, "is not a form"),
        (b"nonsense", "multipart/form-data", "is not a form"),
    ],
)
def test_a_bad_upload_is_one_clear_error(port, body, kind, message):
    response, answer = ask(port, "/v1/files", body, **{"content-type": kind})
    assert response.status == 400 and message in answer["error"]["message"], answer


def test_a_bad_batch_is_one_clear_error(port, client):
    file = upload(client, [line(0)])
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for change, status, words in (
        ({"input_file_id": "file-none"}, 404, "no file 'file-none'"),
        ({"input_file_id": "../lock"}, 404, "no file"),
        ({"input_file_id": 3}, 400, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metdata": {}}, 400, "did you mean 'metadata'"),
        ({"metadata": {"a": "\ud800"}}, 400, "half of a surrogate pair"),
        ({"\ud800": 1}, 400, "half of a surrogate pair"),
    ):
        response, answer = ask(port, "/v1/batches", {**good, **change})
        assert response.status == status and words in answer["error"]["message"], answer
    assert ask(port, "/v1/batches", b"{")[0].status == 400
    for query in ("limit=0", "limit=x", f"limit={10**8:09}{0:05000}", "order=up", "after=nothing"):
        assert ask(port, f"/v1/batches?{query}", method="GET")[0].status == 400
    assert ask(port, "/v1/batches/none", method="GET")[0].status == 404
    assert ask(port, "/v1/files/..%2Flock/content", method="GET")[0].status == 404
    batch = ended(client, begin(client, [line(0)]))
    assert ask(port, f"/v1/batches/{batch.id}/cancel")[0].status == 409
    assert ask(port, "/v1/batches", {**good, "input_file_id": batch.output_file_id})[0].status == 400


def test_an_upload_that_is_too_large_is_refused(port, monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_UPLOAD", 1 << 20)
    body = form(("file", '; filename="a"', "x" * (3 << 20)), ("purpose", "", "batch"))
    response, answer = ask(port, "/v1/files", body, **{"content-type": FORM})
    assert response.status == 413 and "more than 1 MiB" in answer["error"]["message"]


def test_a_batch_that_is_cancelled_keeps_its_answers_and_its_file(tmp_path):
    with serving(folder=tmp_path, sleep_s=0.01) as (port, loop):
        client = client_of(port)
        batch = begin(client, [line(i, max_tokens=10) for i in range(200)])
        waiting = begin(client, [line(0)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
        response, answer = ask(port, f"/v1/files/{batch.input_file_id}", method="DELETE")
        assert response.status == 409 and batch.id in answer["error"]["message"]
        assert client.batches.cancel(waiting.id).status == "cancelled", "nobody runs it yet"
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch, waiting = ended(client, batch), ended(client, waiting)
        assert batch.status == waiting.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
        answers = rows(client, batch.output_file_id)
        assert 5 <= len(answers) == batch.request_counts.completed < 200
        assert waiting.output_file_id is None
        until(lambda: loop.pending == 0)


def test_other_clients_are_served_beside_a_batch(tmp_path):
    with serving(folder=tmp_path, sleep_s=0.005) as (port, _):
        client = client_of(port)
        batch = begin(client, [line(i, max_tokens=20, ignore_eos=True) for i in range(100)])
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        assert client.completions.create(model="fake", prompt="hi", max_tokens=6, seed=3).choices[0].text == alone(
            b"hi", 6, seed=3
        )
        assert client.batches.retrieve(batch.id).status == "in_progress"


def test_a_batch_goes_on_with_the_next_server_and_not_under_another_model(tmp_path):
    lines = [line(i, max_tokens=10) for i in range(60)]
    with serving(folder=tmp_path, sleep_s=0.01) as (port, _):
        client = client_of(port)
        batch = begin(client, lines)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
    other = Batch("batch_aaaaaaaaaaaaaaaaaaaaaaaa", "/v1/completions", batch.input_file_id, "24h", "another", 5, 1)
    BatchStore(tmp_path / "batches", print).put(other)
    with serving(replace(SETTINGS, max_tokens=7), tmp_path) as (port, _):
        client = client_of(port)
        done = ended(client, batch)
        assert done.status == "completed" and done.request_counts.completed == 60
        answers = list(map(json.loads, client.files.content(done.output_file_id).iter_lines()))
        assert sorted(a["custom_id"] for a in answers) == sorted(one["custom_id"] for one in lines)
        for answer in answers:
            i = int(answer["custom_id"].removeprefix("line-"))
            assert answer["response"]["body"]["choices"][0]["text"] == alone(f"prompt {i}".encode(), 10, seed=i)
        assert client.batches.retrieve(other.id).status == "validating"
    assert not list((tmp_path / "batches").glob("*.answers.jsonl"))


def test_lines_that_one_server_refuses_are_tried_by_the_next_and_listed_once(tmp_path):
    lines = [line(0, model="other"), line(1, max_tokens=20), *(line(i, max_tokens=10) for i in range(2, 60))]
    with serving(folder=tmp_path, sleep_s=0.01) as (port, _):
        batch = begin(client_of(port), lines)
        until(lambda: client_of(port).batches.retrieve(batch.id).request_counts.completed >= 5)
    with serving(folder=tmp_path) as (port, _):
        client = client_of(port)
        batch = ended(client, batch)
        assert asdict_of(batch.request_counts) == {"total": 60, "completed": 59, "failed": 1}
        refused = list(map(json.loads, client.files.content(batch.error_file_id).iter_lines()))
        assert [row["custom_id"] for row in refused] == ["line-0"]
        assert "line-0" not in rows(client, batch.output_file_id)


def asdict_of(counts):
    return {"total": counts.total, "completed": counts.completed, "failed": counts.failed}


def test_a_batch_that_nobody_runs_can_be_cancelled(tmp_path):
    """Of another model, or after an engine that failed."""
    with serving(folder=tmp_path, crash="exception") as (port, _):
        client = client_of(port)
        broken = begin(client, [line(0)])
        until(lambda: client.batches.retrieve(broken.id).errors)
        assert client.batches.cancel(broken.id).status == "cancelled"
    other = Batch("batch_aaaaaaaaaaaaaaaaaaaaaaaa", "/v1/completions", broken.input_file_id, "24h", "another", 5, 1)
    BatchStore(tmp_path / "batches", print).put(other)
    with serving(folder=tmp_path) as (port, _):
        client = client_of(port)
        assert client.batches.cancel(other.id).status == "cancelled"
        assert client.files.delete(other.input_file_id).deleted
        assert ended(client, begin(client, [line(0)])).status == "completed"


@pytest.mark.parametrize("damage", [b"nonsense\n", b'{"line": 1}\n', b"[]\n"])
def test_answers_that_are_damaged_fail_their_batch_and_no_other(tmp_path, damage):
    with serving(folder=tmp_path, sleep_s=0.01) as (port, _):
        batch = begin(client_of(port), [line(i, max_tokens=10) for i in range(60)])
        until(lambda: client_of(port).batches.retrieve(batch.id).request_counts.completed >= 5)
    answers = BatchStore(tmp_path / "batches", print).answers(batch.id)
    answers.write_bytes(damage + answers.read_bytes())
    with serving(folder=tmp_path) as (port, _):
        client = client_of(port)
        batch = ended(client, batch)
        assert batch.status == "failed" and batch.errors.data[0].message
        assert ended(client, begin(client, [line(0)])).status == "completed"
    assert answers.exists(), "what can be saved of them is the user's to decide"


def test_answers_of_other_weights_are_not_mixed(tmp_path):
    with serving(folder=tmp_path, sleep_s=0.01) as (port, _):
        client = client_of(port)
        batch = begin(client, [line(i, max_tokens=10) for i in range(60)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
    with serving(folder=tmp_path, digest="another") as (port, _):
        batch = ended(client_of(port), batch)
        assert batch.status == "failed" and "answers of another model" in batch.errors.data[0].message
        assert 5 <= len(rows(client_of(port), batch.output_file_id)) < 60


def test_a_server_that_breaks_says_so_of_its_batch(tmp_path):
    with serving(folder=tmp_path, crash="exception") as (port, _):
        client = client_of(port)
        batch = begin(client, [line(0)])
        until(lambda: client.batches.retrieve(batch.id).errors)
        batch = client.batches.retrieve(batch.id)
        assert "the engine has failed" in batch.errors.data[0].message and batch.status == "in_progress"
    with serving(folder=tmp_path) as (port, _):
        batch = ended(client_of(port), batch)
        assert batch.status == "completed" and batch.errors is None


def test_two_servers_do_not_share_a_folder_and_an_unused_one_goes(tmp_path):
    folder = tmp_path / "files"
    with (
        serving(folder=folder),
        pytest.raises(HarnessError, match="files of another server that runs"),
        serving(folder=folder),
    ):
        pass
    assert not folder.exists()


def test_what_a_killed_server_left_is_swept_and_what_is_not_ours_is_kept(tmp_path):
    (tmp_path / "file-0123456789abcdef01234567.jsonl").write_text("half")
    (tmp_path / "file-1123456789abcdef01234567.json").write_text("{}")
    said = []
    store = FileStore(tmp_path, said.append)
    assert store.all() == [] and [path.name for path in tmp_path.iterdir()] == ["file-1123456789abcdef01234567.json"]
    assert "does not describe a file" in said[0]
    batches = BatchStore(tmp_path / "b", said.append)
    (tmp_path / "b" / "batch_1.json").write_text("[]")
    name, file = "batch_0123456789abcdef01234567", "file-0123456789abcdef01234567"
    batches.put(Batch(name, "/v1/completions", file, "24h", "fake", 5, 1, status="completed"))
    batches.answers(name).write_text("")
    again = BatchStore(tmp_path / "b", said.append)
    assert [batch.id for batch in again.all()] == [name] and not again.answers(name).exists()
    assert "does not describe a batch" in said[1]


@pytest.mark.parametrize("id_", ["../../kept", "batch_" + "b" * 24, "a\0b"])
def test_a_record_of_another_name_than_its_file_s_is_left_alone(tmp_path, id_):
    """Its name decides which files are removed."""
    batch = Batch(id_, "/v1/completions", "file-" + "a" * 24, "24h", "fake", 5, 1, status="completed")
    (tmp_path / "a" / "batches").mkdir(parents=True)
    (tmp_path / "kept.answers.jsonl").write_text("")
    (tmp_path / "a" / "batches" / f"batch_{'a' * 24}.json").write_text(json.dumps(asdict(batch)))
    said = []
    assert BatchStore(tmp_path / "a" / "batches", said.append).all() == []
    assert "does not describe a batch" in said[0] and (tmp_path / "kept.answers.jsonl").exists()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    """Writes beyond a size fail, as on a full disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(folder=tmp_path / "files") as (port, _):
        client = client_of(port)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
            with pytest.raises(openai.InternalServerError) as told:
                upload(client, [b"x" * (1 << 16)])
            assert told.value.status_code == 507 and "cannot write" in told.value.message
            batch = begin(client, [line(i, max_tokens=300, ignore_eos=True) for i in range(60)])
            batch = ended(client, batch)
            assert batch.status == "failed" and "cannot write" in batch.errors.data[0].message
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert len(list((tmp_path / "files" / "files").iterdir())) % 2 == 0
        assert any("cannot write" in note for note in NOTES)
        assert ended(client, begin(client, [line(0)])).status == "completed"
        assert client.batches.retrieve(batch.id).status == "failed"
    with serving(folder=tmp_path / "files") as (port, _):  # it goes on with what had been answered
        batch = ended(client_of(port), batch)
        assert batch.status == "completed" and batch.errors is None
        assert len(rows(client_of(port), batch.output_file_id)) == batch.request_counts.completed == 60
