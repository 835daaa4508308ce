"""The classes that get a method for each declared task; methods.pyi has the types of these."""

from typing import Any


class ModelTasks:
    """A method for each declared task, which returns its results or a stream of them.

    stream: return an iterator that reads inputs as needed, instead of all results at the end.
    show_progress: a bar on stderr that counts texts.
    """

    # spec: a TaskSpec, whose module imports this one.
    def _run_task(self, spec: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError


class AsyncModelTasks:
    """A coroutine for each declared task.

    A task on one input has a method of that input, which gives an asynchronous iterator.
    priority: lower numbers run first.  timeout_s: seconds until a DeadlineError.
    """

    async def _run_task(self, spec: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _run_one(self, spec: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError
