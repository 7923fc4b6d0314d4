"""Who is timed: contenders by registration, so that routes and peers arrive without harness edits.

Routes of `stream_attention` come from its registry, one contender each (`route_contenders`). Peers
are functions with the decorator `peer`, in any module of `stream_attention.bench.peers` or in a
module named by `--contender_modules`; importing the module registers them:

    @peer("my_kernel", supports=lambda case, device: () if case.page_size == 16 else ("page 16",))
    def build(case, pools, device):
        return [Work(run=..., out=...) for pool in pools]

A build returns one `Work` a pool, with plans made and outputs allocated: `run` only does the work.
It says that it cannot serve a case by `supports`; a peer may raise `NotImplementedError` too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.pools import Pool
from stream_attention.core.errors import Faults

KINDS = ("route", "peer")

# NaN where our own routes must not look (contract, section 2, line 6). Peers made no such promise:
# their unused slots hold a finite value, large enough that reading one shows.
ROUTE_POISON = float("nan")
PEER_POISON = 1000.0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One bound problem: `run()` writes `out` `[rows, num_qo_heads, head_dim]`.

    output: where `run()` returns the result in a fresh tensor, `out` is `None` and `output()` gives
    the latest one. note: what the contender chose, such as a number of splits. Each work should
    have an output of its own: a shared one holds the last result only when the timed runs are over.
    resolved: the route that runs, where the contender chose one; "" = the contender itself.
    """

    run: Callable[[], Any]
    out: torch.Tensor | None = None
    output: Callable[[], torch.Tensor] | None = None
    note: str = ""
    resolved: str = ""

    def result(self) -> torch.Tensor:
        """The output of the last run."""
        if self.out is not None:
            return self.out
        assert self.output is not None
        return self.output()

    def poison(self) -> None:
        """Fill the output with NaN, so that an element that is not written shows.

        A fresh output is filled too: a run that makes none leaves the old one, and that shows.
        """
        if self.out is not None:
            self.out.fill_(float("nan"))
            return
        with contextlib.suppress(Exception):  # before its first run it has none
            self.result().fill_(float("nan"))


Facts = tuple[tuple[str, str], ...]
"""Names with values, ascending by name."""

Build = Callable[[AttentionCase, Sequence[Pool], torch.device], Sequence[Work]]
Supports = Callable[[AttentionCase, torch.device], Iterable[str]]


def _always(case: AttentionCase, device: torch.device) -> tuple[str, ...]:
    return ()


def distribution_versions(*names: str) -> dict[str, str]:
    """Installed distributions among `names`, with their versions."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _torch_version() -> dict[str, str]:
    return distribution_versions("torch")


def _no_kernel(case: AttentionCase, device: torch.device) -> Facts:
    return ()


@dataclass(frozen=True, slots=True)
class Contender:
    """A named way to compute a case. `supports` gives the reasons why it cannot, or none.

    graph_safe: on a GPU, `run` may be captured in a CUDA graph; if not, only eager runs time it.
    batch_invariant: a peer that promises what a case with that flag asks. A route says it by
    `supports`. versions: the distributions that it computes with, by name, as far as installed.
    kernel: facts of the kernel that it launches for a case, names with values; `()` = not known.
    """

    name: str
    kind: str
    build: Build
    supports: Supports = _always
    graph_safe: bool = True
    batch_invariant: bool = False
    versions: Callable[[], dict[str, str]] = _torch_version
    kernel: Callable[[AttentionCase, torch.device], Facts] = _no_kernel

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: must be 'route' or 'peer'; use 'peer'")

    def reasons(self, case: AttentionCase, device: torch.device) -> tuple[str, ...]:
        """Every reason why it cannot serve the case; empty when it can."""
        found = tuple(self.supports(case, device))
        if case.batch_invariant and self.kind == "peer" and not self.batch_invariant:
            return (*found, "batch_invariant=True: the peer makes no such promise; use False")
        return found

    @property
    def unused_fill(self) -> float:
        """What slots without a token hold while this contender runs."""
        return ROUTE_POISON if self.kind == "route" else PEER_POISON


@dataclass(slots=True)
class PeerRegistry:
    """Peers by name, and modules that could not bring theirs with the reason."""

    peers: dict[str, Contender] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, contender: Contender) -> None:
        """Register; a name that is taken raises `ValueError`."""
        if contender.name in self.peers:
            raise ValueError(
                f"name={contender.name!r}: a contender of that name is registered; rename it"
            )
        self.peers[contender.name] = contender

    def load(self, module: str) -> None:
        """Import a module that registers contenders; a failure becomes a reason, not an error."""
        try:
            importlib.import_module(module)
        except Exception as error:  # one broken module must not take the run with it
            self.missing[module.rpartition(".")[2]] = f"{type(error).__name__}: {error}"


_DEFAULT = PeerRegistry()


def default_peers() -> PeerRegistry:
    """The registry that `peer` adds to."""
    return _DEFAULT


def peer(
    name: str,
    *,
    supports: Supports = _always,
    kind: str = "peer",
    batch_invariant: bool = False,
    versions: Callable[[], dict[str, str]] = _torch_version,
    registry: PeerRegistry | None = None,
) -> Callable[[Build], Build]:
    """Decorator: register a build function as the contender `name`.

    kind: `"route"` for one that obeys the contract on unused slots and counts as ours.
    batch_invariant: it promises that the bits of a request do not depend on the rest of the batch.
    versions: the distributions that it computes with, where they are more than torch.
    """

    def register(build: Build) -> Build:
        contender = Contender(
            name, kind, build, supports, batch_invariant=batch_invariant, versions=versions
        )
        (registry or _DEFAULT).add(contender)
        return build

    return register


def load_peers(modules: Iterable[str] = ()) -> PeerRegistry:
    """Every peer of `stream_attention.bench.peers` and of `modules`.

    A module whose name starts with `_` is a piece that others share, and brings no peer.
    A module of ours that fails to import is missing with its reason. One that the user named is
    what the run is about: `ValueError` with all of those.
    """
    from stream_attention.bench import peers

    names = sorted(entry.name for entry in pkgutil.iter_modules(peers.__path__))
    for name in names:
        if not name.startswith("_"):
            _DEFAULT.load(f"{peers.__name__}.{name}")
    faults = Faults()
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            faults.add(
                "--contender_modules",
                module,
                f"must be a module that imports; {type(error).__name__}: {error}",
                "the name of one on PYTHONPATH, or leave it out",
            )
    faults.raise_if_any()
    return _DEFAULT


def join_names(*groups: Iterable[Contender]) -> dict[str, Contender]:
    """Contenders of all groups by name; a name that is taken raises `ValueError`."""
    registry = PeerRegistry()
    for contender in (entry for group in groups for entry in group):
        registry.add(contender)
    return registry.peers


def choose(
    available: Mapping[str, Contender], wanted: Sequence[str] | None, parameter: str
) -> tuple[Contender, ...]:
    """The contenders named in `wanted` (`None` = all), in the order of registration.

    An unknown name raises `ValueError` with the nearest known one.
    """
    import difflib

    if wanted is None:
        return tuple(available.values())
    for name in wanted:
        if name not in available:
            known = list(available)
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"{parameter}={name!r}: must be 'all', 'none' or names out of "
                f"{', '.join(known) or 'nothing'}; use {close[0] if close else 'none'}"
            )
    return tuple(contender for name, contender in available.items() if name in wanted)
