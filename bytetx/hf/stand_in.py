"""StandIn: a callable in place of a module's forward or generate, which can call the original."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from bytetx.hf import arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Scoped to a call that runs transformers' own loop, whose first token is chosen at the last column.
IN_THEIR_LOOP: ContextVar[bool] = ContextVar("bytetx_in_their_loop", default=False)


@contextmanager
def their_loop() -> Iterator[None]:
    """In this context, pads have the stock model's values."""
    token = IN_THEIR_LOOP.set(True)
    try:
        yield
    finally:
        IN_THEIR_LOOP.reset(token)


class StandIn(ABC):
    """A callable that takes the place of a module's method and can call the original.

    It carries the original's signature, and is copied and pickled along with its module.
    """

    method = "forward"
    run: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        # torch.compile leaves the call to this code and compiles what is around it.
        cls.run = torch.compiler.disable(
            cls._run, reason="a wrapped model is not compiled; unwrap it for one full graph"
        )

    def __init__(self, module: "PreTrainedModel"):
        self.module = module
        self.__signature__ = inspect.signature(self.original)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [n for n, p in self.__signature__.parameters.items() if p.kind in kinds]

    @property
    def original(self) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(type(self.module), self.method).__get__(self.module)
        return original

    @property
    def __code__(self) -> CodeType:
        """The original's: torch.export names a graph's inputs and source by it."""
        code: CodeType = getattr(type(self.module), self.method).__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    @abstractmethod
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The call, in place of the original."""

    def run_original(
        self, given: dict[str, Any], finish: Callable[[Any, Mapping[str, Any]], None] | None
    ) -> Any:
        """The original's output, whose fields `finish` may change."""
        if finish is None:
            return self.original(**given)
        output = self.original(**given | {"return_dict": True})
        finish(output, given)
        wants_dict = arguments.wants_dict(given, self.module.config)
        return output if wants_dict else output.to_tuple()


class LoopStandIn(StandIn):
    """`generate` of a head whose forward is its own: transformers' loop finds stock values."""

    method = "generate"

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with their_loop():
            return self.original(*args, **kwargs)
