"""Outputs → inputs: from what layers hand out back to what they were given."""
