"""What an environment's server needs, brought into an image that has a bare Python: packages from here, without an index."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import re
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

from prized_gym.errors import SetupError
from prized_gym.sandbox.driver import Sandbox
from prized_gym.sandbox.modules import visible
from prized_gym.sandbox.plan import SITE

NEEDED = ("gymnasium", "numpy", "cloudpickle", "msgpack", "tqdm", "h11")
"""The distributions that the server imports; those that they require come too."""

_PACKAGE = Path(__file__).parents[1]
_SKIPPED = re.compile(r"(^|/)(__pycache__|tests?|testing/tests|\.git)(/|$)|\.pyc$|\.pyi$")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_TIMEOUT = 300.0

_PROBE = """
import importlib.util, json, os, platform, sys, sysconfig
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"python": list(sys.version_info[:2]), "abi": sysconfig.get_config_var("SOABI") or "", "missing": missing}))
"""

_UNPACK = """
import os, sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2])
os.remove(sys.argv[1])
"""


def bring(sandbox: Sandbox, payload: bytes) -> None:
    """Upload this library, what its server needs and is not there yet, and modules of the user's that a recipe refers to.

    Raises:
        SetupError: there is no Python inside, or what is compiled for this one does not fit it.
        SandboxError, OSError: it could not be uploaded.
    """
    here = _distributions()
    modules = {name: module for name, distribution in here.items() for module in _modules(distribution)[:1]}
    result = sandbox.exec(["python3", "-c", _PROBE, *modules.values()], timeout=_TIMEOUT)
    try:
        found = json.loads(result.stdout)
        python, abi, missing = tuple(found["python"]), str(found["abi"]), set(found["missing"])
    except (ValueError, KeyError, TypeError):
        raise SetupError(
            f"the image has no python3 that could run the environment (exit code {result.exit_code}): "
            f"{(result.stderr or result.stdout)[-1000:].strip()}"
        ) from None
    chosen = [here[name] for name, module in modules.items() if module in missing]
    if abi != (sysconfig.get_config_var("SOABI") or ""):
        compiled = [each.metadata["Name"] for each in chosen if _is_compiled(each)]
        if compiled:
            raise SetupError(
                f"the image has Python {python[0]}.{python[1]} ({abi}) without {', '.join(sorted(compiled))}, and those "
                f"installed here are built for Python {sys.version_info[0]}.{sys.version_info[1]} "
                f"({sysconfig.get_config_var('SOABI')}): run this program with the same Python, or have set-up install them, "
                f"as in setup=['python3 -m pip install --user {' '.join(sorted(compiled))}']"
            )
    archive = pack(tuple(sorted(each.metadata["Name"] for each in chosen)), _own_modules(payload))
    packed, site = f"{sandbox.scratch}/site.tar.gz", f"{sandbox.scratch}/{SITE}"
    sandbox.files.write(packed, archive)
    sandbox.exec(["python3", "-c", _UNPACK, packed, site], timeout=_TIMEOUT).check()


@functools.lru_cache(maxsize=4)
def pack(distributions: Sequence[str], modules: Sequence[tuple[str, str]]) -> bytes:
    """Pack this library, distributions that are installed here, and files, into a compressed archive.

    Args:
        distributions: their names, in a tuple.
        modules: pairs of a path here and a name in the archive, in a tuple.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(_PACKAGE, _PACKAGE.name, filter=_wanted)
        for name in distributions:
            for file in importlib.metadata.distribution(name).files or ():
                # What lies outside, such as scripts, is no module.
                if ".." not in file.parts and not _SKIPPED.search(str(file)):
                    path = Path(str(file.locate()))
                    if path.is_file():
                        archive.add(path, str(file))
        for path_here, name in modules:
            archive.add(path_here, name, filter=_wanted)
    return buffer.getvalue()


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _SKIPPED.search(info.name) else info


def _own_modules(payload: bytes) -> tuple[tuple[str, str], ...]:
    places, _ = visible(payload, (), ())
    # The library itself may be run from a checkout, and is brought in any case.
    return tuple(sorted((place, Path(place).name) for place in places.values() if Path(place) != _PACKAGE))


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """What the server needs, as it is installed here, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(NEEDED)
    while waiting:
        name = _plain(waiting.pop())
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # Required on other platforms or other versions of Python.
            continue
        found[name] = distribution
        for requirement in distribution.requires or ():
            match = _NAME.match(requirement)
            if match is not None and "extra ==" not in requirement:
                waiting.append(match[0])
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _modules(distribution: importlib.metadata.Distribution) -> list[str]:
    """The top-level modules of a distribution, the one that has its name first."""
    names: set[str] = set()
    for file in distribution.files or ():
        top = file.parts[0]
        if len(file.parts) > 1 and top.isidentifier() and file.suffix == ".py":
            names.add(top)
        elif len(file.parts) == 1 and file.suffix == ".py":
            names.add(file.stem)
    own = _plain(distribution.metadata["Name"]).replace("-", "_")
    return sorted(names, key=lambda name: (name != own, name))


def _is_compiled(distribution: importlib.metadata.Distribution) -> bool:
    return any(file.suffix in (".so", ".pyd") for file in distribution.files or ())
