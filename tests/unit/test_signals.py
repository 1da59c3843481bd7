"""Signals end a command in its exit code, and leave handlers as they were."""

import multiprocessing
import os
import signal

import click
import pytest

from harness.cli.errors import one_line_errors
from harness.cli.signals import stopping


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_raised_where_the_command_is_and_becomes_its_exit_code(signum, code, capsys):
    started = signal.signal(signum, signal.default_int_handler)  # who started the tests may ignore it, as nohup does
    cleaned = []
    try:
        with pytest.raises(SystemExit) as ended, one_line_errors(), stopping():
            try:
                os.kill(os.getpid(), signum)
            finally:
                cleaned.append(True)
        assert ended.value.code == code and cleaned and not capsys.readouterr().err
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, started)


def test_a_signal_at_a_question_keeps_its_exit_code():
    """click answers Ctrl-C at a prompt by an exception of its own."""
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise click.Abort from None
    assert ended.value.code == 143


def test_what_nohup_ignores_stays_ignored():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_workers_that_a_pool_ends_just_end(capfd):
    """lm-eval bootstraps in a pool, which ends its workers by SIGTERM."""
    with stopping(), multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
        workers = list(pool._pool)
    assert not any(worker.exitcode is None for worker in workers)
    told = capfd.readouterr()
    assert "Stopped" not in told.err + told.out
