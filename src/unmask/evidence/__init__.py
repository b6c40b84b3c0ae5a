"""What the adversary sees, with the side knowledge stated, and how it is kept on disk."""

from unmask.evidence.caches import CacheEvidence
from unmask.evidence.files import load_evidence
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.evidence.ledger import Ledger
from unmask.evidence.next_token import vectors_of_logits
from unmask.evidence.oracles import FunctionOracle, ModuleOracle, OracleEvidence
from unmask.evidence.outputs import AttentionEvidence, HiddenEvidence, Site
from unmask.evidence.samples import SampleEvidence
from unmask.evidence.stacks import AttentionLayer, AttentionStackEvidence
from unmask.evidence.vectors import VectorEvidence

__all__ = [
    "AttentionEvidence",
    "AttentionLayer",
    "AttentionStackEvidence",
    "CacheEvidence",
    "FunctionOracle",
    "GradientEvidence",
    "HiddenEvidence",
    "Ledger",
    "ModuleOracle",
    "OracleEvidence",
    "SampleEvidence",
    "Site",
    "Task",
    "Update",
    "VectorEvidence",
    "load_evidence",
    "vectors_of_logits",
]
