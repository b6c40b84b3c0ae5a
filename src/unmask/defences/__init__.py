"""Defences: evidence in, evidence out. Each says what it promises; audits measure what it keeps."""

from unmask.defences.noise import add_gaussian_noise

__all__ = ["add_gaussian_noise"]
