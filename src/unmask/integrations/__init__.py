"""Doors to other people's systems: services that answer over HTTP."""
