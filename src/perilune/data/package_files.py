"""Texts of Python packages: installed ones in a site-packages folder, or sources unpacked side by side.

Every file belongs to the distribution whose metadata lists it (*.dist-info/RECORD) or, in a folder of unpacked sources,
to the folder whose PKG-INFO lies at its top. From the same metadata comes the licence, where it says one.
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "node_modules", ".git", "locale", "locales", "licenses", "LICENSES", "egg-info")
)


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str
    licence: str | None


@dataclass(frozen=True, kw_only=True)
class PackageFile:
    path: Path
    name: str
    """Relative to the folder of packages, with forward slashes."""
    package: Package


def package_files(root: Path) -> Iterator[PackageFile]:
    """All files below a folder of packages, sorted by name."""
    if not root.is_dir():
        raise FileNotFoundError(f"the folder of packages {str(root)!r} does not exist")
    owners = _owners(root)
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        base = Path(folder).relative_to(root)
        names += [(base / name).as_posix() for name in files if not name.startswith(".")]
    for name in sorted(names):
        path = root / name
        if path.is_file() and not path.is_symlink():
            top = name.split("/")[0]
            package = owners.get(name) or owners.get(top) or Package(name=top.removesuffix(".py"), licence=None)
            yield PackageFile(path=path, name=name, package=package)


def _owners(root: Path) -> dict[str, Package]:
    """Distribution by file (installed) or by folder (unpacked sources)."""
    owners: dict[str, Package] = {}
    for folder in sorted(root.glob("*.dist-info")):
        package = read_metadata(folder / "METADATA")
        record = folder / "RECORD"
        if package is not None and record.is_file():
            with record.open(encoding="utf-8", errors="replace", newline="") as stream:
                owners |= {row[0]: package for row in csv.reader(stream) if row}
    for metadata in sorted(root.glob("*/PKG-INFO")):
        if (package := read_metadata(metadata)) is not None:
            owners[metadata.parent.name] = package
    return owners


def read_metadata(path: Path) -> Package | None:
    """Name and licence of a METADATA or PKG-INFO file; None when it has no name."""
    try:
        fields = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    name = fields.get("Name")
    if not name:
        return None
    trove = [value.split(" :: ")[-1] for value in fields.get_all("Classifier", []) if value.startswith("License :: ")]
    # The free field may hold a whole licence: then its first line names it.
    free = (fields.get("License") or "").strip().splitlines()
    said = fields.get("License-Expression") or " AND ".join(trove) or (free[0].strip()[:80] if free else "")
    return Package(name=re.sub(r"[-_.]+", "-", name).lower(), licence=said or None)
