"""Ranks as users start them: by the harness, by torchrun on two hosts, by the guide's job for SLURM; and killed."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.api import RankLink
from harness.launchers.links.network import network
from tests.integration.conftest import wait_for
from tests.offload import save_with_tokenizer, with_kernels
from tests.unit.test_links import needs_links

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "many-machines.md").read_text()
pytestmark = pytest.mark.slow
RANK = "engines.offload.rank"


class Job:
    """A job of requests that take a few seconds, one sequence of a group at a time."""

    def __init__(self, folder):
        self.folder = folder
        self._started = []
        with_kernels(folder / "cache")
        save_with_tokenizer(folder / "opt-6.7b")
        lines = [{"prompt": f"w{5 + i} w{9 + i} w7", "max_tokens": 40, "ignore_eos": True} for i in range(40)]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        self.environment = os.environ | {
            "HARNESS_CACHE": str(folder / "cache"), "CI": "true", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip

    def words(self, output="answers.jsonl", ranks=2):
        files = ["--model", "./opt-6.7b", "--memory", "1GiB", "--input", "prompts.jsonl", "--output", output]
        return ["generate", *files, "--set", "policy.gpu_batch_size=2", "--set", f"policy.pipeline={ranks}"]

    def start(self, command, **variables):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment | variables, **pipes)
        self._started.append(process)
        return process

    def close(self):
        """Ends what is left of the processes of a test that failed."""
        while self._started:
            process = self._started.pop()
            if process.poll() is None:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    each.kill()
                process.communicate()

    def run(self, command, **variables):
        process = self.start(command, **variables)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err
        return err

    def rows(self, output="answers.jsonl"):
        path = self.folder / output
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert len({row["line"] for row in found}) == len(found), "a line is answered once"
        return sorted(found, key=lambda row: row["line"])

    def answered(self, output="answers.jsonl"):
        path = self.folder / output
        return path.exists() and path.stat().st_size > 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A job and what one process answers."""
    job = Job(tmp_path_factory.mktemp("ranks"))
    job.run([sys.executable, "-m", "harness", *job.words("alone.jsonl", 1)])
    return job, texts(job.rows("alone.jsonl"))


@pytest.fixture
def job(alone):
    """The same without answers."""
    alone[0].folder.joinpath("answers.jsonl").unlink(missing_ok=True)
    yield alone[0]
    alone[0].close()


def texts(rows):
    assert all(row["error"] is None for row in rows)
    return [row["response"]["body"]["choices"] for row in rows]


def ranks_of(process):
    """Processes of ranks below this one."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            found += [child] if RANK in child.cmdline() else []
        except psutil.Error:  # it has ended
            continue
    return found


@pytest.mark.parametrize("after_s", [0.0, 3.0, None], ids=["at its start", "3 s", "first answer"])
def test_a_rank_killed_at_any_moment_is_named_and_the_job_goes_on(job, alone, after_s):
    process = job.start([sys.executable, "-m", "harness", *job.words()])
    wait_for(lambda: ranks_of(process), 300)
    (rank,) = ranks_of(process)
    if after_s is None:
        wait_for(job.answered, 300)
    else:
        time.sleep(after_s)
    rank.kill()
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("harness: ")]
    assert "rank 1 died of SIGKILL" in line
    assert not rank.is_running()
    if after_s is None:
        assert 0 < len(job.rows()) < 40
        job.run([sys.executable, "-m", "harness", *job.words()])
        assert texts(job.rows()) == alone[1]


def hosts(job):
    """Two agents with the guide's command, as of two hosts."""
    text = re.search(r"^torchrun --nnodes 4 .*?-m engines\.offload\.rank", GUIDE, re.M | re.S)[0]
    port = str(free_port())
    changes = (("--nnodes 4", "--nnodes 2"), ("first-host", "127.0.0.1"), ("29400", port), ("\\\n", " "))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    commands = [text.replace("--node-rank 0", f"--node-rank {k}").split()[1:] for k in range(2)]
    return [job.start([sys.executable, "-m", "torch.distributed.run", *words, *job.words()]) for words in commands]


