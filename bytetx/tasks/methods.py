"""Methods of Model and AsyncModel, made from the declared tasks; methods.pyi has their types."""

from collections.abc import Callable
from typing import Any

# A TaskSpec, whose module imports this one.
_Spec = Any


class ModelTasks:
    """A method for each declared task, which returns its results or a stream of them.

    stream: return an iterator that reads inputs as needed, instead of all results at the end.
    show_progress: a bar on stderr that counts texts.
    """

    def _run_task(self, spec: _Spec, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError


class AsyncModelTasks:
    """A coroutine for each declared task.

    priority: lower numbers run first.  timeout_s: seconds until a DeadlineError.
    """

    async def _run_task(self, spec: _Spec, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        raise NotImplementedError


def attach(spec: _Spec) -> None:
    """Gives both classes the method of a task."""

    def method(self: ModelTasks, *inputs: Any, **given: Any) -> Any:
        return self._run_task(spec, inputs, given)

    async def async_method(self: AsyncModelTasks, *inputs: Any, **given: Any) -> Any:
        return await self._run_task(spec, inputs, given)

    run = (
        {"show_progress": False} if spec.item is None else {"stream": False, "show_progress": False}
    )
    _put(ModelTasks, method, spec, run)
    _put(AsyncModelTasks, async_method, spec, {"priority": 0, "timeout_s": None})


def _put(owner: type, method: Callable[..., Any], spec: _Spec, run: dict[str, Any]) -> None:
    method.__name__, method.__qualname__ = spec.name, f"{owner.__name__}.{spec.name}"
    method.__doc__, method.__module__ = spec.doc, owner.__module__
    method.__signature__ = spec.signature(**run)  # type: ignore[attr-defined]
    setattr(owner, spec.name, method)
