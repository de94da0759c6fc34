"""The memory that a fleet of local copies shares with the trainer: one mapping, laid out once."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from prized_gym.batch import ActionBuffer, AnySpace, Array, ObservationBuffer
from prized_gym.interface.commands import COMMAND

SLOT = 16384
"""Bytes per copy for a pickled answer; a longer one goes through the copy's socket."""

IN_SLOT = 1
"""Flag: the answer is in the copy's slot."""
ON_SOCKET = 2
"""Flag: the answer follows on the copy's socket."""

RESETTING = 2
KEPT = 3
"""What ``busy`` is while a copy writes its observation, if it has kept the one before."""

_AT_ONCE = 1024
"""Bytes of an observation, of one array, that are written in no time: whoever is killed has written all or nothing."""
_CHEAP = 8192
"""Bytes of an observation up to which the one before is kept: keeping frames would cost a fifth to a third of the speed
(measured)."""

LISTEN_SOCKET = 0
"""Wait for the next batch on the copy's socket; ``1 + k`` is semaphore k."""

_ALIGN = 64


class Block:
    """One mapping with actions, observations, rewards, flags and answers of ``count`` copies.

    Both sides compute the same layout from the same spaces.

    Attributes:
        ops: what each copy is to do, a byte each.
        busy: 1 from the start of a batch until the copy has finished it; ``RESETTING`` during the reset of a ``STEP_RESET``,
            ``KEPT`` from when it writes its observation.
        flags: where its answer is.
        lengths: how long that answer is.
        listen: (one byte) where every copy waits next.
        each: (one byte) 1 while every copy is to say that it is done, not only the last of a batch of all.
        pinned: (one byte) 1 while each copy is to stay on one core.
        given_up: (one number) fork requests up to this one are not waited for any more.
        cpu, memory: what each copy had used at the end of its latest episode, in seconds and bytes.
    """

    def __init__(self, observation_space: AnySpace, action_space: AnySpace, count: int, fd: int | None = None) -> None:
        self.size = self._lay_out(observation_space, action_space, count, None)
        self.fd = _anonymous_file(self.size) if fd is None else fd
        try:
            memory = mmap.mmap(self.fd, self.size)
        except BaseException:
            self.close()
            raise
        self._lay_out(observation_space, action_space, count, memory)

    def _lay_out(
        self, observation_space: AnySpace, action_space: AnySpace, count: int, memory: mmap.mmap | None
    ) -> int:
        """Place every part; without ``memory`` only measure, in arrays that own no page."""
        end = 0

        def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            nonlocal end
            offset = -(-end // _ALIGN) * _ALIGN
            elements = 1
            for length in shape:
                elements *= length
            end = offset + elements * dtype.itemsize
            if memory is None:
                return np.lib.stride_tricks.as_strided(np.zeros(1, dtype=dtype), shape, [0] * len(shape))
            return np.frombuffer(memory, dtype=dtype, count=elements, offset=offset).reshape(shape)

        byte, real = np.dtype(np.uint8), np.dtype(np.float64)
        self.listen = allocate((1,), byte)
        self.each = allocate((1,), byte)
        self.pinned = allocate((1,), byte)
        self.given_up = allocate((1,), np.dtype(np.int64))
        self.ops = allocate((count,), byte)
        self.busy = allocate((count,), byte)
        self.flags = allocate((count,), byte)
        self.lengths = allocate((count,), np.dtype(np.int64))
        self.rewards = allocate((count,), real)
        self.terminations = allocate((count,), np.dtype(np.bool_))
        self.truncations = allocate((count,), np.dtype(np.bool_))
        self.cpu = allocate((count,), real)
        self.memory = allocate((count,), real)
        self.actions = ActionBuffer(action_space, count, allocate)
        self.observations = ObservationBuffer(observation_space, count, allocate)
        rows = [array[:1] for array in self.observations.arrays]
        size = sum(row.nbytes for row in rows)
        keeps = size <= _CHEAP and (len(rows) > 1 or size > _AT_ONCE)
        self._kept = [allocate(array.shape, array.dtype) for array in self.observations.arrays] if keeps else []
        self.slots = allocate((count, SLOT), byte)
        return end

    def keeper(self, index: int) -> Callable[[], None] | None:
        """What copy ``index`` calls before it writes an observation, so that one which is cut short is not the last there is.

        None where none can be cut short.
        """
        if not self._kept:
            return None
        rows = [array[index : index + 1] for array in self.observations.arrays]
        pairs = list(zip([array[index : index + 1] for array in self._kept], rows, strict=True))
        busy = self.busy.data

        def keep() -> None:
            for kept, row in pairs:
                kept[...] = row
            busy[index] = KEPT

        return keep

    def before(self, index: int) -> list[Array]:
        """The array leaves of what copy ``index`` had observed before what it is at work on, or has just finished."""
        rows = [array[index].copy() for array in self.observations.arrays]
        # They may have been written meanwhile.
        finished = not self.busy[index] and self.ops[index] != COMMAND
        if self._kept and (finished or self.busy[index] == KEPT):
            return [array[index].copy() for array in self._kept]
        return rows

    def restore(self, index: int) -> None:
        """Copy ``index`` has ended: if it was writing an observation, the one before is the last there is."""
        if self._kept and self.busy[index] == KEPT:
            for array, kept in zip(self.observations.arrays, self._kept, strict=True):
                array[index] = kept[index]

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last array over it does."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("prized_gym", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="prized_gym-")
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd
