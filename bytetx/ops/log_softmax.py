"""Log-softmax of rows of logits."""

import torch.nn.functional as F
from torch import Tensor

# Elements: torch's kernel reads rows in 16 bytes of f32, and sums in another order where a row does
# not start at a multiple of them.
_ALIGNED_COLUMNS = 4


def log_softmax(logits: Tensor) -> Tensor:
    """f32 [n, vocab_size], over the last dim of logits [n, vocab_size].

    A row's bits do not depend on its index: on a GPU, rows get columns of -inf where that makes
    each of them start at 16 bytes, and the result is a view without them.
    """
    x, columns = logits.float(), logits.shape[1]
    extra = -columns % _ALIGNED_COLUMNS if x.is_cuda else 0
    if extra == 0:
        return x.log_softmax(dim=-1)
    return F.pad(x, (0, extra), value=float("-inf")).log_softmax(dim=-1)[:, :columns]
