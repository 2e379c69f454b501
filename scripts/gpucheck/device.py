"""Names the device and the versions of what drives it. DEVICE FILE

Writes nothing and ends with 1 where torch finds no such device.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["name"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    for package in ("torch", "triton", "transformers", "nixl-cu13", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    device = sys.argv[1]
    if device == "cuda" and not torch.cuda.is_available():
        return 1
    Path(sys.argv[2]).write_text(json.dumps(describe(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
