"""One head from its answers."""
