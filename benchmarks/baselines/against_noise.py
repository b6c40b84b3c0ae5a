"""Gaussian noise on the update: what DAGER reads with its authors' settings and tuned by the truth, and what ours does.

The authors' own variant for noise, of decoders alone (appendix C.4 of the NeurIPS version), is not in here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from baselines.dager_sweep import RANK_TOLERANCES, DagerSweep, authors_settings
from torch import Tensor

import unmask
from unmask.attacks.baselines.dager import Dager
from unmask.attacks.baselines.dager_spans import query_layers, span_distance, take_spans
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.recovery import RecoveredTexts, Recovery

TOKEN_TOLERANCES = tuple(10 ** (-5 + step / 4) for step in range(19))  # 1e-5 … 0.3
SEQUENCE_TOLERANCES = (1e-3, 1e-1)  # the nearest are returned whatever τ₂ is, so it matters little
MAX_PRODUCTS = 20_000  # for each length; four texts of 8 tokens have 4,096 once their [CLS] is known
Row = dict[str, Any]


def noise_rows(
    model: Model,
    evidence: GradientEvidence,
    texts: Sequence[Sequence[int]],
    sigmas: Sequence[float],
    own: Sequence[str],
) -> Iterator[Row]:
    """A row for each level of noise."""
    for sigma in sigmas:
        started = time.perf_counter()
        noisy = evidence
        if sigma:
            noisy = parse_defence(f"noise:sigma={sigma}")(evidence, torch.Generator().manual_seed(0))
        ours = {
            "DAGER's own tensors": told(unmask.recover_text(noisy.only(*own), model), texts),
            "whole update": told(unmask.recover_text(noisy, model), texts),
        }
        yield {
            "cell": f"noise, σ = {sigma:g}",
            "setting": "DAGER, MiniLM",
            "sigma": sigma,
            "texts": len(texts),
            "authors": told(Dager(**authors_settings(len(texts)))(noisy, model), texts),
            "tuned": tuned(noisy, model, texts, sigma),
            "ours": ours,
            "seconds_spent": time.perf_counter() - started,
        }


def told(recovery: Recovery[RecoveredTexts], texts: Sequence[Sequence[int]]) -> Row:
    """Tokens and texts of a recovery against the batch."""
    tokens = set(recovery.value.token_set)
    held = {token for text in texts for token in text}
    return {
        **shares(tokens, held),
        "exact": (Counter(recovery.value.expand()) & Counter(map(tuple, texts))).total(),
        "status": recovery.status.name,
    }


def shares(found: set[int], held: set[int]) -> Row:
    """Recall, and precision where something was found."""
    right = len(found & held)
    return {"recall": right / len(held), "precision": right / len(found) if found else None}


def tuned(evidence: GradientEvidence, model: Model, texts: Sequence[Sequence[int]], sigma: float) -> Row:
    """DAGER at the rank tolerance, cut and τ₁ whose token sets have the best F1, and the most exact texts of those.

    Distances are computed once for each span, so that τ₁ is swept finely. Among the rank tolerances are the largest
    singular value that noise of this level has, σ(√d + √m), and three times that: what an adversary who knows σ takes.
    It is also told how long the longest text is.
    """
    held = {token for text in texts for token in text}
    num_positions = max(map(len, texts))
    scored: list[tuple[float, Dager, Row]] = []
    edge = 2 * sigma * model.width**0.5
    sweep = DagerSweep(
        Dager(max_length=num_positions, max_products=MAX_PRODUCTS),
        rank_tolerances=(*RANK_TOLERANCES, edge, 3 * edge) if sigma else RANK_TOLERANCES,
        rank_margins=(20,),
    )
    attacks = sweep.settings(evidence, model)
    for attack, distances in zip(attacks, token_distances(evidence, model, attacks, num_positions), strict=True):
        for tolerance in TOKEN_TOLERANCES:
            row = shares(passing(distances, tolerance), held)
            f1 = 2 * row["recall"] * row["precision"] / (row["recall"] + row["precision"]) if row["recall"] else 0.0
            scored.append((f1, replace(attack, token_tolerance=tolerance), row))
    f1, chosen, row = max(scored, key=lambda one: one[0])
    exact = 0
    for tolerance in SEQUENCE_TOLERANCES if f1 else ():
        if exact < len(texts):
            found = told(replace(chosen, sequence_tolerance=tolerance)(evidence, model), texts)
            exact = max(exact, found["exact"])
    return {
        **row,
        "exact": exact,
        **{name: getattr(chosen, name) for name in ("rank_tolerance", "rank_margin", "token_tolerance")},
    }


@torch.no_grad()
def token_distances(
    evidence: GradientEvidence, model: Model, attacks: Sequence[Dager], num_positions: int
) -> list[Tensor]:
    """For each attack the distances (positions, vocabulary) of all tokens to its span of block 0, as in Algorithm 1."""
    layers = [layer for layer in query_layers(evidence, model) if layer is not None]
    bases = [
        take_spans(
            evidence, layers, rank_margin=one.rank_margin, rank_tolerance=one.rank_tolerance, seed=one.seed
        ).first
        for one in attacks
    ]
    distances: list[list[Tensor]] = [[] for _ in attacks]
    everyone = torch.arange(model.vocab_size)
    for position in range(num_positions):
        rows = model.first_input(everyone, torch.full_like(everyone, position))
        for held, basis in zip(distances, bases, strict=True):
            held.append(span_distance(rows, basis))
    return [torch.stack(held) for held in distances]


def passing(distances: Tensor, tolerance: float) -> set[int]:
    """Tokens within τ₁ at some position before the first at which none is."""
    found: set[int] = set()
    for at_position in distances:
        here = (at_position < tolerance).nonzero().flatten().tolist()
        if not here:
            break
        found.update(here)
    return found
