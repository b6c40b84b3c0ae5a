"""A stack of bare attention layers, inverted one after the other from the last.

    B = X⁽ᴸ⁾ → X⁽ᴸ⁻¹⁾ → … → X⁽⁰⁾,   X⁽ˡ⁻¹⁾ a pre-image of X⁽ˡ⁾ under layer l

Certificates compose. Let ‖X̂⁽ˡ⁾ − X⁽ˡ⁾‖ ≤ ε_l. Newton–Kantorovich at X̂⁽ˡ⁻¹⁾ with ε_l/σ_min(V_l) added to the residual
proves that *every* output within ε_l of X̂⁽ˡ⁾ has exactly one pre-image near X̂⁽ˡ⁻¹⁾, within its radius: that is ε_{l−1}.
ε_L is the rounding of B. So the radius at the bottom holds for the exact chain; a layer multiplies it by
‖J⁻¹‖/σ_min(V).

A layer with several pre-images branches the search, and all chains that reach the bottom are returned. What was
searched and not proved at one layer is not proved for the stack.

RECOVERED: one chain, certified, and each layer alone is RECOVERED; or the norms of the rows of X are known, the one
chain has them, and no symmetry of a layer may give another chain that has them too (`symmetries.py`).

Notation: layer l maps X⁽ˡ⁻¹⁾ to X⁽ˡ⁾; L layers.
Limits: those of each layer (`attack.py`). Layers average: where tokens see each other, four of them leave rows that are
equal to the last digits, and nothing can be certified.
Cost: one inversion of a layer for each chain that reaches it, `max_chains` of them at the most.
Source: ours; arXiv 2310.12462, Theorem 1.3, has several layers, without the growth of errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.claim import COARSE
from unmask.attacks.outputs.layer_inputs.preimages import Preimage, Preimages
from unmask.attacks.outputs.layer_inputs.problem import pose, rounding_error
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.stacks import AttentionStackEvidence
from unmask.linalg.coarse import relative_rounding
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of


@dataclass(frozen=True)
class Chain:
    """Pre-images of the last layers: the lowest one, ε, 1/σ_min of all layers so far, and each layer's recovery."""

    X: Float[Tensor, "n d"]
    error: float
    amplification: float = 1.0
    preimage: Preimage | None = None
    recoveries: tuple[Recovery[Preimages], ...] = ()

    @property
    def certified(self) -> bool:
        """Whether ε is proved at every layer; it is not finite from the first one on at which it is not."""
        return self.error < float("inf")


@dataclass(frozen=True)
class AttentionStackAttack:
    """Recover all inputs that a stack of attention layers may have had.

    `max_chains`: of the chains that reach a layer, so many are followed. `layer_attack` inverts one layer.
    """

    max_chains: int = 16
    residual_tolerance: float = 1e-10
    seed: int = 0
    layer_attack: AttentionAttack = field(default_factory=AttentionAttack)

    def __call__(self, evidence: AttentionStackEvidence, progress: Progress = silent) -> Recovery[Preimages]:
        """Run the attack; the evidence is left as it is."""
        run = Run(self.seed, progress)
        output = evidence.output.detach().to("cpu", torch.float64)
        rounding = relative_rounding(evidence.output)
        chains = [Chain(output, rounding_error(evidence.output))]
        ended, cut = list[Recovery[Preimages]](), False
        for index in reversed(range(len(evidence.layers))):
            progress("inverting layers", len(evidence.layers) - 1 - index, len(evidence.layers))
            followed, cut = chains[: self.max_chains], cut or len(chains) > self.max_chains
            grown = [self._invert(evidence, index, chain) for chain in followed]
            ended += [recovery for recovery, longer in grown if not longer]
            chains = [chain for _, longer in grown for chain in longer]
        return self._claim(evidence, [self._check(evidence, chain) for chain in chains], ended, cut, rounding, run)

    def _invert(
        self, evidence: AttentionStackEvidence, index: int, chain: Chain
    ) -> tuple[Recovery[Preimages], list[Chain]]:
        """What one layer says, and the chains with each of its pre-images."""
        norms = evidence.row_norms if index == 0 else None
        layer = evidence.layers[index]
        # After a pre-image without a proof there is nothing to hand on: later ones are not certified either.
        posed = pose(layer.evidence(chain.X, norms), chain.error if chain.certified else 0.0)
        recovery = replace(self.layer_attack, seed=self.seed).invert(posed)
        least = float(torch.linalg.svdvals(posed.V)[-1])
        return recovery, [
            Chain(
                preimage.X,
                preimage.radius if chain.certified else float("inf"),
                chain.amplification * preimage.inverse_norm / least,
                preimage,
                (*chain.recoveries, recovery),
            )
            for preimage in recovery.value.preimages
        ]

    def _check(self, evidence: AttentionStackEvidence, chain: Chain) -> Chain:
        """The evidence, recomputed through all layers."""
        assert chain.preimage is not None  # there is at least one layer
        B = chain.X
        for layer in evidence.layers:
            W, V = (tensor.detach().to("cpu", torch.float64) for tensor in (layer.W, layer.V))
            B = AttentionMap(W * layer.scale, layer.causal)(B) @ V
        output = evidence.output.detach().to("cpu", torch.float64)
        residual = float((B - output).norm() / output.norm())
        checked = replace(
            chain.preimage,
            residual=residual,
            radius=chain.error,
            unique_within=chain.preimage.unique_within if chain.certified else 0.0,
            inverse_norm=chain.amplification,
        )
        return replace(chain, preimage=checked)

    def _claim(
        self,
        evidence: AttentionStackEvidence,
        chains: list[Chain],
        ended: list[Recovery[Preimages]],
        cut: bool,
        rounding: float,
        run: Run,
    ) -> Recovery[Preimages]:
        """The ending that the chains deserve."""
        tolerance = max(self.residual_tolerance, rounding)
        exact = [chain for chain in chains if chain.preimage is not None and chain.preimage.residual <= tolerance]
        found = self._join(exact, cut, evidence.row_norms is not None)
        if not exact:
            return _refuse(evidence, ended, found, run)
        status, reason = _judge(exact, ended, found, rounding, len(evidence.layers))
        certificate = Certificate(
            claim=f"each of the {len(exact)} inputs listed gives this output under the weights given; {reason}",
            residual=max(preimage.residual for preimage in found.preimages),
            tolerance=tolerance,
            details={
                "num_layers": float(len(evidence.layers)),
                "num_preimages": float(len(exact)),
                "num_certified": float(sum(preimage.certified for preimage in found.preimages)),
                "worst_radius": max(preimage.radius for preimage in found.preimages),
                "amplification": max(chain.amplification for chain in exact),
                "num_dead_ends": float(len(ended)),
            },
        )
        searches = searches_of(Aim.INPUTS, stopped=cut, unconfirmed=status is not Status.RECOVERED)
        return Recovery(found, status, reason, certificate, run.cost(), _used(evidence), searches)

    def _join(self, chains: list[Chain], cut: bool, normed: bool) -> Preimages:
        """The pre-images of the stack; how hard they were looked for is what the weakest layer says."""
        layers = [recovery.value for chain in chains for recovery in chain.recoveries]
        weakest = min(layers, key=lambda found: found.num_converged / max(1, found.num_starts), default=Preimages())
        return Preimages(
            tuple(chain.preimage for chain in chains if chain.preimage is not None),
            weakest.num_starts,
            weakest.num_converged,
            definite=all(found.definite for found in layers),
            proved_complete=bool(layers) and all(found.proved_complete for found in layers),
            budget_ended=cut or any(found.budget_ended for found in layers),
            unseen=any(found.unseen for found in layers),
            normed=normed,
            symmetric=any(found.symmetric for found in layers),
        )


