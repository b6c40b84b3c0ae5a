"""Inputs of attention layers, of blocks and of stacks of them, as real vectors."""
