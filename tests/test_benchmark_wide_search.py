"""benchmarks/wide_search.py in miniature, and the cap that was committed."""

import contextlib
import json

from perilune.data.dialogues import read_dialogues
from perilune.rl.environments.wide_search import CRITICAL_STEPS, WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_traces import TraceConfig
from tests.benchmark_scripts import FOLDER, load_script
from tests.serve.tiny import tokenizer

SMALL = WideSearch(corpus=CorpusConfig(pages=2000))


def test_the_committed_cap_is_the_environments_and_leaves_a_serial_oracle_half_of_the_items():
    made = json.loads((FOLDER / "results" / "wide_search_cap.json").read_text())
    assert made["critical_steps"] == made["caps"]["cap"]["critical_steps"] == CRITICAL_STEPS
    assert 0.5 <= made["caps"]["cap"]["serial"]["recall"] <= 0.6 and made["tasks"] >= 200
    assert made["caps"]["half"]["serial"]["recall"] < 0.4 < 0.8 < made["caps"]["double"]["serial"]["recall"]
    assert made["caps"]["cap"]["parallel"]["outcome"] == 1.0


def test_every_policy_is_paid_by_every_form_of_the_reward(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "wide_search")
    with contextlib.suppress(SystemExit):  # two tasks say little about where the cap should be
        script.Cap(tasks=2, results=tmp_path / "cap.json", chart=tmp_path / "rewards.png").run()
    made = json.loads((tmp_path / "cap.json").read_text())
    assert made["rewards"].keys() == script.POLICIES.keys()
    assert made["rewards"]["hollow"]["instantiation only"] == made["rewards"]["parallel"]["instantiation only"] == 1.0
    assert max(made["rewards"], key=lambda name: made["rewards"][name]["full"]) == "parallel"
    assert (tmp_path / "rewards.png").stat().st_size > 10_000


def test_dialogues_are_written_counted_and_measured(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "wide_search")
    tokenizer().save(tmp_path / "tokenizer.json")
    config = TraceConfig(orchestrators=10, workers=10, environment=SMALL)
    script.Traces(out=tmp_path / "traces.jsonl", config=config, tokenizer=tmp_path / "tokenizer.json").run()
    dialogues, broken = read_dialogues([tmp_path / "traces.jsonl"])
    assert len(dialogues) == 20 and not broken.count
    said = capsys.readouterr().out
    assert "worker lookup" in said and "serial, wide" in said and "20 dialogues" in said
