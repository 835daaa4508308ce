"""viterbi_calibration.json: what the transitions between tags add to the score of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bytetx.checkpoint.side_files import TABLE, check_fields, number, read_json
from bytetx.errors import CheckpointError

TAG_CALIBRATION = "viterbi_calibration.json"
_POINT = "default"
_PREFIX = "transition_bias_"
_BIAS = number(-1e38)


@dataclass(frozen=True, slots=True)
class TransitionBiases:
    """Natural logarithms that a transition adds, by what it leaves and what it enters.

    background: O.  start: B or S.  inside: B or I.  end: E, and of what is left also S.
    """

    background_stay: float = 0.0
    background_to_start: float = 0.0
    inside_to_continue: float = 0.0
    inside_to_end: float = 0.0
    end_to_background: float = 0.0
    end_to_start: float = 0.0


def read_transition_biases(folder: Path) -> TransitionBiases | None:
    """The operating point "default" of the file; None without the file.

    Raises CheckpointError where the file is damaged, or has a bias that is not known.
    """
    path = folder / TAG_CALIBRATION
    if not path.is_file():
        return None
    where, content = str(path), read_json(path)
    for key in ("operating_points", _POINT, "biases"):
        check_fields(where, content, {key: TABLE})
        if not isinstance(content.get(key), Mapping):
            raise CheckpointError(f"{where} lacks {key}, the table of what transitions add")
        content, where = content[key], f"{where}: {key}"
    known = {f"{_PREFIX}{name}": name for name in TransitionBiases.__dataclass_fields__}
    if unknown := sorted(content.keys() - known.keys()):
        raise CheckpointError(f"{where} has {unknown[0]!r:.120}; known: {', '.join(known)}")
    check_fields(where, content, dict.fromkeys(known, _BIAS))
    given = {known[key]: float(value) for key, value in content.items() if value is not None}
    return TransitionBiases(**given)
