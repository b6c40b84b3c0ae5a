"""The numbers that steer the search for an encoder's texts. None of them decides what is certain: the replay does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """Shares are of a token's gradient, costs relative to that of a random text.

    They were chosen on MiniLM and on random BERT models, with texts of 5 to 30 tokens. Wider nets cost time and find
    texts of rarer kinds; narrower ones are faster.
    """

    unique_share: float = 0.9  # from here on a token stands at one position only, and leaves the search with its text
    spread_share: float = 0.6  # a token whose largest share is below this may stand anywhere
    clear_anchor: float = 0.8  # the share of a place to start from, in the first pass
    least_share: float = 0.05  # of the prior: the least that a place starts from in the first pass; later all of it
    least_anchor: float = 0.02  # the same in later passes: every place that may hold a token
    num_output_probes: int = 64  # equations of the output projection; more is slower and tells more places apart
    fewest_equations: int = 48  # for the shortest lists of candidates
    num_whitening_rows: int = 8  # rows that set the scale of the probes
    num_random_texts: int = 8  # texts whose cost and distance say what wrong ones have
    promising_cost: float = 1e-2  # worth the test in float64
    zero_cost: float = 1e-4  # no other text is nearer; if it is refused, that is noise
    near_cost: float = 0.1  # most tokens are right, so swapping single ones is tried
    hopeless_cost: float = 0.2  # from here, swapping single tokens leads nowhere
    max_sweeps: int = 6  # over all positions, of swaps
    max_regroupings: int = 3  # times that anchors are taken together again
    max_anchors: int = 6  # taken together
    heavy_weight: float = 0.5  # a weight that speaks for a place
    wrong_distance: float = 0.1  # of wrong texts, where all random ones are right by chance
    right_distance: float = 1e-3  # of a wrong text's: below, a random text is right
    most_in_vain: int = 40  # anchors in a row that lead to no new text
    most_in_vain_at_first: int = 16  # the same before any text is found
    drift_distance: float = 5e-3  # what local steps leave of a zero distance; only a replay makes such a text certain
    noisy_distance: float = 2.0  # the same of noise and few digits, in what they leave of a row of the batch
    alike: float = 0.6  # of two texts' places: they are one text, nearly right twice
    max_noisy_sweeps: int = 2  # over all positions, by all layers
    max_noisy_attempts: int = 4  # descents from an anchor, each from the best rows of the text before
    noisy_patience: int = 4  # anchors in a row that lead to no new text, where drafts may be corrected instead
    noisy_share: float = 0.02  # of a token's largest share: places with less are left out at first
    max_noisy_rows: int = 16  # of a descent: what noise blurs in one row, others tell
    noisy_progress: float = 0.95  # of the cost before: an attempt that leaves more is the last
    patience: int = 3  # anchors of the last text that fail before all are taken together
