"""The whole models of random weights that suite `encoder` runs from token ids."""

import torch

from benchmarks.deberta import DEBERTA_SIZES, Deberta
from benchmarks.modernbert import MODERNBERT_SIZES, ModernBert
from benchmarks.token_inputs import WholeModel

WHOLE_MODELS = (*MODERNBERT_SIZES, *DEBERTA_SIZES)


def load_whole_model(
    size: str, dtype: torch.dtype, notes: list[str], *, device: torch.device | str
) -> WholeModel:
    """size: one of WHOLE_MODELS.  notes: gets a line for each rival that does not load."""
    if size in DEBERTA_SIZES:
        return Deberta(size, dtype, notes, device=device)
    return ModernBert(size, dtype, notes, device=device)
