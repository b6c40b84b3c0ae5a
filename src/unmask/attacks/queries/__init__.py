"""Queries → weights: somebody may only ask a model."""
