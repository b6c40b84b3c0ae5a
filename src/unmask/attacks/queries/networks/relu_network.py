"""A two-layer ReLU network, whole, from its answers to single vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import certify
from unmask.attacks.queries.networks.kinks import TooManyKinks
from unmask.attacks.queries.networks.relu_learner import learn_network, measure_noise, polish
from unmask.attacks.queries.networks.relu_regions import Asked, Noise
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence, Refused
from unmask.linalg.relu import ReluNetwork
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

NUM_FRESH = 48
_NUM_DIRECTIONS = 8
_RANDOM = 0.05  # of a value: the coarsest arithmetic in use is off by less; answers without a law, by the order of 1
_HOMOGENEOUS = 100.0  # times an answer's own error: far from chance, and far below any bias that matters to answers
_ALLOWED = 10.0  # times the blur, a standard deviation: the largest of 48 values, each of norm √d, not 1
_SPREAD = 100.0  # times the noise of an answer: the largest of 48 inputs, where weights are known to the last digits
_LOOSEST = 1e-2  # of an answer: what blur may excuse, as in `claims.certify`


@dataclass(frozen=True)
class ReluNetworkAttack:
    """Recover f(x) = Σ_j a_j·relu(b_jᵀx + β_j) + α from answers to sequences of one token, x.

    On a circle around the origin f is a sinusoid between kinks, one for each neuron; the jump of the gradient at a
    kink is the neuron. With biases the same is done with f̃(x, s) = s·f(x/s), which has none.

    `biases`: whether there are any. `polish`: Gauss–Newton at the end, 1.5 queries an unknown; worth it in float32,
    and done for up to 4,096 unknowns. `max_neurons`: where the search for kinks gives up.

    Notation: value as in `ReluNetwork`: normals n_j = ±a_j·b_j, signs of a_j, linear part ℓ.
    Limits: m neurons' kinks come as close as 1/m², so float64 reaches about 1e-15·m²·10 and float32 only m ≤ 16.
    Biases need inputs up to 1e4·√d long. Which side of its kink a neuron is active on is known only for m ≤ d
    (`ReluNetwork.orientation`).
    Cost: m·d + O(m + d) queries: 1.0 to 2.5 a parameter, and about 150 for probing.
    Source: arXiv 2601.16873, §4.1 (such a learner is assumed there); learner ours, after Carlini et al., arXiv
    2003.04884.
    """

    biases: bool = False
    polish: bool = False
    max_neurons: int = 4096
    seed: int = 0

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[ReluNetwork]:
        """Run the attack; the evidence's ledger remembers every answer."""
        run = QueryRun(self.seed, progress, evidence=evidence)
        try:
            return self._learn(run)
        except BudgetSpent as spent:
            return self._refuse(run, Status.BUDGET_EXHAUSTED, f"{spent}; a network is learned whole.")
        except Refused as seen:
            return self._refuse(run, Status.NOT_APPLICABLE, f"Inputs as long as are needed are refused: {seen}")
        except TooManyKinks as many:
            why = (
                f"There are {many}: the oracle is not a ReLU network, or max_neurons, {self.max_neurons:,}, is too few."
            )
            return self._refuse(run, Status.NOTHING_FOUND, why)

    def _learn(self, run: QueryRun) -> Recovery[ReluNetwork]:
        evidence, generator = run.evidence, run.generator
        profile = run.probe()
        why_not = self._why_not(evidence, profile, generator)
        if why_not is not None:
            run.num_probing = run.num_asked
            return self._refuse(run, *why_not)
        scale = 1.0 if self.biases else input_scale(profile)
        asked = with_last_entry(evidence) if self.biases else ask_one_token(evidence, scale)
        size = evidence.width + self.biases
        noise = measure_noise(asked, size, self.biases, generator)
        run.num_probing, why_not = run.num_asked, no_law(noise)
        if why_not is not None:
            return self._refuse(run, *why_not)
        run.progress("neurons", 0, 1)
        found = learn_network(asked, size, self.biases, noise, self.max_neurons, generator)
        found = polish(asked, found, noise, generator) if self.polish else found
        network = found.network
        run.progress("neurons", 1, 1)

        def answer(X: Float[Tensor, "b n d"]) -> Float[Tensor, " b"]:
            return network(X[:, 0]).to(evidence.device)

        fresh = scale * random_tokens(NUM_FRESH, evidence.width, profile, generator)[:, None]
        run.unknowns = network.normals.numel() + size
        certificate = certify_network(evidence, answer, fresh, noise, found.blur, _SPREAD)
        certificate, cost = run.charge(certificate, NUM_FRESH)
        if not certificate.holds:
            why = (
                f"{len(network)} kinks were found, but with them fresh inputs are off by {certificate.residual:.1e} of "
                f"an answer, where {certificate.tolerance:.1e} is explained: the oracle is not a ReLU network, or its "
                "arithmetic is too coarse for so many neurons."
            )
            return Recovery(no_network(size, self.biases), Status.NOTHING_FOUND, why, certificate, cost)
        searches = searches_of(Aim.WEIGHTS)
        return Recovery(network, Status.RECOVERED, _describe(network), certificate, cost, ("answers",), searches)

    def _why_not(
        self, evidence: OracleEvidence, profile: OracleProfile, generator: torch.Generator
    ) -> tuple[Status, str] | None:
        """Why this oracle cannot be attacked, if so."""
        if profile.signs_only or profile.num_outputs:
            return no_numbers(profile)
        if evidence.width == 1 and not self.biases:
            return Status.NOT_APPLICABLE, "One input has no circle around 0; biases=True handles it."
        tokens = random_tokens(_NUM_DIRECTIONS, evidence.width, profile, generator)
        if not bool(evidence.ask(tokens[:, None]).any()):
            return Status.NOTHING_FOUND, f"The oracle answers 0 to {_NUM_DIRECTIONS} random inputs."
        if not self.biases and not is_homogeneous(evidence, profile, tokens):
            return Status.NOT_APPLICABLE, (
                "f(λx) = λ·f(x) does not hold, so the oracle is no ReLU network without biases; try biases=True."
            )
        return None

    def _refuse(self, run: QueryRun, status: Status, reason: str) -> Recovery[ReluNetwork]:
        certificate, cost = run.charge(Certificate.none(reason), 0)
        return Recovery(no_network(run.evidence.width + self.biases, self.biases), status, reason, certificate, cost)


