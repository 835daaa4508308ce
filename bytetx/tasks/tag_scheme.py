"""Schemes of tags (BIO, BIOES, BILOU): which tag may follow which, and the likeliest sequence."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bytetx.checkpoint.tag_calibration import TransitionBiases

# Prefixes of the tags that begin an entity, and of those that end one: B I E S, or B I L U.
_BEGINS, _ENDS = ("B", "S", "U"), ("E", "L", "S", "U")
_OPENS, _CONTINUES = ("B", "I"), ("I", "E", "L")
_SCHEMES = ("BIES", "BILU")


@dataclass(frozen=True, slots=True)
class TagScheme:
    """The prefixes that a model's tags have before a `-`.

    prefixes: "BI" unless every tag but those without `-` has one of BIES, or one of BILU, and some
    end an entity.
    """

    prefixes: str = "BI"

    @staticmethod
    def of(labels: Iterable[str]) -> "TagScheme":
        found = {label[0] for label in labels if label[1:2] == "-"}
        are_whole = all(label[1:2] == "-" for label in labels if "-" in label)
        for prefixes in _SCHEMES:
            if are_whole and "B" in found <= set(prefixes) and found & set(_ENDS):
                return TagScheme(prefixes)
        return TagScheme()

    @property
    def has_ends(self) -> bool:
        return self.prefixes != "BI"

    def split(self, label: str) -> tuple[str, str]:
        """(prefix, tag without it) of a label; no prefix where the scheme does not know it."""
        is_prefixed = label[1:2] == "-" and label[0] in self.prefixes
        return (label[0], label[2:]) if is_prefixed else ("", label)

    def runs(self, labels: Sequence[str]) -> Iterator[range]:
        """The entities of a row of labels, as ranges of it; those of O are runs, too.

        A label continues the entity before it where its tag is the same, its prefix begins none,
        and that entity has not ended; otherwise it begins one.  So I or E without B begins an
        entity, B without E ends where another tag comes, and a label without a prefix is as I.
        """
        first, last_tag, is_open = 0, "", False
        for i, label in enumerate(labels):
            prefix, tag = self.split(label)
            if i and not (is_open and tag == last_tag and prefix not in _BEGINS):
                yield range(first, i)
                first = i
            last_tag, is_open = tag, prefix not in _ENDS
        if labels:
            yield range(first, len(labels))


@dataclass(frozen=True, slots=True)
class TagDecoder:
    """The likeliest sequence of tags of those that a scheme allows.

    first, last: f64 [num_labels], 0 where a sequence may begin, or end, with a label, else -inf.
    transitions: f64 [num_labels, num_labels], what a label adds behind another, -inf where it may
    not follow it.
    """

    first: np.ndarray
    last: np.ndarray
    transitions: np.ndarray

    @staticmethod
    def of(labels: Sequence[str], biases: TransitionBiases | None) -> "TagDecoder | None":
        """biases: of a scheme with ends.  None where no label has a prefix."""
        scheme = TagScheme.of(labels)
        parts = [scheme.split(label) for label in labels]
        if not any(prefix for prefix, _ in parts):
            return None
        opens = np.array([scheme.has_ends and prefix in _OPENS for prefix, _ in parts])
        continues = np.array([prefix in _CONTINUES for prefix, _ in parts])
        transitions = np.full((len(parts), len(parts)), -np.inf)
        for i, (before, its) in enumerate(parts):
            for j, (after, tag) in enumerate(parts):
                follows = before in _OPENS and its == tag if continues[j] else not opens[i]
                if follows:
                    transitions[i, j] = _bias(before, after, biases if scheme.has_ends else None)
        first, last = (np.where(hidden, -np.inf, 0.0) for hidden in (continues, opens))
        return TagDecoder(first, last, transitions)

    def decode(self, probabilities: np.ndarray) -> np.ndarray:
        """The label of each row of probabilities f32 [rows, num_labels], as int64 [rows].

        Source: Viterbi (1967).  Where no sequence is allowed, the likeliest label of each row.
        """
        if not len(probabilities):
            return np.zeros(0, np.int64)
        scores = np.log(np.maximum(probabilities.astype(np.float64), np.finfo(np.float64).tiny))
        best, behind = scores[0] + self.first, np.zeros(scores.shape, np.int64)
        for i, row in enumerate(scores[1:], 1):
            sums = best[:, None] + self.transitions
            behind[i] = sums.argmax(0)
            best = sums.max(0) + row
        best = best + self.last
        if best.max() == -np.inf:
            likeliest: np.ndarray = scores.argmax(1)
            return likeliest
        path = [int(best.argmax())]
        for row in behind[:0:-1]:
            path.append(int(row[path[-1]]))
        return np.array(path[::-1])


def _bias(before: str, after: str, biases: TransitionBiases | None) -> float:
    """The bias of an allowed transition, by its prefixes."""
    if biases is None:
        return 0.0
    if before in _OPENS:
        return biases.inside_to_continue if after == "I" else biases.inside_to_end
    if before:
        return biases.end_to_start if after else biases.end_to_background
    return biases.background_to_start if after else biases.background_stay
