"""Solvers of continuous problems: one loop (`iterate`), one method a file."""
