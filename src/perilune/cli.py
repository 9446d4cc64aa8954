"""`perilune <verb>`: every verb is a function with typed arguments; tyro turns them into flags and help.

Errors a person can do something about come out as one line and exit code 1; wrong arguments exit with 2; an interrupted
training exits with 130 after saving. `--json` prints one JSON document on standard output and nothing else there.
"""

import dataclasses
import difflib
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from perilune import __version__

if TYPE_CHECKING:
    from perilune.train.run_config import RunConfig

USAGE = """\
usage: perilune <verb> [arguments]

  train RECIPE       pre-train a model              perilune train nano --optimizer.lr 3e-3
  train extend       go on with longer rows         perilune train extend --from nano --length 1024
  launch RECIPE      what starts it on many GPUs    perilune launch small --nodes 4 --gpus 8 --slurm
  generate RUN       continue a prompt              perilune generate nano --prompt "import os"
                     or look at a picture           perilune generate nano --image a.png --to svg
  view RUN           a page of samples              perilune view nano --out samples.html
  data RECIPE        look at tokens and packing     perilune data nano
  data collect OUT   build a corpus                 perilune data collect c.jsonl.zst --packages site-packages
  eval RUN           what a run can do              perilune eval nano
  eval safety URL    how safe a chat model is       perilune eval safety http://127.0.0.1:8000
  report RUN         write the report of a run      perilune report nano
  export RUN         write it for transformers      perilune export nano ./nano-hf --to kimi_linear
  import FOLDER      bring in a released model      perilune import ./Kimi-Linear-48B-A3B-Instruct
  sft RUN|FOLDER     teach it to answer             perilune sft nano --data chats.jsonl
  rl RECIPE          learn from rewards             perilune rl micro_copy
  serve RUN|FOLDER   the OpenAI API, a chat page    perilune serve nano
  chat RUN|URL       talk to it in the terminal     perilune chat nano
  ladder STEP NAME   what an idea buys at scale     perilune ladder run tiny
  swarm STEP         agents that work in parallel   perilune swarm demo
  bench AREA         operators beside their peers   perilune bench kda --filter T8192
  doctor             what this machine can do       perilune doctor

`perilune <verb> --help` shows all arguments. Every reporting verb takes --json.
"""


class UserError(ValueError):
    """What went wrong and what to do, in one line."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"perilune {__version__}")
        return
    verb = VERBS.get(arguments[0])
    if verb is None:
        _fail(f"unknown verb {arguments[0]!r}{_nearest(arguments[0], VERBS)}; `perilune --help` lists them", code=2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a verb
    try:
        verb(arguments[1:])
    except BrokenPipeError:
        # The reader (head, less) has gone; leave quietly, and keep Python from complaining at exit.
        sys.stdout = None
    except KeyboardInterrupt:
        _fail("interrupted", code=130)
    except (UserError, ValueError, RuntimeError, OSError) as error:
        if not _explains_itself(error):
            raise
        _fail(str(error))
    except ModuleNotFoundError as error:
        extra = MODULE_EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        _fail(f"this verb needs {error.name!r}: pip install 'perilune[{extra}]'")


def _explains_itself(error: Exception) -> bool:
    """Whether the message was written for the person: by us, or by the operating system with a file's name."""
    if isinstance(error, OSError) or type(error).__module__.split(".")[0] == "perilune":
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = "" if trace is None else trace.tb_frame.f_code.co_filename
    return isinstance(error, ValueError) and Path(raised_in).is_relative_to(Path(__file__).parent)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"perilune: {message}", file=sys.stderr)
    raise SystemExit(code)


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


