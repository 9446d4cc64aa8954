"""What a trained run can do beyond its loss: by domain, copying, by position, retrieval from long texts; and how safe a
chat model is, against any endpoint (safety/).

found = evaluate_run(folder, EvalConfig(needle_lengths=(4096, 32768)), device=torch.device("cuda"))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.eval.run import EvalConfig, evaluate_run

__all__ = ["EvalConfig", "evaluate_run"]


def __getattr__(name: str) -> Any:
    """On first use: the safety probes, which live below, need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from perilune.eval import run

    return getattr(run, name)
