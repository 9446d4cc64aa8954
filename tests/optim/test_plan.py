"""Which parameter is optimised how: declarations, the default rule, overrides, and their errors."""

import pytest
import torch
from torch import nn

from perilune.optim import Adam, ColumnBlocks, MuonClip, RowBlocks, Stacked, Whole
from perilune.optim.matrices import blocks
from perilune.optim.plan import plan_parameters


def layouts_of(model: nn.Module, **options) -> dict[str, object]:
    return {entry.name: entry.layout for entry in plan_parameters(model, **options)}


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.conv = nn.Conv1d(width, width, 4, groups=width)
        self.table = nn.Parameter(torch.zeros(4, width))


class Model(nn.Module):
    def __init__(self, vocab: int = 11, width: int = 4, inner: int = 6, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_default_rule():
    layouts = layouts_of(Model())
    assert layouts["blocks.0.up.weight"] == layouts["blocks.1.down.weight"] == Whole()
    for decayed in ("embed.weight", "head.weight", "blocks.0.norm.weight", "blocks.0.conv.weight", "blocks.0.table"):
        assert layouts[decayed] == Adam(weight_decay=True), decayed
    for plain in ("blocks.0.up.bias", "blocks.0.conv.bias"):
        assert layouts[plain] == Adam(weight_decay=False), plain


def test_norm_gains_can_be_left_undecayed():
    assert layouts_of(Model(), decay_norm_gains=False)["blocks.0.norm.weight"] == Adam(weight_decay=False)


class NormedGate(nn.Module):
    """Norm in the name, a declaration for one parameter, nothing said about the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))

    def logical_matrices(self):
        return {"scale": Adam(weight_decay=True)}


class GateRMSNorm(NormedGate):
    """Even the name of a norm."""


class LibraryRMSNorm(nn.Module):
    """As transformers writes them: no subclass of nn.RMSNorm, and no declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Normaliser(LibraryRMSNorm):
    """A vector called weight, in a class that only sounds like a norm."""


def test_names_decide_only_for_modules_that_declare_nothing():
    for declaring in (NormedGate(), GateRMSNorm()):
        assert layouts_of(declaring) == {"weight": Adam(weight_decay=False), "scale": Adam(weight_decay=True)}
    assert layouts_of(LibraryRMSNorm()) == {"weight": Adam(weight_decay=True)}
    assert layouts_of(LibraryRMSNorm(), decay_norm_gains=False) == {"weight": Adam(weight_decay=False)}
    assert layouts_of(Normaliser()) == {"weight": Adam(weight_decay=False)}


def test_tied_parameters_appear_once_and_stay_with_the_embedding():
    layouts = layouts_of(Model(tied=True))
    assert layouts["embed.weight"] == Adam(weight_decay=True) and "head.weight" not in layouts
    head_first = nn.ModuleDict({"head": nn.Linear(4, 11, bias=False), "embed": nn.Embedding(11, 4)})
    head_first["embed"].weight = head_first["head"].weight
    assert layouts_of(head_first) == {"head.weight": Adam(weight_decay=True)}


def test_hidden_layers_as_wide_as_the_vocabulary_are_hidden():
    layouts = layouts_of(Model(vocab=6, inner=6))
    assert layouts["blocks.0.up.weight"] == layouts["blocks.1.up.weight"] == Whole()
    assert layouts["head.weight"] == Adam(weight_decay=True)


def test_the_last_linear_of_a_sequence_is_its_head():
    layouts = layouts_of(nn.Sequential(nn.Embedding(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    assert layouts["1.weight"] == Whole() and layouts["2.weight"] == Adam(weight_decay=True)


def test_a_model_can_say_which_module_is_its_head():
    model = Model(vocab=6, inner=6)
    model.get_output_embeddings = lambda: model.blocks[1].up
    layouts = layouts_of(nn.ModuleDict({"wrapped": model}))
    assert layouts["wrapped.head.weight"] == Whole()
    assert layouts["wrapped.blocks.1.up.weight"] == Adam(weight_decay=True)


def test_frozen_parameters_are_left_out():
    model = Model()
    model.embed.requires_grad_(False)
    assert "embed.weight" not in layouts_of(model)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 4, 5))
        self.A_log = nn.Parameter(torch.zeros(4))

    def logical_matrices(self):
        return {"q_proj.weight": RowBlocks((4, 4)), "experts": Stacked(row_sizes=(2, 2)), "A_log": Adam()}


def test_modules_declare_their_own_layouts():
    assert layouts_of(nn.ModuleList([Fused()])) == {
        "0.q_proj.weight": RowBlocks((4, 4)),
        "0.experts": Stacked(row_sizes=(2, 2)),
        "0.A_log": Adam(),
    }


def test_the_outer_declaration_wins():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fused()

        def logical_matrices(self):
            return {"inner.q_proj.weight": Whole()}

    assert layouts_of(Outer())["inner.q_proj.weight"] == Whole()


def test_overrides_by_name_and_pattern():
    chosen = layouts_of(Model(), overrides={"blocks.*.up.weight": Adam(), "blocks.1.up.weight": ColumnBlocks((2, 2))})
    assert chosen["blocks.0.up.weight"] == Adam()  # the exact name beats the pattern whatever their order
    assert chosen["blocks.1.up.weight"] == ColumnBlocks((2, 2))
    assert layouts_of(Fused(), overrides={"q_proj.weight": Whole()})["q_proj.weight"] == Whole()


def test_an_override_of_a_tied_parameter_may_use_either_name():
    chosen = layouts_of(Model(tied=True), overrides={"head.weight": Adam()})
    assert chosen["embed.weight"] == Adam()


def test_errors_name_the_parameter_and_the_nearest_match():
    with pytest.raises(
        ValueError, match=r"'blocks.0.upp.weight', which matches no parameter \(nearest: 'blocks.0.up.w"
    ):
        plan_parameters(Model(), overrides={"blocks.0.upp.weight": Adam()})
    with pytest.raises(TypeError, match="'muon'; expected one of Whole"):
        plan_parameters(Model(), overrides={"embed.weight": "muon"})
    with pytest.raises(ValueError, match="needs 3 dimensions"):
        plan_parameters(Model(), overrides={"embed.weight": Stacked()})
    with pytest.raises(ValueError, match="with sum 7; they must be positive and add up to its 11 rows"):
        plan_parameters(Model(), overrides={"embed.weight": RowBlocks((4, 3))})
    with pytest.raises(ValueError, match="add up to its 4 columns"):
        plan_parameters(Model(), overrides={"embed.weight": ColumnBlocks((11,))})

    class Wrong(Fused):
        def logical_matrices(self):
            return {"k_proj.weight": Whole()}

    with pytest.raises(ValueError, match=r"Wrong '' declares the layout of 'k_proj.weight'.*nearest: 'q_proj.weight'"):
        plan_parameters(Wrong())


def test_blocks_are_views_that_cover_the_parameter_once():
    cases = [
        (torch.arange(24.0).view(6, 4), RowBlocks((1, 2, 3)), 3),
        (torch.arange(24.0).view(6, 4), ColumnBlocks((1, 3)), 2),
        (torch.arange(24.0).view(2, 4, 3), Stacked(row_sizes=(1, 3)), 4),
        (torch.arange(24.0).view(2, 4, 3), Stacked(), 2),
        (torch.arange(24.0).view(6, 4), Whole(), 1),
    ]
    for tensor, layout, count in cases:
        cut = list(blocks(tensor, layout, per_head=True))
        assert len(cut) == count and sum(block.numel() for block in cut) == tensor.numel()
        for block in cut:
            block.neg_()
        assert torch.equal(tensor, -torch.arange(24.0).view(tensor.shape))
    assert len(list(blocks(torch.zeros(6, 4), RowBlocks((1, 2, 3)), per_head=False))) == 1
    assert len(list(blocks(torch.zeros(6, 4), RowBlocks((2, 2, 2), fused=True), per_head=False))) == 3


def test_the_table_says_what_happens_to_every_parameter():
    model = Model()
    optimizer = MuonClip.for_model(model, lr=2e-3, adam_lr=5e-4, weight_decay=0.1, qk_clip_tau=None)
    rows = optimizer.describe()
    assert sum(row.num_elements for row in rows) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(row.num_tensors for row in rows) == len(list(model.parameters()))
    assert [(row.group, row.layout, row.num_tensors, row.lr, row.weight_decay) for row in rows] == [
        ("muon", "Whole", 4, 2e-3, 0.1),
        ("adam_decay", "", 8, 5e-4, 0.1),
        ("adam", "", 4, 5e-4, 0.0),
    ]
    header, rule, *lines = optimizer.table().splitlines()
    assert header.split() == ["group", "layout", "tensors", "elements", "lr", "decay", "shapes"] and set(rule) == {"-"}
    assert "2 x 6x4, 2 x 4x6" in lines[0]
