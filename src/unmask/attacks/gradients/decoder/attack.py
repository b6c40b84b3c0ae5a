"""Decoders: exact texts from the gradients of the first block and the last one.

    tokens   ← embedding rows that moved, or all tokens in the span of block 0's query/key/value gradients; where that
               span is full, tokens with long rows (`long_rows.py`)
    prefixes ← grown token by token at the cheapest layer whose gradient the update holds
    texts    ← where prefixes end, their last token and how often they occur, from the last block

Up to d distinct prefixes the test is exact from the start; beyond, the span of a wider layer is completed first
(`beyond_width.py`). Updates with few digits, noise or local steps are left to `noisy/attack.py`.
Source: DAGER, arXiv 2405.15586, with the deviations that each module states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unmask.attacks.claims import guess_texts
from unmask.attacks.gradients.bag_of_words.candidates import find_exact_tokens
from unmask.attacks.gradients.bag_of_words.claim import claim_tokens, token_proof
from unmask.attacks.gradients.bag_of_words.long_rows import find_long_rows
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.beyond_width import CompletedSpan, complete, wide_site
from unmask.attacks.gradients.decoder.endings import (
    EndingsRead,
    TextEnding,
    endings_at_leaves,
    endings_of_classification,
    endings_of_next_token,
)
from unmask.attacks.gradients.decoder.last_block_rows import last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest, Node, PrefixSearch
from unmask.attacks.gradients.noisy.attack import NoisyAttack, is_blurred
from unmask.attacks.gradients.sites import SpanSite, prefix_sites
from unmask.attacks.gradients.stated_task import as_update_shows
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.proof.arrivals import highest_layer
from unmask.proof.conclusions import Searched, conclude_texts
from unmask.proof.label_flow import label_layer
from unmask.proof.replay import run_forward
from unmask.proof.sketched_replay import SketchedClient
from unmask.proof.updates import UpdateProof, is_coarse
from unmask.proof.verdicts import ProposedText
from unmask.recovery import RecoveredTexts, Recovery, Status

_TYPICAL_LENGTH = 16  # tokens a text, to guess how many texts a batch holds when nobody says


@dataclass(frozen=True)
class DecoderAttack:
    """Recover a batch from a causal model's update.

    `min_gap_decades`: how clearly zero distances must stand apart from all others before anything is called certain.
    `memory_budget_bytes`: the size of the largest temporary; more is faster.
    """

    num_probes: int = 32
    min_gap_decades: float = 1.0
    memory_budget_bytes: int = 2**30
    seed: int = 0

    @as_update_shows
    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        progress("reading the bag of words", 0, 1)
        bag = find_exact_tokens(evidence, model, self.num_probes, self.min_gap_decades, run.generator)
        exact: Recovery[RecoveredTexts] | None = None
        if bag.candidates is not None:
            exact = self._read_exactly(run, evidence, model, bag.candidates, bag.used)
        elif bag.status is Status.NOT_IDENTIFIABLE:
            exact = self._read_long_rows(run, evidence, model)
        if exact is not None and (exact.status is Status.RECOVERED or not is_blurred(evidence, model)):
            return exact
        noisy = NoisyAttack(self.num_probes, self.min_gap_decades, self.memory_budget_bytes, self.seed)
        found = noisy.read_texts(run, evidence, model, bag)
        says_why = any(search.stopped for search in found.searches) and exact is not None and not exact.value.certain
        if exact is None or found.status is Status.RECOVERED or says_why:
            return found
        return found if _num_claimed(found) > _num_claimed(exact) else exact

    def _read_exactly(
        self, run: Run, evidence: GradientEvidence, model: Model, candidates: Candidates, used: tuple[str, ...]
    ) -> Recovery[RecoveredTexts]:
        """Texts by spans without noise, once the tokens of the batch are known."""
        progress = run.progress
        if model.problem:
            return claim_tokens(run, candidates, used, model.problem)
        proof = UpdateProof(evidence, model)
        working = proof.working
        found = self._search_sites(run, working, model, candidates)
        wide = None
        if found is None:
            wide = wide_site(working, model)
            completion = self._complete(run, wide, working, model, candidates)
            if completion.site is None:
                reason = _why_no_site(evidence, model)
                guesses = guess_texts(model, completion.hypotheses, evidence.num_texts)
                return claim_tokens(run, candidates, used, reason, guesses)
            found = completion.site, self._search(run, completion.site, model, candidates)
        site, forest = found
        if not forest.leaves:
            why = f"no prefix passed at the {site.name}"
            return claim_tokens(run, candidates, used, why)
        progress("reading endings", 0, 1)
        read = self._read_endings(proof, model, forest, candidates)
        progress("running the client again", 0, 1)
        proof.client = read.client
        chosen = _choose_reading(proof, read.read, candidates.equal)
        replayed = proof.replay(chosen)
        is_replayed = replayed is not None and replayed.agreement.holds
        if not is_replayed and (late := model.problem_at(forest.longest)):
            return claim_tokens(run, candidates, used, late)  # the client alone is run without the model's parts
        verdict = proof.judge(chosen, beside=_unread(forest.leaves, read.read.endings, proof.labelled))
        used = (*used, *site.parameters, *read.used)
        if verdict.agreement is not None:
            used = (*used, *sorted(evidence.gradients))
        searched = Searched(
            run.cost(
                candidates=candidates.num_tested + forest.num_tested,
                forward_passes=len(forest.leaves) + verdict.num_passes,
            ),
            tuple(dict.fromkeys(used)),
            token_proof(candidates),
            {
                "rank": float(site.span.rank),
                "explained_rank": float(forest.num_rows(model)),
                "gap_decades": forest.gap.decades,
                "token_gap_decades": candidates.gap.decades,
                "noise_floor": site.span.noise_floor,
            },
        )
        return conclude_texts(verdict, model, searched)

    def _read_long_rows(self, run: Run, evidence: GradientEvidence, model: Model) -> Recovery[RecoveredTexts] | None:
        """Texts of tokens that are guessed by their rows: whatever the replay does not confirm is dropped."""
        candidates = None if is_coarse(evidence, model) else find_long_rows(evidence, model)
        if candidates is None:
            return None
        found = self._read_exactly(run, evidence, model, candidates, (model.token_embedding,))
        return found if found.status is Status.RECOVERED else None

    def _search_sites(
        self, run: Run, evidence: GradientEvidence, model: Model, candidates: Candidates
    ) -> tuple[SpanSite, Forest] | None:
        """The first site whose search separates; else the last one tried; None if every span is full."""
        found = None
        for site in prefix_sites(evidence, model):
            if not site.span.is_saturated:
                found = site, self._search(run, site, model, candidates)
                if found[1].leaves and found[1].is_clear(self.min_gap_decades):
                    break
        return found

    def _search(self, run: Run, site: SpanSite, model: Model, candidates: Candidates) -> Forest:
        return PrefixSearch(run, model, site, candidates, self.num_probes, self.memory_budget_bytes).search()

    def _complete(
        self, run: Run, wide: SpanSite | None, evidence: GradientEvidence, model: Model, candidates: Candidates
    ) -> CompletedSpan:
        """More tokens than the width: a wider layer, its span completed by prefixes that verify each other."""
        if wide is None:
            return CompletedSpan(None)
        num_texts = evidence.num_texts or max(1, wide.span.rank // _TYPICAL_LENGTH)
        return complete(run, wide, model, candidates, num_texts, self.memory_budget_bytes)

    def _read_endings(self, proof: UpdateProof, model: Model, forest: Forest, candidates: Candidates) -> _TextsRead:
        """Texts with their last tokens; one for each leaf where the update does not hold what tells."""
        evidence, leaves = proof.working, EndingsRead(endings_at_leaves(model, forest.leaves))
        if not forest.is_clear(self.min_gap_decades):
            return _TextsRead(leaves)
        if not proof.labelled:
            nodes, arrivals, _ = proof.arrivals_at(forest.leaves)
            top = highest_layer(evidence, model)
            ends = None
            if arrivals is not None and top is not None and top.is_last(model):
                ends = endings_of_classification(model, nodes, arrivals.sizes, evidence.pooling)
            used = () if arrivals is None else (arrivals.parameter,)
            return _TextsRead(leaves if ends is None else EndingsRead(ends), used)
        # What weights moved by in several steps is no gradient at the weights that the rows are of.
        role = None if evidence.update is Update.DELTA else label_layer(evidence, model)
        gradient = None if role is None else evidence.linear(model, role, model.num_blocks - 1)
        if role is None or gradient is None or len(forest.nodes) > gradient.shape[0] or model.token_head is None:
            return _TextsRead(leaves)
        layer = model.linear(role, model.num_blocks - 1).parameter  # type: ignore[union-attr]
        client = None if any(start for start, _ in forest.leaves) else run_forward(evidence, model, forest.texts)
        rows = last_block_rows(model, forest, self.memory_budget_bytes, role, client)
        reading = endings_of_next_token(model, rows, gradient, self.memory_budget_bytes, candidates.equal)
        return _TextsRead(reading, (layer,), client) if reading.endings else _TextsRead(leaves, (layer,))


@dataclass(frozen=True)
class _TextsRead:
    """Endings of texts, and the tensors that tell them.

    `client`: one that has run over the texts, but for their last tokens.
    """

    read: EndingsRead
    used: tuple[str, ...] = ()
    client: SketchedClient | None = None


def _choose_reading(proof: UpdateProof, read: EndingsRead, equal: Mapping[int, tuple[int, ...]]) -> list[ProposedText]:
    """The reading that the client agrees with, where labels can be read in several ways; else the plain one.

    A first token's run may seem a text of its own, and a last label of which the model is sure may not be there.
    """
    stated, endings = proof.evidence.num_texts, read.with_named(equal)
    if stated is not None and sum(ending.count for ending in endings) > stated and proof.evidence.num_clients == 1:
        merged = _with_inner_runs(proof.model, endings)
        endings = merged if sum(ending.count for ending in merged) == stated else endings
    texts = [ending.proposed for ending in endings]
    if not any(ending.is_traceless for ending in endings) or _agrees(proof, texts):
        return texts
    cut = [e.proposed if not e.is_traceless else replace(e.proposed, tokens=e.node[1][:-1]) for e in endings]
    cut = [text for text in cut if len(text.tokens) > 1]
    return cut if cut and _agrees(proof, cut) else texts


def _unread(leaves: Sequence[Node], endings: Sequence[TextEnding], labelled: bool) -> list[Node]:
    """Leaves whose rows are in no text: the last token of a text is only a label where tokens are predicted."""
    inputs = [(start, tokens[: len(tokens) - labelled]) for start, tokens in (ending.node for ending in endings)]
    return [
        (start, tokens)
        for start, tokens in leaves
        if not any(start == other and tokens == given[: len(tokens)] for other, given in inputs)
    ]


def _agrees(proof: UpdateProof, texts: Sequence[ProposedText]) -> bool:
    replayed = proof.replay(texts)
    return replayed is not None and replayed.agreement.holds


def _with_inner_runs(model: Model, endings: Sequence[TextEnding]) -> list[TextEnding]:
    """Texts 't t' and 't x' as 't t x': where positions are relative they leave the same trace, and are one text less.

    Only where one text of each first token can take the run.
    """
    kept = list(endings)
    for pure in [ending for ending in endings if len(set(ending.node[1])) == 1 and not model.learned_positions]:
        start, tokens = pure.node
        others = [e for e in kept if e.node[:1] == (start,) and e.node[1][0] == tokens[0] and e is not pure]
        if len(others) == 1 and others[0].count == 1 and len(set(others[0].node[1])) > 1:
            run = tokens[1:] * pure.count
            longer = replace(others[0], node=(start, (*run, *others[0].node[1])))
            kept = [longer if ending is others[0] else ending for ending in kept if ending is not pure]
    return kept


def _num_claimed(recovery: Recovery[RecoveredTexts]) -> tuple[int, int]:
    """Certain texts, then those of which only a few points are open; a guess is none of them."""
    texts = recovery.value.texts
    return len(recovery.value.certain), sum(bool(text.ambiguities) and not text.certain for text in texts)


def _why_no_site(evidence: GradientEvidence, model: Model) -> str:
    sites = list(prefix_sites(evidence, model))
    if not sites:
        return (
            "the order of the tokens needs the gradient of block 0's output projection or MLP, or of block 1's "
            "attention, and the update holds none of them"
        )
    ranks = ", ".join(f"{site.name}: rank {site.span.rank} of {site.span.width}" for site in sites)
    why = "too many tokens for its width, or rounding and noise fill it"
    return f"every span that could check a prefix is full ({ranks}): {why}"
