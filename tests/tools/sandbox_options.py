"""What several tests use."""

from typing import Any

SMALL: dict[str, Any] = {"memory_gb": 1, "disk_gb": 0.05, "vcpu": 2, "max_runtime_min": 10, "progress": False}
"""Options of the gvisor bases of the tests."""
