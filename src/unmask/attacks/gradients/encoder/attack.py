"""Encoders: exact texts from the gradients of the first block, in polynomial time.

    tokens  ← embedding rows that moved, or all tokens in the span of block 0's query/key/value gradients
    shares  ← at which position each token's gradient arrives                              (`attention_shares.py`)
    texts   ← from an anchor, a token whose position is clear: weights on all places by Gauss–Newton (`relaxation.py`),
              rounded to a text, single tokens exchanged while that helps                         (`token_swaps.py`)
    accept  ← if every row of the text lies in the gradients' spans, in float64; its unique tokens are set aside

until the texts' rows are as many as the gradient's rank. After masked-token training, what was hidden is then read off
the gradient that arrives at the last block (`masked_tokens.py`).

Where noise or few digits blur the spans, the same search accepts what is as near as they leave it (`noisy_search.py`),
and nothing is certain but what the client, run again, confirms.

Deviation: DAGER (arXiv 2405.15586, Algorithm 3) enumerates products of token sets, which is exponential in the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_candidates
from unmask.attacks.gradients.bag_of_words.claim import claim_bag, claim_tokens, token_proof
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates, merge_equal
from unmask.attacks.gradients.decoder.endings import last_down_projection
from unmask.attacks.gradients.encoder.guesses import guess_found, guess_refused
from unmask.attacks.gradients.encoder.masked_tokens import Original, find_originals
from unmask.attacks.gradients.encoder.noisy_search import NoisySearch, correct_texts
from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem, is_full, set_up
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.attacks.gradients.noisy.attack import is_blurred
from unmask.attacks.gradients.stated_task import as_update_shows
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.proof.conclusions import NO_ORDER, Searched, conclude_texts
from unmask.proof.encoder_updates import EncoderProof
from unmask.proof.updates import is_coarse
from unmask.proof.verdicts import EncoderText, Ground
from unmask.recovery import RecoveredTexts, Recovery, Status

_MOST_UNDER_NOISE = 96  # equations a row: noise drowns the others


@dataclass(frozen=True)
class EncoderAttack:
    """Recover a batch from an encoder's update.

    `frame`: the tokens that open and close every text; the tokenizer's [CLS] and [SEP] if None.
    `num_equations`: equations a row; more is slower and needs fewer steps. `max_steps`: Gauss–Newton steps an anchor.
    `max_anchors`: the budget, in anchors tried; None for all. `effort`: how often the search is started with fresh
    random probes while texts are missing.
    """

    frame: tuple[int, int] | None = None
    num_probes: int = 32
    min_gap_decades: float = 1.0
    num_equations: int = 128
    max_steps: int = 8
    max_anchors: int | None = None
    effort: int = 1
    seed: int = 0

    @as_update_shows
    @torch.no_grad()
    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        run.progress("reading the bag of words", 0, 1)
        bag = find_candidates(evidence, model, self.num_probes, self.min_gap_decades, run.generator)
        if bag.candidates is None:
            return claim_bag(run, bag)
        if _is_blurred(evidence, model, bag):
            return self._read_noisy(run, evidence, model, bag)
        if bag.expected_false is not None:
            return claim_bag(run, bag)
        candidates, used = bag.candidates, bag.used
        search = self.find_texts(run, evidence, model, candidates)
        if isinstance(search, str) and _can_be_noisy(evidence) and is_full(evidence, model):
            return self._read_noisy(run, evidence, model, bag)  # noise fills spans before it hides tokens
        if isinstance(search, str):
            return claim_tokens(run, candidates, used, search)
        exact = self._claim(run, evidence, bag, search)
        if exact.status is Status.RECOVERED or not (_can_be_noisy(evidence) and is_blurred(evidence, model)):
            return exact
        noisy = self._read_noisy(run, evidence, model, bag)  # spans have room, but noise hides rows in them
        is_better = len(noisy.value.certain) > len(exact.value.certain) or noisy.status is Status.RECOVERED
        return noisy if is_better else exact

    def _claim(
        self, run: Run, evidence: GradientEvidence, bag: BagOfWords, search: EncoderSearch
    ) -> Recovery[RecoveredTexts]:
        """What a search without noise has found, once the client was run again on it."""
        assert bag.candidates is not None  # it was searched
        candidates, used, model = bag.candidates, bag.used, search.problem.model
        problem = search.problem
        if problem.drifts and len(search.found) != evidence.num_texts:
            correct_texts(run, evidence, search)
        originals = find_originals(evidence, problem, list(search.found))
        told = [last_down_projection(evidence, model)[1]] if isinstance(originals, dict) else []
        if not search.found:
            why = (
                "the budget ended before a text was found" if search.is_cut else "no text was found whose rows all fit"
            )
            return claim_tokens(run, candidates, used, why, guess_refused(evidence, search))
        run.progress("running the client again", 0, 1)
        texts = [_proposed(problem, text, originals) for text in search.found]
        proof = EncoderProof(evidence, model)
        options: dict[str, Any] = {
            "is_masked": isinstance(originals, dict),
            "why_masked": originals if isinstance(originals, str) else "",
        }
        verdict = proof.judge(texts, blurred=problem.is_noisy, **options)
        is_whole = _can_be_noisy(evidence) and len(search.found) == evidence.num_texts
        if verdict.ground is Ground.NONE and is_whole:  # a little noise leaves spans as they are
            verdict = proof.judge(texts, blurred=True, **options)
        replayed = sorted(evidence.gradients) if verdict.agreement is not None else []
        used = tuple(dict.fromkeys((*used, *problem.parameters, *told, *replayed)))
        return conclude_texts(verdict, model, _searched(run, evidence, search, candidates, used))

    def _read_noisy(
        self, run: Run, evidence: GradientEvidence, model: Model, bag: BagOfWords
    ) -> Recovery[RecoveredTexts]:
        """Texts of tokens that may be false or missing, near spans above noise; the client, run again, is the judge."""
        assert bag.candidates is not None  # it was looked at
        candidates = merge_equal(bag.candidates, model, told_apart=True)
        search = self.find_texts(run, evidence, model, candidates, noisy=True)
        if isinstance(search, str):
            return claim_bag(run, bag, why=search)
        correct_texts(run, evidence, search)
        run.progress("running the client again", 0, 1)
        proof = EncoderProof(evidence, model)
        texts = [_proposed(search.problem, text, None) for text in search.found]
        verdict = proof.judge(texts, blurred=search.problem.is_noisy)
        if not verdict.ground.is_whole:
            guesses = (*guess_found(evidence, search), *guess_refused(evidence, search))
            return claim_bag(run, bag, guesses, verdict.stopped or NO_ORDER)
        used = tuple(dict.fromkeys((*bag.used, *search.problem.parameters, *sorted(evidence.gradients))))
        recovery = conclude_texts(verdict, model, _searched(run, evidence, search, candidates, used))
        held = frozenset(token for text in recovery.value.texts if text.certain for token in text.tokens)
        return replace(recovery, value=replace(recovery.value, token_set=held))

    @torch.no_grad()
    def find_texts(
        self, run: Run, evidence: GradientEvidence, model: Model, candidates: Candidates, *, noisy: bool = False
    ) -> EncoderSearch | str:
        """The finished search for texts of some tokens, or why there was none."""
        problem = set_up(evidence, model, candidates, self.frame, noisy=noisy)
        if not isinstance(problem, Problem):
            return problem
        search = (NoisySearch if noisy else EncoderSearch)(
            run,
            problem,
            num_texts=evidence.num_texts,
            num_equations=min(self.num_equations, _MOST_UNDER_NOISE) if noisy else self.num_equations,
            max_steps=self.max_steps,
            max_anchors=self.max_anchors,
        )
        search.search(self.effort)
        return search


def _proposed(problem: Problem, text: Text, originals: Mapping[Text, Original] | str | None) -> EncoderText:
    """A text of places as it is handed to the proof."""
    kinds = tuple(problem.places.kind[list(text)].tolist())
    types = kinds if any(kinds) else None
    tokens = problem.places.tokens_of(text)
    if not isinstance(originals, Mapping):
        return EncoderText(tokens, types)
    read = originals[text]
    return EncoderText(tokens, types, read.tokens, read.count, read.num_labels, read.residual)


def _searched(
    run: Run, evidence: GradientEvidence, search: EncoderSearch, candidates: Candidates, used: tuple[str, ...]
) -> Searched:
    return Searched(
        run.cost(candidates=candidates.num_tested + len(search.refused) + len(search.found)),
        used,
        token_proof(candidates),
        {
            "rank": float(search.problem.rank),
            "explained_rank": float(search.num_rows),
            "gap_decades": Gap(max(search.found.values(), default=0.0), search.nearest_refused).decades,
            "token_gap_decades": candidates.gap.decades,
        },
        guess_refused(evidence, search),
        is_cut=search.is_cut,
    )


def _is_blurred(evidence: GradientEvidence, model: Model, bag: BagOfWords) -> bool:
    """Whether noise or few digits blur a gradient whose texts a replay could confirm."""
    return _can_be_noisy(evidence) and (is_coarse(evidence, model) or bag.expected_false is not None)


def _can_be_noisy(evidence: GradientEvidence) -> bool:
    """Whether the search under noise takes such an update: a gradient of one label for each text."""
    return evidence.task is not Task.MASKED_TOKEN and evidence.update is Update.GRADIENT and not evidence.adapters
