"""Registry of operations: the backends of each in order; the first that takes a call runs it.

An architecture or an instruction set registers what it has, and every other call falls through to
the backends behind it, operation by operation.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bytetx.ops import native, triton_backend

OPERATIONS: dict[str, "Operation"] = {}  # by name, in the order that reports show them

Run = TypeVar("Run", bound=Callable[..., Any])
WhyMissing = Callable[[torch.device], str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One way to compute an operation.

    device_types: those that it is for, where reports say why it does not run.
    why_missing: why it does not run on a device of this machine, with what to do where something
    can be done; None where it does.
    takes: whether it computes calls of a shape class: a device, then what Operation.choose gets.
    run: computes a call on checked arguments.
    """

    name: str
    device_types: tuple[str, ...]
    why_missing: WhyMissing
    takes: Callable[..., bool]
    run: Callable[..., Any]


class Operation:
    """An operation of the library, and its backends in order of preference.

    device_types: those that models need it on; elsewhere it runs, but reports leave it out.
    choose(device, *shape_class): the first backend that runs on the device and takes such calls;
    remembered, so that a call costs one look into a table, and a model can ask once for all calls.
    The shape class is the operation's to define: dtype, widths, options. LookupError where no
    backend takes it.
    """

    def __init__(self, name: str, *device_types: str) -> None:
        self.name = name
        self.device_types = device_types or ("cpu", "cuda")
        self.backends: list[Backend] = []
        self.choose = native.cached_lookup(self._choose)
        OPERATIONS[name] = self

    def register(
        self,
        name: str,
        *device_types: str,
        why_missing: WhyMissing = lambda device: None,
        takes: Callable[..., bool] = lambda device, *shape_class: True,
        first: bool = False,
    ) -> Callable[[Run], Run]:
        """Decorate the function that runs a backend; the last one unless `first`."""

        def add(run: Run) -> Run:
            backend = Backend(name, device_types or ("cpu", "cuda"), why_missing, takes, run)
            self.backends.insert(0 if first else len(self.backends), backend)
            native.forget_lookups()
            return run

        return add

    def native_kernel(
        self,
        *device_types: str,
        kernel: str | None = None,
        takes: Callable[..., bool] = lambda device, *shape_class: True,
    ) -> Callable[[Run], Run]:
        """Decorate the function that calls the native core's `kernel`; its name is the op's."""
        name = kernel or self.name
        return self.register(
            "native",
            *device_types,
            why_missing=lambda device: native.why_no_kernel(name, device),
            takes=takes,
        )

    def triton_kernel(
        self,
        *,
        beside: str | None = None,
        takes: Callable[..., bool] = lambda device, *shape_class: True,
    ) -> Callable[[Run], Run]:
        """Decorate the function that calls a Triton kernel.

        beside: the native kernel that serves a GPU instead where the core has it; the op's name
        where None, "" for a Triton kernel that runs beside the native ones.
        """
        kernel = self.name if beside is None else beside

        def why_missing(device: torch.device) -> str | None:
            if kernel and native.kernel(kernel, device) is not None:
                return "the native kernel serves this GPU"
            return triton_backend.why_no_triton(device)

        return self.register("triton", "cuda", why_missing=why_missing, takes=takes)

    def in_torch(self) -> Callable[[Run], Run]:
        """Decorate the function in plain torch, which takes every call."""
        return self.register("torch")

    def _choose(self, device: torch.device, *shape_class: Hashable) -> Backend:
        for backend in self.backends:
            if backend.why_missing(device) is None and backend.takes(device, *shape_class):
                return backend
        raise LookupError(f"no backend of {self.name} takes {list(shape_class)} on {device}")