def _judge(
    chains: list[Chain], ended: list[Recovery[Preimages]], found: Preimages, rounding: float, num_layers: int
) -> tuple[Status, str]:
    """RECOVERED for one certified chain, each layer of which is, or whose norms are those that are known."""
    if len(chains) > 1:
        limit = ", and more were left out" if found.budget_ended else ""
        return Status.PARTIAL, f"{len(chains)} chains of exact pre-images through {num_layers} layers{limit}"
    if not chains[0].certified:
        return Status.PARTIAL, "one chain of pre-images, too ill-conditioned to prove that it is exact"
    weak = [
        (num_layers - place, recovery.reason)
        for place, recovery in enumerate(chains[0].recoveries)
        if recovery.status is not Status.RECOVERED
    ]
    if rounding > COARSE or found.unseen:
        return Status.PARTIAL, f"one chain of pre-images, but layer {weak[0][0]}: {weak[0][1]}"
    radius = f"the input lies within {chains[0].error:.1e}, errors of all layers included"
    if found.normed and not found.symmetric and chains[0].recoveries[-1].status is Status.RECOVERED:
        return Status.RECOVERED, f"one chain through {num_layers} layers; {radius}; {chains[0].recoveries[-1].reason}"
    if weak:
        return Status.PARTIAL, f"one chain of pre-images, but layer {weak[0][0]}: {weak[0][1]}"
    if ended or found.budget_ended:
        return Status.PARTIAL, f"one chain of pre-images, and {len(ended)} that ended at a layer without one found"
    return Status.RECOVERED, (
        f"one chain through {num_layers} layers, each with one pre-image known; {radius}; of layer 1: "
        f"{chains[0].recoveries[-1].reason}"
    )


def _used(evidence: AttentionStackEvidence) -> tuple[str, ...]:
    """Tensors as the file of the evidence names them."""
    weights = [f"layers.{index}.{name}" for index in range(len(evidence.layers)) for name in "WV"]
    return (*weights, "output", *(() if evidence.row_norms is None else ("row_norms",)))


def _refuse(
    evidence: AttentionStackEvidence, ended: list[Recovery[Preimages]], found: Preimages, run: Run
) -> Recovery[Preimages]:
    """Nothing reaches the bottom: the first layer at which a chain ended says why."""
    reason = ended[0].reason if ended else "no chain of pre-images gives the output again"
    status = ended[0].status if ended else Status.NOTHING_FOUND
    return Recovery(found, status, reason, Certificate.none(reason), run.cost(), _used(evidence))
