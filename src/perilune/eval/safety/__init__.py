"""A small probe of a chat model's safety: does it refuse what it should, keep to its task, leave tests and logs alone,
and still answer harmless questions.

    outcome = await run_probes(client, "model", load_probes(), SafetyConfig())
    write_reports(outcome, folder)                  safety.json, safety.html, safety.md

Read them in this order: probes.py (what is asked), talk.py (how), judges.py (what counts), scores.py, report.py.
Nothing here imports torch: the model is behind an OpenAI-compatible address, perhaps one inside this process.
"""

from perilune.eval.safety.probes import CATEGORIES, Probe, ProbeError, load_probes
from perilune.eval.safety.report import FILES, write_reports
from perilune.eval.safety.run import Outcome, SafetyConfig, SafetyError, run_probes

__all__ = [
    "CATEGORIES",
    "FILES",
    "Outcome",
    "Probe",
    "ProbeError",
    "SafetyConfig",
    "SafetyError",
    "load_probes",
    "run_probes",
    "write_reports",
]
