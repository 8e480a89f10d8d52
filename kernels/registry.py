"""Which implementation serves each kernel, and why the others declined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One implementation. `declines(device, **traits)` gives the reason why it cannot serve, or None."""

    name: str
    run: Any
    declines: Callable[..., str | None]


@dataclass(frozen=True)
class Choice:
    """The backend that serves and the reason of each one that was asked before it."""

    backend: Backend
    declined: dict[str, str]


@dataclass
class Kernel:
    """An operation with its backends, best first; the last one is the reference and never declines."""

    name: str
    backends: Sequence[Backend]
    _choices: dict[tuple[Any, ...], Choice] = field(default_factory=dict)

    def choose(self, device: torch.device, **traits: Any) -> Choice:
        """The first backend that does not decline; decided once for a device type and traits, and logged."""
        key = (device.type, *sorted((name, str(value)) for name, value in traits.items()))
        if key not in self._choices:
            declined: dict[str, str] = {}
            for backend in self.backends:
                reason = backend.declines(device, **traits)
                if reason is None:
                    self._choices[key] = Choice(backend, declined)
                    log.info("%s on %s: %s%s", self.name, device.type, backend.name, _reasons(declined))
                    break
                declined[backend.name] = reason
            else:
                raise RuntimeError(f"no backend serves {self.name} on {device}: {declined}")
        return self._choices[key]


def _reasons(declined: dict[str, str]) -> str:
    return "" if not declined else " (" + "; ".join(f"{name}: {why}" for name, why in declined.items()) + ")"


def first_line(error: Exception) -> str:
    """What a reason says of an error; compilers tell pages, and some errors nothing but their kind."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def always(device: torch.device, **traits: Any) -> str | None:
    """A reference serves everything."""
    return None
