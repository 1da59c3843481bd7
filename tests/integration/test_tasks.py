"""Accuracy tasks through the command: data in, figures in records and reports, and one line for what is wrong."""

import pytest


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "di_buy").mkdir(parents=True)
    rows = "".join(f"thing {i},it does {i},maker {i}\n" for i in range(5))
    (folder / "di_buy" / "test.csv").write_text("name,description,manufacturer\n" + rows)
    (folder / "wrangling_prefixes").mkdir()
    (folder / "wrangling_prefixes" / "di_buy.txt").write_text("Who makes it?\n\n")
    return folder


def run(cli, data, workload="{kind: task, task: di_buy}", **options):
    return cli.run(cli.suite(workload=workload), "--data-dir", data, **options)


def test_a_task_is_asked_and_judged(cli, data):
    run(cli, data)
    (record, *_) = cli.records()
    found = record.accuracy
    assert (found.task, found.examples, found.truncated) == ("di_buy", 5, 0)
    assert found.figures["accuracy"] == 0  # the fake engine knows no makers
    assert found.outcomes["accuracy"] == (0.0,) * 5
    assert set(found.files) == {"di_buy/test.csv", "wrangling_prefixes/di_buy.txt"}
    assert len(record.requests) == 5
    prompt = "Who makes it?\n\nname: thing 0. description: it does 0. Who is the manufacturer?"
    assert {r.prompt_tokens for r in record.requests} == {len(prompt)}
    assert str(data) not in (cli.out / "records.jsonl").read_text()
    page = (cli.out / "report.html").read_text()
    assert "Accuracy of the answers" in page
    assert "task di_buy" in page


def test_the_first_examples_are_asked_where_a_number_is_given(cli, data):
    run(cli, data, "{kind: task, task: di_buy, num_requests: 2}")
    assert cli.records()[0].accuracy.examples == 2


def test_a_run_goes_on_with_what_is_done_of_the_same_data_alone(cli, data):
    run(cli, data)
    before = len(cli.records())
    run(cli, data)
    assert len(cli.records()) == before
    (data / "di_buy" / "test.csv").write_text("name,description,manufacturer\na,b,c\n")
    run(cli, data)
    assert len(cli.records()) == 2 * before
    assert cli.records()[-1].accuracy.examples == 1


def test_broken_data_are_the_cells_end_with_their_line(cli, data):
    (data / "di_buy" / "test.csv").write_text("name,description,manufacturer\na,b\n")
    assert "test.csv:2: the row has too few fields" in run(cli, data, code=1).stderr
    assert cli.records()[0].status == "error"


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("{kind: task, task: di_by}", "unknown task 'di_by'; did you mean 'di_buy'"),
        ("{kind: task}", "workload.task goes with `kind: task`"),
        ("{task: di_buy}", "workload.task goes with `kind: task`"),
        ("{kind: task, task: di_buy, prompt_len: 5}", "workload.prompt_len: the examples of a task have their own"),
    ],
)
def test_wrong_workloads_of_tasks_are_refused(cli, data, workload, words):
    assert words in run(cli, data, workload, code=2).stderr


def test_a_missing_data_folder_is_refused(cli):
    assert "--data-dir nowhere: no such folder" in run(cli, "nowhere", code=2).stderr
    done = cli.run(cli.suite(workload="{kind: task, task: di_buy}"), code=1)
    assert "not on the hub; name the folder that has them with --data-dir" in done.stderr
