"""The memory of forwards that run one at a time, kept for the next."""

from __future__ import annotations

import ctypes
import weakref

from . import _c
from ._handle import Handle


class Workspace(Handle):
    """A workspace of the library, of as many bytes as the layer it was made for needs."""

    def __init__(self, layer: ctypes.c_void_p | None, size: int) -> None:
        super().__init__(_c.made(_c.lib.fmoe_workspace_create, layer), _c.lib.fmoe_workspace_release)
        self.size = size

    @property
    def handle(self) -> ctypes.c_void_p | None:
        return self._handle


class Workspaces:
    """The free ones. Without a lock, which a fork could leave closed: pop and append of a list are atomic, and whoever
    finds none makes one."""

    def __init__(self) -> None:
        self._free = list[Workspace]()

    @staticmethod
    def of_cpus() -> Workspaces:
        """Those of the layers on CPUs, which share them: as many as forwards run at a time, of the largest layer, instead
        of one a layer. They go with the last layer."""
        global _of_cpus
        found = _of_cpus() if _of_cpus is not None else None
        if found is None:  # two threads may make two: what matters is that layers share theirs
            found = Workspaces()
            _of_cpus = weakref.ref(found)
        return found

    def take(self, size: int) -> Workspace | None:
        """One of at least `size` bytes that nobody else has, until it is given back; None where there is none. Those that
        are smaller go: the one that the caller makes serves their layers too."""
        try:
            while True:
                found = self._free.pop()
                if found.size >= size:
                    return found
        except IndexError:
            return None

    def give_back(self, workspace: Workspace) -> None:
        self._free.append(workspace)


_of_cpus: weakref.ref[Workspaces] | None = None
