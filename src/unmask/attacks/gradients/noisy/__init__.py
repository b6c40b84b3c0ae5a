"""Texts of decoders from updates with few digits, noise, or several local steps."""
