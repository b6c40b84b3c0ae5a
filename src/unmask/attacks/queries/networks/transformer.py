"""A one-layer transformer: heads, and a two-layer ReLU network behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import AMPLIFICATION
from unmask.attacks.queries.fresh import check_lengths, fresh_sequences
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.networks.antisymmetric import antisymmetric, antisymmetric_evidence, is_even
from unmask.attacks.queries.networks.homogeneous import learn_scores
from unmask.attacks.queries.networks.kinks import TooManyKinks
from unmask.attacks.queries.networks.relu_learner import learn_network, measure_noise, polish
from unmask.attacks.queries.networks.relu_network import (
    ask_one_token,
    certify_network,
    input_scale,
    is_homogeneous,
    no_law,
    no_numbers,
    random_tokens,
)
from unmask.attacks.queries.networks.relu_regions import Asked
from unmask.attacks.queries.networks.routing import Routing
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence, Refused
from unmask.linalg.heads import HeadWeights
from unmask.linalg.relu import ReluNetwork
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

LearnHeads = Callable[[OracleEvidence, Progress], Recovery[HeadWeights]]

_NUM_DIRECTIONS = 8
_NUM_PAIRS = 24
_LONG_ENOUGH = 1e-2  # ε·R² for the longest R: what homogeneity neglects, 1/R², is then a hundred roundings
_LOOSEST = 1e-2  # of an answer: as in `claims.certify`


@dataclass(frozen=True, eq=False)
class TransformerWeights:
    """f(X) = φ(z_1, …, z_H),  z_h = Σ_i softmax_i(x_iᵀ W_h x_n)·x_i; value matrices are in φ.

    `network`, φ, is None where only W is known; what is not known of W is NaN.
    """

    W: Float[Tensor, "h d d"]
    network: ReluNetwork | None

    def __len__(self) -> int:
        """The number of heads."""
        return len(self.W)

    def __call__(self, X: Float[Tensor, "b n d"]) -> Float[Tensor, " b"]:
        """f of a batch of sequences."""
        if self.network is None:
            raise InputError("the network behind the heads is not known, so nothing can be computed; only W is")
        X = X.to(self.W)
        scores = torch.einsum("bnd,hde,be->bhn", X, self.W, X[:, -1])
        return self.network(torch.einsum("bhn,bnd->bhd", scores.softmax(dim=2), X).flatten(1))


@dataclass(frozen=True)
class TransformerAttack:
    """Recover W and φ of f(X) = φ(attention(X)), φ a two-layer ReLU network without biases.

    One head: W by homogeneity (`homogeneous.py`), or from g(X) = f(X) − f(−X) where token norms are bounded; then φ
    from sequences of one token. With `many_heads`: every W_h from g by the learner for heads, then φ on R^(H·d) by
    routing (`routing.py`).

    `polish`, `max_neurons` as for `ReluNetworkAttack`; `learn_heads`: None for `MultiHeadAttack`.

    Limits: one head needs φ ≠ 0 only, and W is known even if φ cannot be learned (PARTIAL). Many heads need a linear
    part of φ that each head's values see, and H² ≤ d. Biases in φ are refused.
    Cost: d² + 2·d queries for one W, 2·H·(d² + d)·1.1 for many; φ: 1.0 to 2.5 for each of its m·H·d weights.
    Source: arXiv 2601.16873, §4.1. The homogeneity, routing and the learner for φ are ours.
    """

    many_heads: bool = False
    polish: bool = False
    max_neurons: int = 4096
    seed: int = 0
    learn_heads: LearnHeads | None = None

    def __call__(
        self, evidence: OracleEvidence, progress: Progress = silent, profile: OracleProfile | None = None
    ) -> Recovery[TransformerWeights]:
        """Run the attack; the evidence's ledger remembers every answer. `profile`, if the oracle was probed before."""
        run = QueryRun(self.seed, progress, evidence=evidence)
        try:
            why_not = _why_not(evidence, run.probe(profile), run.generator)
            run.num_probing = run.num_asked
            if why_not is not None:
                return _refuse(run, *why_not)
            found = self._heads(run)
            return found if isinstance(found, Recovery) else self._with_network(run, found)
        except BudgetSpent as spent:
            return _refuse(run, Status.BUDGET_EXHAUSTED, f"{spent}, before any column of W was known.")
        except Refused as seen:
            return _refuse(run, Status.NOT_APPLICABLE, f"Tokens as long as are needed are refused: {seen}")

    def _heads(self, run: QueryRun) -> HeadsFound | Recovery[TransformerWeights]:
        """Every W, and how φ is asked once they are known; or why there is none."""
        profile = run.profile
        if self.many_heads:
            return self._many_heads(run)
        if profile.max_norm**2 * profile.precision >= _LONG_ENOUGH:
            return _one_head(run)
        found = antisymmetric(run.evidence, self.seed, run.progress)
        if found.status.conclusive:
            asked = ask_one_token(run.evidence, input_scale(profile))
            return HeadsFound(found.value.W, asked, found.certificate, "W of one head from f(X) − f(−X)")
        why = f"Tokens are not answered beyond a norm of {profile.max_norm:.3g}, and so: {found.reason}"
        return _refuse(run, found.status, why, found.value.W)

    def _many_heads(self, run: QueryRun) -> HeadsFound | Recovery[TransformerWeights]:
        evidence, precision = run.evidence, run.profile.precision
        if is_even(evidence, precision, run.generator):
            why = "The oracle answers to −x as to x: the network's linear part is 0, through which heads are seen."
            return _refuse(run, Status.NOT_IDENTIFIABLE, why)
        heads = (self.learn_heads or MultiHeadAttack(seed=self.seed))(antisymmetric_evidence(evidence), run.progress)
        W = heads.value.W
        if not heads.status.conclusive:
            return _refuse(run, heads.status, f"In f(X) − f(−X): {heads.reason}", W)
        found = HeadsFound(
            W, Routing(evidence, W, precision), heads.certificate, f"W of {len(W)} heads from f(X) − f(−X)"
        )
        if len(W) ** 2 > evidence.width:
            why = (
                f"{len(W)}² equations for {evidence.width} unknowns: single heads cannot be made to read single tokens"
            )
            return _partial(run, found, why)
        return found

    def _with_network(self, run: QueryRun, found: HeadsFound) -> Recovery[TransformerWeights]:
        """The recovery with φ; or with W alone, where φ cannot be had."""
        size = found.W.shape[0] * found.W.shape[1]
        if size == 1:
            return _partial(run, found, "one input has no circle around 0")
        run.progress("the network behind the heads", 0, 1)
        try:
            noise = measure_noise(found.asked, size, False, run.generator)
            why_not = no_law(noise)
            if why_not is not None:
                return _partial(run, found, why_not[1])
            learned = learn_network(found.asked, size, False, noise, self.max_neurons, run.generator)
            learned = polish(found.asked, learned, noise, run.generator) if self.polish else learned
            weights = TransformerWeights(found.W, learned.network.to(found.W))
            heads, longest = HeadWeights(found.W, found.W[:, 0]), min(run.profile.max_norm, 1e12)
            fresh = fresh_sequences(heads, 1.0, longest, run.generator)
            certificate = certify_network(run.evidence, weights, fresh, noise, learned.blur, AMPLIFICATION)
            lengths = check_lengths(run, weights, heads, 1.0, fresh, certificate) if certificate.holds else None
        except TooManyKinks as many:
            return _partial(run, found, f"there are {many}")
        except BudgetSpent as spent:
            return replace(_partial(run, found, str(spent)), status=Status.BUDGET_EXHAUSTED)
        num_neurons = len(learned.network)
        if lengths is None:
            off = f"with {num_neurons} neurons fresh sequences are off by {certificate.residual:.1e} of an answer"
            return _partial(run, found, f"{off}, where {certificate.tolerance:.1e} is explained")
        run.unknowns = found.W.numel() + learned.network.normals.numel() + size
        certificate, cost = run.charge(lengths.extend(certificate), len(fresh) + lengths.num_queries)
        reason = f"{found.what}; {num_neurons} neurons behind it, with the value matrices in them.{lengths.remark}"
        status = Status.RECOVERED if lengths.agree else Status.PARTIAL
        searches = searches_of(Aim.WEIGHTS, unconfirmed=not lengths.agree)
        return Recovery(weights, status, reason, certificate, cost, ("answers",), searches)


