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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unmask.attacks.claims import guess_texts
from unmask.attacks.gradients.bag_of_words.candidates import find_exact_tokens
from unmask.attacks.gradients.bag_of_words.claim import claim_tokens
from unmask.attacks.gradients.bag_of_words.long_rows import find_long_rows
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.beyond_width import CompletedSpan, complete, dependencies, wide_site
from unmask.attacks.gradients.decoder.claim import SearchResult, claim_texts
from unmask.attacks.gradients.decoder.confirm import (
    Proof,
    arrivals_of,
    confirm_classification,
    confirm_next_token,
    is_coarse,
)
from unmask.attacks.gradients.decoder.endings import (
    TextEnding,
    endings_at_leaves,
    endings_of_classification,
    endings_of_next_token,
    telling_layer,
)
from unmask.attacks.gradients.decoder.last_block_rows import last_block_rows, site_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest, Node, PrefixSearch, is_repetition
from unmask.attacks.gradients.noisy.attack import NoisyAttack, is_blurred
from unmask.attacks.gradients.sites import SpanSite, prefix_sites
from unmask.attacks.gradients.stated_task import as_update_shows
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.evidence.tensor_files import StoredTensors
from unmask.models.adapter import Model
from unmask.proof.arrivals import Arrivals, highest_layer
from unmask.proof.replay import run_forward
from unmask.proof.sketched_replay import SketchedClient
from unmask.recovery import RecoveredTexts, Recovery, Status

