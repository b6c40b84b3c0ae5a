"""Heads that read orthogonal subspaces: second derivatives tell the subspaces, then each holds one head."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from unmask.attacks.queries.claims import judge_heads, refuse
from unmask.attacks.queries.one_head.boosted_probes import (
    BoostedProbes,
    ScoreReader,
    measure_v,
    random_basis,
    score_reader,
)
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_NODES = (1.0, 0.75, 0.5, 0.25)  # of the step: the odd powers t³, t⁵, t⁷ of tanh cancel
_NUM_DRAWS = 24  # of weights in Σ ρ_i M_i²; each may bring eigenvalues of two blocks together by chance
_NUM_PILOTS = 16
_NUM_TURNS = 2  # the second is for what the first leaves in second order
_BEST_SCORE = 1.5  # |t| at which a logit loses least to added errors (t·tanh(t/2) = 1)


class _NotFound(Exception):  # noqa: N818 (an ending, not an error)
    """What in the answers is not of orthogonal heads."""


@dataclass(frozen=True)
class OrthogonalHeadsAttack:
    """All heads of a layer whose heads read orthogonal subspaces, as many as there are.

        φ_y(u) = F(u, y),   φ_y(u) + φ_y(−u) = Σ_h (v_hᵀu)·tanh(t_h/2) = ½ uᵀM_y u + O(u⁴)
        M_y = ½ Σ_h (v_h (W_h y)ᵀ + (W_h y) v_hᵀ)

    In a basis of the subspaces every M_y is block-diagonal. Eigenvectors of Σ_i ρ_i M_i² therefore lie in one block
    each, and two of them are in the same block if some M_i couples them. For u in the block of h all other heads are
    silent, so W_h is read there as that of a single head. The square is needed: Σ_i ρ_i M_i has rank 2H at most.

    Notation: F, t_h, v_h, W_h as in `Pairs`; M_i for random y_i, ρ_i > 0 random; r the width of a subspace. Second
    differences at four steps are extrapolated to zero. M_i are added until their common range stops growing, and one
    more, so K = r of them.
    Limits: v_h and the range of W_h must lie in subspaces that are orthogonal between heads (Assumption C.1); what
    W_h is applied to may be anything. Other layers give one block, or wrong ones: reading a block as one head, or
    fresh sequences, then refuse.
    Cost: 4·d(d + 1) queries for each M_i and d·Σ r for the scores.
    Source: Bhattamishra et al., arXiv 2601.16873, Prop. C.2 (learning with known or found subspaces) and the conjecture
    after it (finest simultaneous block-diagonalisation); squares, steps and the stopping rule are ours.
    """

    max_hessians: int = 64
    seed: int = 0

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Probe, find the subspaces, read a head in each, certify."""
        run = QueryRun(self.seed, progress, evidence=evidence)
        try:
            profile = run.probe()
            if profile.signs_only or profile.num_outputs or not profile.is_linear:
                why = "Second derivatives need single numbers that grow with the tokens; this oracle answers otherwise."
                return refuse(run, Status.NOT_APPLICABLE, why)
            reader = score_reader(evidence, profile, measure_v(evidence, profile))
            size = _score_size(reader, run.generator)
            hessians = self._hessians(run, reader, size)
            blocks = find_blocks(hessians, _choose_coupling(profile, reader), run.generator)
            heads = [_read(reader, block, size, run.generator) for block in blocks]
            learned = HeadWeights(W=torch.stack([W for W, _ in heads]), v=torch.stack([v for _, v in heads]))
            unknowns = sum(len(block) * (evidence.width + 1) for block in blocks)
            run.unknowns = unknowns
            sizes = ", ".join(str(len(block)) for block in blocks)
            reason = (
                f"{len(blocks)} orthogonal subspaces of width {sizes}, from {len(hessians)} Hessians; a head in each."
            )
            return judge_heads(run, learned, reader.fresh_boost, reason)
        except BudgetSpent as ending:
            return refuse(run, Status.BUDGET_EXHAUSTED, f"The budget ended: {ending}.")
        except _NotFound as ending:
            return refuse(run, Status.NOTHING_FOUND, str(ending))

    def _hessians(self, run: QueryRun, reader: ScoreReader, size: float) -> Float[Tensor, "k d d"]:
        """M_y for random y, until their common range stops growing, and one more."""
        width, found, ranks = len(reader.v), list[Tensor](), [0]
        # Rounding costs about 50·ε/t, the power t⁹ of tanh that is left 7·10⁻⁷·t⁸, where a few scores are four times
        # the typical one. The sum is least at t⁹ = 136·ε.
        step = min(0.3, (136 * (run.profile.precision + _measure_added_error(run.profile, reader))) ** (1 / 9)) / size
        while len(found) < self.max_hessians:
            run.progress("Hessians", len(found), self.max_hessians)
            y = torch.nn.functional.normalize(torch.randn(width, generator=run.generator, dtype=torch.float64), dim=0)
            found.append(measure_hessian(reader, y.to(reader.v), step, run.generator))
            squares = sum(M @ M for M in found)
            values = torch.linalg.eigvalsh(squares).clamp_min(0).sqrt()
            ranks.append(int((values > _choose_coupling(run.profile, reader) * values.max()).sum()))
            if ranks[-1] == ranks[-2]:
                return torch.stack(found)
        raise _NotFound(f"{len(found)} Hessians did not exhaust the range of the heads; allow more of them.")


