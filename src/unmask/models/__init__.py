"""Models: one adapter a family, and where real weights come from. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "LinearLayer": "unmask.models.linear",
    "Model": "unmask.models.adapter",
    "Role": "unmask.models.linear",
    "adapt": "unmask.models.load",
    "load_encoder_decoder": "unmask.models.load",
    "load_model": "unmask.models.load",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from unmask.models.adapter import Model as Model
    from unmask.models.linear import LinearLayer as LinearLayer
    from unmask.models.linear import Role as Role
    from unmask.models.load import adapt as adapt
    from unmask.models.load import load_encoder_decoder as load_encoder_decoder
    from unmask.models.load import load_model as load_model


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unmask.models' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
