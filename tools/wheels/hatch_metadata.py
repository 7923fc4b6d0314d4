"""Metadata hook of every package: pins first-party requirements to the tree's one version.

A `pyproject.toml` names the packages of this tree that it needs by folder,

    [tool.hatch.metadata.hooks.custom]
    path = "../tools/wheels/hatch_metadata.py"
    first-party = ["core", "planner"]
    third-party = ["torch>=2.10"]

and the umbrella its extras in the table `first-party-extras`. Packages of different versions are
never tested together, so the pins are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def distribution(package: str) -> str:
    """The distribution of a package folder: `kernels_sm90` -> `stream-attention-kernels-sm90`."""
    return f"stream-attention-{package.replace('_', '-')}"


def pinned(packages: Iterable[str], version: str) -> list[str]:
    """Requirements on packages of this tree, at exactly `version`."""
    return [f"{distribution(package)}=={version}" for package in packages]


class FirstPartyMetadata(MetadataHookInterface):
    """Fills the dynamic fields `dependencies` and `optional-dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        version = metadata["version"]
        metadata["dependencies"] = [
            *pinned(self.config.get("first-party", []), version),
            *self.config.get("third-party", []),
        ]
        extras = self.config.get("first-party-extras")
        if extras:
            metadata["optional-dependencies"] = {
                extra: pinned(packages, version) for extra, packages in extras.items()
            }
