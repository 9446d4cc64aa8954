"""Fine-tuning on dialogues through the trainer: what is learnt, packing, resume, ranks, adapters and folders."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.tiny_runs import MODEL, tiny_run

from perilune import hub
from perilune.data.chat_rows import ChatRows
from perilune.data.packing import IGNORED
from perilune.data.raster import encode_png
from perilune.data.vision_rows import assemble, lay_row
from perilune.model import Decoder, VisionConfig
from perilune.model.lora import LoraConfig, add_adapters, has_adapters
from perilune.recipes.sft import FOLDER_LR, LORA_LR_FACTOR, LR_SHARE, recipe_sources, sft
from perilune.train import RunConfig, RunError, checkpoint, load_run, train
from perilune.train.batches import _on_device, micro_batches, open_data
from perilune.train.ranks import Part
from perilune.train.run_folder import CHECKPOINTS, METRICS, load_weights, read_config

CPU = torch.device("cpu")
TOWER = VisionConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pos_emb_height=2, pos_emb_width=2
)


def talk(question: Any, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def picture(number: int) -> dict[str, Any]:
    png = encode_png(np.full((28, 28, 3), 10 * number, dtype=np.uint8))
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two base runs, blind and seeing, and files of dialogues."""
    folder = tmp_path_factory.mktemp("sft")
    base = tiny_run(folder / "cache", trainer={"steps": 2, "sample_prompts": (), "eval_every": 0})
    train(replace(base, name="blind"), runs_folder=folder / "runs", quiet=True)
    train(replace(base, name="seeing", model=replace(MODEL, vision=TOWER)), runs_folder=folder / "runs", quiet=True)
    plain = [talk(f"what is {number}?", f"it is {number}") for number in range(24)]
    shown = [talk([picture(number), {"type": "text", "text": "?"}], f"grey {number}") for number in range(8)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain + shown))
    return folder


def tuned(place: Path, source: str = "blind", data: str = "chats.jsonl", **changes: Any) -> RunConfig:
    config = sft(
        place / "runs" / source, sources=(str(place / data),), lora=LoraConfig(rank=changes.pop("rank", 0))
    )  # fmt: skip
    trainer = {"steps": 4, "global_batch_rows": 4, "micro_batch_rows": 2, "eval_every": 2, "checkpoint_every": 2}
    assert config.data.chat is not None
    return replace(
        config,
        data=replace(config.data, seq_len=64, chat=replace(config.data.chat, valid_fraction=0.2)),
        trainer=replace(config.trainer, **{**trainer, **changes.pop("trainer", {})}),
        **changes,
    )


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.find(run / CHECKPOINTS)
    assert found is not None
    return checkpoint.load_tensors(found.folder)


def test_the_loss_is_that_of_assistant_tokens_and_of_nothing_else(place: Path) -> None:
    config = tuned(place)
    data = open_data(config.data, seed=0)
    (batch,) = micro_batches(data.train, first_row=0, rows=2, micro_batch_rows=2, device=CPU)
    model = load_run(place / "runs" / "blind")[0]
    logits = model.logits(model.hidden(batch.tokens_BT, cu_seqlens=batch.cu_seqlens))[0].double().log_softmax(-1)
    learnt = batch.targets_BT[0] != IGNORED
    said = data.tokenizer.decode(batch.targets_BT[0][learnt].tolist())
    assert set(said.replace("it is ", "").split("<|im_end|>")) <= {*map(str, range(24)), ""}, "only answers"
    by_hand = -logits[learnt].gather(1, batch.targets_BT[0][learnt][:, None]).sum()
    torch.testing.assert_close(model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens).double(), by_hand)
    assert batch.num_targets == int(learnt.sum())


