"""The checkpoint images of a sandbox: when one is made, who uses it, and when it is removed.

An image that is the sandbox's present state is held and serves every fork: of one at rest (paused, and stopped) until it is
resumed, of a kept one for ever. Of a sandbox that runs every fork makes an image of its own, removed after it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from . import store
from .errors import RunscError, SandboxDied
from .life import Life
from .runtime import uninterrupted


class Images:
    """The images of one sandbox. Thread-safe: one at a time makes, uses or drops them.

    Args:
        life: the sandbox's.
        outbound: whether it has a network.
        held: the image of a kept sandbox, which belongs to the store; None for one that runs.
    """

    def __init__(self, life: Life, outbound: bool, held: Path | None = None) -> None:
        self._life = life
        self._outbound = outbound
        self._held = held
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def present(self, timeout: float) -> Iterator[Path]:
        """Give an image of the present state, for use inside only.

        Args:
            timeout: seconds that a checkpoint may take.

        Raises:
            SandboxDied: the sandbox ended. SandboxStateError: it is closed, or no longer kept.
            SandboxTimeout: not in time. RunscError: it could not be checkpointed.
        """
        with self._lock:
            image = self._make(timeout)
            try:
                yield image
            finally:
                if image != self._held:
                    shutil.rmtree(image, ignore_errors=True)

    @contextlib.contextmanager
    def released(self, timeout: float) -> Iterator[Path | None]:
        """Give an image of the present state that the caller may move away; held no longer, and removed if it is still there.

        It is None where the sandbox has been kept.

        Raises:
            SandboxDied, SandboxStateError, SandboxTimeout, RunscError: as :meth:`present`.
        """
        with self._lock:
            if self._life.state == "kept":
                yield None
                return
            image = self._make(timeout)
            self._held = None
            try:
                yield image
            finally:
                shutil.rmtree(image, ignore_errors=True)

    def prepare(self, timeout: float) -> None:
        """Make the image now if the sandbox is at rest; else do nothing."""
        with self._lock:
            if self._at_rest():
                self._make(timeout)

    def hold(self, image: Path) -> None:
        """Hold the image of a sandbox that has just been kept; inside :meth:`released`."""
        self._held = image

    def resume(self) -> None:
        """Let a paused sandbox go on; its image is its state no more."""
        with self._lock:
            self.drop()
            self._life.awake.resume()

    def drop(self) -> None:
        """Remove the image that is held, unless it belongs to the store, or to the process that this one was forked from."""
        if self._life.state == "kept" or os.getpid() != self._life.runtime.pid:
            return
        image, self._held = self._held, None
        if image is not None:
            shutil.rmtree(image, ignore_errors=True)

    def _at_rest(self) -> bool:
        return self._life.awake.paused and self._life.awake.stopped

    def _make(self, timeout: float) -> Path:
        """Return an image of the present state, which is held if it stays that."""
        life = self._life
        if life.state == "kept":
            store.read_kept(life.id)  # it may have expired, or been removed
        if self._held is not None:
            return self._held
        life.must_be("running")
        image = life.runtime.directory / "images" / uuid.uuid4().hex[:12]
        at_rest = self._at_rest()
        uninterrupted(
            lambda: self._checkpoint(image, timeout),
            lambda: None,
            lambda _: shutil.rmtree(image, ignore_errors=True),
        )
        if at_rest:  # and so it stays: `resume` waits for us
            self._held = image
        return image

    def _checkpoint(self, image: Path, timeout: float) -> None:
        """Have the supervisor write the present state to ``image``, or nothing; the sandbox goes on."""
        life = self._life
        runtime = life.runtime
        arguments = ["checkpoint", "--compression=none", "--leave-running", f"--image-path={image}", life.id]
        try:
            image.mkdir()
            with life.awake.hold(even_paused=True), life.link.silent(timeout):
                saved = runtime.request(
                    "command",
                    id=life.id,
                    argv=runtime.runsc.command(runtime.directory / "state", self._outbound, arguments),
                    log=str(life.directory / "runsc.log"),
                    what="checkpoint",
                    timeout=timeout,
                )
                saved.result(timeout + 10)
        except BaseException as error:
            shutil.rmtree(image, ignore_errors=True)
            death = life.link.death
            if isinstance(error, RunscError) and death is None:
                raise type(error)(f"sandbox {life.id} could not be checkpointed: {error}") from None
            if isinstance(error, RunscError):
                raise SandboxDied(f"sandbox {life.id} ended during its checkpoint: {death}") from None
            raise
