"""A run that asks: queries by purpose, whoever probed the oracle."""

from __future__ import annotations

from tests.attacks.queries.layers import generator
from tests.attacks.queries.random_heads import oracle_of, random_head

from unmask.attacks.queries.profile import probe_oracle
from unmask.attacks.queries.query_run import QueryRun
from unmask.recovery import Certificate


def test_queries_are_counted_from_the_start_of_the_run():
    evidence = oracle_of(random_head(4))
    probe_oracle(evidence, generator())  # somebody else's
    run = QueryRun(evidence=evidence, unknowns=20)
    assert run.num_asked == 0
    profile = run.probe()
    assert run.num_asked == run.num_probing == profile.num_queries > 0
    certificate, cost = run.charge(Certificate.none("nothing"), 0)
    assert (cost.queries, certificate.details["learning_queries"]) == (profile.num_queries, 0)
    assert certificate.details["degrees_of_freedom"] == 20


def test_a_profile_that_was_measured_before_is_counted_too():
    evidence = oracle_of(random_head(4))
    profile = probe_oracle(evidence, generator())
    run = QueryRun(evidence=evidence)
    assert run.probe(profile) is profile
    assert run.num_asked == profile.num_queries
