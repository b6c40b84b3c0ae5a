"""The dimension vocabulary: one letter or word per axis, the same in every annotation.

| axis | meaning |
| --- | --- |
| `n` | rows that are tokens (of one text, or of a batch laid end to end) |
| `d` | width of the residual stream; `d_in`, `d_out` of a linear layer |
| `r` | rank of a span |
| `k` | number of probes |
| `h`, `g`, `e` | query heads, key/value heads, width of one head |
| `f` | input width of the MLP's down projection |
| `batch`, `length` | texts in a batch, padded length |
| `vocab` | vocabulary size |

Rows are tokens, always `(n, d)`. Weights and gradients are `(d_in, d_out)`, so a gradient is Xᵀ·∂L/∂Y and the
inputs X lie in its column space.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Rows = Float[Tensor, "n d"]
Basis = Float[Tensor, "d r"]
Probes = Float[Tensor, "d k"]
Tokens = Int[Tensor, "n"]
TokenBatch = Int[Tensor, "batch length"]
MaskBatch = Bool[Tensor, "batch length"]
States = Float[Tensor, "batch length d"]