def test_torchrun_on_two_hosts(job, alone):
    """A rank is killed, and the same commands go on."""
    first, second = hosts(job)
    wait_for(job.answered, 300)
    (follower,) = ranks_of(second)
    follower.kill()
    told = first.communicate(timeout=600)[1], second.communicate(timeout=600)[1]
    assert first.returncode and second.returncode
    assert re.search(r"^harness: all ranks have ended: lost rank 1", told[0], re.M), told
    assert 0 < len(job.rows()) < 40
    for host in hosts(job):
        err = host.communicate(timeout=600)[1]
        assert host.returncode == 0, err
    assert texts(job.rows()) == alone[1]


def test_a_policy_with_fewer_ranks_than_torchrun_started_is_refused_at_once(job):
    host = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", RANK, *job.words(ranks=1)]
    process = job.start(host)
    err = process.communicate(timeout=600)[1]
    assert process.returncode
    assert "harness: the policy has 1 rank, and 2 were started: set policy.pipeline" in err


SRUN = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
while words[0].startswith("-"):  # an option and its value are one word
    words.pop(0)
tasks = int(os.environ["SLURM_NTASKS"])
step = {{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}}
running = [subprocess.Popen(words, env=os.environ | step | {{"SLURM_PROCID": str(i)}}) for i in range(tasks)]
while any(each.poll() is None for each in running):
    if any(each.poll() for each in running):  # --kill-on-bad-exit
        for each in running:
            each.kill()
    time.sleep(0.05)
sys.exit(max(each.returncode for each in running))
"""


def test_the_guides_job_for_slurm(job, alone):
    """With an srun that starts the tasks here, and sbatch's variables."""
    (script,) = [text for text in re.findall(r"^```sh\n(#!/bin/bash.*?)^```", GUIDE, re.M | re.S) if RANK in text]
    (job.folder / "job.sh").write_text(script)
    programs = job.folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN.format(python=sys.executable))
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (job.folder / ".venv" / "bin").mkdir(parents=True)
    (job.folder / ".venv" / "bin" / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    variables = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_PROCID": "0"}
    job.run(["bash", "-eu", "job.sh"], **variables)
    assert texts(job.rows()) == alone[1]
    err = job.run(["bash", "-eu", "job.sh"], **variables)
    assert "rank 1: nothing to do: rank 0 has ended" in err, "all answers are there"


STALLED = """
import sys
from pathlib import Path
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.ranks import Ranks
from harness.api import HarnessError
from tests.offload import load, prepare, rank_pids, requests_of
Ranks.links = lambda self, wire: Links(0, self.order, wire, patience_s=3)
engine, _ = load(prepare(sys.argv[1]), Path(sys.argv[2]), pipeline=2, schedule="sweep", gpu_batch_size=2)
results = engine.generate(requests_of(3, 40, eos=False))
next(results)
print("begun", flush=True)
sys.stdin.readline()
try:
    list(results)
except HarnessError as exc:
    print(exc, flush=True)
engine.close()
print(rank_pids())
"""


@needs_links
def test_a_link_that_drops_ends_the_job_with_why(job):
    with network(RankLink(None, 0.001), 2, 60) as made:
        command = made.wrap([sys.executable, "-c", STALLED, "opt-6.7b", "cache"])
        process = job.start(command, **made.env)
        assert process.stdout.readline() == "begun\n"
        enter = ["nsenter", f"--net={made.namespaces[1]}"]
        subprocess.run([*enter, "ip", "link", "set", "link0", "down"], check=True)
        out, _ = process.communicate("\n", timeout=300)
    assert out.splitlines() == ["all ranks have ended: lost rank 1: nothing came for 3 s", "[]"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
