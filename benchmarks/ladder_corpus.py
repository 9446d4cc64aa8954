"""Build the text of the scaling ladders: sources of packages, by version (ladder_packages.txt), and documents.

    python benchmarks/ladder_corpus.py --docs documents.jsonl.zst

Downloads source archives from PyPI, unpacks them below .cache/ladder (3 GB), and writes .cache/corpus/text.jsonl.zst.
Nothing of it belongs into the repository: packages keep their licences, which the corpus records.

A ladder refuses results of other text, so the text must be the same on every machine: it is a function of the pinned
versions, the documents and the default limit for each package, and of nothing that happens to be installed. Its
fingerprint is said at the end, and whether it is that of PINNED. Results under benchmarks/results/ladder are of text
998ae821d00d6327, which held packages that were installed then as well and cannot be put together again.
"""

import hashlib
import io
import json
import tarfile
import urllib.parse
import urllib.request
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

import tyro

from perilune.data import Corpus
from perilune.data.collect import CollectConfig, collect
from perilune.recipes.ladders import muon

PACKAGES = Path(__file__).with_name("ladder_packages.txt")
PINNED = "dcd325250fee0822"
"""With docs.jsonl.zst, 26,534 documents of MDN, Kubernetes, GitHub, tldr-pages and Rust by Example."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    docs: tuple[str, ...] = ()
    """More text: .jsonl or .jsonl.zst with a field "text"."""
    folder: Path = Path(".cache/ladder")
    out: Path = Path(".cache/corpus/text.jsonl.zst")
    max_package_megabytes: float = 1.05
    """Text of one package at most: none should speak for all."""
    downloads: int = 6
    """At a time."""


def fetch(pin: str, folder: Path) -> str:
    """Unpack the source archive of NAME==VERSION below the folder; what happened, in words."""
    name, _, version = pin.partition("==")
    mark = _mark(pin, folder)
    if mark.exists():
        return f"{pin}: there already"
    try:
        archive = _archive(name, version)
        if archive is None:
            return f"{pin}: no source archive"
        _unpack(archive, folder)
    except (OSError, HTTPException, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        return f"{pin}: {type(error).__name__}: {error}"
    mark.touch()
    return pin


def _mark(pin: str, folder: Path) -> Path:
    return folder / f"{pin.replace('==', '-')}.done"


def _archive(name: str, version: str) -> bytes | None:
    """None when the version has no source archive."""
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
    pins = PACKAGES.read_text().split()
    # Packages of another list would be collected too.
    folder = settings.folder / hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(settings.downloads) as pool:
        for line in pool.map(lambda pin: fetch(pin, folder), pins):
            print(line, flush=True)
    missing = [pin for pin in pins if not _mark(pin, folder).exists()]
    if missing:
        raise SystemExit(f"{len(missing)} of {len(pins)} packages are missing, run again: {', '.join(missing)}")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    config = CollectConfig(
        docs=settings.docs,
        packages=(str(folder),),
        max_package_megabytes=settings.max_package_megabytes,
    )
    found = collect(config, str(settings.out)).to_plain()
    unique, packed = found["unique_bytes"] / 1e6, found["compressed_bytes"] / 1e6
    corpus = replace(muon().rungs[0].config.data.corpus, source=str(settings.out.parent))
    mark = Corpus(corpus).fingerprint[:16]
    same = "the pinned text" if mark == PINNED else f"not the pinned text, which is {PINNED}"
    print(f"{settings.out}: {unique:,.1f} MB of text without copies, {packed:,.1f} MB on disk; {mark}, {same}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
