"""The portable routes. Each module describes its own capability; this file only lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stream_attention.core.registry import Registry


def register(registry: Registry) -> None:
    """Add the portable routes, in order of preference at equal cost."""
    from stream_attention.core.routes import sdpa_route, torch_route, triton_route

    for module in (triton_route, torch_route, sdpa_route):
        module.register(registry)
