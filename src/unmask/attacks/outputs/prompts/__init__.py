"""Texts from hidden states of all positions."""
