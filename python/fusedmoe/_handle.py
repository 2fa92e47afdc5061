"""What the handles of the library have in common."""

from __future__ import annotations

import ctypes
from typing import Any


class Handle:
    """Owns a handle of the library."""

    _handle: ctypes.c_void_p | None = None

    def __init__(self, handle: ctypes.c_void_p, release: Any) -> None:
        self._handle, self._release = handle, release  # the module may be gone when the handle ends

    def __reduce__(self) -> Any:
        # What copy and pickle ask; the attributes alone would be a second owner of one handle.
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled, it owns memory of the library: share this "
                        f"one, or load another")

    def __del__(self) -> None:
        if self._handle is not None:
            self._release(self._handle)
            self._handle = None
