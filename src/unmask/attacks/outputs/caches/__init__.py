"""Texts from the keys and values that a serving stack keeps."""
