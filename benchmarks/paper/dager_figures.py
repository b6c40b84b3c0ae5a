"""Figures 2 to 4 of DAGER's paper as points that can be measured.

    fig2   tokens that pass Algorithm 1 at the first position, and those that pass block 1 too, against the tolerance
           (GPT-2, SST-2, 32 texts)
    fig3   ROUGE against the tokens in a batch around the width, for several rank margins (GPT-2, 4 long texts)
    fig4   texts found and seconds against the length, DAGER with and without its heuristics (encoder, 4 texts)
    long   one text of 512 tokens

Figure 3, Figure 4 and the long text are on ECHR in the paper, whose texts are not here: sentences of SST-2 are joined
to the length, and DAGER has the settings that its authors use for ECHR. The heuristics of Figure 4 are, in our version,
what the number of texts gives: nearest tokens kept, best effort.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch

import torch
from baselines.dager_sweep import authors_settings
from machine import machine
from paper.dager_batches import (
    MAX_PRODUCTS,
    Attack,
    Workshop,
    attack_and_compare,
    dager_parameters,
    make_attack,
    observe,
    stopwatch,
)
from paper.dager_cells import Cell
from paper.dager_models import Subject, Tokens
from result_lines import Result
from text_sets import draw_batch

from unmask.attacks.baselines.dager import Dager
from unmask.attacks.baselines.dager_spans import query_layers, span_distance, take_spans

TOLERANCES = tuple(10.0**power for power in range(-7, 1))
MARGINS = (5, 20, 50)
LONG_LENGTHS = (150, 170, 185, 190, 200, 220)  # of 4 texts: 600 to 880 tokens, the width is 768
ENCODER_LENGTHS = (5, 6, 7, 8, 9, 10)  # with [CLS] and [SEP]
FEW_PRODUCTS = 100_000  # of Figure 4: what a core checks in a minute
TEXTS_OF_FIGURE_2 = 32
NUM_BATCHES = 2
SET = "sst2"


@dataclass(frozen=True)
class Point:
    """One measurement of a figure."""

    figure: str
    model: str
    texts: int
    length: int  # tokens of each text; 0: sentences as they are
    attack: str  # ours, dager, or dager with a margin or without heuristics
    batch: int
    seed: int
    data_sha256: str
    settings: str

    @property
    def name(self) -> str:
        """What --cells matches."""
        return f"{self.figure}/{self.model}/{self.length}/{self.attack}"

    @property
    def key(self) -> str:
        """A hash of the point."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def choose_points(
    patterns: Sequence[str], device: str, num_batches: int, seed: int, digests: Mapping[str, str]
) -> list[Point]:
    """Points that match a pattern (all if there is none); on a processor core those that take minutes."""
    grid = [("fig2", "gpt2", TEXTS_OF_FIGURE_2, 0, "dager", f"tolerances={TOLERANCES}")]
    long_texts = ", ".join(f"{name}={value:g}" for name, value in authors_settings(4, long_texts=True).items())
    grid += [
        ("fig4", "minilm", 4, length, attack, f"max_products={FEW_PRODUCTS}, {long_texts}")
        for length in ENCODER_LENGTHS
        for attack in ("ours", "dager", "dager without heuristics")
    ]
    grid += [("long", "gpt2", 1, 512, "ours", ""), ("long", "gpt2", 1, 512, "dager", long_texts)]
    grid += [("fig3", "gpt2", 4, length, "ours", "") for length in LONG_LENGTHS]
    grid += [
        ("fig3", "gpt2", 4, length, f"dager, margin {margin}", f"max_products={MAX_PRODUCTS}")
        for length in LONG_LENGTHS
        for margin in MARGINS
    ]
    points = [
        Point(*entry[:5], batch, seed, digests[SET], entry[5])
        for batch in range(min(num_batches, NUM_BATCHES))
        for entry in grid
    ]
    return [
        point
        for point in points
        if (device != "cpu" or point.figure != "fig3")
        and (not patterns or any(fnmatch(point.name, pattern) for pattern in patterns))
    ]


