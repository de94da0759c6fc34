"""Bring gVisor's runsc (and slirp4netns) to a Debian machine without installing anything.

    python scripts/get_runsc.py DIR          # prints the path of the runsc it put into DIR

The packages come from the archive the machine's own apt source list names, with the suite replaced by one whose runsc
can checkpoint a running sandbox; apt checks the signatures with its own keyring. Nothing outside DIR is written: apt is
given lists, caches and a source file of its own in a temporary directory. slirp4netns (needed for sandboxes with
network only) comes from the machine's own suite with the libraries it lacks; when it cannot be had, that is said on
stderr and runsc is still brought.

`RUNSC=$(python scripts/get_runsc.py DIR)` is enough for prized_gym to find both.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Older suites have a build that hangs on a live checkpoint, and sid's crashes under systrap.
GOOD_SUITE = "trixie"
ROLLING = {"stable", "testing", "unstable", "sid"}


class Failed(Exception):
    """runsc could not be brought; the message says why."""


def codename(os_release: Path = Path("/etc/os-release")) -> str:
    """The code name of the Debian release this machine runs, "" where it names none."""
    found = (
        re.search(r'^VERSION_CODENAME="?([\w.-]+)"?$', os_release.read_text(), re.M) if os_release.exists() else None
    )
    return found[1] if found else ""


def stanzas(directory: Path = Path("/etc/apt")) -> list[dict[str, str]]:
    """Every enabled binary source of the machine's apt, one-line and deb822 format alike, as deb822 fields."""
    files = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    found: list[dict[str, str]] = []
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(errors="replace")
        if file.suffix == ".sources":
            for block in re.split(r"\n[ \t]*\n", text):
                fields: dict[str, str] = {}
                key = ""
                for line in block.splitlines():
                    if line.startswith("#"):
                        continue
                    if line[:1] in (" ", "\t"):
                        if key:
                            fields[key] += "\n" + line
                    elif ":" in line:
                        key, _, value = line.partition(":")
                        fields[key.strip()] = value.strip()
                if "deb" in fields.get("Types", "").split() and fields.get("Enabled", "yes").lower() not in (
                    "no",
                    "false",
                ):
                    found.append(fields)
        elif file.suffix == ".list":
            for line in text.splitlines():
                match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line)
                if match:
                    options = dict(part.split("=", 1) for part in (match[1] or "").split() if "=" in part)
                    fields = {"URIs": match[2], "Suites": match[3], "Components": match[4].strip()}
                    for option, name in (("signed-by", "Signed-By"), ("trusted", "Trusted")):
                        if option in options:
                            fields[name] = options[option]
                    found.append(fields)
    return found


def source_for(suite: str, own: str, sources: list[dict[str, str]]) -> str:
    """The machine's own Debian source with its suite replaced by `suite`, as the text of a .sources file.

    Raises Failed when no source of the machine carries its own release.
    """
    for fields in sources:
        if {own, *ROLLING} & set(fields.get("Suites", "").split()) - {""}:
            kept = {key: fields[key] for key in ("URIs", "Signed-By", "Trusted") if key in fields}
            kept = {"Types": "deb", "Suites": suite, "Components": "main", **kept}
            return "".join(f"{key}: {value}\n" for key, value in kept.items())
    raise Failed(
        f"no apt source of this machine carries its release ({own or 'unknown'}); runsc is brought from the Debian "
        "archive only: on other systems install gVisor by hand and set RUNSC to the path of its runsc"
    )


