"""Prefixes from spans that are blurred by noise, rounding or local steps: many layers together tell what one cannot.

    sites    ← output projections and MLP inputs of the first blocks, their noise whitened
    score    ← how far a prefix's last row is from each span beyond noise (`noisy_span.py`); the mean over sites, the
               worst left out
    grow     ← level by level, by all tokens of the bag; nearly all extensions are wrong, so that their own scores are
               the null: one is kept if it lies further below their bulk than any of them by chance

Limits: it is no proof. A prefix that the noise hides is missed, with all that stands behind it, until labels tell it
(`noisy_labels.py`); a wrong one may pass.
Cost: for each prefix a forward pass of the bag's tokens through the first blocks.
Source: measured for this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.attacks.gradients.prefix_states import CachedPrefix, Layer, PrefixStates
from unmask.attacks.gradients.sites import noisy_span
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import Gap
from unmask.linalg.noisy_span import NoisySpan
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.progress import track

_BLOCKS = 4  # later ones cost more, and their inputs differ more between the client's precision and ours
_LAYERS = ((Role.ATTENTION_OUT, (Role.ATTENTION_OUT,)), (Role.MLP_IN, (Role.MLP_IN, Role.MLP_GATE)))
_DEVIATIONS = 4.0  # below the bulk of wrong extensions: one in 30,000
_NEAR = 0.35  # prefixes of the batch may have as much
_BELOW = 0.159  # the share of a normal variable that lies more than one deviation below its mean
_LONGEST_RUN = 1  # a first token repeated has the rows of the token alone, where positions are relative: labels tell
_MORE_TOKENS, _LEAST_TOKENS = 1.1, 16  # times block 0's directions, and so many more, are the tokens that are tried
_FULL = 0.9  # of the width: too many inputs, or steps, to tell anything
_OVERFLOW = 3  # prefixes for each direction above the noise: more, and nothing was told apart

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class NoisySite:
    """A layer, and the span of its gradient above the noise."""

    layer: Layer
    span: NoisySpan


def noisy_sites(evidence: GradientEvidence, model: Model) -> list[NoisySite]:
    """The layers of the first blocks that can tell a prefix, in the order of the forward pass."""
    blocks = range(min(_BLOCKS, model.num_blocks))
    sites = (_noisy_site(evidence, model, block, layers) for block in blocks for layers in _LAYERS)
    return [site for site in sites if site is not None]


def _noisy_site(
    evidence: GradientEvidence, model: Model, block: int, layers: tuple[Role, tuple[Role, ...]]
) -> NoisySite | None:
    """Layers with one input; None if the update has none of them, or their span is empty or full."""
    kind, roles = layers
    span = noisy_span(evidence, model, [(role, block) for role in roles], model.dtype)
    if span is None or not 0 < span.rank < _FULL * len(span.basis):
        return None
    return NoisySite((block, kind), span)


@torch.no_grad()
def nearest_tokens(evidence: GradientEvidence, model: Model) -> list[int]:
    """The tokens whose vectors are nearest to block 0's span, a few more than it has directions."""
    site = _noisy_site(evidence, model, 0, (Role.QUERY, (Role.QUERY, Role.KEY, Role.VALUE)))
    if site is None or model.learned_positions:
        return []
    every = torch.arange(model.vocab_size, device=model.device)
    distances = site.span.excess(model.first_input(every, torch.zeros_like(every)))
    return distances.sort().indices[: int(_MORE_TOKENS * site.span.rank) + _LEAST_TOKENS].tolist()


