"""The processes that run one layer together."""

from __future__ import annotations

import os

from . import _c
from ._handle import Handle


class Communicator(Handle):
    """The ranks of one job: `Communicator.mpi`, and over it `on_cards`. One call at a time. Layers that were made with it
    keep it alive."""

    @classmethod
    def mpi(cls, module: str | os.PathLike[str] = "libfusedmoe_mpi.so", deadline: float = 60) -> Communicator:
        """The ranks that mpirun started this process among. `module`: libfusedmoe_mpi.so of an installation, where the
        loader finds it. An exchange that takes longer than `deadline` seconds fails."""
        handle = _c.made(_c.lib.fmoe_communicator_mpi, _c.encoded(module, "module"), deadline)
        return cls(handle, _c.lib.fmoe_communicator_release)

    def on_cards(self, library: str | os.PathLike[str] | None = None, deadline: float = 60, card: int = -1,
                 adopt: int | None = None) -> Communicator:
        """The same ranks, which own a card each, for layers on "cuda"; all of them call. `library`: the file of NCCL.
        `card`: of this rank; -1: its number among the ranks of its machine. `adopt`: the address of an ncclComm_t of
        the same ranks that the caller keeps."""
        path = None if library is None else _c.encoded(library, "library")
        handle = _c.made(_c.lib.fmoe_communicator_nccl, self._handle, path, deadline, _c.integer(card, "card"), adopt)
        return Communicator(handle, _c.lib.fmoe_communicator_release)

    @property
    def rank(self) -> int:
        return int(_c.lib.fmoe_communicator_rank(self._handle))

    @property
    def size(self) -> int:
        return int(_c.lib.fmoe_communicator_size(self._handle))

    def finish(self, stream: int = 0) -> None:
        """Waits for all that is enqueued in `stream` (torch.cuda.current_stream().cuda_stream) of this rank's card, under
        the deadline."""
        _c.check(_c.lib.fmoe_communicator_finish(self._handle, stream or None))
