"""Safety probes of a model opened in this process, and the model card that links what they found."""

import json
from pathlib import Path

import pytest
from tests.test_cli import TINY

from perilune.cli import main
from perilune.hub.safety_section import NAMES, NOT_ASKED, safety_section, write_section

QUICK = ["--categories", "over_refusal", "injection", "--max-tokens", "4", "--turns", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safety")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "micro", "--quiet", *TINY])
        main(["eval", "safety", "micro", *QUICK])
    return folder


def test_a_run_is_asked_in_this_process_and_its_export_links_the_report(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    found = json.loads((workplace / "runs/micro/safety.json").read_text())
    assert found["model"] == "micro" and found["scores"]["over_refusal"]["rate"] == 0.0 and found["complete"]
    main(["export", "micro", "out"])
    card = (workplace / "out/README.md").read_text()
    assert all((workplace / "out" / name).is_file() and f"]({name})" in card for name in NAMES)
    assert "| over-refusal | 0% |" in card and NOT_ASKED not in card


def test_a_folder_that_is_asked_has_the_new_results_in_its_card_and_all_else_as_it_was(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    for name in NAMES:
        (workplace / "runs/micro" / name).unlink(missing_ok=True)
    main(["export", "micro", "plain"])
    before = (workplace / "plain/README.md").read_text()
    assert NOT_ASKED in before
    main(["eval", "safety", "plain", *QUICK])
    after = (workplace / "plain/README.md").read_text()
    assert NOT_ASKED not in after and "[safety.html](safety.html)" in after
    assert before.partition("## Safety")[0] == after.partition("## Safety")[0]
    main(["generate", "plain", "--prompt", "x", "--max-new-tokens", "2"])


def test_the_section_of_a_card_is_replaced_in_its_place_and_only_in_a_model_folder(tmp_path: Path) -> None:
    card = "# m\n\n## Safety\n\nold\n\n## Contact\n\nme\n"
    (tmp_path / "README.md").write_text(card)
    assert not write_section(tmp_path, {}) and (tmp_path / "README.md").read_text() == card
    (tmp_path / "config.json").write_text('{"model_type": "perilune"}')
    assert write_section(tmp_path, {})
    text = (tmp_path / "README.md").read_text()
    assert text == f"# m\n\n## Safety\n\n{safety_section({})}\n\n## Contact\n\nme\n"
    (tmp_path / "README.md").write_text("# m\n")
    assert write_section(tmp_path, {}) and write_section(tmp_path, {})
    assert (tmp_path / "README.md").read_text() == f"# m\n\n## Safety\n\n{safety_section({})}\n"
