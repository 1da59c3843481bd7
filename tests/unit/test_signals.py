"""Signals end a command in its exit code, and leave handlers as they were."""

import contextlib
import importlib.machinery
import multiprocessing
import os
import signal
import sys
import time
import types

import click
import pytest

from harness.api import HarnessError
from harness.cli.errors import one_line_errors
from harness.cli.signals import stopping
from harness.cluster.connection import connected, signals_held


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


class NoActorError(Exception):
    """What a library may raise as it is closed."""


@pytest.mark.parametrize("raised", [HarnessError("cannot record"), NoActorError("of that name")], ids=repr)
@pytest.mark.parametrize("plain", [False, True])
def test_what_fails_on_the_way_out_does_not_change_the_exit_code(raised, plain, capsys):
    """Where the signal comes while Ray waits, Ray raises a KeyboardInterrupt of its own (`plain`)."""
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping():
        try:
            interrupt(plain)
        finally:
            raise raised
    assert ended.value.code == 143
    assert str(raised) in capsys.readouterr().err, "and it is shown"


def interrupt(plain):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        if not plain:
            raise
    raise KeyboardInterrupt


def test_a_keyboard_interrupt_of_ray_s_keeps_the_signals_exit_code():
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping():
        interrupt(plain=True)
    assert ended.value.code == 143


class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_where_nothing_can_be_raised_comes_again():
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping():
        Closing()
        time.sleep(60)
    assert ended.value.code == 143


def test_a_signal_while_ray_is_imported_is_not_lost():
    """Its module of Cython drops what is raised meanwhile."""
    done = []
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping(), signals_held():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        done.append(True)
    assert ended.value.code == 143 and done


def test_a_signal_while_ray_connects_is_the_commands(monkeypatch):
    """Ray's own handler of it raises SystemExit(15)."""

    def init(**options):
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
        os.kill(os.getpid(), signal.SIGTERM)

    ray = types.ModuleType("ray")
    ray.__spec__, ray.init = importlib.machinery.ModuleSpec("ray", None), init
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(SystemExit) as ended, one_line_errors(), stopping(), connected("auto"):
        pass
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
    with stopping(), multiprocessing.get_context("fork").Pool(1) as pool:  # Python forgets a signal amid the fork
        assert pool.map(abs, [-1, -2]) == [1, 2]
        workers = list(pool._pool)
    assert not any(worker.exitcode is None for worker in workers)
    told = capfd.readouterr()
    assert "Stopped" not in told.err + told.out
