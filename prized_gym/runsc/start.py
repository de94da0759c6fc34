"""Starting sandboxes, afresh or from an image: all of them or none."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import bundle, store
from .agent import MAX_PROCESSES
from .errors import RunscError
from .life import Life
from .runtime import Runtime, uninterrupted
from .spec import Spec

RESTORES_AT_ONCE = 4
"""Restores that run at the same time; more are no faster."""
SENTRY_MEMORY = 192 << 20
"""Bytes that the sentry itself may need beyond what it gives the guest."""
_HOST_THREADS = 4 * MAX_PROCESSES
"""Threads of sentry, gofer and guest, where a cgroup counts them."""


def start_all(
    runtime: Runtime, spec: Spec, root: Path, image: Path | None, n: int, idle_after: float | None, timeout: float
) -> list[Life]:
    """Start ``n`` sandboxes and wait for their agents: all of them or none, also where an interrupt comes between.

    Args:
        runtime: what they belong to.
        spec: of each.
        root: host path of their root directory.
        image: what they are restored from; None: they start afresh.
        n: how many.
        idle_after: seconds without use after which one is stopped until the next use; None for never.
        timeout: seconds that the start of one may take.

    Raises:
        SandboxTimeout: an agent did not answer in time. RunscError: one could not be started.
    """
    lives = [Life(runtime, store.new_id(), idle_after) for _ in range(n)]

    def close() -> None:
        for life in lives:
            life.close()

    def work() -> list[Life]:
        try:
            with ThreadPoolExecutor(min(n, RESTORES_AT_ONCE), thread_name_prefix="prized_gym-restore") as pool:
                started = [pool.submit(start, life, spec, root, image, timeout) for life in lives]
                for future in started:
                    try:
                        future.result()
                    except BaseException:
                        close()  # the others end at once instead of starting
                        raise
        except BaseException:
            close()
            raise
        return lives

    return uninterrupted(work, close, lambda _: close())


def start(life: Life, spec: Spec, root: Path, image: Path | None, timeout: float) -> None:
    """Have the supervisor run or restore a sandbox, and wait for its agent to dial.

    Raises:
        SandboxStateError: it was closed meanwhile. SandboxTimeout: the agent did not answer in time.
        RunscError: it could not be started.
    """
    ends = time.monotonic() + timeout
    runtime = life.runtime
    namespace = life.directory / "netns" if spec.outbound else None
    try:
        _lay_out(life, spec, root, namespace)
    except BaseException:
        if life.state != "running":  # closed meanwhile, when close() found nothing of what was made after
            runtime.sandboxes.pop(life.id, None)
            life.link.died("closed")
            shutil.rmtree(life.directory, ignore_errors=True)
        raise
    how = ["run", "--detach"] if image is None else ["restore", "--detach", f"--image-path={image}"]
    started = runtime.request(
        "start",
        id=life.id,
        argv=runtime.runsc.command(
            runtime.directory / "state", spec.outbound, [*how, "--bundle", str(life.directory), life.id]
        ),
        log=str(life.directory / "runsc.log"),
        what="start" if image is None else "restore",
        timeout=timeout,
        seconds=None if spec.max_runtime_min is None else spec.max_runtime_min * 60,
        network=str(namespace) if namespace else None,
        limits={"memory": spec.memory + spec.disk + SENTRY_MEMORY, "cpus": spec.vcpu, "processes": _HOST_THREADS},
    )
    if life.state != "running":  # closed meanwhile, maybe before the supervisor knew of it
        runtime.request("kill", id=life.id)
    try:
        groups = started.result(timeout + 10)["groups"]
    except RunscError as error:
        raise RunscError(
            f"sandbox {life.id} could not be {'started' if image is None else 'restored'}: {error}"
        ) from None
    life.groups = {name: Path(path) for name, path in groups.items()}
    life.link.connected(max(1.0, ends - time.monotonic()))
    runtime.hub.ticks[life.awake] = life.awake.tick
    if life.state != "running":
        runtime.hub.ticks.pop(life.awake, None)
    life.awake.touch()
    runtime.hub.poke()


def _lay_out(life: Life, spec: Spec, root: Path, namespace: Path | None) -> None:
    """Write the directory that runsc takes it from, listen for its agent, and let the runtime know of it."""
    life.must_be("running")
    (life.directory / "c").mkdir(parents=True, mode=0o700)
    config = bundle.configuration(
        root,
        life.directory / "c",
        python=spec.python,
        mounts=spec.mounts,
        disk=spec.disk,
        memory=spec.memory,
        namespace=namespace,
    )
    bundle.write_bundle(life.directory, config)
    life.link.listen()
    life.runtime.sandboxes[life.id] = life.died
    life.must_be("running")
