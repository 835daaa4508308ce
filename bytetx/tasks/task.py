"""Declarations of Model's one-pass tasks: a frozen dataclass of options and one function each.

A declared task is a method of Model and of AsyncModel, and where it says so the server's POST
/tasks takes its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, cleandoc, signature
from textwrap import fill
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_type_hints

from bytetx.errors import InputError, OptionError, shown
from bytetx.requests.inputs import Input
from bytetx.tasks.methods import AsyncModelTasks, ModelTasks
from bytetx.tasks.run import run_encode

Texts = Iterable[Input]
Pairs = Iterable[tuple[str, str]]
OnError = Literal["raise", "return"]
Overflow = Literal["error", "truncate", "chunk"]

T = TypeVar("T")
P = ParamSpec("P")


def option(default: T, doc: str, *, min: int | None = None) -> T:
    """A field of an options class.

    doc: one sentence or more, for docstrings, --help and the schema of HTTP.  min: the smallest
    integer that --help and the schema name; the class itself checks it.
    """
    made: T = field(default=default, metadata={"doc": doc, "min": min})
    return made


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of every task and of every prompt."""

    adapter: str | Sequence[str | None] | None = option(
        None,
        "The name of the LoRA adapter (`load(adapters=)`, `add_adapter`) that all texts run with, "
        "or a list with a name or None for each; None is the model without any.",
    )


@dataclass(frozen=True, kw_only=True)
class TaskOptions(AdapterOptions):
    """Options of every task."""

    on_error: OnError = option(
        "raise", "Raise a bad text's InputError, or return it in place of that text's result."
    )

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return', got {shown(self.on_error)}")


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """Options of tasks on texts."""

    truncate: bool = option(
        False, "Cut a text beyond the model's positions; else it is a TooLongError."
    )


@dataclass(frozen=True, kw_only=True)
class OverflowOptions(TextOptions):
    """Options of tasks that cut long texts into chunks."""

    overflow: Overflow | None = option(
        None,
        "A text that is too long: 'error', 'truncate' (as truncate=True), or 'chunk', which cuts "
        "it into chunks of the model's positions and gives one result for all of them. A prompt "
        "is in the first chunk; pairs and token ids are not cut into chunks.",
    )
    stride: int = option(0, "Tokens that neighbouring chunks share.", min=0)

    def __post_init__(self) -> None:
        """OptionError where a value is unknown or options exclude each other."""
        super().__post_init__()
        overflow, stride = self.overflow, self.stride
        if overflow is not None and self.truncate:
            raise OptionError("truncate and overflow exclude each other; give overflow alone")
        if overflow not in (None, "error", "truncate", "chunk"):
            raise OptionError(f"overflow must be error, truncate or chunk, got {shown(overflow)}")
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 0:
            raise OptionError(f"stride must be a number of tokens, 0 or more, got {shown(stride)}")
        if stride and overflow != "chunk":
            chosen = overflow or ("truncate" if self.truncate else "error")
            raise OptionError(f"stride goes with overflow='chunk', got {shown(chosen)}")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TaskOptions):
    """Options of tasks that choose a route, an adapter and a prompt of the checkpoint."""

    task: str | Sequence[str | None] | None = option(
        None,
        "'query', 'document', or the name of a task that the checkpoint has an adapter or a route "
        "for, or a list with one for each text. It also takes the prompt of that name, where the "
        "checkpoint has one.",
    )
    prompt: str | None = option(
        None,
        "Text put before every str; None is the task's prompt, else the checkpoint's default.",
    )
    prompt_name: str | None = option(None, "The prompt of the checkpoint with this name.")


def _is_quick(*inputs: Any) -> bool:
    return False


