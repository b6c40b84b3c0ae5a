"""The papers as they are: attacks to measure against."""
