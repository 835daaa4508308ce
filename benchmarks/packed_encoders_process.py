"""The process of packed-encoders: python -m, a folder of inputs, a device, a folder of packages.

Only the standard library is imported before the folder of packages is first on the path: its
transformers is an older one.
"""

import json
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS, IDS, HIDDEN_STATES = "lengths.npy", "ids.npy", "hidden_states.npy"
_ROUNDS, _WARM_UP = 5, 3


def main(work: str, device: str, packages: str | None = None) -> None:
    """Prints {"us": times by name, "notes": lines}; leaves HIDDEN_STATES f32 in the folder.

    work: a ModernBertModel's folder that holds LENGTHS and IDS, too.  packages: what pip installed
    with --target.
    """
    if packages is not None:
        sys.path.insert(0, packages)
        site.addsitedir(packages)  # for the .pth files in it
    import numpy as np
    import torch

    folder = Path(work)
    run = _load(folder, device, np.load(folder / LENGTHS), np.load(folder / IDS))
    notes: list[str] = []
    with torch.inference_mode():
        np.save(folder / HIDDEN_STATES, run().float().cpu().numpy())
        found = {"packed-encoders": _wall_us(run)}
        if device.startswith("cuda"):
            found |= _graph_us(run, notes)
    print("\n" + json.dumps({"us": found, "notes": notes}))


def _load(folder: Path, device: str, lengths: Any, ids: Any) -> Callable[[], Any]:
    """Its forward pass of already packed tokens, to hidden states [total_tokens, hidden_size].

    lengths, ids: int64 arrays [batch_size] and [total_tokens].
    """
    import packed_encoders
    import torch
    from transformers import ModernBertModel

    from benchmarks.flash_attn import flash_attn_package

    options: dict[str, Any] = {"dtype": torch.bfloat16, "trust_remote_code": False}
    model: Any = ModernBertModel.from_pretrained(folder, **options)
    model = model.to(device).eval()
    if not hasattr(model.config, "global_attn_every_n_layers"):
        # Checkpoints of earlier transformers name it; what a later one saves has only the list.
        kinds = model.config.layer_types
        later = (i for i in range(1, len(kinds)) if kinds[i] == "full_attention")
        model.config.global_attn_every_n_layers = next(later, len(kinds))
    with flash_attn_package():  # torch's kernels where the folder has no flash-attn
        packed_encoders.pack(model)
        sums = torch.from_numpy(lengths).cumsum(0)
        batch = packed_encoders.PackedBatch(
            input_ids=torch.from_numpy(ids).to(device),
            cu_seqlens=torch.nn.functional.pad(sums, (1, 0)).int().to(device),
            max_seqlen=int(lengths.max()),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device),
        )
        engine = packed_encoders.get_engine(model)
        with torch.inference_mode():
            engine.forward_packed(batch)  # which imports what it attends with
    return lambda: engine.forward_packed(batch)


def _wall_us(run: Callable[[], Any]) -> float:
    """Median microseconds from the first launch to the end of the last kernel."""
    from benchmarks.gpu import wall_us

    for _ in range(_WARM_UP):
        run()
    return wall_us(run, rounds=_ROUNDS)


def _graph_us(run: Callable[[], Any], notes: list[str]) -> dict[str, float]:
    """Time its kernels as one CUDA graph, as ours are; a line in notes where it is none."""
    from benchmarks.gpu import graph_us, left_out

    name = "packed-encoders-graph"
    try:
        return graph_us({name: run})
    except Exception as error:  # a rival may raise anything, and costs no other number
        notes.append(left_out(name, error))
        return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
