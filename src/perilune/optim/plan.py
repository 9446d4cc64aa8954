"""From a model to a plan: every trainable parameter once, with its layout.

Who decides, first match wins: an explicit override; a module that implements `DeclaresMatrices` (the outermost one,
which knows more than its parts); adapters.py for transformers modules; the default rule:

- AdamW: embeddings and whatever is tied to one, output heads, convolutions, norms, biases, everything else that is not
  the weight of an `nn.Linear`. A tensor nobody knows is safe with AdamW and shows up in the table.
- Muon, whole: the weight of every other `nn.Linear`, router gates included (arXiv 2502.16982).

Weight decay of AdamW parameters by the default rule: tensors of two or more dimensions (embeddings, heads,
convolutions) and the gains of norms, which Moonlight (arXiv 2502.16982) calls crucial for stability; not biases and
other vectors.

An output head is what `get_output_embeddings()` returns; in a model without that method, a Linear with as many outputs
as an embedding has rows that stands outside repeated blocks (no number in its name), or, when there is none, the last
Linear of the model if it has that many outputs and ends one nn.Sequential. Width alone does not decide: in a byte model
with 256 tokens, hidden layers of width 256 are hidden.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from perilune.optim.adapters import transformers_matrices
from perilune.optim.matrices import Adam, DeclaresMatrices, Layout, Whole, check_layout

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedParameter:
    name: str
    parameter: nn.Parameter
    layout: Layout


def plan_parameters(
    model: nn.Module, *, overrides: Mapping[str, Layout] | None = None, decay_norm_gains: bool = True
) -> list[PlannedParameter]:
    """Layouts of all parameters of `model` that require a gradient, tied ones once, in the order of
    named_parameters()."""
    declared = _declared(model)
    defaults = _defaults(model, decay_norm_gains)
    named = dict(model.named_parameters())
    chosen = {id(parameter): declared.get(id(parameter), defaults[id(parameter)]) for parameter in named.values()}
    chosen.update(_overridden(model, overrides or {}))
    plan = [
        PlannedParameter(name=name, parameter=parameter, layout=chosen[id(parameter)])
        for name, parameter in named.items()
        if parameter.requires_grad
    ]
    for entry in plan:
        check_layout(entry.name, entry.parameter, entry.layout)
    return plan


def _declared(model: nn.Module) -> dict[int, Layout]:
    declared: dict[int, Layout] = {}
    for module_name, module in model.named_modules():
        matrices = _matrices_of(module)
        if not matrices:
            continue
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, layout in matrices.items():
            if name not in own:
                where = f"{type(module).__name__} {module_name!r}"
                raise ValueError(
                    f"{where} declares the layout of {name!r}, but has no such parameter{_nearest(name, own)}; "
                    "correct logical_matrices()"
                )
            check_layout(f"{module_name}.{name}".lstrip("."), own[name], layout)
            declared.setdefault(id(own[name]), layout)
    return declared


def _matrices_of(module: nn.Module) -> Mapping[str, Layout]:
    return module.logical_matrices() if isinstance(module, DeclaresMatrices) else transformers_matrices(module)


def _defaults(model: nn.Module, decay_norm_gains: bool) -> dict[int, Layout]:
    heads = _output_heads(model)
    layouts: dict[int, Layout] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (
                isinstance(module, nn.Linear)
                and name == "weight"
                and parameter.ndim == 2
                and id(parameter) not in heads
            ):
                layouts.setdefault(id(parameter), Whole())
                continue
            gain = name == "weight" and _is_norm(module)
            decays = decay_norm_gains if gain else parameter.ndim >= 2
            layouts[id(parameter)] = Adam(weight_decay=decays)
    return layouts


def _is_norm(module: nn.Module) -> bool:
    """By type, or by class name for libraries that write their own; a module that declares itself is not guessed."""
    if isinstance(module, DeclaresMatrices):
        return False
    return isinstance(module, NORMS) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _output_heads(model: nn.Module) -> set[int]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = {id(embedding.weight) for embedding in embeddings}
    for module in model.modules():
        getter: Any = getattr(module, "get_output_embeddings", None)
        output = getter() if callable(getter) else None
        if isinstance(output, nn.Module):
            return heads | {id(parameter) for parameter in output.parameters()}
    rows = {embedding.num_embeddings for embedding in embeddings}
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wide = [(name, module) for name, module in linears if module.out_features in rows]
    outside = [module for name, module in wide if not any(part.isdigit() for part in name.split("."))]
    if outside:
        heads.update(id(module.weight) for module in outside)
    elif wide and wide[-1] == linears[-1] and _ends_sequential(wide[-1][0]):
        heads.add(id(wide[-1][1].weight))
    return heads


def _ends_sequential(name: str) -> bool:
    """True for "3" and "net.3", a member of one sequence; False inside repeated blocks ("layers.7.down",
    "blocks.2.mlp.0")."""
    parts = name.split(".")
    return parts[-1].isdigit() and not any(part.isdigit() for part in parts[:-1])


def _overridden(model: nn.Module, overrides: Mapping[str, Layout]) -> dict[int, Layout]:
    """Exact names beat patterns; among patterns the later one wins. Any name of a tied parameter will do."""
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen: dict[int, Layout] = {}
    for key, layout in sorted(overrides.items(), key=lambda item: item[0] in named):
        matches = [key] if key in named else fnmatch.filter(named, key)
        if not matches:
            raise ValueError(f"overrides has {key!r}, which matches no parameter{_nearest(key, named)}")
        for name in matches:
            check_layout(name, named[name], layout)
            chosen[id(named[name])] = layout
    return chosen


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.0)
    return f" (nearest: {close[0]!r})" if close else ""
