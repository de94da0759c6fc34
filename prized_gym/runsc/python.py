"""The Python a sandbox runs: this interpreter with the packages this process can import, all of it read-only."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent  # prized_gym itself, which sandboxes import
_ALWAYS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")  # bound whole in every sandbox
# Directories that hold more than packages: bound because of a stray path entry, they would show the host to a guest.
_NEVER = (
    "/",
    "/home",
    "/root",
    "/etc",
    "/var",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/opt",
    "/srv",
    "/mnt",
    "/media",
)


@dataclass(frozen=True)
class PythonPaths:
    """The paths to bind in a sandbox, and its settings, so that its Python is this one.

    Attributes:
        executable: the interpreter as it is called here, in a virtual environment the environment's.
        base: the interpreter without its environment; runs the agent.
        binds: absolute paths to show read-only, each in the same place, parents before children.
        search: entries for ``PYTHONPATH``: what is importable here and not found by the interpreter itself.
        sites: site directories, whose ``.pth`` files count.
    """

    executable: str
    base: str
    binds: tuple[str, ...]
    search: tuple[str, ...]
    sites: tuple[str, ...] = ()


def python_paths(extra: Iterable[str | os.PathLike[str]] = ()) -> PythonPaths:
    """Collect what this interpreter needs to run elsewhere.

    That is its prefixes, site-packages, what ``.pth`` files and ``PYTHONPATH`` add, and editable installs. Directories such
    as ``/``, ``/home``, a home or ``/tmp`` are never bound. The sandbox's user sees what everybody on this machine may read.

    Args:
        extra: more directories to import from, such as the one of a script, which is not taken by itself: it may be a home.
    """
    executable = sys.executable or "/usr/bin/python3"
    base = os.path.realpath(getattr(sys, "_base_executable", None) or executable)
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, str(Path(base).parent.parent)}
    sites = [
        path
        for path in [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
        if os.path.isdir(path)
    ]
    search = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    search += [os.path.abspath(path) for path in extra]
    binds = [*prefixes, *sites, *search, str(_PACKAGE)]
    from_files = [path for directory in sites for path in _path_files(directory)]
    binds += from_files
    search += [path for path in from_files if os.path.isdir(path)]
    binds += _editable()
    if str(_PACKAGE.parent) not in {*sites, *search}:
        search.append(str(_PACKAGE.parent))
    links = [os.path.realpath(path) for path in binds]  # a prefix that is a link shows nothing without its target
    return PythonPaths(executable, base, _outermost([*binds, *links]), tuple(dict.fromkeys(search)), tuple(sites))


def write_environment(directory: Path, home: str, python: PythonPaths) -> None:
    """Write a virtual environment for a sandbox, on top of what ``python`` has.

    So ``pip install`` works there like anywhere: it finds what is installed here, and adds to it.

    Args:
        directory: where it is written.
        home: where it is to lie in the sandbox.
        python: the interpreter and packages below it.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    for name in ("python", "python3", f"python{version}"):
        (directory / "bin" / name).symlink_to(python.base)
    for name in ("pip", "pip3"):
        script = directory / "bin" / name
        script.write_text(
            f"#!{home}/bin/python\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)
    (directory / "pyvenv.cfg").write_text(
        f"home = {Path(python.base).parent}\ninclude-system-site-packages = false\n"
        f"version = {version}.{sys.version_info.micro}\n"
    )
    (packages / "host.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in python.sites))


def _path_files(directory: str) -> list[str]:
    """List the paths that ``.pth`` files of a site directory add."""
    found = []
    for file in sorted(Path(directory).glob("*.pth")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            line = line.strip()
            if line and not line.startswith(("#", "import ", "import\t")):
                path = os.path.abspath(os.path.join(directory, line))
                if os.path.exists(path):
                    found.append(path)
    return found


def _editable() -> list[str]:
    """List what the finders of editable installs map packages to."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            mapping = getattr(module, "MAPPING", None)
            if isinstance(mapping, dict):
                found += [str(path) for path in mapping.values()]
            namespaces = getattr(module, "NAMESPACES", None)
            if isinstance(namespaces, dict):
                found += [str(path) for paths in namespaces.values() for path in paths]
    # A mapped module is a file without its suffix.
    return [
        path if os.path.exists(path) else f"{path}.py"
        for path in found
        if os.path.exists(path) or os.path.exists(f"{path}.py")
    ]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Keep the existing paths that may be shown, without those inside another one."""
    homes = {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}):
        within = [outer for outer in (*_ALWAYS, *kept) if path == outer or path.startswith(outer + "/")]
        holds_a_home = any(home == path or home.startswith(path.rstrip("/") + "/") for home in homes)
        if os.path.exists(path) and not within and path not in _NEVER and not holds_a_home:
            kept.append(path)
    return tuple(kept)
