"""`perilune data collect OUT`: the command's part of building a corpus."""

from dataclasses import dataclass

from perilune.cli import _parse, _positional, _print_json


@dataclass(kw_only=True)
class CollectFlags:
    docs: tuple[str, ...] = ()
    """Files of records (.jsonl, .jsonl.zst) with a field "text", and maybe source, licence, path and split."""
    packages: tuple[str, ...] = ()
    """Folders of installed packages or of unpacked sources; "site-packages" is that of this Python."""
    valid_fraction: float = 0.01
    """Share of documents held out, of those that do not say where they belong."""
    near_duplicate: float = 0.6
    """Share of a text's lines, by threes, that were there before from which on it counts as a copy."""
    max_megabytes: float | None = None
    """Stop taking texts at this size of all together."""
    max_package_megabytes: float | None = None
    """And at this size of one package's: none should speak for all."""
    level: int = 19
    """Of zstd: 3 is fast, 19 small, 22 the smallest."""
    json: bool = False


def collect_verb(arguments: list[str]) -> None:
    """Gather texts of packages and files of records into one corpus without copies."""
    example = "perilune data collect corpus.jsonl.zst --packages site-packages"
    out, rest = _positional(arguments, "OUT", "the corpus to write, a .jsonl.zst", example)
    help_text = (
        "Gather texts of packages and files of records into one corpus: filtered, without copies, held-out part marked."
        f"\n\nexample: {example} --docs notes.jsonl"
    )
    flags = _parse(f"perilune data collect {out}", help_text, CollectFlags, rest)
    from perilune.data.collect import CollectConfig, collect
    from perilune.train.progress import DataProgress

    fields = {name: value for name, value in vars(flags).items() if name != "json"}
    config = CollectConfig(**fields)
    with DataProgress(quiet=flags.json) as progress:
        found = collect(config, out, progress=progress).to_plain()
    if flags.json:
        _print_json({"corpus": out, **found})
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=box.SIMPLE, title=f"{out}, MB of text", title_justify="left")
    for column in ("domain", "kept", "", "left out"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    kept = sorted(found["domains"].items(), key=lambda item: -item[1])
    lost = sorted(found["left_out"].items(), key=lambda item: -item[1])
    for row in range(max(len(kept), len(lost))):
        domain = (kept[row][0], f"{kept[row][1] / 1e6:,.1f}") if row < len(kept) else ("", "")
        reason = (f"{lost[row][1] / 1e6:,.1f}", lost[row][0]) if row < len(lost) else ("", "")
        table.add_row(*domain, reason[1], reason[0])
    console.print(table)
    unique, sound = found["unique_bytes"], found["sound_bytes"]
    documents, sizes = found["documents"], found["bytes"]
    print(
        f"read {found['read_bytes'] / 1e6:,.1f} MB in {found['read_documents']:,} documents; {sound / 1e6:,.1f} MB "
        f"passed the filters; {unique / 1e6:,.1f} MB are unique ({1 - unique / max(1, sound):.0%} were copies)\n"
        f"train {documents.get('train', 0):,} documents, {sizes.get('train', 0) / 1e6:,.1f} MB; valid "
        f"{documents.get('valid', 0):,} documents, {sizes.get('valid', 0) / 1e6:,.1f} MB; compressed "
        f"{found['compressed_bytes'] / 1e6:,.1f} MB\n"
        f"use it: perilune train small --data.corpus.source {out} --data.corpus.split-field split"
    )
