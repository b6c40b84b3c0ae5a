"""Gradients → text."""
