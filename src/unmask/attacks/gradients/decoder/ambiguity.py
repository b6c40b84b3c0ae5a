"""What an update leaves open about a decoder's text, as classes of texts that explain it equally well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unmask.attacks.gradients.bag_of_words.token_filter import EQUAL
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.decoder.prefix_search import Node
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.progress import track
from unmask.recovery import Ambiguity, AmbiguityKind, run_length

_SAME_ROWS = 5e-2  # later rows that differ by less do not tell how long a run is


def why_end_is_skipped(evidence: GradientEvidence, model: Model) -> str:
    """Why a classified text may end in padding tokens of its own; empty where the client's head is stated.

    transformers' classifiers may have sent the update though the model was loaded without one.
    """
    is_stated = model.classifier is None and (evidence.head is not None or evidence.pooling == "mean")
    if is_stated or model.unread_end is None:
        return ""
    return (
        f"a classifier of transformers takes token {model.unread_end} at the end of a text for padding and does not "
        "read it"
    )


@dataclass(frozen=True)
class EqualTokens:
    """Classes of tokens that no forward pass tells apart, and which member the labels name where they do.

    `by_input`: a token that stands for several, with all of them; `names`: labels read for the last token of a prefix.
    """

    model: Model
    by_input: Mapping[int, tuple[int, ...]]
    names: Mapping[Node, frozenset[int]]
    by_output: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        model: Model,
        by_input: Mapping[int, tuple[int, ...]],
        names: Mapping[Node, frozenset[int]],
        endings: Sequence[TextEnding],
    ) -> EqualTokens:
        """Compare the output rows of every label that may be alone in naming a token."""
        output = model.unembedding
        asked = {ending.node[1][-1] for ending in endings}.union(*by_input.values())
        by_output = {} if output is None else near_rows(output.detach(), sorted(asked), EQUAL)
        return cls(model, by_input, names, by_output)

    def resolve(self, ending: TextEnding, labelled: bool) -> tuple[tuple[int, ...], list[Ambiguity]]:
        """The text's tokens with those that labels name, and a class for each that nothing names."""
        start, tokens = ending.node
        found = list(tokens)
        classes: list[Ambiguity] = []
        for place, token in enumerate(tokens):
            members = self.by_input.get(token, (token,))
            named = self.names.get((start, tokens[: place + 1]), frozenset()) & set(members)
            if labelled and place and len(named) == 1:
                found[place] = next(iter(named))
                members = self.by_output.get(found[place], (found[place],))
                if place < len(tokens) - 1 and token in self.by_input:
                    members = tuple(member for member in members if member in self.by_input[token])
            elif labelled and place == len(tokens) - 1:
                members = tuple(sorted({*members, *self.by_output.get(token, ())}))
            if len(members) > 1:
                classes.append(_equal_tokens(self.model, place, members))
        return tuple(found), classes


def equal_tokens(model: Model, tokens: Sequence[int], equal: Mapping[int, tuple[int, ...]]) -> list[Ambiguity]:
    """A class for every token of a text that stands for several."""
    members = {member: others for others in equal.values() for member in others}
    return [_equal_tokens(model, place, members[token]) for place, token in enumerate(tokens) if token in members]


def _equal_tokens(model: Model, place: int, members: Sequence[int]) -> Ambiguity:
    words = ", ".join(repr(model.decode([member])) for member in members)
    reason = f"token {place + 1} is one of {words}: their embeddings are equal, and nothing in the update shows which"
    return Ambiguity(AmbiguityKind.EQUAL_TOKENS, reason, place, tuple(members))


def leading_run(token: int) -> Ambiguity:
    """How often the first token is repeated."""
    reason = "the first token may be repeated at the start: a model with relative positions does not show how often"
    return Ambiguity(AmbiguityKind.LEADING_RUN, reason, 0, (token,))


def open_end(why: str) -> Ambiguity:
    """The text may go on."""
    return Ambiguity(AmbiguityKind.OPEN_END, f"the text may continue after its last token: {why}")


# Why a text's count is open where the number of texts was not stated: the loss is a mean.
COUNT_IS_UNSTATED = "one copy and ten copies look identical here; pass `--num-texts`"


def open_count(why: str) -> Ambiguity:
    """How often the text occurs."""
    return Ambiguity(AmbiguityKind.COUNT, f"it may occur more often: {why}")


def counts_by_means(counts: Sequence[int], num_labels: Sequence[int], num_texts: int) -> list[int] | None:
    """Counts that send the same update if the loss is a mean of each text's own mean; None if none are `num_texts`.

    There a text of n labels weighs n times less on each than it does in a mean over all labels.
    """
    weights = [count * labels for count, labels in zip(counts, num_labels, strict=True)]
    shares = [num_texts * weight for weight in weights]
    total = sum(weights)
    return None if not total or any(share % total for share in shares) else [share // total for share in shares]


@torch.no_grad()
def texts_of_any_run(model: Model, endings: Sequence[TextEnding], labelled: bool) -> frozenset[Node]:
    """Texts whose rows hardly change when their first token is repeated once more, or once less.

    Labels count the repetitions of all texts together, so with labels only the runs of texts that share a first token
    with a run can be traded. A text of one repeated token has no later rows, and a mean loss has no length: nothing
    tells it.
    """
    if model.learned_positions:
        return frozenset()
    runs = {ending.node: run_length(ending.node[1]) for ending in endings}
    firsts = Counter(ending.node[1][0] for ending in endings for _ in range(ending.count))
    risky = {
        node[1][0]
        for node, run in runs.items()
        if not labelled or run == len(node[1]) or (run > 1 and firsts[node[1][0]] > 1)
    }
    return frozenset(
        node
        for node, run in track(list(runs.items()), "comparing repetitions")
        if node[1][0] in risky and _is_any_run(model, node[1], run, labelled)
    )


def _is_any_run(model: Model, tokens: tuple[int, ...], run: int, labelled: bool) -> bool:
    inputs = tokens[:-1] if labelled else tokens  # the last token of a next-token text has no row
    rest = inputs[run:]
    if not rest or len(inputs) + 1 > model.max_positions or model.problem_at(len(inputs) + 1):
        return True
    own = _last_states(model, inputs)[run:]
    lengths = [run + 1] if run == 1 else [run + 1, run - 1]
    for length in lengths:
        other = _last_states(model, (*(tokens[:1] * length), *rest))[length:]
        if float(((own - other).norm(dim=1) / own.norm(dim=1)).max()) < _SAME_ROWS:
            return True
    return False


def _last_states(model: Model, tokens: tuple[int, ...]) -> torch.Tensor:
    return model.hidden_states(torch.tensor([tokens], device=model.device))[-1][0].double()
