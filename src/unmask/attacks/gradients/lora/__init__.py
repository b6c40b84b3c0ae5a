"""Texts from the gradients of low-rank adapters, however many more tokens than the rank there are."""
