"""The bundle of a sandbox: a root directory that is all but empty, and the OCI configuration that binds the rest."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import agent, network
from .python import PythonPaths

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "alternatives",
    "ssl/certs",
    "ssl/openssl.cnf",
    "mime.types",
    "services",
    "protocols",
)
_WRITTEN = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:{agent.UID}:{agent.UID}:user:{agent.HOME}:/bin/bash\n",
    "group": f"root:x:0:\nuser:x:{agent.UID}:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": f"nameserver {network.NAMESERVER}\noptions timeout:2\n",
}
AGENT = "/.agent"
"""Where the agent's package lies in a sandbox: no project that is bound or mounted there has this name."""
_BOOT = f"import sys; sys.path.append({AGENT!r}); from agent.main import main; main()"
ENVIRONMENT = f"{agent.HOME}/.python"  # a virtual environment, first on PATH
# What PID 1 needs to run commands as another user and to end them; commands themselves have none.
_CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]


def make_root(root: Path) -> None:
    """Write the root directory of a sandbox: the agent, and the few files of ``/etc`` that programs need, none of them secret.

    Args:
        root: a directory that does not exist yet.
    """
    etc = root / "etc"
    etc.mkdir(parents=True)
    for name in _ETC:
        source = Path("/etc", name)
        target = etc / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
            elif source.exists():
                shutil.copy2(source, target)
        except (OSError, shutil.Error):
            continue  # one this user may not read
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text)
    for path in SYSTEM:
        if os.path.isdir(path):
            (root / path[1:]).mkdir()
    for name in ("tmp", "home", "ctl", "proc", "sys", "dev", "root", "run", "var"):
        (root / name).mkdir()
    (root / "var" / "tmp").symlink_to("/tmp")
    _write_agent(root / AGENT[1:] / "agent")
    for directory, _, files in os.walk(root):
        os.chmod(directory, 0o755)
        for name in files:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                os.chmod(path, 0o644)


def _write_agent(package: Path) -> None:
    """Write the agent's package with its bytecode, which would otherwise be compiled at every start of a sandbox."""
    bytecode = package / "__pycache__"
    bytecode.mkdir(parents=True)
    for source in sorted(Path(agent.__file__).parent.glob("*.py")):
        shutil.copyfile(source, package / source.name)
        py_compile.compile(
            str(package / source.name),
            str(bytecode / f"{source.stem}.{sys.implementation.cache_tag}.pyc"),
            f"{AGENT}/agent/{source.name}",
            doraise=True,
            optimize=0,
        )


def environment(python: PythonPaths) -> dict[str, str]:
    """Return the environment of a command without the caller's own variables; nothing is taken from the host's."""
    home = agent.HOME
    path = [
        f"{ENVIRONMENT}/bin",
        f"{home}/.local/bin",
        str(Path(python.executable).parent),
        str(Path(python.base).parent),
    ]
    path += ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    variables = {
        "HOME": home,
        "USER": "user",
        "LOGNAME": "user",
        "SHELL": "/bin/bash",
        "PATH": ":".join(dict.fromkeys(path)),
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }
    if python.search:
        variables["PYTHONPATH"] = ":".join(python.search)
    return variables


def configuration(
    root: Path,
    control: Path,
    *,
    python: PythonPaths,
    mounts: Mapping[str, str],
    disk: int,
    memory: int,
    namespace: Path | None,
) -> dict[str, Any]:
    """Build the OCI configuration of a sandbox.

    Args:
        root: host path of its root directory.
        control: host path of the directory with its agent's socket.
        python: the interpreter and packages that it shows.
        mounts: more read-only binds, from path inside to path on the host.
        disk: bytes that ``/home`` may hold; ``/tmp`` and ``/dev/shm`` as much, but no more than half of ``memory``.
        memory: bytes.
        namespace: the network namespace's path; None for no network.
    """
    scratch = max(1 << 20, min(disk, memory // 2))
    temporary = [("/home", disk, 755), ("/tmp", scratch, 1777), ("/dev/shm", scratch, 1777)]
    binds = {path: path for path in (*filter(os.path.isdir, SYSTEM), *python.binds)} | dict(mounts)
    entries: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    entries += [
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec", "nodev"]}
    ]
    entries += [
        {
            "destination": path,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", f"size={size}", f"mode={mode}"],
        }
        for path, size, mode in temporary
    ]
    entries += [
        {"destination": inside, "type": "bind", "source": outside, "options": ["rbind", "ro", "nosuid", "nodev"]}
        for inside, outside in sorted(binds.items())
    ]
    entries += [{"destination": "/ctl", "type": "bind", "source": str(control), "options": ["rbind", "ro"]}]
    namespaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    namespaces.append({"type": "network", "path": str(namespace)} if namespace else {"type": "network"})
    return {
        "ociVersion": "1.0.0",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [python.base, "-I", "-S", "-c", _BOOT],
            "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        },
        "mounts": entries,
        "linux": {"namespaces": namespaces},
    }


def write_bundle(directory: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration into a bundle directory."""
    (directory / "config.json").write_text(json.dumps(config))
