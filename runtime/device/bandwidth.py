"""Memory bandwidth of devices in GB/s (10^9 bytes per second): data sheets, and recorded measurements."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.files import write_atomic
from mycli.runtime.utils.json_fields import read_object

BANDWIDTH_FILE = "bandwidth.json"

# From the makers' data sheets, by NVML's name without the vendor. Names must match exactly: the laptop part of the same
# number has half the bandwidth.
BANDWIDTH: Mapping[str, float] = {
    "A10": 600,
    "A10G": 600,
    "A40": 696,
    "A100-PCIE-40GB": 1555,
    "A100-SXM4-40GB": 1555,
    "A100 80GB PCIe": 1935,
    "A100-SXM4-80GB": 2039,
    "B200": 8000,
    "GH200 480GB": 4000,
    "H20": 4000,
    "H100 PCIe": 2000,
    "H100 NVL": 3900,
    "H100 80GB HBM3": 3350,
    "H200": 4800,
    "H200 NVL": 4800,
    "L4": 300,
    "L40": 864,
    "L40S": 864,
    "RTX 6000 Ada Generation": 960,
    "RTX A6000": 768,
    "RTX PRO 6000 Blackwell Server Edition": 1597,
    "RTX PRO 6000 Blackwell Workstation Edition": 1792,
    "RTX 3060": 360,
    "RTX 3080": 760,
    "RTX 3090": 936,
    "RTX 3090 Ti": 1008,
    "RTX 4060": 272,
    "RTX 4060 Ti": 288,
    "RTX 4070": 504,
    "RTX 4070 SUPER": 504,
    "RTX 4070 Ti": 504,
    "RTX 4070 Ti SUPER": 672,
    "RTX 4080": 717,
    "RTX 4080 SUPER": 736,
    "RTX 4090": 1008,
    "RTX 5070": 672,
    "RTX 5070 Ti": 896,
    "RTX 5080": 960,
    "RTX 5090": 1792,
    "T4": 320,
    "V100-SXM2-16GB": 900,
    "V100-SXM2-32GB": 900,
}


def datasheet(name: str) -> float | None:
    """Return the data-sheet bandwidth of a GPU by its NVML name, or None."""
    for vendor in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(vendor)
    return BANDWIDTH.get(name)


def recorded_bandwidth(folder: Path, device: str) -> float | None:
    """Return the recorded bandwidth of `device` (its name), or None."""
    try:
        return read_object(folder / BANDWIDTH_FILE).number(device, low=1e-3)
    except ModelError:
        return None


def record_bandwidth(folder: Path, device: str, gigabytes_per_second: float) -> float:
    """Record a measurement of `device` in `folder`, if it can be written, and return the best so far."""
    # Other work on the machine makes a measurement smaller; nothing makes it larger.
    try:
        records = dict(read_object(folder / BANDWIDTH_FILE).values)
    except ModelError:
        records = {}
    best = max(gigabytes_per_second, recorded_bandwidth(folder, device) or 0.0)
    records[device] = round(best, 2)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder / BANDWIDTH_FILE, (json.dumps(records, indent=2) + "\n").encode(), private=True)
    return best
