"""Audits: a plan becomes cases, a case becomes a finding, findings are kept, and gates judge them."""
