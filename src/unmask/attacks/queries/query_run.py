"""A run that asks an oracle: the evidence, what probing told, and the queries by purpose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unmask.attacks.queries.profile import OracleProfile, probe_oracle
from unmask.attacks.run import Run
from unmask.evidence.oracles import OracleEvidence
from unmask.recovery import Certificate, Cost


@dataclass(kw_only=True)
class QueryRun(Run):
    """`unknowns`: the numbers that learning determines. `num_probing`: queries that taught nothing about them."""

    evidence: OracleEvidence
    unknowns: int = 0
    num_probing: int = 0
    asked_before: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked_before = self.evidence.ledger.num_asked

    def probe(self, profile: OracleProfile | None = None) -> OracleProfile:
        """What the oracle is like; the queries of a profile that was measured before this run are counted too."""
        if profile is None:
            profile = probe_oracle(self.evidence, self.generator)
        else:
            self.asked_before -= profile.num_queries
        self.num_probing = profile.num_queries
        self.profile = profile
        return profile

    @property
    def num_asked(self) -> int:
        """Queries of this run so far."""
        return self.evidence.ledger.num_asked - self.asked_before

    def charge(self, certificate: Certificate, num_fresh: int) -> tuple[Certificate, Cost]:
        """The certificate with the queries by purpose in its details, and the cost."""
        learning = self.num_asked - self.num_probing - num_fresh
        details = {
            **certificate.details,
            "probing_queries": self.num_probing,
            "learning_queries": learning,
            "fresh_queries": num_fresh,
            "degrees_of_freedom": self.unknowns,
            "learning_queries_per_degree_of_freedom": learning / max(1, self.unknowns),
        }
        return replace(certificate, details=details), self.cost(queries=self.num_asked)
