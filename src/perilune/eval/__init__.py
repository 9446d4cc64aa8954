"""What a trained run can do beyond its loss: by domain, copying, by position, retrieval from long texts.

found = evaluate_run(folder, EvalConfig(needle_lengths=(4096, 32768)), device=torch.device("cuda"))
"""

from perilune.eval.run import EvalConfig, evaluate_run

__all__ = ["EvalConfig", "evaluate_run"]