def measure_hessian(
    reader: ScoreReader, y: Float[Tensor, " d"], step: float, generator: torch.Generator
) -> Float[Tensor, "d d"]:
    """M_y of norm one, by second differences along a random basis and the sums of its pairs, extrapolated to 0."""
    width = len(y)
    basis = random_basis(width, generator).to(y)
    i, j = torch.triu_indices(width, width, 1, device=y.device)
    U = torch.cat([basis, (basis[i] + basis[j]) / math.sqrt(2)])
    squares = torch.tensor(_NODES, dtype=torch.float64).square()
    form = torch.zeros(len(U), dtype=torch.float64, device=y.device)
    for place, node in enumerate(_NODES):
        others = torch.cat([squares[:place], squares[place + 1 :]])
        weight = float((others / (others - squares[place])).prod())
        form += weight / node * _even_part(reader, U, y, node * step)
    M = form[:width].diag()
    M[i, j] = form[width:] - (form[i] + form[j]) / 2
    M[j, i] = M[i, j]
    M = basis.T @ M @ basis
    return M / M.norm().clamp_min(1e-300)


def find_blocks(
    hessians: Float[Tensor, "k d d"], linked: float, generator: torch.Generator
) -> list[Float[Tensor, "r d"]]:
    """Orthonormal bases of the finest subspaces that all Hessians keep; what none of them sees is left out.

    Of several random weights ρ that is taken which gives most blocks, and the smallest coupling between them.
    """
    best: tuple[int, float, list[Tensor]] = (0, 0.0, [])
    for _ in range(_NUM_DRAWS):
        rho = 0.2 + torch.rand(len(hessians), generator=generator, dtype=torch.float64).to(hessians)
        values, vectors = torch.linalg.eigh(torch.einsum("k,kij,kjl->il", rho, hessians, hessians))
        E = vectors[:, values.clamp_min(0).sqrt() > linked * values.max().sqrt()]
        coupling = torch.einsum("ia,kij,jb->kab", E, hessians, E).norm(dim=0)
        coupling = coupling / coupling.max()
        num_blocks, block = connected_components((coupling > linked).cpu().numpy(), directed=False)
        member = torch.from_numpy(block).to(E.device)
        between = float((coupling * (member[:, None] != member)).max())
        if (num_blocks, -between) > best[:2]:
            best = (num_blocks, -between, [E[:, member == number].T for number in range(num_blocks)])
    return _refine(best[2], hessians)


