"""Doors to other people's systems: federations, training loops, vector databases, services that answer over HTTP."""
