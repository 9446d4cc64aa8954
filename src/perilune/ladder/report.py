"""The report of a ladder: one self-contained page, the same tables as Markdown, and plots as pictures.

LADDER/report.html  report.md  loss_HORIZON.png  multipliers.png  time.png  trend.png
"""

from __future__ import annotations

import os
from pathlib import Path

from perilune.ladder.evidence import Evidence
from perilune.ladder.findings import Estimate
from perilune.ladder.report_plots import accuracy_plots, logit_plots, loss_plots, multiplier_plots, sweep_plots
from perilune.ladder.report_tables import Rows, all_rows, as_markdown, shown
from perilune.report import Headline, Notes, Page, Plots, Section, Table, save_png, write_page
from perilune.report.plots import compact

MAX_HEADLINES = 6


def write_report(evidence: Evidence, folder: Path, *, png: bool = False) -> list[Path]:
    """All files that were written, the page first."""
    written = [write_page(page(evidence), folder / "report.html")]
    markdown = folder / "report.md"
    partial = markdown.with_name(f".{markdown.name}")
    partial.write_text(as_text(evidence), encoding="utf-8")
    os.replace(partial, markdown)
    written.append(markdown)
    if png:
        names = [f"loss_{horizon.name}" for horizon in evidence.ladder.ordered_horizons()]
        pictures = [*zip(names, loss_plots(evidence), strict=False)]
        pictures += zip(_multiplier_names(evidence), multiplier_plots(evidence), strict=True)
        pictures += [("accuracy", plot) for plot in accuracy_plots(evidence)]
        pictures += [(f"logits_{number}", plot) for number, plot in enumerate(logit_plots(evidence))]
        written += [save_png(plot, folder / f"{name}.png") for name, plot in pictures if not plot.is_empty]
    return written


def page(evidence: Evidence) -> Page:
    ladder = evidence.ladder
    sections: list[Section] = []
    if plots := accuracy_plots(evidence):
        sections.append(Plots(title="Accuracy", plots=plots))
    if plots := loss_plots(evidence):
        sections.append(Plots(title="Loss over compute", plots=plots))
    if plots := multiplier_plots(evidence):
        sections.append(Plots(title="What every arm buys", plots=plots))
    if plots := logit_plots(evidence):
        sections.append(Plots(title="Attention logits", plots=plots))
    for rows in all_rows(evidence):
        sections.append(_table(rows))
        if rows.title == "What was tuned" and (plots := sweep_plots(evidence)):
            sections.append(Plots(title="Sweeps", plots=plots))
    if evidence.notes:
        sections.append(Notes(title="To know when reading", notes=evidence.notes))
    return Page(
        title=f"Scaling ladder {ladder.name}",
        subtitle=ladder.question,
        headlines=headlines(evidence),
        facts=facts(evidence),
        sections=sections,
    )


def headlines(evidence: Evidence) -> list[Headline]:
    found = []
    if evidence.fit is not None:
        by_name = {arm.arm: arm for arm in evidence.fit.arms}
        for name in evidence.present_arms():
            if name in by_name:
                rho = by_name[name].rho
                found.append(Headline(label=name, value=f"{rho.value:.2f}x", note=_interval(rho)))
    found = found[:MAX_HEADLINES]
    if evidence.outcomes:
        worst = max(evidence.outcomes, key=lambda outcome: abs(outcome.error))
        found.append(
            Headline(
                label=f"held out, {worst.predicted.rung}",
                value=f"{worst.error:+.4f}",
                note=f"largest error of {len(evidence.outcomes)} predictions, nats",
            )
        )
    return found


def _interval(rho: Estimate) -> str:
    if rho.low is None or rho.high is None:
        return "times the baseline's compute"
    return f"compute; {rho.low:.2f} to {rho.high:.2f}"


def facts(evidence: Evidence) -> dict[str, str]:
    results = evidence.results

    def every(name: str) -> str:
        return ", ".join(sorted({r.environment[name] for r in results if r.environment.get(name)}))

    started = sorted(r.environment["started"] for r in results if r.environment.get("started"))
    found = {
        "baseline": evidence.ladder.baseline.name,
        "results": f"{len(results)}, seeds {', '.join(map(str, evidence.seeds))}",
        "trained": f"{compact(sum(r.tokens for r in results), 3)} tokens, {sum(r.flops for r in results):.3g} FLOPs",
        "text": ", ".join(sorted({r.corpus for r in results if r.corpus})),
        "dates": started[0][:10] + ("" if started[0][:10] == started[-1][:10] else f" to {started[-1][:10]}")
        if started
        else "",
        "commit": every("commit"),
        "perilune": every("perilune"),
        "torch": every("torch"),
        "python": every("python"),
        "machine": every("machine"),
    }
    if evidence.fit is not None:
        curve, sd = evidence.fit.curve, evidence.fit.seed_sd
        found["floor E"] = "given, " + f"{curve.floor.value:.3f}" if curve.floor_is_given else shown(curve.floor)
        found["exponent a"] = shown(curve.exponent)
        found["noise of a run"] = "not known" if sd is None else f"{sd:.4f} nats"
    return {name: value for name, value in found.items() if value}


def _table(rows: Rows) -> Table:
    return Table(title=rows.title, columns=rows.columns, rows=rows.rows, text=rows.text, folded=rows.is_long)


def _multiplier_names(evidence: Evidence) -> list[str]:
    by_title = {
        "What an arm is worth in compute": "multipliers",
        "What an arm is worth in time": "time",
        "The multiplier over compute": "trend",
    }
    return [by_title[plot.title] for plot in multiplier_plots(evidence)]


def as_text(evidence: Evidence) -> str:
    """The tables as Markdown."""
    ladder = evidence.ladder
    parts = [f"# Scaling ladder {ladder.name}", *([ladder.question] if ladder.question else [])]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts(evidence).items()))
    parts += [as_markdown(rows) for rows in all_rows(evidence)]
    if evidence.notes:
        parts.append("\n".join(["## To know when reading", "", *(f"- {note}" for note in evidence.notes)]))
    return "\n\n".join(parts) + "\n"
