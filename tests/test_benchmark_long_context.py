"""benchmarks/long_context.py in miniature: an arm is trained, extended and read at both lengths."""

import importlib.util
import json
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "long_context.py"


def test_an_arm_gives_a_row_before_and_a_row_after_its_extension(tmp_path: Path, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_long_context", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_long_context", script)
    spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    sources = sorted((SCRIPT.parents[1] / "src" / "perilune" / "model").glob("*.py"))
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
