"""Models: one adapter a family, and where real weights come from."""

from unmask.models.adapter import Model
from unmask.models.linear import LinearLayer, Role
from unmask.models.load import adapt, load_model

__all__ = ["LinearLayer", "Model", "Role", "adapt", "load_model"]
