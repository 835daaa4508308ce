"""Choice of the rivals to measure: those that compute what ours computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bert import LayerInputs
from benchmarks.gpu import left_out
from bytetx.errors import BytetxError

# Beyond this a rival did other work than ours: f16 rounds at 2^-11, through 24 layers.
_MAX_RELATIVE_ERROR = 2e-2


@torch.inference_mode()
def right_runs(
    runs: dict[str, Callable[[], Tensor]], inputs: LayerInputs | None, notes: list[str]
) -> dict[str, Callable[[], Tensor]]:
    """The runs whose real tokens come out as ours do; `notes` gets a line for each other one.

    inputs: which tokens of a padded result are real; None where no result is padded.
    """
    kept: dict[str, Callable[[], Tensor]] = {}
    ours = runs["ours"]().float()
    if not ours.isfinite().all():
        raise BytetxError("our own result is not finite: nothing can be compared")
    for name, run in runs.items():
        try:
            theirs = run()
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(name, error))
            continue
        if theirs.dim() == 3 and inputs is not None:
            theirs = theirs[inputs.is_real()]
        distance = float((theirs.float() - ours).norm() / ours.norm())
        if distance <= _MAX_RELATIVE_ERROR:
            kept[name] = run
        else:
            notes.append(f"{name} left out: its relative distance to ours is {distance:.1e}")
    return kept