def ask_one_token(evidence: OracleEvidence, scale: float = 1.0) -> Asked:
    """f(scale·x)/scale, which for a homogeneous f is f(x)."""
    return lambda x: evidence.ask(scale * x[:, None]).cpu() / scale


def with_last_entry(evidence: OracleEvidence) -> Asked:
    """f̃(x, s) = s·f(x/s)."""
    return lambda x: x[:, -1] * evidence.ask((x[:, :-1] / x[:, -1:])[:, None]).cpu()


def input_scale(profile: OracleProfile) -> float:
    """The norm of tokens that makes what is added to answers small, within what is answered."""
    return min(profile.boost(1.0, 2.0), profile.max_norm / 2)


def random_tokens(count: int, width: int, profile: OracleProfile, generator: torch.Generator) -> Float[Tensor, "b d"]:
    """Gaussian vectors; no longer than the oracle answers to, when multiplied by `input_scale`."""
    tokens = torch.randn(count, width, generator=generator, dtype=torch.float64)
    longest = profile.max_norm / max(1.0, input_scale(profile)) if profile.is_linear else torch.inf
    return tokens * (longest / tokens.norm(dim=1, keepdim=True)).clamp(max=1.0)


def is_homogeneous(evidence: OracleEvidence, profile: OracleProfile, tokens: Float[Tensor, "b d"]) -> bool:
    """Whether f(λx) = λ·f(x), between λ = ¼ and λ = 1; powers of two are exact in binary arithmetic."""
    tokens = tokens / tokens.norm(dim=1, keepdim=True) * input_scale(profile)
    answers, shorter = evidence.ask(tokens[:, None]), 4 * evidence.ask(tokens[:, None] / 4)
    own = profile.precision * float(answers.square().mean().sqrt()) + 4 * profile.absolute_error
    return profile.is_linear and float((answers - shorter).abs().max()) <= _HOMOGENEOUS * own


def no_numbers(profile: OracleProfile) -> tuple[Status, str]:
    """What is said of an oracle that does not answer with one number."""
    kind = "signs" if profile.signs_only else f"vectors of {profile.num_outputs}"
    return Status.NOT_APPLICABLE, f"The oracle answers with {kind}; one number is needed, such as one output."


def no_law(noise: Noise) -> tuple[Status, str] | None:
    """Whether near inputs have answers that have nothing to do with each other, or are all 0."""
    if noise.size == 0:
        return Status.NOTHING_FOUND, "The oracle answers 0 to almost all inputs, so there is nothing to learn from."
    if noise.deviation <= _RANDOM * noise.size:
        return None
    off = noise.deviation / noise.size
    return Status.NOTHING_FOUND, f"Answers to inputs close to each other differ by {off:.0%}, as chance would have it."


def certify_network(
    evidence: OracleEvidence,
    learned: Callable[[Float[Tensor, "b n d"]], Float[Tensor, " b"]],
    fresh: Float[Tensor, "b n d"],
    noise: Noise,
    blur: float,
    amplification: float,
) -> Certificate:
    """The error on fresh sequences, against the oracle's own error and what close kinks make of it.

    Notation: `noise` as measured on unit vectors, relative to values there; `blur`, what learning may be off by;
    `amplification`, what else makes more of the noise.
    """
    own = OracleProfile(0, False, True, 0.0, 0.0, noise.deviation / noise.size, float("inf"), 0)
    certificate = certify(evidence, own, learned, fresh, "With this network")
    excused = min(max(_ALLOWED * blur / noise.size, amplification * own.precision), _LOOSEST)
    details = {**certificate.details, "blur": blur / noise.size}
    return replace(certificate, tolerance=max(6 * own.precision, excused), details=details)


def no_network(size: int, biases: bool) -> ReluNetwork:
    """A network of which nothing is known: no neurons, and a linear part that is not a number."""
    empty = torch.zeros(0, size, dtype=torch.float64)
    return ReluNetwork(empty, empty[:, 0], torch.full((size,), torch.nan, dtype=torch.float64), biases)


def _describe(network: ReluNetwork) -> str:
    if len(network) == 0:
        return "No neurons: the function is linear."
    known = f"{len(network)} neurons"
    if network.orientation is not None:
        return f"{known}, each with the side on which it is active."
    why = "more of them than inputs" if len(network) > len(network.linear) - network.biases else "no clear solution"
    return f"{known}; the sides on which they are active are not determined ({why}), a linear term stands for them."
