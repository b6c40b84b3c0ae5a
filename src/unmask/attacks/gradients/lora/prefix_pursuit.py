"""Prefixes from the adapters' gradients: ∂A of block b is made of the attention inputs of the batch's prefixes.

    U_b      ← an orthonormal basis of the whitened ∂A_b, for some blocks b ≥ 1
    pool     ← the tokens of the batch, as prefixes of one token
    repeat     take the prefix of the pool that explains most of what is left, on average over the blocks
               (`pursuit.py`); put its extensions by all tokens of the batch into the pool
    until      rounding is left, or no prefix of the pool explains anything
    keep     ← the prefixes without which some block is not explained

The same prefixes explain every block, so that blocks add up: a block shows as many directions as its adapters have
ranks, and the batch may hold many more prefixes than that.

Rows are whitened by the second moments of texts that are drawn from the batch's own tokens, behind the direction that
all first tokens share: most attention goes there, and it is much longer than all others.

Limits: up to about 0.5·d prefixes, as wrong ones are taken too; a search that has explained too little by then ends. It
is no proof: with few blocks a wrong prefix leaves hardly more than a right one, so that a replay must judge. A token
that is missing loses all that stands behind it.
Cost: for each prefix a forward pass of the batch's tokens through the blocks below, and a pass over the pool.
Source: measured for this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.attacks.gradients.prefix_states import CachedPrefix, Extensions, PrefixStates, attention_layers
from unmask.attacks.run import Run
from unmask.linalg.pursuit import Pursuit, inverse_root, orthonormal, support_of
from unmask.models.adapter import Model

_NUM_TEXTS, _LENGTH = 80, 20  # texts drawn to measure second moments
_RIDGE = 1e-6  # of the largest second moment
_COLUMNS = 1e-4  # of the largest: with fewer prefixes than columns, the last ones are rounding
_FLOOR = 1e-4  # of a block's basis: less is rounding
_EXPLAINED = 2e-4
_NEARLY = 2e-3  # explained up to what float32 may leave: it ends if nothing in the pool is right any more
_RIGHT = 0.5  # of an atom: one of the few that are left lies in what is left entirely
_NEEDED = 1e-3  # prefixes that are not in the batch have 4e-6 at most, those that are 2e-2 at least
_MOST = 0.92  # of the width: wrong prefixes do no harm below it
_HOPELESS = 0.25  # is left at half of that: searches that succeed have 0.07 to 0.1 there, those that do not 0.3
MOST_TOKENS = 0.4  # of the width: a batch has 1.3 to 1.4 times as many prefixes as distinct tokens, or more


@dataclass(frozen=True)
class PrefixesFound:
    """Prefixes that explain the adapters' gradients together, how much each is needed, and what they leave."""

    needs: Mapping[tuple[int, ...], float]
    residual: float
    num_tested: int

    @property
    def leaves(self) -> list[tuple[int, ...]]:
        """Prefixes that no other one continues."""
        inner = {tokens[:-1] for tokens in self.needs}
        return sorted(tokens for tokens in self.needs if tokens not in inner)


@torch.no_grad()
def pursue_prefixes(
    run: Run, model: Model, measured: Mapping[int, Float[Tensor, "d m"]], tokens: Int[Tensor, " c"]
) -> PrefixesFound:
    """Prefixes of a batch, from what its inputs left at some blocks, and the tokens that it holds."""
    states = PrefixStates(model, attention_layers(list(measured)))
    first = states.extend(states.begin(), tokens)
    drawn = states.draw(tokens, _NUM_TEXTS, _LENGTH, run.generator)
    whiteners = [_whitener(rows, firsts) for rows, firsts in zip(drawn, first.rows, strict=True)]
    bases = [
        orthonormal(w.T @ measured[b].double(), _COLUMNS) for b, w in zip(sorted(measured), whiteners, strict=True)
    ]

    def atoms(extensions: Extensions) -> list[Tensor]:
        return [normalize(rows.double() @ w, dim=1).float() for rows, w in zip(extensions.rows, whiteners, strict=True)]

    search = Pursuit(bases, _FLOOR)
    search.add(atoms(first))
    parents: list[tuple[CachedPrefix, Extensions]] = [(states.begin(), first)]
    most = int(_MOST * min(len(basis) for basis in bases))
    found: list[tuple[int, ...]] = []
    while len(found) < most and search.residual > _EXPLAINED:
        best, gain = search.best()
        is_hopeless = len(found) == most // 2 and search.residual > _HOPELESS
        if gain <= 0 or is_hopeless or (search.residual < _NEARLY and gain < _RIGHT):
            break
        search.take(best)
        parent, column = divmod(best, len(tokens))
        prefix = states.cache(parents[parent][0], int(tokens[column]), parents[parent][1], column)
        found.append(prefix.tokens)
        run.progress("growing prefixes", len(found), most)
        extensions = states.extend(prefix, tokens) if len(prefix.tokens) < model.max_positions else None
        if extensions is not None:
            parents.append((prefix, extensions))
            search.add(atoms(extensions))
    needs = torch.stack(
        [support_of(rows, range(len(found)), basis).needs for rows, basis in zip(search.rows(), bases, strict=True)]
    ).amax(0)
    kept = {prefix: need for prefix, need in zip(found, needs.tolist(), strict=True) if need > _NEEDED}
    return PrefixesFound(kept, search.residual, search.num_atoms)


def _whitener(rows: Float[Tensor, "n d"], firsts: Float[Tensor, "c d"]) -> Float[Tensor, "d d"]:
    """The inverse root of rows' second moments, outside of the direction that the rows of first tokens share."""
    every = torch.cat([rows, firsts]).double()
    shared = torch.linalg.svd(firsts.double(), full_matrices=False).Vh[:1]
    return inverse_root(every.T @ every / len(every), shared.T, _RIDGE)