def measure_point(workshop: Workshop, point: Point) -> Result:
    """One batch of a figure."""
    subject = workshop.subject(point.model, SET)
    examples = workshop.examples(point.model, SET)
    texts = draw_texts(subject, examples, point)
    model, labels = subject.model, [number % 2 for number in range(len(texts))]
    reads_all = point.attack == "ours"
    evidence = observe(model, texts, "classification", labels, None if reads_all else dager_parameters(model), 0)
    if point.figure == "fig2":
        return tokens_that_pass(subject, evidence, texts)
    if point.attack == "dager without heuristics":
        evidence = replace(evidence, num_texts=None)
    return attack_and_compare(attack_of(point, subject), evidence, subject, texts)


def attack_of(point: Point, subject: Subject) -> Attack:
    """DAGER with the point's setting, or ours."""
    if point.attack == "ours":
        return make_attack(Cell(point.model, SET, point.texts, "ours"), subject.model)
    theirs = Dager(**authors_settings(point.texts, long_texts=True), max_products=MAX_PRODUCTS)
    if point.figure == "fig3":
        return replace(theirs, rank_margin=int(point.attack.rpartition(" ")[2]))
    products = FEW_PRODUCTS if point.figure == "fig4" else MAX_PRODUCTS
    return replace(theirs, max_products=products, max_length=point.length + 2)


def draw_texts(subject: Subject, examples: Sequence[tuple[Tokens, int]], point: Point) -> list[Tokens]:
    """Sentences; where a length is asked for, joined and cut to it, with the frame at both ends."""
    if not point.length:
        return [tokens for tokens, _ in draw_batch(examples, SET, point.texts, point.batch, point.seed)]
    frame = subject.model.frame_tokens
    bare = [tokens[1:-1] if frame else tokens for tokens, _ in examples]
    shuffled = draw_batch(bare, SET, len(bare), point.batch, point.seed)
    stream = [token for tokens in shuffled for token in tokens]
    inner = point.length - 2 if frame else point.length
    pieces = [stream[inner * number : inner * (number + 1)] for number in range(point.texts)]
    return [[frame[0], *piece, frame[1]] for piece in pieces] if frame else pieces


@torch.no_grad()
def tokens_that_pass(subject: Subject, evidence: object, texts: Sequence[Tokens]) -> Result:
    """How many tokens of the vocabulary pass at the first position, and how many of them are first tokens."""
    model = subject.model
    with stopwatch() as times:
        layers = [layer for layer in query_layers(evidence, model) if layer is not None]
        theirs = Dager(**authors_settings(len(texts)))
        spans = take_spans(
            evidence, layers, rank_margin=theirs.rank_margin, rank_tolerance=theirs.rank_tolerance, seed=theirs.seed
        )
        tokens = torch.arange(model.vocab_size, device=model.device)
        rows = [model.first_input(part, torch.zeros_like(part)) for part in tokens.split(2**13)]
        first = torch.cat([span_distance(part, spans.first) for part in rows])
        states = [model.hidden_states(part[:, None], num_blocks=1)[-1] for part in tokens.split(2**13)]
        second = torch.cat([span_distance(model.attention_input(1, part), spans.second)[:, 0] for part in states])
    held = torch.zeros(model.vocab_size, dtype=torch.bool, device=model.device)
    held[[text[0] for text in texts]] = True
    return {
        "rank": spans.rank,
        "num_held": int(held.sum()),
        "tolerances": list(TOLERANCES),
        "pass_first": [int((first < tolerance).sum()) for tolerance in TOLERANCES],
        "pass_second": [int((second < tolerance).sum()) for tolerance in TOLERANCES],
        "found_first": [int((held & (first < tolerance)).sum()) for tolerance in TOLERANCES],
        "found_second": [int((held & (second < tolerance)).sum()) for tolerance in TOLERANCES],
        **times,
        "machine": machine(),
    }
