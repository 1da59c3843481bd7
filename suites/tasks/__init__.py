"""The registry of accuracy tasks by name."""

from harness.api import HarnessError
from harness.api.task import Task
from harness.common.packages import install_extra
from harness.common.words import nearest
from suites.tasks import helm, wikitext, wrangling
from suites.tasks.helm_bridge import HelmRun

#: The prefix of a task of lm-eval.
LM_EVAL = "lm_eval:"
#: The prefix of a run entry of HELM's command line.
HELM_RUN = "helm_run:"
_TASKS: dict[str, Task] = {task.name: task for task in (*wrangling.TASKS, *helm.TASKS, wikitext.WikiText())}


def names() -> list[str]:
    """The names of all native tasks."""
    return list(_TASKS)


def known(name: str) -> bool:
    """Whether a suite may use this name; accepts any lm-eval task and HELM entry, which only their packages know."""
    return name in _TASKS or (name.startswith((LM_EVAL, HELM_RUN)) and name not in (LM_EVAL, HELM_RUN))


def task(name: str) -> Task:
    """The task of a name: a native task, `lm_eval:NAME` of lm-eval, or `helm_run:ENTRY` of crfm-helm.

    Raises HarnessError for an unknown task.
    """
    if name.startswith(HELM_RUN):
        return HelmRun(name.removeprefix(HELM_RUN))
    if name.startswith(LM_EVAL):
        return _of_lm_eval(name.removeprefix(LM_EVAL))
    if name not in _TASKS:
        raise HarnessError(f"no task {name!r}; {nearest(name, _TASKS)}")
    return _TASKS[name]


def _of_lm_eval(name: str) -> Task:
    """Imports lm-eval on demand, which takes seconds. Raises HarnessError where it is not installed."""
    try:
        from suites.tasks.lm_eval_bridge import LmEvalTask
    except ModuleNotFoundError as exc:
        if exc.name and not exc.name.startswith("lm_eval"):
            raise
        raise HarnessError(f"lm-eval is not installed: {install_extra('eval')}") from None
    return LmEvalTask(name)
