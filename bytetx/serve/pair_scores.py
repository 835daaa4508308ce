"""Scores of pairs of texts from their vectors, or from the vectors of their tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bytetx.tasks.search import Similarity, similarity

_BLOCK = 32  # pairs whose scores are read off those of all their texts with each other


def pair_scores(
    vectors: np.ndarray, pairs: Sequence[Sequence[int]], function: Similarity
) -> torch.Tensor:
    """f32 [num_pairs].  vectors: f32 [num_texts, dimensions].  pairs: texts, [firsts, seconds]."""
    firsts, seconds = pairs
    if len(set(firsts)) == 1:
        return similarity(vectors[firsts[:1]], vectors[seconds], function=function)[0]
    scores = torch.empty(len(firsts))
    for begin in range(0, len(firsts), _BLOCK):
        own = slice(begin, begin + _BLOCK)
        block = similarity(vectors[firsts[own]], vectors[seconds[own]], function=function)
        scores[own] = block.diagonal()
    return scores


def late_pair_scores(
    queries: Mapping[int, np.ndarray],
    documents: Mapping[int, np.ndarray],
    pairs: Sequence[Sequence[int]],
    function: Similarity,
) -> torch.Tensor:
    """f32 [num_pairs].  queries, documents: f32 [num_vectors, dimensions] of each text's tokens.

    function: maxsim or meanmaxsim; each query is compared with all of its documents at once.
    """
    of_query: dict[int, list[int]] = {}
    for index, query in enumerate(pairs[0]):
        of_query.setdefault(query, []).append(index)
    scores = torch.empty(len(pairs[0]))
    for query, own in of_query.items():
        rows = [documents[pairs[1][index]] for index in own]
        scores[own] = similarity([queries[query]], rows, function=function)[0]
    return scores