@dataclass(frozen=True)
class TaskSpec:
    """A declared task.

    name: of the methods.  inputs: names of the arguments before the options, with their types.
    defaults: of inputs that may be left out.
    options: the dataclass.  start: (TaskContext, *inputs, options) -> Call.  item: the type of a
    result in a stream; None where the task gives no stream.  pieces: that of stream="pieces",
    where the task has such a stream.  result: the type of all results.
    run: (call, model, stream=, show_progress=) -> results or a stream.
    one: the task on one input, which AsyncModel's method takes and answers without a coroutine;
    None where it takes the same inputs as Model's.
    is_slow: whether making the Call takes long enough for a thread of its own.  has_route: whether
    POST /tasks takes it.
    """

    name: str
    inputs: Mapping[str, Any]
    options: type[Any]
    start: Callable[..., Any]
    result: Any
    item: Any = None
    pieces: Any = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] = run_encode
    one: "TaskSpec | None" = None
    is_slow: Callable[..., bool] = _is_quick
    has_route: bool = False

    @property
    def doc(self) -> str:
        """The function's docstring, then a line for each option that it does not name."""
        text = cleandoc(self.start.__doc__ or "")
        lines = [
            fill(f"{name}: {entry.metadata['doc']}", 92, subsequent_indent="    ")
            for name, entry in self.fields.items()
            if f"{name}:" not in text
        ]
        return "\n".join([text, "", *lines])

    @property
    def fields(self) -> Mapping[str, Any]:
        """The options' dataclass fields by name: the task's own first, those of all tasks last."""
        found = {entry.name: entry for entry in fields(self.options)}
        common = [entry.name for entry in fields(TextOptions) if entry.name in found]
        return {name: found[name] for name in [*(n for n in found if n not in common), *common]}

    def signature(self, **run: Any) -> Signature:
        """The signature of a method. run: more keyword arguments with their defaults."""
        hints = get_type_hints(self.options)
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        inputs = [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=self.defaults.get(name, Parameter.empty),
                annotation=kind,
            )
            for name, kind in self.inputs.items()
        ]
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=entry.default, annotation=hints[name])
            for name, entry in self.fields.items()
        ]
        more = [Parameter(name, Parameter.KEYWORD_ONLY, default=run[name]) for name in run]
        return Signature([own, *inputs, *options, *more])

    def bind(self, inputs: Sequence[Any], given: dict[str, Any]) -> tuple[list[Any], Any]:
        """(inputs, options) of a call. Raises TypeError as a function with this signature does."""
        names, bound = list(self.inputs), list(inputs)
        for name in names[len(inputs) :]:
            if name in given:
                bound.append(given.pop(name))
            elif name in self.defaults:
                bound.append(self.defaults[name])
        if len(bound) != len(names):
            raise TypeError(f"{self.name}() takes {', '.join(names)} and then options by name")
        try:
            return bound, self.options(**given)
        except TypeError:
            for name in given:
                if name not in self.fields:
                    raise TypeError(
                        f"{self.name}() got an unexpected keyword argument {name!r}"
                    ) from None
            raise


# The tasks whose modules are imported, by name; catalog.declared_tasks has all.
TASKS: dict[str, TaskSpec] = {}


def task(
    *,
    item: Any = None,
    pieces: Any = None,
    defaults: Mapping[str, Any] | None = None,
    run: Callable[..., Any] = run_encode,
    one: Callable[..., Any] | None = None,
    is_slow: Callable[..., bool] = _is_quick,
    has_route: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declares a task: a function (context, inputs..., options) -> Call.

    Its name is that of the methods, its docstring theirs; the annotation of `options` is the
    dataclass of options, the argument of Call the type of all results.
    one: such a function, too.  All else is as of TaskSpec.  A task with a route has texts as its
    only input and gives Results of dataclasses, whose size a request must not multiply without
    bound.
    """

    def declare(start: Callable[P, T]) -> Callable[P, T]:
        name, given = start.__name__, defaults or {}
        spec = TaskSpec(
            name,
            *_declared(start),
            item=item,
            pieces=pieces,
            defaults=given,
            run=run,
            one=None if one is None else TaskSpec(name, *_declared(one), defaults=given),
            is_slow=is_slow,
            has_route=has_route,
        )
        TASKS[name] = spec
        _attach(spec)
        return start

    return declare


def _declared(start: Callable[..., Any]) -> tuple[Mapping[str, Any], type[Any], Any, Any]:
    """(inputs, options, start, result) of a TaskSpec."""
    hints = get_type_hints(start)
    inputs = {name: hints[name] for name in list(signature(start).parameters)[1:-1]}
    return inputs, hints["options"], start, get_args(hints["return"])[0]


def _attach(spec: TaskSpec) -> None:
    """Gives both classes the method of a task."""

    def method(self: Any, *inputs: Any, **given: Any) -> Any:
        return self._run_task(spec, inputs, given)

    async def async_method(self: Any, *inputs: Any, **given: Any) -> Any:
        return await self._run_task(spec, inputs, given)

    def method_of_one(self: Any, *inputs: Any, **given: Any) -> Any:
        return self._run_one(spec.one, inputs, given)

    run = (
        {"show_progress": False} if spec.item is None else {"stream": False, "show_progress": False}
    )
    _put(ModelTasks, method, spec, run)
    own = async_method if spec.one is None else method_of_one
    _put(AsyncModelTasks, own, spec.one or spec, {"priority": 0, "timeout_s": None})


def _put(owner: type, method: Callable[..., Any], spec: TaskSpec, run: dict[str, Any]) -> None:
    method.__name__, method.__qualname__ = spec.name, f"{owner.__name__}.{spec.name}"
    method.__doc__, method.__module__ = spec.doc, owner.__module__
    method.__signature__ = spec.signature(**run)  # type: ignore[attr-defined]
    setattr(owner, spec.name, method)
