"""Heads that read orthogonal subspaces which are known beforehand: each is a single head of its subspace's width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unmask.attacks.queries.claims import is_zero, judge_heads, refuse
from unmask.attacks.queries.one_head.boosted_probes import NotOneHead, ScoreReader, measure_v, score_reader
from unmask.attacks.queries.one_head.single_head import read_columns
from unmask.attacks.queries.opening import not_applicable, silence
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import Answers, OracleEvidence, Refused, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_ORTHOGONAL = 1e-6  # of unit vectors: subspaces that were kept in float32 meet at 10⁻⁷
_SILENT = 100.0  # times the arithmetic's error, of the largest v: a smaller v is what rounding leaves of none
_DEPENDENT = 1e-6  # of the largest singular value: rows that add no direction


@dataclass(frozen=True, eq=False)
class InSubspace(OracleEvidence):
    """The same oracle, asked with tokens of one subspace only: a layer of that subspace's width.

    f_B(Z) = f(Z·B),    B (r, d) orthonormal rows
    """

    whole: OracleEvidence = field(kw_only=True)
    basis: Float[Tensor, "r d"] = field(kw_only=True)

    @classmethod
    def of(cls, whole: OracleEvidence, basis: Float[Tensor, "r d"]) -> InSubspace:
        """The view of `whole` in the span of the rows of `basis`; it pays from the same ledger."""
        return cls(whole.oracle, len(basis), whole.ledger, whole.max_norm, whole.device, whole=whole, basis=basis)

    def ask(self, sequences: Sequences, repetition: int = 0) -> Answers:
        """Answers to sequences that are given in coordinates of the basis."""
        return self.whole.ask(sequences.detach().double() @ self.basis, repetition)


@dataclass(frozen=True, eq=False)
class KnownSubspacesAttack:
    """All heads of a layer whose heads live in orthogonal subspaces, which the adversary also knows.

        W_h = B_hᵀ A_h B_h,  v_h = B_hᵀ a_h,  B_g B_hᵀ = 0 for g ≠ h
        f(Z·B_h) = one head with (A_h, a_h) on tokens Z of width r_h

    since for tokens in the span of B_h all other heads have scores 0 and values 0. So each subspace is asked as a
    single head (`SingleHeadAttack`): r_h queries of one token for a_h, r_h² of two tokens for A_h.

    Notation: B_h (r_h, d) orthonormal rows; a `file` (safetensors) holds a tensor (r_h, d) for each subspace, whose
    rows span it; in Python, `subspaces`.
    Limits: heads that read or ask with anything outside of their subspace are not of this form, and fresh sequences
    refuse them. A subspace whose head has v = 0 is left out; no query tells its W. A head whose share of the answers is
    not above what fresh sequences are off by is left out too, and the status is PARTIAL.
    Cost: exactly Σ_h (r_h² + r_h) learning queries, at the scales of W that `SingleHeadAttack` names.
    Source: Bhattamishra et al., arXiv 2601.16873, Prop. C.2.
    """

    file: str = ""
    subspaces: Sequence[Any] = ()
    seed: int = 0

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Probe, read a head in each subspace, certify on sequences of all of space."""
        bases = [basis.to(evidence.device) for basis in self._bases(evidence.width)]
        run = QueryRun(self.seed, progress, evidence=evidence)
        run.unknowns = sum(len(basis) ** 2 + len(basis) for basis in bases)
        try:
            profile = run.probe()
            if profile.signs_only or profile.num_outputs or not profile.is_linear:
                return refuse(run, Status.NOT_APPLICABLE, not_applicable(profile, "numbers"))
            values = [measure_v(InSubspace.of(evidence, basis), profile) for basis in bases]
            if all(is_zero(a, profile) for a in values):
                return refuse(run, *silence(profile))
            least = _SILENT * profile.precision * max(float(a.norm()) for a in values)
            heard = [place for place, a in enumerate(values) if float(a.norm()) > least and not is_zero(a, profile)]
            found = [_read(run, bases[place], values[place]) for place in heard]
            heads = HeadWeights(W=torch.stack([W for W, _, _ in found]), v=torch.stack([v for _, v, _ in found]))
            sizes = ", ".join(str(len(basis)) for basis in bases)
            reason = f"{len(found)} heads, each in a known subspace; the subspaces have the widths {sizes}."
            return judge_heads(run, heads, max(reader.fresh_boost for _, _, reader in found), reason)
        except BudgetSpent as ending:
            return refuse(run, Status.BUDGET_EXHAUSTED, f"The budget ended: {ending}.")
        except NotOneHead as seen:
            return refuse(run, Status.NOTHING_FOUND, f"{seen} So heads do not live in these subspaces.")
        except Refused as seen:
            return refuse(run, Status.NOTHING_FOUND, f"No head could be read: {seen}.")

    def _bases(self, width: int) -> list[Float[Tensor, "r d"]]:
        """Orthonormal rows of every subspace; refused where they do not fit together."""
        if bool(self.file) == bool(len(self.subspaces)):
            raise InputError(
                "known-subspaces needs the subspaces: known-subspaces:file=PATH, a safetensors file with a tensor "
                "(rank, width) for each, or in Python recover_weights(…, subspaces=[…])"
            )
        given = [torch.as_tensor(rows, dtype=torch.float64) for rows in self.subspaces] or _read_file(Path(self.file))
        for rows in given:
            if rows.ndim != 2 or rows.shape[1] != width or not len(rows) or not bool(rows.isfinite().all()):
                raise InputError(f"each subspace must be (rank, {width}) finite numbers, got {tuple(rows.shape)}")
        bases = [_orthonormal(rows) for rows in given]
        meeting = max(
            (float((first @ other.mT).abs().max()) for n, first in enumerate(bases) for other in bases[:n]), default=0.0
        )
        if meeting > _ORTHOGONAL:
            raise InputError(
                f"known subspaces must be orthogonal to each other, got two with an inner product of {meeting:.1e}; "
                "without orthogonality use the attack 'many-heads'"
            )
        return bases


def _read(
    run: QueryRun, basis: Float[Tensor, "r d"], a: Float[Tensor, " r"]
) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"], ScoreReader]:
    """W, v and the reader of the head in one subspace."""
    reader = score_reader(InSubspace.of(run.evidence, basis), run.profile, a)
    head = HeadWeights(W=a.new_full((1, len(a), len(a)), torch.nan), v=a[None])
    read_columns(run, reader, head)
    return basis.mT @ head.W[0] @ basis, a @ basis, reader


def _orthonormal(rows: Float[Tensor, "m d"]) -> Float[Tensor, "r d"]:
    """An orthonormal basis of what the rows span; rows that are orthonormal already stay as they are."""
    if float((rows @ rows.mT - torch.eye(len(rows), dtype=rows.dtype)).abs().max()) < 1e-12:
        return rows
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    return right[values > _DEPENDENT * values[0]]


def _read_file(path: Path) -> list[Float[Tensor, "r d"]]:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file of subspaces {path} cannot be read as safetensors: {error}") from error
    return [tensors[name].double() for name in sorted(tensors)]
