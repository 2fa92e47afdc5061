"""The threads of layers on CPUs: one pool for the process."""

from __future__ import annotations

import os
import threading

from . import _c
from ._handle import Handle


class Pool(Handle):
    """Threads of the library. A forward that has begun with them keeps them."""

    def __init__(self, count: int) -> None:
        super().__init__(_c.made(_c.lib.fmoe_thread_pool_create, _c.integer(count, "count", 32)), _c.lib.fmoe_thread_pool_release)
        self.executor: _c.Executor = _c.lib.fmoe_thread_pool_executor(self._handle)


_lock = threading.Lock()
_count = 0
_pool: Pool | None = None


def set_num_threads(count: int) -> None:
    """Threads of the layers on CPUs, of all in this process, from the next forward on; 0: one for each core that it may
    use. Safe at any time."""
    global _count, _pool
    made = Pool(count)
    with _lock:
        _count, _pool = count, made


def _begin_in_child() -> None:
    """After a fork: the threads stayed with the parent, and so did whoever holds the lock. A pool is made anew."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_begin_in_child)


def current_pool() -> Pool:
    """Hold it for as long as its executor is used."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool(_count)
        return _pool
