"""From cases to findings: engines, workers and controls."""
