"""Hierarchical pooling of a document's token vectors, as sentence-transformers' module does it."""

from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F

from bytetx.checkpoint.multi_vector import TokenPoolingSpec
from bytetx.errors import InputError


def check_token_pooling() -> None:
    """Raises InputError where scipy, which has Ward's clustering, is not installed."""
    if find_spec("scipy") is None:
        raise InputError(
            "the checkpoint pools the vectors of documents by clustering "
            "(HierarchicalTokenPooling), which needs scipy; pip install scipy"
        )


def pool_tokens(vectors: np.ndarray, spec: TokenPoolingSpec) -> np.ndarray:
    """f32 [num_tokens, dimensions] -> [fewer, dimensions]: the protected vectors as they are, then
    the mean of each of num_tokens // factor clusters by cosine distance (Ward's linkage)."""
    protected, rest = vectors[: spec.num_protected], vectors[spec.num_protected :]
    num_clusters = max(int(len(rest) // spec.factor), 1)
    if spec.factor > 1 and num_clusters < len(rest):
        vectors = np.concatenate([protected, _cluster_means(rest, num_clusters)])
    if not spec.normalizes:
        return vectors
    return F.normalize(torch.from_numpy(vectors), dim=-1).numpy()


def _cluster_means(vectors: np.ndarray, num_clusters: int) -> np.ndarray:
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    rows = torch.from_numpy(vectors)
    distances = (1 - rows @ rows.T).clamp_(0, 2).numpy()
    linkage = hierarchy.linkage(squareform(distances, checks=False), method="ward")
    labels = hierarchy.fcluster(linkage, t=num_clusters, criterion="maxclust")
    kinds, places = np.unique(labels, return_inverse=True)
    sums = np.zeros((len(kinds), vectors.shape[1]), dtype=np.float32)
    np.add.at(sums, places, vectors)
    means: np.ndarray = sums / np.bincount(places)[:, None].astype(np.float32)
    return means
