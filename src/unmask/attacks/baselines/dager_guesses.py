"""DAGER's best effort: where fewer texts pass than the batch holds, the nearest sequences that failed are returned.

A guess is never certain. Guesses are ranked by the mean distance of their rows, and two that agree in most of their
tokens count as one (the paper's TopUnique).

Source: DAGER, arXiv 2405.15586, and the authors' public code. Deviations, all in its favour: guesses of a decoder are
grown only where texts are missing, which saves time; with learned positions they go on to the longest length that
Algorithm 1 saw, also where no sequence passes at all; two guesses are compared over the shorter one, without padding;
of a guess and its continuations the longest is taken that is about as near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.shapes import TokenBatch

_ABOUT_AS_NEAR = 2.0  # a wrong token at the end multiplies the mean distance of a right prefix by hundreds

Text = tuple[int, ...]
Scored = tuple[float, Text]  # the mean distance of its rows, the sequence


@dataclass
class FailedSequences:
    """Of the sequences of each length that failed, the nearest `most`, no two alike in `fraction` of their tokens."""

    most: int
    fraction: float
    of_length: dict[int, list[Scored]] = field(default_factory=dict)

    def offer(self, sequences: TokenBatch, distances: Float[Tensor, " n"]) -> None:
        """Keep those of the sequences, all of one length, that are nearer than what is kept."""
        if self.most and len(sequences):
            length = sequences.shape[1]
            kept = self.of_length.get(length, [])
            self.of_length[length] = add_nearest(kept, sequences, distances, self.most, self.fraction)

    def prefixes(self, length: int) -> TokenBatch:
        """The sequences kept of a length, to be extended."""
        kept = [text for _, text in self.of_length.get(length, [])]
        return torch.tensor(kept, dtype=torch.long).reshape(len(kept), length)

    def list_all(self) -> list[Scored]:
        """Everything kept, of all lengths."""
        return [pair for kept in self.of_length.values() for pair in kept]


def add_nearest(
    kept: list[Scored], sequences: TokenBatch, distances: Float[Tensor, " n"], most: int | None, fraction: float
) -> list[Scored]:
    """The nearest of what was kept and of new sequences of the same length, no two alike; None: as many as there are.

    Two sequences are alike if they agree in `fraction` of their tokens; of those the nearest stays.
    """
    if not len(sequences) or (kept and len(kept) == most and float(distances.min()) >= kept[-1][0]):
        return kept
    if kept:
        sequences = torch.cat([torch.tensor([text for _, text in kept]), sequences])
        distances = torch.cat([torch.tensor([distance for distance, _ in kept], dtype=distances.dtype), distances])
    left, nearest = distances.clone(), list[Scored]()
    while most is None or len(nearest) < most:
        best = int(left.argmin())
        if math.isinf(float(left[best])):
            break
        nearest.append((float(left[best]), tuple(sequences[best].tolist())))
        left[(sequences == sequences[best]).sum(1) >= fraction * sequences.shape[1]] = math.inf
    return nearest


def choose_guesses(found: Sequence[Text], failed: Sequence[Scored], num_missing: int, fraction: float) -> list[Text]:
    """The nearest that failed, unlike every text that was found and unlike one another."""
    guesses: list[Text] = []
    for distance, text in sorted(failed):
        if len(guesses) >= num_missing:
            break
        if not any(_alike(text, other, fraction) for other in (*found, *guesses)):
            guesses.append(_longest(text, _ABOUT_AS_NEAR * distance, failed))
    return guesses


def _longest(start: Text, within: float, failed: Sequence[Scored]) -> Text:
    """The longest that begins with `start` and is within a distance."""
    return max((text for distance, text in failed if distance <= within and text[: len(start)] == start), key=len)


def _alike(text: Text, other: Text, fraction: float) -> bool:
    return sum(a == b for a, b in zip(text, other, strict=False)) >= fraction * min(len(text), len(other))
