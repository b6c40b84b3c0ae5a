"""Decoders whose adapters alone are sent (LoRA): exact texts, however many more tokens than the rank there are.

    tokens   ← sparse recovery of block 0's ∂A over the vocabulary (`lora_tokens.py`)
    prefixes ← the same over prefixes of these tokens, at later blocks (`prefix_pursuit.py`)
    labels   ← what arrives at the adapters of the last block names the token behind every prefix (`label_rows.py`)
    texts    ← where prefixes end and how often, from labels; the client, run again on them, is the judge

Source: measured for this project. DAGER (arXiv 2405.15586) needs fewer tokens than the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.claims import guess_texts
from unmask.attacks.gradients.bag_of_words.claim import claim_tokens, read_tokens, token_proof
from unmask.attacks.gradients.bag_of_words.lora_tokens import gradients_of_inputs
from unmask.attacks.gradients.decoder.endings import endings_of_next_token
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.attacks.gradients.lora.label_rows import find_label_adapter, label_rows
from unmask.attacks.gradients.lora.prefix_pursuit import MOST_TOKENS, PrefixesFound, pursue_prefixes
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.conclusions import Searched, conclude_texts
from unmask.proof.updates import UpdateProof
from unmask.recovery import RecoveredTexts, Recovery

# Blocks that are looked at, from the lowest up. Each shows only as many directions as its rank: with every second of
# these, 4 of a batch's 176 prefixes were lost.
_MOST_BLOCKS = 12


@dataclass(frozen=True)
class LoraAttack:
    """Recover a batch from the gradients of a causal model's adapters.

    `min_gap_decades`: how clearly the tokens must stand apart from all others. `memory_budget_bytes`: the size of the
    largest temporary when labels are read.
    """

    num_probes: int = 32
    min_gap_decades: float = 1.0
    memory_budget_bytes: int = 2**30
    seed: int = 0

    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        read = read_tokens(run, evidence, model, self.num_probes, self.min_gap_decades)
        if isinstance(read, Recovery):
            return read
        candidates, used = read
        why = _why_no_texts(evidence, model)
        measured = {} if why else _gradients_of_blocks(evidence, model)
        if why or not measured:
            why = why or (
                "the order of tokens needs gradients of the factors A of later blocks (a first round has none: audit a "
                "later one as well)"
            )
            return claim_tokens(run, candidates, used, why)
        trained = model.with_factors(evidence.adapters, evidence.adapter_scale)
        tokens = torch.tensor(sorted(candidates.searched), device=model.device)
        if len(tokens) > (most := int(MOST_TOKENS * model.width)):
            why = f"the batch has {len(tokens)} distinct tokens, and whole texts are read from at most {most}"
            return claim_tokens(run, candidates, used, why)
        found = pursue_prefixes(run, trained, measured, tokens)
        if late := model.problem_at(max(map(len, found.leaves), default=1)):
            return claim_tokens(run, candidates, used, late)
        adapter = find_label_adapter(evidence, model)
        if adapter is None or not found.leaves:
            why = "no adapter of the last block tells labels" if found.leaves else "no prefixes explain later blocks"
            return claim_tokens(
                run, candidates, used, why, guess_texts(model, ((leaf, found.residual) for leaf in found.leaves))
            )
        progress("reading endings", 0, 1)
        forest = _forest(found)
        rows = label_rows(trained, forest, adapter, self.memory_budget_bytes)
        endings = endings_of_next_token(trained, rows, adapter.gradient, self.memory_budget_bytes, candidates.equal)
        progress("running the client again", 0, 1)
        verdict = UpdateProof(evidence, model).judge([e.proposed for e in endings.with_named(candidates.equal)])
        if verdict.agreement is not None:
            used = tuple(sorted(evidence.gradients))
        cost = run.cost(
            candidates=candidates.num_tested + forest.num_tested,
            forward_passes=len(forest.leaves) + verdict.num_passes,
        )
        return conclude_texts(verdict, model, Searched(cost, used, token_proof(candidates)))


def reads_adapters_alone(evidence: GradientEvidence, model: Model) -> bool:
    """Whether an update tells block 0's inputs by adapters, and by no layer of the model."""
    roles = (Role.QUERY, Role.KEY, Role.VALUE)
    return bool(evidence.adapters) and all(evidence.linear(model, role, 0) is None for role in roles)


def _why_no_texts(evidence: GradientEvidence, model: Model) -> str:
    """Why texts are not tried; empty if they are."""
    if model.problem:
        return model.problem
    if evidence.update is not Update.GRADIENT:
        return "texts are read from gradients of adapters, and this is a difference of weights"
    if any(name.replace(".lora_A.", ".lora_B.") not in evidence.adapters for name in evidence.adapters):
        return "the adapters that the server sent lack some of their factors B, without which texts are not read"
    if evidence.task is Task.CLASSIFICATION or model.token_head is None:
        return "texts are read from adapters that were trained to predict the next token"
    return ""


def _gradients_of_blocks(evidence: GradientEvidence, model: Model) -> dict[int, Float[Tensor, "d m"]]:
    """∂Aᵀ at the attention of the lowest blocks above block 0 that have adapters."""
    held = ((block, gradients_of_inputs(evidence, model, block)) for block in range(1, model.num_blocks))
    found = {block: torch.cat(list(gradients.values()), dim=1) for block, gradients in held if gradients}
    return {block: found[block] for block in sorted(found)[:_MOST_BLOCKS]}


def _forest(found: PrefixesFound) -> Forest:
    nodes = {(0, tokens): found.residual for tokens in found.needs}
    gap = Gap(found.residual, min(found.needs.values()))
    return Forest(nodes, [(0, tokens) for tokens in found.leaves], gap, found.num_tested)
