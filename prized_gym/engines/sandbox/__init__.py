"""What all sandbox engines share. An engine is a `Driver` that makes `Sandbox` objects, and a class of a few lines."""

from prized_gym.engines.sandbox.driver import Driver, ExecResult, FileInfo, Files, Sandbox, Shape
from prized_gym.engines.sandbox.engine import SandboxBase, SandboxEngine
from prized_gym.engines.sandbox.fleet import SandboxFleet

__all__ = [
    "Driver",
    "ExecResult",
    "FileInfo",
    "Files",
    "Sandbox",
    "SandboxBase",
    "SandboxEngine",
    "SandboxFleet",
    "Shape",
]
