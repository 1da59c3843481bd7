"""Accuracy tasks by name: prompts from data, and what answers are worth."""

from __future__ import annotations

import difflib

from harness.api import HarnessError
from harness.api.task import Task
from suites.helm_bridge import HelmRun
from suites.tasks import helm, wikitext, wrangling

#: Before the name of a task of lm-eval's.
LM_EVAL = "lm_eval:"
#: Before an entry of HELM's own command line.
HELM_RUN = "helm_run:"
_TASKS: dict[str, Task] = {task.name: task for task in (*wrangling.TASKS, *helm.TASKS, wikitext.WikiText())}


def names() -> list[str]:
    """All tasks there are."""
    return list(_TASKS)


def known(name: str) -> bool:
    """Whether a suite may name it: of lm-eval's tasks and HELM's entries only they know which there are."""
    return name in _TASKS or (name.startswith((LM_EVAL, HELM_RUN)) and name not in (LM_EVAL, HELM_RUN))


def task(name: str) -> Task:
    """A task by its name; `lm_eval:NAME` is any of lm-eval's, `helm_run:ENTRY` any run spec of crfm-helm's.

    Raises HarnessError for one that there is not.
    """
    if name.startswith(HELM_RUN):
        return HelmRun(name.removeprefix(HELM_RUN))
    if name.startswith(LM_EVAL):
        return _of_lm_eval(name.removeprefix(LM_EVAL))
    if name not in _TASKS:
        near = difflib.get_close_matches(name, _TASKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise HarnessError(f"no task {name!r}{hint} (known: {', '.join(_TASKS)})")
    return _TASKS[name]


def _of_lm_eval(name: str) -> Task:
    """Imported only where it is asked for: it takes seconds. Raises HarnessError where it is not installed."""
    try:
        from suites.lm_eval_bridge import LmEvalTask
    except ModuleNotFoundError as exc:
        if exc.name and not exc.name.startswith("lm_eval"):
            raise
        raise HarnessError("lm-eval is not installed: pip install 'offload-harness[eval]' -c constraints.txt") from None
    return LmEvalTask(name)