@pytest.mark.parametrize("rank", [0, 2])
def test_packed_dialogues_equal_separate_dialogues_in_loss_and_gradients(place: Path, rank: int) -> None:
    config = tuned(place, "seeing", "mixed.jsonl")
    config = replace(config, data=replace(config.data, seq_len=200))
    rows = open_data(config.data, seed=0).train
    assert isinstance(rows, ChatRows)
    index = next(number for number in range(rows.num_rows) if rows.has_pictures(number))
    documents = [rows._whole(rows._kept[number]) for number in rows._chosen(index)]
    assert len(documents) > 1
    model = Decoder(replace(config.model, compute_dtype="float64"), seed=0).double()
    load_weights(place / "runs" / "seeing", model, config)
    model.double()
    add_adapters(model, LoraConfig(rank=rank), seed=0)

    def gradients(batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        total = 0.0
        for each in batches:
            batch = _on_device(each, CPU)
            loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=batch.media)
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed, packed_gradients = gradients([rows.batch_of([index])])
    alone = [assemble([lay_row([each], len(each.tokens) - 1, rows.tokenizer.pad_id)], rows.tokenizer)
             for each in documents]  # fmt: skip
    separate, separate_gradients = gradients(alone)
    assert packed == pytest.approx(separate, rel=1e-9)
    assert packed_gradients.keys() == separate_gradients.keys() and packed_gradients
    for name, gradient in packed_gradients.items():
        torch.testing.assert_close(gradient, separate_gradients[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_resumed_fine_tuning_has_the_same_bits(place: Path, tmp_path: Path, rank: int) -> None:
    config = tuned(place, "seeing", "mixed.jsonl", rank=rank, trainer={"checkpoint_in_background": False})
    train(config, runs_folder=tmp_path / "whole", quiet=True)

    class Killed(Exception):
        pass

    reached: list[str] = []

    def kill(phase: str) -> None:
        reached.append(phase)
        if reached.count("step:begin") == 4:
            raise Killed

    with pytest.raises(Killed):
        train(config, runs_folder=tmp_path / "cut", quiet=True, on_phase=kill)
    train(config, runs_folder=tmp_path / "cut", quiet=True, resume=True)
    whole, cut = (tensors_of(tmp_path / part / config.name) for part in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert losses_of(tmp_path / "whole" / config.name) == losses_of(tmp_path / "cut" / config.name)


def test_rows_with_pictures_are_cut_apart_and_every_part_has_as_many_batches(place: Path) -> None:
    rows = open_data(tuned(place, "seeing", "mixed.jsonl").data, seed=0).train
    parts = [
        list(micro_batches(rows, first_row=0, rows=5, micro_batch_rows=2, device=CPU, part=Part(number=n, count=2)))
        for n in range(2)
    ]
    assert [batch.media is None for batch in parts[0]] == [batch.media is None for batch in parts[1]]
    whole = list(micro_batches(rows, first_row=0, rows=5, micro_batch_rows=5, device=CPU))
    assert [batch.media is None for batch in whole] == [True, False]
    counted = sum(batch.num_targets for part in parts for batch in part)
    assert counted == sum(batch.num_targets for batch in whole) == rows.batch(0, 5).num_targets


@pytest.mark.parametrize("rank", [0, 2])
def test_two_ranks_train_as_one(place: Path, tmp_path: Path, rank: int) -> None:
    config = tuned(place, "seeing", "mixed.jsonl", rank=rank, trainer={"steps": 3})
    trained(config, tmp_path / "one", world=None)
    trained(config, tmp_path / "two", world=2)
    one, two = (losses_of(tmp_path / world / config.name) for world in ("one", "two"))
    # float32 sums in another order, a few steps long.
    assert worst_difference(two, one) < 2e-3
    model = load_run(tmp_path / "two" / config.name)[0]
    assert not has_adapters(model)


def test_what_follows_from_the_source(place: Path) -> None:
    source = read_config(place / "runs" / "blind")
    config, light = (sft(place / "runs" / "blind", sources=("x",), lora=LoraConfig(rank=rank)) for rank in (0, 4))
    assert config.optimizer.lr == pytest.approx(LR_SHARE * source.optimizer.lr)
    assert light.optimizer.lr == pytest.approx(LORA_LR_FACTOR * config.optimizer.lr)
    assert config.start_from == str(place / "runs" / "blind") and config.name == "blind-sft"
    assert config.data.chat is not None and config.model == source.model


def test_adapters_leave_the_weights_and_what_starts_from_them_has_them_merged(place: Path, tmp_path: Path) -> None:
    config = tuned(place, rank=2)
    train(config, runs_folder=tmp_path, quiet=True)
    base = load_run(place / "runs" / "blind")[0].state_dict()
    apart = load_run(tmp_path / config.name, merge=False)[0]
    assert has_adapters(apart)
    assert all(torch.equal(tensor, apart.state_dict()[name]) for name, tensor in base.items())
    merged = load_run(tmp_path / config.name)[0].state_dict()
    assert merged.keys() == base.keys()
    assert any(not torch.equal(merged[name], tensor) for name, tensor in base.items())
    again = sft(tmp_path / config.name, sources=config.data.chat.sources if config.data.chat else ())
    assert again.lora.rank == 0
    fresh = Decoder(again.model, seed=9)
    load_weights(tmp_path / config.name, fresh, again)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in fresh.state_dict().items())


def test_a_model_folder_is_fine_tuned_with_its_own_tokenizer(place: Path, tmp_path: Path) -> None:
    model, tokenizer, _ = load_run(place / "runs" / "blind")
    folder = tmp_path / "exported"
    hub.export_model(model, folder, target=hub.choose(model.config, None), tokenizer=tokenizer)
    config = sft(folder, sources=(str(place / "chats.jsonl"),))
    assert config.optimizer.lr == FOLDER_LR
    config = replace(
        config,
        data=replace(config.data, seq_len=64),
        optimizer=replace(config.optimizer, lr=0.01),
        trainer=replace(config.trainer, steps=3, global_batch_rows=4, device="cpu", report=False, tensorboard=False),
    )
    starts: dict[str, torch.Tensor] = {}
    train(config, runs_folder=tmp_path, quiet=True, initialize=lambda model: starts.update(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}))  # fmt: skip
    assert all(torch.equal(tensor, starts[name]) for name, tensor in model.state_dict().items())
    after, own, _ = load_run(tmp_path / config.name)
    assert own.fingerprint == tokenizer.fingerprint
    losses = losses_of(tmp_path / config.name)
    assert losses[-1][0] < losses[0][0]


def test_broken_rows_are_left_out_counted_and_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (place / "chats.jsonl").read_text()
    (tmp_path / "broken.jsonl").write_text(whole + 'not json\n{"messages": []}\n' + json.dumps(talk("x " * 200, "y")))
    config = tuned(place, name="broken", trainer={"steps": 1})
    assert config.data.chat is not None
    sources = (str(tmp_path / "broken.jsonl"),)
    config = replace(config, data=replace(config.data, chat=replace(config.data.chat, sources=sources)))
    train(config, runs_folder=tmp_path, quiet=False)
    said = capsys.readouterr()
    assert "3 rows left out: 1 not JSON, 1 not a dialogue, 1 too long" in said.out + said.err


def test_held_out_dialogues_are_validated_and_never_trained_on(place: Path, tmp_path: Path) -> None:
    config = tuned(place)
    data = open_data(config.data, seed=0)
    assert isinstance(data.train, ChatRows) and isinstance(data.valid, ChatRows)
    trained_on, held = ({kept.document.tokens.tobytes() for kept in rows._kept} for rows in (data.train, data.valid))
    assert len(trained_on) + len(held) == 24 and not trained_on & held and held
    train(config, runs_folder=tmp_path, quiet=True)
    records = [json.loads(line) for line in (tmp_path / config.name / METRICS).read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "valid"] == [2, 4]


def test_a_blind_model_refuses_pictures_in_one_line(place: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="hold pictures, but the model has no vision tower"):
        train(tuned(place, "blind", "mixed.jsonl"), runs_folder=tmp_path, quiet=True)


def test_other_dialogues_or_adapters_are_not_a_resume(place: Path, tmp_path: Path) -> None:
    config = tuned(place, rank=2)
    train(config, runs_folder=tmp_path, quiet=True)
    longer = replace(config, trainer=replace(config.trainer, steps=5))
    with pytest.raises(RunError, match="lora.rank: 2 -> 3"):
        train(replace(longer, lora=LoraConfig(rank=3)), runs_folder=tmp_path, quiet=True, resume=True)
    assert config.data.chat is not None
    (tmp_path / "other.jsonl").write_text(json.dumps(talk("who", "me")))
    chat = replace(config.data.chat, sources=(str(tmp_path / "other.jsonl"),), valid_fraction=0.0)
    with pytest.raises(RunError, match="dialogues"):
        train(replace(longer, data=replace(config.data, chat=chat)), runs_folder=tmp_path, quiet=True, resume=True)


def test_a_recipe_writes_its_dialogues_once_and_unknown_ones_are_named(tmp_path: Path) -> None:
    (path,) = recipe_sources("zero-vision", cache_dir=tmp_path, count=3, seed=1)
    written = Path(path).stat().st_mtime_ns
    assert recipe_sources("zero_vision", cache_dir=tmp_path, count=3, seed=1) == (path,)
    assert Path(path).stat().st_mtime_ns == written and len(Path(path).read_text().splitlines()) == 3
    with pytest.raises(RunError, match="known are zero_vision, text_image, none"):
        recipe_sources("zero", cache_dir=tmp_path, count=3, seed=1)
