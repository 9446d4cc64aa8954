"""What QK-Clip does: a run with far too large a learning rate, without and with a limit on its attention logits.

    python benchmarks/logit_explosion.py                      under two minutes on two cores
    python benchmarks/logit_explosion.py --steps 600 --tau 50

Both arms are the same hybrid model (KDA and MLA layers, Attention Residuals) on the generated corpus, with the same
seed and data; only `optimizer.qk_clip_tau` differs. Writes a page with both curves to runs/logit_explosion/report.html,
the plot beside it, and the numbers to benchmarks/results/logit_explosion.json.
"""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from perilune.data import CorpusConfig
from perilune.model import KDAConfig, MLAConfig, ModelConfig
from perilune.report import Headline, Page, Plot, Plots, Series, Table, Threshold, save_png, write_page
from perilune.train import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig, train
from perilune.train.environment import describe_environment


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The exploding run."""

    steps: int = 400
    lr: float = 0.04
    tau: float = 30.0
    runs: Path = Path("runs")
    results: Path = Path("benchmarks/results")


def exploding_run(settings: Settings) -> RunConfig:
    return RunConfig(
        name="logit_explosion",
        model=ModelConfig(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=4,
            layer_types=("kda", "mla", "kda", "mla"),
            kda=KDAConfig(num_heads=2, head_dim=32),
            mla=MLAConfig(
                num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
            ),
            intermediate_size=128,
        ),
        data=DataConfig(corpus=CorpusConfig(source="generated"), vocab_size=512, seq_len=128),
        optimizer=OptimizerConfig(lr=settings.lr, adam_lr=3e-3, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
        trainer=TrainerConfig(
            steps=settings.steps,
            global_batch_rows=16,
            micro_batch_rows=16,
            eval_every=0,
            checkpoint_every=0,
            tensorboard=False,
        ),
    )


def run_arm(settings: Settings, name: str, tau: float | None) -> list[dict[str, Any]]:
    """The train records of one arm."""
    config = exploding_run(settings)
    optimizer = replace(config.optimizer, qk_clip_tau=tau)
    config = replace(config, name=f"{config.name}_{name}", optimizer=optimizer)
    train(config, runs_folder=settings.runs, overwrite=True)
    lines = (settings.runs / config.name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def curve(name: str, records: list[dict[str, Any]], value: Any) -> Series:
    return Series(name=name, x=[record["step"] for record in records], y=[value(record) for record in records])


def summary(settings: Settings, arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    peaks = {name: [max(record["max_logit"]) for record in records] for name, records in arms.items()}
    clipped = peaks["tau"]
    first = next((step for step, value in enumerate(clipped) if value > settings.tau), None)
    return {
        "settings": {"steps": settings.steps, "lr": settings.lr, "tau": settings.tau},
        "max_logit_without_clip": max(peaks["off"]),
        "first_step_above_tau": None if first is None else first + 1,
        "max_logit_after_first_clip": None if first is None else max(clipped[first + 1 :], default=None),
        "bound": 1.5 * settings.tau,
        "clipped_heads_in_all_steps": sum(record["clipped_heads"] for record in arms["tau"]),
        "final_loss": {name: statistics.fmean(r["loss"] for r in records[-20:]) for name, records in arms.items()},
        "environment": describe_environment(torch.device("cpu")),
    }


def page(settings: Settings, arms: dict[str, list[dict[str, Any]]], numbers: dict[str, Any]) -> Page:
    names = {"off": "no limit", "tau": "QK-Clip"}

    def plot(title: str, y_label: str, value: Any, **options: Any) -> Plot:
        series = [curve(names[arm], records, value) for arm, records in arms.items()]
        return Plot(title=title, x_label="step", y_label=y_label, series=series, **options)

    limits = [Threshold(value=settings.tau, name="tau"), Threshold(value=1.5 * settings.tau, name="1.5 tau")]
    logits = plot(
        "Largest attention logit", "logit", lambda r: max(r["max_logit"]), log_y=True, thresholds=limits,
        caption="Over all MLA layers and heads, measured in the forward pass before the step that the clip follows.",
    )  # fmt: skip
    rows = [[name, value] for name, value in numbers.items() if not isinstance(value, dict)]
    return Page(
        title="Exploding attention logits, with and without QK-Clip",
        subtitle=f"Muon with lr {settings.lr:g}, no weight decay, {settings.steps} steps; same seed and data",
        headlines=[
            Headline(label="without a limit", value=f"{numbers['max_logit_without_clip']:.0f}", note="largest logit"),
            Headline(
                label=f"tau = {settings.tau:g}",
                value=f"{numbers['max_logit_after_first_clip'] or 0:.1f}",
                note="largest logit after the first clip",
            ),
        ],
        facts=numbers["environment"],
        sections=[
            Plots(
                title="Logits",
                plots=[logits, plot("Heads clipped", "heads", lambda r: r["clipped_heads"], from_zero=True)],
            ),
            Plots(
                title="Training",
                plots=[
                    plot("Loss", "nats per token", lambda r: r["loss"]),
                    plot("Gradient norm", "norm", lambda r: r["grad_norm"], log_y=True),
                ],
            ),
            Table(title="Numbers", columns=["what", "value"], rows=rows),
        ],
    )


def main(settings: Settings) -> None:
    arms = {"off": run_arm(settings, "off", None), "tau": run_arm(settings, "tau", settings.tau)}
    numbers = summary(settings, arms)
    folder = settings.runs / "logit_explosion"
    folder.mkdir(parents=True, exist_ok=True)
    report = page(settings, arms, numbers)
    path = write_page(report, folder / "report.html")
    save_png(report.sections[0].plots[0], folder / "max_logit.png")
    settings.results.mkdir(parents=True, exist_ok=True)
    (settings.results / "logit_explosion.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps({name: value for name, value in numbers.items() if name != "environment"}, indent=2))
    print(f"report: {path}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
