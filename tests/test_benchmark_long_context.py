"""benchmarks/long_context.py in miniature: an arm is trained, extended and read at both lengths, and reported."""

import json
from pathlib import Path

from tests.benchmark_scripts import load_script

MODEL = Path(__file__).parents[1] / "src" / "perilune" / "model"


def test_an_arm_gives_a_row_before_and_a_row_after_its_extension(tmp_path: Path, monkeypatch, capsys) -> None:
    script = load_script(monkeypatch, "long_context")
    monkeypatch.chdir(tmp_path)
    sources = sorted(MODEL.glob("*.py"))
    records = [
        {"id": source.name, "domain": "x", "split": ("train", "valid")[number % 4 == 0], "text": source.read_text()}
        for number, source in enumerate(sources)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    script.main(
        script.Settings(
            arm="mla_rope", tiny=True, corpus="text.jsonl", steps=4, extra_steps=2, length=128, extended=256, read=512,
            asked=(192, 768), needles=(1, 2), texts=2, results=tmp_path / "rows.json",
        )
    )  # fmt: skip
    short, long = json.loads((tmp_path / "rows.json").read_text())
    assert (short["extended"], long["extended"]) == (None, 256)
    assert short["steps"] == 4 and long["steps"] == 2
    assert short["config"]["model"]["mla"]["rope"]["factor"] == 1.0
    assert long["config"]["model"]["mla"]["rope"]["factor"] == 2.0
    for row in (short, long):
        assert [bucket["to"] for bucket in row["positions"]] == [64, 128, 256, 512]
        asked = (192,) if row is short else (192, 768)
        assert [(needle["needles"], needle["length"]) for needle in row["needles"]] == [
            (needles, length) for needles in (1, 2) for length in asked
        ]
    assert short["positions"][0]["nats"] != long["positions"][0]["nats"]
    assert long["config"]["start_from"] == "runs/mla_rope-0"  # not where this happened to run
    report = load_script(monkeypatch, "long_context_report")
    _tell(tmp_path / "rows.json", tiny=False)
    capsys.readouterr()
    report.main(report.Settings(results=tmp_path / "rows.json", png=tmp_path / "plot.png", beyond=256))
    told = capsys.readouterr().out
    before, after = f"{short['positions'][-1]['nats']:.3f}", f"{long['positions'][-1]['nats']:.3f}"
    assert f"| MLA, RoPE + YaRN, as trained | {before} |" in told
    assert f"| MLA, RoPE + YaRN, extended to 256 | {after} |" in told
    assert "| MLA, RoPE + YaRN, as trained | 0% / 0% | - / - |" in told
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def _tell(path: Path, *, tiny: bool) -> None:
    path.write_text(json.dumps([row | {"tiny": tiny} for row in json.loads(path.read_text())]))
