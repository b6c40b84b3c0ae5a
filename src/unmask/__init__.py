"""unmask: what a transformer gives away, exactly.

Names are imported on first use, so that `import unmask` and `unmask --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "unmask.attacks.outputs.layer_inputs.preimages": "Preimages",
    "unmask.attacks.recover": "recover_inputs recover_text recover_weights",
    "unmask.audit.findings.finding": "Finding",
    "unmask.audit.findings.folder": "read_audit",
    "unmask.audit.plan": "load_plan",
    "unmask.audit.run": "run_audit",
    "unmask.defences": "defend_states parse_defence parse_oracle_defence",
    "unmask.errors": "UnmaskError",
    "unmask.evidence": (
        "AttentionEvidence AttentionLayer AttentionStackEvidence CacheEvidence FunctionOracle GradientEvidence "
        "HiddenEvidence Ledger ModuleOracle OracleEvidence SampleEvidence Site Task Update VectorEvidence "
        "load_evidence vectors_of_logits"
    ),
    "unmask.integrations.http": "HttpOracle",
    "unmask.linalg.heads": "HeadWeights",
    "unmask.models": "load_encoder_decoder load_model",
    "unmask.protocols": (
        "observe_cache observe_dpsgd observe_fedavg observe_gradients observe_hidden observe_lora "
        "observe_next_token observe_vectors"
    ),
    "unmask.proof.verdicts": "Decision ProposedText Verdict",
    "unmask.protocols.table": "parse_protocol",
    "unmask.recovery": "Certificate Cost RecoveredText RecoveredTexts Recovery Status",
    "unmask.report": "write_reports",
    "unmask.scores": "score_heads score_inputs score_texts",
    "unmask.verification": "verify",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from unmask.attacks.outputs.layer_inputs.preimages import Preimages as Preimages
    from unmask.attacks.recover import recover_inputs as recover_inputs
    from unmask.attacks.recover import recover_text as recover_text
    from unmask.attacks.recover import recover_weights as recover_weights
    from unmask.audit.findings.finding import Finding as Finding
    from unmask.audit.findings.folder import read_audit as read_audit
    from unmask.audit.plan import load_plan as load_plan
    from unmask.audit.run import run_audit as run_audit
    from unmask.defences import defend_states as defend_states
    from unmask.defences import parse_defence as parse_defence
    from unmask.defences import parse_oracle_defence as parse_oracle_defence
    from unmask.errors import UnmaskError as UnmaskError
    from unmask.evidence import AttentionEvidence as AttentionEvidence
    from unmask.evidence import AttentionLayer as AttentionLayer
    from unmask.evidence import AttentionStackEvidence as AttentionStackEvidence
    from unmask.evidence import CacheEvidence as CacheEvidence
    from unmask.evidence import FunctionOracle as FunctionOracle
    from unmask.evidence import GradientEvidence as GradientEvidence
    from unmask.evidence import HiddenEvidence as HiddenEvidence
    from unmask.evidence import Ledger as Ledger
    from unmask.evidence import ModuleOracle as ModuleOracle
    from unmask.evidence import OracleEvidence as OracleEvidence
    from unmask.evidence import SampleEvidence as SampleEvidence
    from unmask.evidence import Site as Site
    from unmask.evidence import Task as Task
    from unmask.evidence import Update as Update
    from unmask.evidence import VectorEvidence as VectorEvidence
    from unmask.evidence import load_evidence as load_evidence
    from unmask.evidence import vectors_of_logits as vectors_of_logits
    from unmask.integrations.http import HttpOracle as HttpOracle
    from unmask.linalg.heads import HeadWeights as HeadWeights
    from unmask.models import load_encoder_decoder as load_encoder_decoder
    from unmask.models import load_model as load_model
    from unmask.proof.verdicts import Decision as Decision
    from unmask.proof.verdicts import ProposedText as ProposedText
    from unmask.proof.verdicts import Verdict as Verdict
    from unmask.protocols import observe_cache as observe_cache
    from unmask.protocols import observe_dpsgd as observe_dpsgd
    from unmask.protocols import observe_fedavg as observe_fedavg
    from unmask.protocols import observe_gradients as observe_gradients
    from unmask.protocols import observe_hidden as observe_hidden
    from unmask.protocols import observe_lora as observe_lora
    from unmask.protocols import observe_next_token as observe_next_token
    from unmask.protocols import observe_vectors as observe_vectors
    from unmask.protocols.table import parse_protocol as parse_protocol
    from unmask.recovery import Certificate as Certificate
    from unmask.recovery import Cost as Cost
    from unmask.recovery import RecoveredText as RecoveredText
    from unmask.recovery import RecoveredTexts as RecoveredTexts
    from unmask.recovery import Recovery as Recovery
    from unmask.recovery import Status as Status
    from unmask.report import write_reports as write_reports
    from unmask.scores import score_heads as score_heads
    from unmask.scores import score_inputs as score_inputs
    from unmask.scores import score_texts as score_texts
    from unmask.verification import verify as verify


def __getattr__(name: str) -> Any:
    if name == "plot":
        return import_module("unmask.plot")
    if name not in _HOME:
        raise AttributeError(f"module 'unmask' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "plot"]
