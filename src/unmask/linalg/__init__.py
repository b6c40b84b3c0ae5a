"""Tensors in, tensors out: the mathematics that attacks are written in."""
