"""A decoder's batch, prefix by prefix."""
