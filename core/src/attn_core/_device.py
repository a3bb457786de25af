"""The device of a router, as the place where its work goes.

Kernels of Triton and of most libraries, new streams, captures and synchronisation go to the *current* device of a thread,
whatever device their tensors are on. A router of ``cuda:1`` must not depend on who made which device current.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from attn_core.errors import PlatformError

#: Kinds of devices of which a machine may have several, with a current one for each thread.
_INDEXED = frozenset({"cuda", "xpu", "npu"})


class Place:
    """One device. ``device`` always has an index where its kind has several: ``cuda`` is the device that is current now.

    Immutable; may be used from any thread. Raises :class:`PlatformError` for an index that this machine does not have.
    """

    __slots__ = ("_module", "device")

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._module: Any = getattr(torch, self.device.type, None) if self.device.type in _INDEXED else None
        if self._module is None or not self._module.is_available():
            self._module = None  # nothing to switch to: a plan for other hardware, run with fakes
            return
        if self.device.index is None:
            self.device = torch.device(self.device.type, self._module.current_device())
        elif self.device.index >= self._module.device_count():
            raise PlatformError(
                f"there is no device {self.device}",
                f"found    {self._module.device_count()} device(s) of kind {self.device.type}",
                fix="give an index that is there, or change which devices are visible (CUDA_VISIBLE_DEVICES)",
            )

    @property
    def is_current(self) -> bool:
        """Whether work of this thread goes here already. About 0.1 us."""
        return self._module is None or self._module.current_device() == self.device.index

    def use(self) -> AbstractContextManager[Any]:
        """Make the device the current one of this thread for a ``with`` block."""
        return nullcontext() if self._module is None else self._module.device(self.device.index)

    def wait(self) -> None:
        """Wait for all work on this device; on a CPU there is nothing to wait for."""
        if self._module is not None:
            self._module.synchronize(self.device.index)

    def hold(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with this device as the current one during every call."""

        def call(*arguments: Any) -> Any:
            with self.use():
                return function(*arguments)

        return call
