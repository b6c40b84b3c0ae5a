"""Prefixes and labels, until they agree: a prefix is one label longer than another, and what labels name may go on.

    drop  a prefix whose last token is no label of the prefix before it
    add   a label whose prefix noise has hidden from the growth, and grow behind it: with tokens that the bag lacks, too
    stop  when neither changes anything

After several local steps labels are read from weights that moved, and probabilities with them: other likely tokens seem
to be labels too. Then nothing is dropped, each text ends behind a last prefix with its strongest label, and a replay
says which of these are wrong.

Notation: as in `noisy_labels.py`. Limits: as there; what still disagrees is left for the replay to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unmask.attacks.gradients.decoder.endings import EndingsRead, TextEnding, endings_from_labels, unit_weight
from unmask.attacks.gradients.decoder.labels import Labels
from unmask.attacks.gradients.decoder.last_block_rows import KnownRows
from unmask.attacks.gradients.noisy.noisy_labels import NoisyLabels
from unmask.attacks.gradients.noisy.prefix_growth import PrefixGrowth, Tokens
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.arrivals import is_repetition

_MOST_ROUNDS = 24
_A_LABEL = 0.4  # of the weight of one occurrence: less is noise, or what a wrong prefix took from others
_COMPLETE = 1.2  # times the noise that the last block's gradient has: more is left only where prefixes are missing
_LATE = (1.5, 2.0, 3.0)  # times the cut of the growth: a prefix that a label names may be as far from the spans
_NEEDED = 1.02  # times what is left: prefixes are needed without which more is


@dataclass
class LabelRounds:
    """One tree of prefixes, and what the last block says of it."""

    run: Run
    evidence: GradientEvidence
    model: Model
    growth: PrefixGrowth
    role: Role
    memory_budget_bytes: int
    read: list[Labels] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = KnownRows(self.model, self.role, self.memory_budget_bytes)

    @property
    def drifts(self) -> bool:
        """Whether the weights moved while the update was made."""
        return self.evidence.update is Update.DELTA and self.evidence.num_steps != 1

    def settle(self) -> EndingsRead:
        """Read labels, mend the tree by them, and again; then the texts."""
        self._read()
        if self.drifts:
            return self._last_labels()
        limits = [factor * self.growth.cut for factor in _LATE]
        refused: set[Tokens] = set()
        for count in range(_MOST_ROUNDS):
            self.run.progress("reading endings", count, _MOST_ROUNDS)
            if len(self.growth.scores) > self.growth.most:
                return EndingsRead([])  # more prefixes than the spans can hold: nothing was told apart
            named = self._named()
            if self._add({(*u, y) for u, ys in named.items() for y in ys} - set(self.growth.scores), limits[0]):
                self._read()
            elif self.arrived.unexplained > _COMPLETE and len(limits) > 1:
                limits.pop(0)
            elif not (wrong := self._unnamed(named) - refused):
                break
            elif not self._drop(wrong):
                refused |= wrong
        return self._endings()

    def correct(self, endings: list[TextEnding], again: Mapping[str, Tensor]) -> list[TextEnding]:
        """Texts with other last tokens, where the client, run again on them, leaves something at their ends.

        If nothing is left there, texts that go on.
        """
        place = {node: u for u, node in enumerate(self.arrived.nodes)}
        ends = {place[0, e.node[1][:-1]]: e.node[1][-1] for e in endings if (0, e.node[1][:-1]) in place}
        if not ends or self.arrived.layer.parameter not in again:
            return endings
        found = self.arrived.correct(
            again[self.arrived.layer.parameter], ends, 1 / sum(e.count * (len(e.node[1]) - 1) for e in endings)
        )
        changed = {self.arrived.nodes[u][1]: label for u, label in found.items()}
        corrected = [
            replace(e, node=(0, (*e.node[1][:-1], changed[e.node[1][:-1]]))) if e.node[1][:-1] in changed else e
            for e in endings
        ]
        return self._lengthen(endings) if corrected == endings else corrected

    def _lengthen(self, endings: list[TextEnding]) -> list[TextEnding]:
        """Texts as prefixes: where noise has hidden the last one of a text, a label stands behind it all the same."""
        whole = {ending.node[1] for ending in endings}
        longer = {tokens for tokens in whole if tokens not in self.growth.scores and tokens[:-1] in self.growth.caches}
        for tokens in longer:
            self.growth.add(tokens[:-1], tokens[-1])
        self._read()
        named = set(self._named())
        self.growth.drop(longer - named)
        if not longer & named or not self.growth.grow(longer & named):
            return endings
        self._read()
        return (self._last_labels() if self.drifts else self._endings()).endings

    def _read(self) -> None:
        every = self.rows.at(self.growth.forest)
        rows = every[[u for u, node in enumerate(every.nodes) if not is_repetition(self.model, node[1])]]
        self.arrived = NoisyLabels(self.evidence, self.model, rows, self.role, self.memory_budget_bytes)
        self.read = self.arrived.read()
        strongest = sorted(max(labels.weights.values()) for labels in self.read if labels.weights)
        self.step = (unit_weight(strongest) or strongest[len(strongest) // 2]) if strongest else 1.0

    def _named(self) -> dict[Tokens, set[int]]:
        """The labels behind every prefix at which something arrives."""
        named = {}
        for (_, tokens), labels in zip(self.arrived.nodes, self.read, strict=True):
            found = {y for y, weight in labels.weights.items() if weight > _A_LABEL * self.step}
            if found:
                named[tokens] = found
        return named

    def _unnamed(self, named: Mapping[Tokens, set[int]]) -> set[Tokens]:
        """Prefixes that are no label of the prefix before them."""
        return {
            tokens
            for tokens in self.growth.scores
            if len(tokens) > 1 and tokens[:-1] in named and tokens[-1] not in named[tokens[:-1]]
        }

    def _add(self, longer: set[Tokens], limit: float) -> bool:
        """Take prefixes that labels name and that the spans do not rule out, and grow behind them."""
        added = set()
        wanted: dict[Tokens, list[int]] = {}
        for tokens in sorted(longer, key=len)[: self.growth.most]:
            if tokens[:-1] in self.growth.caches and len(tokens) < self.model.max_positions:
                wanted.setdefault(tokens[:-1], []).append(tokens[-1])
        for prefix, labels in wanted.items():
            for label, score in zip(labels, self.growth.score(prefix, labels), strict=True):
                tokens = (*prefix, label)
                is_run = len(set(tokens)) == 1 and not self.model.learned_positions
                if is_run or score < limit:
                    self.growth.add(prefix, label)
                    added.add(tokens)
        if added:
            new = torch.tensor(sorted({tokens[-1] for tokens in added}), device=self.growth.tokens.device)
            self.growth.tokens = torch.unique(torch.cat([self.growth.tokens, new]))
            self.growth.grow(added)
        return bool(added)

    def _drop(self, wrong: set[Tokens]) -> bool:
        """Forget prefixes that no label names; not if they explain something all the same."""
        before, scores, caches = self.arrived.excess, dict(self.growth.scores), dict(self.growth.caches)
        self.growth.drop(wrong)
        self._read()
        if self.arrived.excess < _NEEDED * before:
            return True
        self.growth.scores, self.growth.caches = scores, caches
        self._read()
        return False

    def _last_labels(self) -> EndingsRead:
        """One text for each prefix that nothing continues, with the first label that has the weight of one.

        If the batch has more texts than that, also those that end inside of others, by the strongest other labels.
        """
        inner = {tokens[:-1] for tokens in self.growth.scores}
        endings, others = [], []
        for (start, tokens), labels in zip(self.arrived.nodes, self.read, strict=True):
            named = [label for label, weight in labels.weights.items() if weight > _A_LABEL * self.step]
            if tokens not in inner and labels.weights:
                last = named[0] if named else max(labels.weights, key=lambda label: labels.weights[label])
                endings.append(TextEnding((start, (*tokens, last)), 1, labels.residual))
                continue
            for label in named:
                if (*tokens, label) not in self.growth.scores:
                    others.append((labels.weights[label], TextEnding((start, (*tokens, label)), 1, labels.residual)))
        missing = max(0, (self.evidence.num_texts or 0) - len(endings))
        others.sort(key=lambda pair: -min(pair[0], self.step))
        return EndingsRead([*endings, *(ending for _, ending in others[:missing])])

    def _endings(self) -> EndingsRead:
        labels = {
            node: Labels({y: w for y, w in found.weights.items() if w > _A_LABEL * self.step}, found.residual)
            for node, found in zip(self.arrived.nodes, self.read, strict=True)
        }
        silent = {node: None for node, found in labels.items() if not found.weights}
        nodes = {(0, tokens) for tokens in self.growth.scores}
        return endings_from_labels(self.model, nodes, labels, silent, self.step, is_unit=True)
