"""Texts from the output of the first attention module."""
