"""Stage 1: download wheels and documentation packages through the registries' ordinary clients.

``pip download`` resolves each PyPI name to its newest wheel (no dependencies, no builds, so nothing
is executed); ``apt-get download`` fetches the Debian packages of the machine's release. A name that
cannot be had is reported and skipped: the corpus is defined by what ``manifest.json`` records.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.common import load_packages

# macOS wheels first: for the projects that ship GPU code in their Linux wheels they hold the same
# Python files at a tenth of the size. Nothing is installed, so the platform is immaterial.
_PLATFORMS = (
    "macosx_15_0_arm64",
    "macosx_14_0_arm64",
    "macosx_12_0_arm64",
    "macosx_11_0_arm64",
    "macosx_11_0_universal2",
    "macosx_10_13_universal2",
    "macosx_10_9_universal2",
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def _pip(names: list[str], dest: Path, timeout_s: float) -> bool:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--python-version",
        "3.12",
        "-d",
        str(dest),
    ]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    try:
        done = subprocess.run([*command, *names], capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def fetch_pypi(names: list[str], dest: Path, batch: int = 8) -> list[str]:
    """Download ``names`` into ``dest``; return those that have no usable wheel."""
    dest.mkdir(parents=True, exist_ok=True)
    have = {
        path.name.split("-")[0].lower().replace("_", "-").replace(".", "-") for path in dest.glob("*.whl")
    }
    todo = [name for name in names if name.lower().replace("_", "-").replace(".", "-") not in have]
    batches = [todo[i : i + batch] for i in range(0, len(todo), batch)]

    def one(group: list[str]) -> list[str]:
        if _pip(group, dest, timeout_s=300):
            return []
        # One missing wheel fails the whole call, so go name by name.
        return [name for name in group if not _pip([name], dest, timeout_s=180)]

    with ThreadPoolExecutor(2) as pool:
        return [name for missing in pool.map(one, batches) for name in missing]


def fetch_debian(names: list[str], dest: Path) -> list[str]:
    """``apt-get download`` each of ``names`` into ``dest``; return those that are not available."""
    dest.mkdir(parents=True, exist_ok=True)
    missing = []
    for name in names:
        if any(dest.glob(f"{name}_*.deb")):
            continue
        done = subprocess.run(["apt-get", "-q", "download", name], cwd=dest, capture_output=True, check=False)
        if done.returncode != 0:
            missing.append(name)
    return missing


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="working directory for downloads and shards")
    args = parser.parse_args()
    packages = load_packages()
    missing = fetch_pypi(packages.heldout_pypi, args.data / "downloads" / "heldout")
    missing += fetch_pypi(packages.train_pypi, args.data / "downloads" / "pypi")
    missing += fetch_debian(list(packages.train_debian), args.data / "downloads" / "debian")
    print(f"fetch: {len(missing)} names had no usable wheel or package: {' '.join(missing)}")


if __name__ == "__main__":
    main()
