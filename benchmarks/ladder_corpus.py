"""Build the text of the scaling ladders: sources of packages (ladder_packages.txt), this Python's own, and documents.

    python benchmarks/ladder_corpus.py --docs documents.jsonl.zst

Downloads source archives from PyPI, unpacks them into .cache/ladder (3 GB), and writes .cache/corpus/text.jsonl.zst:
about 316 MB of text without copies in 56 MB with the documents the ladders were made with, and the default limit for
each package. Nothing of it belongs into the repository: packages keep their licences, which the corpus records.
"""

import io
import json
import tarfile
import urllib.parse
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

from perilune.data.collect import CollectConfig, collect

PACKAGES = Path(__file__).with_name("ladder_packages.txt")


@dataclass(frozen=True, kw_only=True)
class Settings:
    docs: tuple[str, ...] = ()
    """More text: .jsonl or .jsonl.zst with a field "text"."""
    folder: Path = Path(".cache/ladder")
    out: Path = Path(".cache/corpus/text.jsonl.zst")
    max_package_megabytes: float = 1.2
    """Text of one package at most: none should speak for all."""
    downloads: int = 6
    """At a time."""


def fetch(pin: str, folder: Path) -> str:
    """Unpack the source archive of NAME==VERSION below the folder; what happened, in words."""
    name, _, version = pin.partition("==")
    mark = folder / f"{name}-{version}.done"
    if mark.exists():
        return f"{pin}: there already"
    try:
        archive = _archive(name, version)
        if archive is None:
            return f"{pin}: no source archive"
        _unpack(archive, folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, json.JSONDecodeError) as error:
        return f"{pin}: {error}"
    mark.touch()
    return pin


def _archive(name: str, version: str) -> bytes | None:
    """The newest description of a package holds the files of its newest version; older ones stand in the index."""
    described = json.loads(_get(f"https://pypi.org/pypi/{name}/json"))
    files = described["urls"] if described["info"]["version"] == version else described["releases"].get(version, [])
    sources = [file for file in files if file["packagetype"] == "sdist"]
    if not sources:
        return None
    return _get(urllib.parse.urljoin(f"https://pypi.org/simple/{name}/", sources[0]["url"]))


def _unpack(archive: bytes, folder: Path) -> None:
    if zipfile.is_zipfile(io.BytesIO(archive)):
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as response:
        return response.read()


def main(settings: Settings) -> None:
    settings.folder.mkdir(parents=True, exist_ok=True)
    pins = PACKAGES.read_text().split()
    with ThreadPoolExecutor(settings.downloads) as pool:
        for line in pool.map(lambda pin: fetch(pin, settings.folder), pins):
            print(line, flush=True)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    config = CollectConfig(
        docs=settings.docs,
        packages=(str(settings.folder), "site-packages"),
        max_package_megabytes=settings.max_package_megabytes,
    )
    found = collect(config, str(settings.out)).to_plain()
    unique, packed = found["unique_bytes"] / 1e6, found["compressed_bytes"] / 1e6
    print(f"{settings.out}: {unique:,.1f} MB of text without copies, {packed:,.1f} MB on disk")


if __name__ == "__main__":
    main(tyro.cli(Settings))