_FAR = 0.1  # relative distance that only a wrong row has
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
        working = as_gradient(evidence)
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
        read = self._read_endings(working, model, forest, candidates)
        progress("running the client again", 0, 1)
        if read.labelled and read.has_ends:
            confirmation = confirm_next_token(
                evidence, working, model, forest, read.endings, candidates.equal, read.client
            )
        else:
            confirmation = confirm_classification(working, model, forest, read.endings, read.arrivals)
        if confirmation.proof is not Proof.CLIENT and (late := model.problem_at(forest.longest)):
            return claim_tokens(run, candidates, used, late)  # the client alone is run without the model's parts
        doubtful = self._find_missed_branches(model, site, forest, confirmation.endings)
        doubtful |= frozenset() if wide is None else self._find_unverified(model, forest, wide)
        used = (*used, *site.parameters, *read.used)
        if confirmation.agreement is not None:
            used = (*used, *sorted(evidence.gradients))
        findings = SearchResult(
            model=model,
            candidates=candidates,
            site=site.name,
            rank=site.span.rank,
            noise_floor=site.span.noise_floor,
            forest=forest,
            confirmation=confirmation,
            used=tuple(dict.fromkeys(used)),
            min_gap_decades=self.min_gap_decades,
            labelled=read.labelled,
            has_ends=read.has_ends,
            has_masked_labels=read.has_masked_labels,
            reads_inside=read.reads_inside,
            names=read.names,
            doubtful=doubtful,
        )
        return claim_texts(run, evidence, findings)

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

    def _find_missed_branches(
        self, model: Model, site: SpanSite, forest: Forest, endings: list[TextEnding]
    ) -> frozenset[Node]:
        """Endings whose last token is no prefix of the search, but has a row in the span: a branch that was missed."""
        beyond = [ending.node for ending in endings if ending.node not in forest.nodes]
        if not beyond:
            return frozenset()
        nodes, rows = site_rows(model, beyond, site.rows, self.memory_budget_bytes)
        distances = dict(zip(nodes, site.span.distance(rows).tolist(), strict=True))
        return frozenset(
            node for node in beyond if distances[node] <= forest.gap.threshold and not is_repetition(model, node)
        )

    def _complete(
        self, run: Run, wide: SpanSite | None, evidence: GradientEvidence, model: Model, candidates: Candidates
    ) -> CompletedSpan:
        """More tokens than the width: a wider layer, its span completed by prefixes that verify each other."""
        if wide is None:
            return CompletedSpan(None)
        num_texts = evidence.num_texts or max(1, wide.span.rank // _TYPICAL_LENGTH)
        return complete(run, wide, model, candidates, num_texts, self.memory_budget_bytes)

    def _find_unverified(self, model: Model, forest: Forest, wide: SpanSite) -> frozenset[Node]:
        """Prefixes of the final result that take part in no dependency with the others."""
        nodes, rows = site_rows(model, forest.leaves, wide.rows, self.memory_budget_bytes)
        own = [index for index, node in enumerate(nodes) if not is_repetition(model, node)]
        verified = dependencies(rows[own], wide.span).verified
        return frozenset(nodes[index] for index, holds in zip(own, verified.tolist(), strict=True) if not holds)

    def _read_endings(
        self,
        evidence: GradientEvidence,
        model: Model,
        forest: Forest,
        candidates: Candidates,
    ) -> _TextsRead:
        """Texts with their last tokens; one for each leaf where the update does not hold what tells."""
        labelled = evidence.task is not Task.CLASSIFICATION and model.unembedding is not None
        leaves = endings_at_leaves(model, forest.leaves)
        if not forest.is_clear(self.min_gap_decades):
            return _TextsRead(leaves, labelled, has_ends=False)
        if not labelled:
            nodes, arrivals = arrivals_of(evidence, model, forest, candidates.equal)
            top = highest_layer(evidence, model)
            ends = None
            if arrivals is not None and top is not None and top.is_last(model):
                ends = endings_of_classification(model, nodes, arrivals.sizes, evidence.pooling)
            used = () if arrivals is None else (arrivals.parameter,)
            known = ends is not None or evidence.num_texts == len(forest.leaves)  # then every text ends at a leaf
            is_seen = arrivals is not None and top is not None and top.is_last(model)
            inside = is_seen and ends is None and evidence.pooling is None
            ends = leaves if ends is None else ends
            return _TextsRead(ends, False, known, reads_inside=inside, arrivals=arrivals, used=used)
        # What weights moved by in several steps is no gradient at the weights that the rows are of.
        role = None if evidence.update is Update.DELTA else telling_layer(evidence, model)
        gradient = None if role is None else evidence.linear(model, role, model.num_blocks - 1)
        if role is None or gradient is None or len(forest.nodes) > gradient.shape[0] or model.token_head is None:
            return _TextsRead(leaves, True, has_ends=False)
        layer = model.linear(role, model.num_blocks - 1).parameter  # type: ignore[union-attr]
        client = None if any(start for start, _ in forest.leaves) else run_forward(evidence, model, forest.texts)
        rows = last_block_rows(model, forest, self.memory_budget_bytes, role, client)
        reading = endings_of_next_token(model, rows, gradient, self.memory_budget_bytes, candidates.equal)
        if not reading.endings:
            return _TextsRead(leaves, True, has_ends=False, used=(layer,))
        return _TextsRead(
            reading.endings, True, True, reading.has_masked_labels, names=reading.names, used=(layer,), client=client
        )


@dataclass(frozen=True)
class _TextsRead:
    """Endings of texts, and what tells or does not tell them."""

    endings: list[TextEnding]
    labelled: bool
    has_ends: bool
    has_masked_labels: bool = False
    reads_inside: bool = False  # the loss of a classification reads most tokens, and nobody said that it takes a mean
    names: Mapping[Node, frozenset[int]] = field(default_factory=dict)
    arrivals: Arrivals | None = None
    used: tuple[str, ...] = ()
    client: SketchedClient | None = None  # that has run over the texts, but for their last tokens


def _num_claimed(recovery: Recovery[RecoveredTexts]) -> tuple[int, int]:
    """Certain texts, then those of which only a few points are open; a guess is none of them."""
    texts = recovery.value.texts
    return len(recovery.value.certain), sum(bool(text.ambiguities) and not text.certain for text in texts)


def as_gradient(evidence: GradientEvidence) -> GradientEvidence:
    """One plain step of gradient descent as its gradient, −Δ/learning rate; everything else as it is.

    Where the learning rate is not known, the gradient is right up to a factor.
    """
    plain = evidence.optimizer in (None, "sgd") and not evidence.weight_decay and not evidence.momentum
    if evidence.update is not Update.DELTA or evidence.num_steps not in (None, 1) or not plain:
        return evidence
    rate = evidence.learning_rate or 1.0
    sent = evidence.gradients
    if isinstance(sent, StoredTensors):
        return replace(evidence, gradients=sent.divided_by(-rate), update=Update.GRADIENT)
    gradients = {name: delta / -rate for name, delta in sent.items()}
    return replace(evidence, gradients=gradients, update=Update.GRADIENT)


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