MODULE_EXTRAS = {
    "torch": "train", "safetensors": "train", "tokenizers": "train", "zstandard": "train", "tensorboard": "train",
    "PIL": "train", "resvg_py": "train", "defusedxml": "train",
    "pyarrow": "parquet", "aiohttp": "swarm", "orjson": "swarm", "pydantic": "swarm", "starlette": "swarm",
    "uvicorn": "swarm", "llguidance": "serve", "prometheus_client": "serve", "h11": "serve", "idna": "swarm",
    "mcp": "swarm", "jsonschema": "swarm", "pypdf": "swarm", "playwright": "swarm-browser",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# train


@dataclass(kw_only=True)
class TrainFlags:
    resume: bool = False
    """Continue the run of this name from its last checkpoint."""
    overwrite: bool = False
    """Replace the run of this name."""
    runs: str = "runs"
    """Folder that holds runs."""
    set: tuple[str, ...] = ()
    """Fields by path with a JSON value, for what has no flag: --set 'model.moe={"num_experts": 8}'"""
    dry_run: int | None = None
    """Train nothing: show what memory and traffic each of so many ranks would need."""
    json: bool = False
    """Print the summary as JSON."""
    quiet: bool = False
    """No progress bar and no lines in between."""


def train_verb(arguments: list[str]) -> None:
    """Pre-train a model from a recipe; every field of the recipe is a flag."""
    from perilune.recipes import RECIPES

    name, rest = _positional(
        arguments, "RECIPE", f"one of {', '.join(RECIPES)}, or a run to resume", "perilune train nano", helps=True
    )
    early = _early_flags(TrainFlags, rest)
    if name == "extend" and not early.resume:
        from perilune.cli_extend import extended

        (default, rest), runs = extended(rest, early.runs), early.runs
    else:
        default, runs = _train_default(name, early)
    from perilune.train import RunConfig, train

    flags, config = _parse_run(
        f"perilune train {name}",
        "Pre-train a model from a recipe; every field of the recipe is a flag.\n\n"
        f"example: perilune train {name} --trainer.steps 100 --optimizer.lr 2e-3",
        TrainFlags,
        RunConfig,
        _with_set(default, early.set),
        rest,
    )

    if flags.dry_run is not None:
        from perilune.cli_launch import show_dry_run

        show_dry_run(config, flags.dry_run, as_json=flags.json)
        return
    from perilune.serve.greedy import greedy_answers

    summary = train(
        config,
        runs_folder=runs,
        resume=flags.resume or _goes_on(Path(runs) / config.name, overwrite=flags.overwrite),
        overwrite=flags.overwrite,
        quiet=flags.quiet or flags.json,
        answer=greedy_answers,
    )
    if not summary:
        return  # one of many ranks: the first one speaks
    if flags.json:
        _print_json(summary)
        return
    for sample in summary.get("samples", []):
        print(f"\n--- sample\n{sample['prompt']}{sample['text']}")
    print(f"\n{_summary_line(summary)}")


def _goes_on(folder: Path, *, overwrite: bool) -> bool:
    """Whether torchrun started this process again after a rank failed, in a run that has begun."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not (folder / "config.json").exists():
        return False
    if overwrite:
        raise UserError(f"a rank failed and torchrun started again: continue {str(folder)!r} with --resume, "
                        "not with --overwrite")  # fmt: skip
    return True


def _train_default(name: str, flags: TrainFlags) -> tuple["RunConfig", str]:
    """A recipe's config, or when resuming that of the run itself; and the folder that holds the run."""
    from perilune.recipes import recipe

    if flags.resume:
        for folder in (Path(flags.runs) / name, Path(name)):
            if (folder / "config.json").exists():
                from perilune.train.run_folder import read_config

                own_name, runs = _resumed_place(folder)
                return dataclasses.replace(read_config(folder), name=own_name), runs
    return recipe(name), flags.runs


def _resumed_place(folder: Path) -> tuple[str, str]:
    """The name of the run in `folder` and the folder that holds it. What its config calls it does not count: a copy
    that is resumed must not continue the run that it was copied from."""
    folder = folder.resolve() if folder.name in ("", "..") else folder
    return folder.name, str(folder.parent)


def _summary_line(summary: dict[str, Any]) -> str:
    def shown(name: str, form: str) -> str:
        return "-" if summary.get(name) is None else format(summary[name], form)

    pictures = summary.get("pictures")
    seen = ""
    if pictures:
        seen = (
            f"{pictures['count']} held-out pictures: {pictures['parses']:.0%} of the answers parse, score "
            f"{pictures['reward']:.3f} ({pictures['shuffled_reward']:.3f} against other pictures)\n"
        )
    return (
        f"{seen}{summary.get('steps', 0)} steps, {summary.get('tokens', 0):,} tokens: validation "
        f"{shown('valid_bits_per_byte', '.3f')} bits per byte (loss {shown('valid_loss', '.3f')}), "
        f"{shown('tokens_per_s', ',.0f')} tokens/s; report: {summary.get('report')}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# data, report, export, bench, doctor


@dataclass(kw_only=True)
class DataFlags:
    rows: int = 3
    """Packed rows to show."""
    set: tuple[str, ...] = ()
    """Fields by path with a JSON value, as in `perilune train`."""
    json: bool = False


def data_verb(arguments: list[str]) -> None:
    """What a recipe's corpus looks like after tokenising and packing; `collect` builds one."""
    if arguments[:1] == ["collect"]:
        from perilune.cli_collect import collect_verb

        collect_verb(arguments[1:])
        return
    from perilune.recipes import RECIPES, recipe

    name, rest = _positional(arguments, "RECIPE", f"one of {', '.join(RECIPES)}", "perilune data nano", helps=True)
    from perilune.train import RunConfig

    default = _with_set(recipe(name), _early_flags(DataFlags, rest).set)
    flags, config = _parse_run(
        f"perilune data {name}",
        "What a recipe's corpus looks like after tokenising and packing.\n\n"
        f"example: perilune data {name} --data.corpus.source ./texts",
        DataFlags,
        RunConfig,
        default,
        rest,
    )
    from perilune.data import Corpus, inspect, tokenize_corpus
    from perilune.train.batches import open_tokenizer
    from perilune.train.progress import DataProgress

    if flags.rows < 0:
        raise UserError(f"--rows is {flags.rows}, expected 0 or more")
    if config.data.probe is not None:
        raise UserError(f"{name!r} trains on rows that the probe {config.data.probe.task!r} makes: it has no corpus")
    with DataProgress(quiet=flags.json) as progress:
        corpus = Corpus(config.data.corpus, progress=progress)
        tokenizer = open_tokenizer(config.data, corpus, progress=progress)
        stores = tokenize_corpus(corpus, tokenizer, cache_dir=config.data.cache_dir, progress=progress)
    found = inspect(corpus, tokenizer, stores, seq_len=config.data.seq_len, seed=config.seed, num_rows=flags.rows)
    if flags.json:
        _print_json(found)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=box.SIMPLE, title=f"{found['source']}, vocabulary {found['vocab_size']:,}", title_justify="left")
    for column in ("split", "documents", "tokens", "bytes", "bytes/token", "median tokens", "longest"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, numbers in found["splits"].items():
        lengths = numbers["document_tokens"]
        table.add_row(
            split, f"{numbers['documents']:,}", f"{numbers['tokens']:,}", f"{numbers['bytes']:,}",
            str(numbers["bytes_per_token"]), str(lengths.get("p50", "-")), str(lengths.get("p100", "-")),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"rows of {found['seq_len']} tokens, {found['rows_per_epoch']:,} an epoch; a bar marks a document's start"
    )
    for row in found["rows"]:
        console.print(Text(f"row {row['row']}: {row['text']}"))
    if config.data.vision is not None and config.data.has_pictures:
        fusion, tasks = config.data.vision.fusion, ", ".join(config.data.vision.tasks)
        console.print(
            f"beside these rows of text, {fusion.share:.1%} of the rows hold pictures ({tasks}), made while it trains"
            + (f", from {fusion.start:.0%} of the run on" if fusion.start else "")
        )
    if found["skipped"]:
        console.print(f"skipped: {found['skipped']}")


@dataclass(kw_only=True)
class ReportFlags:
    runs: str = "runs"
    png: bool = False
    """Also write the plots as PNG files beside the page."""
    json: bool = False


def report_verb(arguments: list[str]) -> None:
    """Write the HTML report of a run again, also of one that is still training."""
    name, rest = _positional(arguments, "RUN", "a run's name or folder", "perilune report nano", helps=True)
    help_text = f"Write the HTML report of a run, also while it trains.\n\nexample: perilune report {name} --png"
    flags = _parse(f"perilune report {name}", help_text, ReportFlags, rest)
    from perilune.report import write_training_report
    from perilune.report.rl import write_rl_report

    folder = _run_folder(name, flags.runs)
    is_rl = (folder / "rl.json").exists()
    path = write_rl_report(folder) if is_rl else write_training_report(folder, png=flags.png)
    _print_json({"report": str(path)}) if flags.json else print(f"report: {path}")


def _verb_of(name: str, module: str | None = None) -> Callable[[list[str]], None]:
    """A verb of another module, imported when it is used: `perilune.cli_MODULE.NAME_verb`; by default both agree."""

    def verb(arguments: list[str]) -> None:
        getattr(importlib.import_module(f"perilune.cli_{module or name}"), f"{name}_verb")(arguments)

    return verb


@dataclass(kw_only=True)
class BenchFlags:
    filter: str = ""
    """Only cases whose name holds this text; several with commas between."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    json: str | None = None
    """Write the rows to this file; "-" prints them on standard output instead of the table."""
    save: bool = False
    """Write the rows to benchmarks/results/bench_AREA.json."""
    commit: str | None = None
    """The commit to name in the rows; from git when not given."""


def bench_verb(arguments: list[str]) -> None:
    """Check operators against their definitions, then time them beside every peer that is installed."""
    areas = (
        "kda",
        "attnres",
        "muon",
        "attention",
        "decode",
        "train",
        "all",
    )  # perilune.bench imports torch; this does not
    example = "perilune bench kda --filter T8192 --json kda.json"
    name, rest = _positional(arguments, "AREA", f"one of {', '.join(areas)}", example)
    if name not in areas:
        _fail(f"unknown area {name!r}{_nearest(name, areas)}; expected one of {', '.join(areas)}", code=2)
    help_text = (
        "Check operators against their definitions, then time them beside every peer that is installed.\n\n"
        f"example: perilune bench {name} --json {name}.json"
    )
    flags = _parse(f"perilune bench {name}", help_text, BenchFlags, rest)
    if flags.save and flags.json is not None:
        raise UserError("--save and --json both name a file for the rows; give one of them")
    from rich.console import Console

    from perilune.bench import AREAS, Bench, BenchError, run_area
    from perilune.bench.rows import print_table, rows_as_json
    from perilune.train.environment import describe_environment
    from perilune.train.trainer import pick_device

    device = pick_device(flags.device, "--device")
    to_output = flags.json == "-"
    path = Path(f"benchmarks/results/bench_{name}.json") if flags.save else None
    if flags.json is not None and not to_output:
        path = Path(flags.json)
    commit = describe_environment(device).get("commit", "") if flags.commit is None else flags.commit
    notes = sys.stderr if to_output else sys.stdout
    bench = Bench(
        device, pattern=flags.filter, path=path, commit=commit, emit=lambda text: print(text, file=notes, flush=True)
    )
    problems = []
    for area in AREAS if name == "all" else (name,):
        bench.prefix = f"{area}: " if name == "all" else ""
        try:
            reason = run_area(area, bench)
        except BenchError as error:
            problems.append(f"{area}: {error}")
            continue
        except Exception as error:  # the other areas are still worth their time
            if name != "all":
                raise
            traceback.print_exc()
            problems.append(f"{area}: {type(error).__name__}: {error}")
            continue
        if reason is not None and name == "all":
            bench.note(reason)
        elif reason is not None:
            problems.append(reason)
    if to_output:
        print(rows_as_json(bench.rows), end="")
    else:
        print_table(bench.rows, Console(width=None if sys.stdout.isatty() else 140))
        if path is not None and bench.rows:
            print(f"{len(bench.rows)} rows: {path}")
    if not bench.rows and not problems:
        raise UserError(f"no case of {name!r} has {flags.filter!r} in its name; without --filter all of them run")
    if problems:
        raise UserError("; ".join(problems))


@dataclass(kw_only=True)
class DoctorFlags:
    json: bool = False


def doctor_verb(arguments: list[str]) -> None:
    """What this machine can do, what it cannot, and why."""
    help_text = "What this machine can do, what it cannot, and why.\n\nexample: perilune doctor --json"
    flags = _parse("perilune doctor", help_text, DoctorFlags, arguments)
    from perilune.doctor import examine, show

    found = examine()
    _print_json(found) if flags.json else show(found)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": train_verb,
    "launch": _verb_of("launch"),
    "generate": _verb_of("generate"),
    "view": _verb_of("view"),
    "data": data_verb,
    "eval": _verb_of("eval"),
    "report": report_verb,
    "export": _verb_of("export", "hub"),
    "import": _verb_of("import", "hub"),
    "sft": _verb_of("sft"),
    "rl": _verb_of("rl"),
    "serve": _verb_of("serve"),
    "chat": _verb_of("chat"),
    "ladder": _verb_of("ladder"),
    "swarm": _verb_of("swarm"),
    "bench": bench_verb,
    "doctor": doctor_verb,
}


# ---------------------------------------------------------------------------------------------------------------------
# arguments


def _positional(
    arguments: list[str], name: str, expected: str, example: str, *, helps: bool = False
) -> tuple[str, list[str]]:
    """The leading positional argument and the rest. `helps`: the verb knows its flags without it, so that whoever asks
    for help alone is shown them, with the argument of the example."""
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            if helps:
                print(f"{name} comes first: {expected}\n")
                return example.split()[2], ["--help"]
            print(f"{name} comes first: {expected}\n\nexample: {example}\nall flags: {example.split(' --')[0]} --help")
            raise SystemExit(0)
        _fail(f"{name} is missing: {expected} (example: {example})", code=2)
    return arguments[0], arguments[1:]


def _parse(prog: str, description: str, flags: type[Any], arguments: list[str]) -> Any:
    return tyro.cli(flags, prog=prog, description=description, args=arguments)


def _parse_run(
    prog: str, description: str, flags: type[Any], run: type[Any], default: Any, arguments: list[str]
) -> tuple[Any, Any]:
    """Flags of the verb, and the recipe with its overrides."""
    both = dataclasses.make_dataclass(
        "Arguments",
        [("flags", Annotated[flags, tyro.conf.arg(name="")]), ("run", Annotated[run, tyro.conf.arg(name="")])],
        kw_only=True,
    )
    parsed = tyro.cli(
        both,
        prog=prog,
        description=description,
        args=arguments,
        default=both(flags=flags(), run=default),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return parsed.flags, parsed.run


def _early_flags(flags: type[Any], arguments: list[str]) -> Any:
    """The verb's own flags, before the recipe's are known; help and complaints wait for the full parse."""
    known = [argument for argument in arguments if argument not in ("-h", "--help")]
    return tyro.cli(flags, args=known, return_unknown_args=True)[0]


def _with_set(config: Any, assignments: Sequence[str]) -> Any:
    """The config with `path=value` applied; values are JSON, or else taken as text."""
    if not assignments:
        return config
    from perilune.train.config_file import from_plain, to_plain

    plain = to_plain(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment!r}: expected path=value, for example model.block_sublayers=6")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        *parents, last = path.split(".")
        place = plain
        for parent in parents:
            if parent in place and place[parent] is None:
                raise UserError(f"--set {path!r}: {parent!r} is not set; give all of it, --set '...{parent}={{...}}'")
            if not isinstance(place.get(parent), dict):
                raise UserError(f"--set {path!r}: there are no fields under {parent!r}{_nearest(parent, place)}")
            place = place[parent]
        if last not in place:
            raise UserError(f"--set {path!r}: there is no field {last!r}{_nearest(last, place)}")
        place[last] = value
    return from_plain(type(config), plain)


def _run_folder(name: str, runs: str) -> Path:
    """A run by name, or any folder that is one."""
    for folder in (Path(runs) / name, Path(name)):
        if (folder / "config.json").exists():
            return folder
    known = [path.parent.name for path in Path(runs).glob("*/config.json")]
    listed = f"; runs in {runs!r}: {', '.join(sorted(known))}" if known else f"; {runs!r} holds no runs"
    raise UserError(f"there is no run {name!r}{_nearest(name, known)}{listed}")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