@dataclass
class PrefixGrowth:
    """A search that may go on with more tokens: what it has found, and what the wrong extensions look like."""

    run: Run
    model: Model
    sites: Sequence[NoisySite]
    tokens: Int[Tensor, " c"]
    scores: dict[Tokens, float] = field(default_factory=dict)
    seen: list[Float[Tensor, " c"]] = field(default_factory=list)
    caches: dict[Tokens, CachedPrefix] = field(default_factory=dict)
    measured: dict[Tokens, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = PrefixStates(self.model, tuple(site.layer for site in self.sites))
        self.caches[()] = self.states.begin()
        self.most = _OVERFLOW * max(site.span.rank for site in self.sites)

    @property
    def cut(self) -> float:
        """The score below which an extension is kept: the middle of the widest gap below the bulk of wrong ones."""
        scores = torch.cat(self.seen)[-(2**20) :]
        middle, low = float(scores.median()), float(torch.quantile(scores, _BELOW))
        bound = max(_NEAR, middle - _DEVIATIONS * (middle - low))
        between = scores[(scores > _NEAR) & (scores < bound)].sort().values
        edges = torch.cat([scores.new_tensor([_NEAR]), between, scores.new_tensor([bound])])
        widest = int(edges.diff().argmax())
        return float(edges[widest : widest + 2].mean())

    def grow(self, alive: Iterable[Tokens] = ((),)) -> bool:
        """Extend prefixes until nothing passes; False if more pass than the spans can hold."""
        level = list(alive)
        while level:
            growing = [prefix for prefix in level if len(prefix) < self.model.max_positions]
            stage = f"growing prefixes of {max(map(len, level))} tokens"
            found = [(prefix, self._extend(prefix)) for prefix in track(growing, stage)]
            cut = self.cut
            level = []
            for prefix, scores in found:
                passing = (scores < cut).nonzero()[:, 0]
                level += self._take(prefix, self.tokens[passing], scores[passing].tolist())
                if len(self.scores) > self.most:
                    return False
        return True

    def add(self, prefix: Tokens, token: int) -> None:
        """Take an extension that something else has told."""
        self.scores[*prefix, token] = self.score(prefix, [token])[0]
        new = torch.tensor([token], device=self.tokens.device)
        self.caches[*prefix, token] = self.states.cache(
            self.caches[prefix], token, self.states.extend(self.caches[prefix], new), 0
        )

    def drop(self, prefixes: Iterable[Tokens]) -> None:
        """Forget prefixes, with all that stands behind them."""
        wrong = set(prefixes)
        for known in list(self.scores):
            if any(known[:length] in wrong for length in range(1, len(known) + 1)):
                del self.scores[known], self.caches[known]

    def worst(self, tokens: Tokens) -> float:
        """The largest score of a text's prefixes."""
        known = (self.scores.get(tokens[:length], 0.0) for length in range(1, len(tokens) + 1))
        return max(known, default=0.0)

    @property
    def forest(self) -> Forest:
        """The prefixes with their scores."""
        inner = {tokens[:-1] for tokens in self.scores}
        nodes = {(0, tokens): score for tokens, score in self.scores.items()}
        leaves = [(0, tokens) for tokens in self.scores if tokens not in inner]
        return Forest(nodes, leaves, Gap(max(self.scores.values(), default=0.0), self.cut), sum(map(len, self.seen)))

    def score(self, prefix: Tokens, tokens: Sequence[int]) -> list[float]:
        """The scores of a prefix that is longer by each of some tokens; each is measured once."""
        known = self.measured.setdefault(prefix, {})
        new = [token for token in tokens if token not in known]
        if new:
            extensions = self.states.extend(self.caches[prefix], torch.tensor(new, device=self.tokens.device))
            known.update(zip(new, self._score(extensions.rows).tolist(), strict=True))
        return [known[token] for token in tokens]

    @property
    def _longest_run(self) -> int:
        return self.model.max_positions if self.model.learned_positions else _LONGEST_RUN

    def _extend(self, prefix: Tokens) -> Float[Tensor, " c"]:
        """The scores of a prefix that is longer by each token of the bag."""
        scores = self._score(self.states.extend(self.caches[prefix], self.tokens).rows)
        self.seen.append(scores)
        return scores

    def _take(self, prefix: Tokens, tokens: Int[Tensor, " p"], scores: Sequence[float]) -> list[Tokens]:
        """Keep the extensions that are new; their keys and values are made again, so that no others are stored."""
        new = []
        extensions = self.states.extend(self.caches[prefix], tokens) if len(tokens) else None
        for column, (token, score) in enumerate(zip(tokens.tolist(), scores, strict=True)):
            longer = (*prefix, token)
            if longer in self.scores or (len(set(longer)) == 1 and len(longer) > self._longest_run):
                continue
            assert extensions is not None
            self.scores[longer] = score
            self.caches[longer] = self.states.cache(self.caches[prefix], token, extensions, column)
            new.append(longer)
        return new

    def _score(self, rows: Sequence[Float[Tensor, "c d"]]) -> Float[Tensor, " c"]:
        excess = torch.stack([site.span.excess(part) for site, part in zip(self.sites, rows, strict=True)])
        best = excess.sort(0).values
        return best[: max(1, len(best) - 1)].mean(0)
