"""Findings on the disk, and what gates make of them."""
