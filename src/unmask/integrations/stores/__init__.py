"""Vectors out of the files of vector databases, and never the documents beside them."""

from unmask.integrations.stores.stored import StoredVectors
from unmask.integrations.stores.table import STORES, read_store

__all__ = ["STORES", "StoredVectors", "read_store"]