def _refine(blocks: list[Float[Tensor, "r d"]], hessians: Float[Tensor, "k d d"]) -> list[Float[Tensor, "r d"]]:
    """Blocks turned towards each other until no Hessian couples them: all M_i count, not only their weighted sum.

        min_X Σ_i ‖M_i^{gh} + M_i^{gg} X − X M_i^{hh}‖²,    B_h ← B_h + XᵀB_g,  B_g ← B_g − X B_h

    Notation: B_h the rows of block h, M_i^{gh} = B_g M_i B_hᵀ. What no Hessian sees is a block too, while turning.
    """
    rows = torch.cat(blocks)
    unseen = torch.linalg.svd(rows).Vh[len(rows) :]
    sizes = [len(block) for block in blocks] + [len(unseen)] * bool(len(unseen))
    rows = torch.cat([rows, unseen])
    for _ in range(_NUM_TURNS):
        parts = rows.split(sizes)
        turned = [part.clone() for part in parts]
        for g, h in itertools.combinations(range(len(parts)), 2):
            own, other, between = (
                torch.einsum("ai,kij,bj->kab", parts[left], hessians, parts[right]).contiguous()
                for left, right in ((g, g), (h, h), (g, h))
            )
            eye_g, eye_h = (torch.eye(len(parts[part]), dtype=rows.dtype, device=rows.device) for part in (g, h))
            system = torch.cat([torch.kron(a, eye_h) - torch.kron(eye_g, b) for a, b in zip(own, other, strict=True)])
            # gelsd: where no head's range depends on a direction, the least turn is taken.
            X = torch.linalg.lstsq(system, -between.reshape(-1, 1), driver="gelsd").solution
            X = X.reshape(len(parts[g]), -1)
            turned[h] += X.T @ parts[g]
            turned[g] -= X @ parts[h]
        left, _, right = torch.linalg.svd(torch.cat(turned))
        rows = left @ right  # the nearest orthonormal rows
    return list(rows.split(sizes)[: len(blocks)])


def _read(
    reader: ScoreReader, block: Float[Tensor, "r d"], size: float, generator: torch.Generator
) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]]:
    """W and v of the only head that is heard inside a block."""
    width, v = len(reader.v), block.T @ (block @ reader.v)
    probes = BoostedProbes(block, v)
    Y = random_basis(width, generator).to(v)
    U = probes.directions
    scores = reader.scores(U.repeat(width, 1), Y.repeat_interleave(len(U), 0), _BEST_SCORE / size)
    if not scores.isfinite().all():
        raise _NotFound(
            f"Inside a subspace of width {len(block)} the answers are not those of one head, so heads do not read "
            "orthogonal subspaces (Assumption C.1)."
        )
    return probes.solve(scores.reshape(width, -1)).T @ Y, v


def _score_size(reader: ScoreReader, generator: torch.Generator) -> float:
    """|uᵀWy| of typical unit vectors, from how the even part bends: tanh(2x)/(2·tanh x) = 1/(1 + tanh² x)."""
    width = len(reader.v)
    U = torch.nn.functional.normalize(
        torch.randn(2 * _NUM_PILOTS, width, generator=generator, dtype=torch.float64), dim=1
    ).to(reader.v)
    y, U = U[0], U[1:]
    step = min(1.0, reader.largest_scale / 2)
    for _ in range(40):  # factors of 4: any scale is reached
        single, double = (_even_part(reader, U, y, factor * step).norm() for factor in (1, 2))
        bend = float(double / (2 * single.clamp_min(1e-300)))
        if 0.8 < bend < 0.98:
            return 2 * math.atanh(math.sqrt(1 / bend - 1)) / step
        step = min(step * 4 if bend >= 0.98 else step / 4, reader.largest_scale / 2)
    raise _NotFound("No scale of tokens was found at which the answers bend as attention does.")


def _even_part(
    reader: ScoreReader, U: Float[Tensor, "b d"], y: Float[Tensor, " d"], step: float
) -> Float[Tensor, " b"]:
    """Σ_h (v_hᵀu)·tanh(s·uᵀW_h y/2) for unit u and y: φ(u) + φ(−u), asked with norms L and s/L and divided by L."""
    long, short = reader.norms(torch.tensor([step], dtype=torch.float64))
    U, Y = float(long) * U, (float(short) * y).expand_as(U)
    return (reader.pairs(U, Y) + reader.pairs(-U, Y)) / float(long)


def _measure_added_error(profile: OracleProfile, reader: ScoreReader) -> float:
    """What the oracle adds to an answer, relative to the answers that are asked for."""
    long, _ = reader.norms(torch.tensor([1.0], dtype=torch.float64))
    return profile.absolute_error / (float(reader.v.norm()) * float(long))


def _choose_coupling(profile: OracleProfile, reader: ScoreReader) -> float:
    """The coupling of two vectors that counts: errors are of the order ε·10³, couplings inside of blocks of 0.01."""
    return min(1e-2, 3 * math.sqrt(profile.precision + _measure_added_error(profile, reader)))