@dataclass(frozen=True, eq=False)
class HeadsFound:
    """Scores that are certain, whatever comes of the network, and how the network is asked through them."""

    W: Float[Tensor, "h d d"]
    asked: Asked
    certificate: Certificate
    what: str


def _one_head(run: QueryRun) -> HeadsFound | Recovery[TransformerWeights]:
    """W by homogeneity, certified on new pairs of tokens, for which no network is needed."""
    evidence = run.evidence
    scores = learn_scores(evidence, run.profile, run.generator, run.progress)
    if scores is None:
        why = "The oracle answers 0 to every single token: the network is 0, and then no answer depends on W."
        return _refuse(run, Status.NOT_IDENTIFIABLE, why)
    if scores.spent is not None:
        known = int(scores.W.isfinite().all(dim=0).sum())
        why = f"{scores.spent}. Known are {known} of {evidence.width} columns of W; the rest is NaN."
        return _refuse(run, Status.BUDGET_EXHAUSTED, why, scores.W[None])
    try:
        residual, own = scores.predicts(run.generator, _NUM_PAIRS)
    except BudgetSpent as spent:
        return _refuse(run, Status.BUDGET_EXHAUSTED, f"{spent}. W is known, and not checked.", scores.W[None])
    tolerance = max(6 * own, min(AMPLIFICATION * own, _LOOSEST))
    if not residual <= tolerance:
        why = (
            f"Scores of new pairs are off by {residual:.1e} where {tolerance:.1e} is explained: there is not one head, "
            "so try many_heads=True; or what is behind it is not homogeneous."
        )
        return _refuse(run, Status.NOTHING_FOUND, why)
    claim = f"With this W the weights of the first of two tokens are as the oracle's in {_NUM_PAIRS} new pairs."
    certificate = Certificate(claim, residual, tolerance, details={"oracle_error": own})
    what = f"W of one head from {scores.W.numel():,} pairs of tokens"
    return HeadsFound(scores.W[None], ask_one_token(evidence, input_scale(run.profile)), certificate, what)


