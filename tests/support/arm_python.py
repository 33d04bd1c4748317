"""Makes a Python for ARM with torch and the packages of this program, and runs it in qemu.

    python -m tests.support.arm_python FOLDER

prints the path of its Python, which takes the place of python in the command of `tests.benchmarks.portable_receipts`.
Needs Debian 12 with g++-aarch64-linux-gnu and qemu-user, and 8 GB in FOLDER. Nothing is installed outside of it.
Importing torch takes half a minute, the first product five minutes: the native code is compiled.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from tests.support.paths import ROOT

DEBS = (
    *("python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6"),
    *("libgcc-s1", "zlib1g", "libssl3", "libffi8", "libexpat1", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1"),
    *("libncursesw6", "libtinfo6", "libreadline8", "libcrypt1", "libdb5.3", "libnsl2", "libtirpc3"),
)
GLIBC = range(17, 37)  # the last numbers of the manylinux tags that Debian 12 can load
# What the emulated processor says of itself: a Neoverse N1, with byte dot products and without SVE.
CPU, MIDR = "neoverse-n1", "0x00000000413fd0c0"
CPUINFO = """\
processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
_APT = """\
APT::Architecture "arm64";
APT::Architectures {{"arm64";}};
Dir::State "{apt}";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
APT::Sandbox::User "root";
"""
# A path in the emulated root takes the place of the machine's; -0 tells Python to start children in the same way.
_PYTHON = """\
#!/bin/sh
export QEMU_LD_PREFIX={root} QEMU_CPU={cpu} PYTHONPATH={site}:{checkout}/.links:{checkout}
export CXX={compiler} XDG_CACHE_HOME={folder}/cache XDG_STATE_HOME={folder}/state
exec qemu-aarch64 -0 "$0" {root}/usr/bin/python3.11 "$@"
"""
_COMPILER = """\
#!/bin/bash
exec aarch64-linux-gnu-g++ "${@/-march=native/-march=armv8.2-a+dotprod}"
"""


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _debian_root(folder: Path) -> Path:
    root, apt, debs = folder / "root", folder / "apt", folder / "debs"
    for part in (apt / "lists" / "partial", apt / "cache" / "archives" / "partial", debs, root):
        part.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(_APT.format(apt=apt))
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    for command in (["update"], ["download", *DEBS]):
        subprocess.run(["apt-get", *command], cwd=debs, env=environment, check=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    midr = root / "sys" / "devices" / "system" / "cpu" / "cpu0" / "regs" / "identification" / "midr_el1"
    for path, text in ((midr, f"{MIDR}\n"), (root / "proc" / "cpuinfo", CPUINFO)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _packages(site: Path) -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    version = torch.__version__.partition("+")[0]
    tags = [f"manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["manylinux2014_aarch64", "any"]
    command = [sys.executable, "-m", "pip", "install", "--target", str(site), "--python-version", "3.11"]
    command += ["--only-binary=:all:", *(f"--platform={tag}" for tag in tags)]
    subprocess.run([*command, *needed, "pytest", f"torch=={version}"], check=True)


def make(folder: Path) -> Path:
    """Make everything in `folder`; return the script that starts Python."""
    root, site = _debian_root(folder), folder / "site"
    _packages(site)
    compiler = _script(folder / "bin" / "g++", _COMPILER)
    paths = {"root": root, "site": site, "folder": folder, "checkout": ROOT, "compiler": compiler}
    return _script(root / "usr" / "bin" / "python", _PYTHON.format(cpu=CPU, **paths))


def main() -> None:
    """Print the path of the script that starts Python for ARM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(make(parser.parse_args().folder.absolute()))


if __name__ == "__main__":
    main()
