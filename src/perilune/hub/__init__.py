"""Models to and from folders that transformers, vLLM and SGLang read and write: config.json and safetensors.

model = from_pretrained(folder)                 kimi_linear, deepseek_v3 (kimi_k2), kimi_k25, or our own superset
save_pretrained(model, folder)                  the public type where the model fits one, else model_type "perilune"
export_model(model, folder, tokenizer=...)      the same with everything that belongs to a model: `perilune export`
import_folder(released, folder)                 a released folder as one of ours, a tensor at a time: `perilune import`
opened = open_folder(folder)                    model, tokenizer, picture budgets and chat template of such a folder
"""

from perilune.hub.entries import FormatError
from perilune.hub.export import Exported, export_model, is_model_folder, save_pretrained
from perilune.hub.imported import Imported, import_folder
from perilune.hub.opened import OpenedModel, builtin_template, open_folder
from perilune.hub.targets import TARGETS, choose, why_not
from perilune.hub.weights import folder_config, from_pretrained, load_folder, load_weights, public_weights

__all__ = [
    "TARGETS",
    "Exported",
    "FormatError",
    "Imported",
    "OpenedModel",
    "builtin_template",
    "choose",
    "export_model",
    "folder_config",
    "from_pretrained",
    "import_folder",
    "is_model_folder",
    "load_folder",
    "load_weights",
    "open_folder",
    "public_weights",
    "save_pretrained",
    "why_not",
]