def _why_not(evidence: OracleEvidence, profile: OracleProfile, generator: torch.Generator) -> tuple[Status, str] | None:
    if profile.signs_only or profile.num_outputs:
        return no_numbers(profile)
    tokens = random_tokens(_NUM_DIRECTIONS, evidence.width, profile, generator).to(evidence.device)
    if not bool(evidence.ask(tokens[:, None]).any()):
        why = (
            f"The oracle answers 0 to {_NUM_DIRECTIONS} random tokens: where the network is 0, no answer depends on W."
        )
        return Status.NOT_IDENTIFIABLE, why
    if not is_homogeneous(evidence, profile, tokens):
        return Status.NOT_APPLICABLE, (
            "f([λx]) = λ·f([x]) does not hold, so the network has biases or is none of ReLUs. ReluNetworkAttack("
            "biases=True) learns what the layer does to single tokens."
        )
    return None


def _partial(run: QueryRun, found: HeadsFound, why: str) -> Recovery[TransformerWeights]:
    run.unknowns = found.W.numel()
    certificate, cost = run.charge(found.certificate, 0)
    reason = f"{found.what}; the network behind it is not known: {why}."
    return Recovery(TransformerWeights(found.W, None), Status.PARTIAL, reason, certificate, cost, ("answers",))


def _refuse(
    run: QueryRun, status: Status, reason: str, W: Float[Tensor, "h d d"] | None = None
) -> Recovery[TransformerWeights]:
    if W is None:
        width = run.evidence.width
        W = torch.zeros(0, width, width, dtype=torch.float64, device=run.evidence.device)
    certificate, cost = run.charge(Certificate.none(reason), 0)
    return Recovery(TransformerWeights(W, None), status, reason, certificate, cost)