def call(command: list[str], cwd: Path) -> str:
    """Run a command; its output, or Failed with the tail of what it wrote."""
    try:
        done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise Failed(f"{command[0]} is not on this machine; it needs a Debian system") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} {command[-1]} did not end within 300 s") from None
    if done.returncode:
        raise Failed(f"{' '.join(command[-2:])} failed:\n{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


class Apt:
    """apt-get for one suite, with lists and caches of its own below `where`."""

    def __init__(self, where: Path, source: str) -> None:
        self.where = where
        for name in ("parts", "lists/partial", "cache/archives/partial", "debs"):
            (where / name).mkdir(parents=True)
        (where / "parts" / "debian.sources").write_text(source)
        options = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": f"{where}/parts",
            "Dir::State::Lists": f"{where}/lists",
            "Dir::Cache": f"{where}/cache",
            "APT::Sandbox::User": "root",
            "Acquire::Retries": "3",
            "Acquire::Languages": "none",
        }
        self.command = [
            "apt-get",
            "-qq",
            *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        ]
        call([*self.command, "update"], where)

    def unpack(self, package: str, into: Path) -> None:
        """Download one package and unpack it, running none of its scripts."""
        before = set((self.where / "debs").iterdir())
        call([*self.command, "download", package], self.where / "debs")
        for deb in set((self.where / "debs").iterdir()) - before:
            call(["dpkg", "-x", str(deb), str(into)], self.where)


def get_runsc(directory: Path, work: Path) -> Path:
    """Put a runsc into `directory` and return its path."""
    apt = Apt(work / "runsc", source_for(GOOD_SUITE, codename(), stanzas()))
    apt.unpack("runsc", work / "runsc" / "root")
    found = next((path for path in (work / "runsc" / "root").rglob("runsc") if path.is_file()), None)
    if found is None:
        raise Failed("the runsc package holds no runsc")
    target = directory / "runsc"
    shutil.copy2(found, directory / ".runsc.part")
    (directory / ".runsc.part").replace(target)  # at once: a runsc in use is not overwritten
    call([str(target), "--version"], directory)
    return target


def get_slirp4netns(directory: Path, work: Path) -> Path:
    """Put a slirp4netns with the libraries it lacks into `directory` and return its path."""
    own = codename()
    apt = Apt(work / "slirp", source_for(own or "stable", own, stanzas()))
    home = directory / "slirp4netns.d"
    shutil.rmtree(home, ignore_errors=True)
    apt.unpack("slirp4netns", home)
    binary = home / "usr" / "bin" / "slirp4netns"
    missing = re.findall(r"^\s*(lib\w+)[\w.+-]*\.so[.\d]* => not found", call(["ldd", str(binary)], directory), re.M)
    for library in missing:
        apt.unpack({"libslirp": "libslirp0", "libseccomp": "libseccomp2"}.get(library, library + "0"), home)
    wrapper = directory / "slirp4netns"
    libraries = ":".join(sorted({str(path.parent.relative_to(home)) for path in home.rglob("*.so*")}))
    wrapper.write_text(
        '#!/bin/sh\nhome="$(dirname "$(readlink -f "$0")")/slirp4netns.d"\n'
        f'LD_LIBRARY_PATH="{":".join("$home/" + part for part in libraries.split(":") if part)}" '
        'exec "$home/usr/bin/slirp4netns" "$@"\n'
    )
    wrapper.chmod(0o755)
    call([str(wrapper), "--version"], directory)
    return wrapper


def main() -> int:
    """Run the script; its exit status."""
    parser = argparse.ArgumentParser(
        description="Bring gVisor's runsc (and slirp4netns) into DIR and print runsc's path."
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--force", action="store_true", help="fetch again even when DIR holds a runsc that runs")
    options = parser.parse_args()
    directory: Path = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    runsc = directory / "runsc"
    try:
        if platform.system() != "Linux":
            raise Failed("gVisor runs on Linux only")
        with tempfile.TemporaryDirectory() as work:
            if options.force or not (
                runsc.exists() and subprocess.run([runsc, "--version"], capture_output=True).returncode == 0
            ):
                runsc = get_runsc(directory, Path(work))
            if not (shutil.which("slirp4netns") or (directory / "slirp4netns").exists()):
                try:
                    get_slirp4netns(directory, Path(work))
                except Failed as error:
                    sys.stderr.write(f"get_runsc: without slirp4netns, so network='outbound' will not work: {error}\n")
    except Failed as error:
        sys.stderr.write(f"get_runsc: {error}\n")
        return 1
    sys.stdout.write(f"{runsc}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
