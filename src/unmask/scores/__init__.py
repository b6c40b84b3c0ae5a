"""The auditor's comparison of a recovery with the secret: texts, input matrices, weights.

Everything here sees the secret, so no attack may import it. A score is not a certificate: the adversary could
not compute it.
"""

from unmask.scores.inputs import InputScore, score_inputs
from unmask.scores.reading import edit_distance, is_near_exact, normalise_text
from unmask.scores.retrieval import neighbour_recall
from unmask.scores.tokens import TextScore, rouge_l, rouge_n, score_texts
from unmask.scores.weights import WeightScore, score_heads, score_up_to_linear_map

__all__ = [
    "InputScore",
    "TextScore",
    "WeightScore",
    "edit_distance",
    "is_near_exact",
    "neighbour_recall",
    "normalise_text",
    "rouge_l",
    "rouge_n",
    "score_heads",
    "score_inputs",
    "score_texts",
    "score_up_to_linear_map",
]
