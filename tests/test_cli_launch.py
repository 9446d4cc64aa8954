"""`perilune launch` prints commands that start the run it was asked for; `train --dry-run` shows what it costs."""

import json
import shlex
import subprocess

import pytest

from perilune.cli import main


def printed(capsys, *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_one_node_is_a_torchrun_command_with_the_flags_of_train(capsys):
    words = shlex.split(printed(capsys, "launch", "micro", "--gpus", "2", "--trainer.steps", "5"))
    assert words[0] == "torchrun" and words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("-m") :] == ["-m", "perilune", "train", "micro", "--trainer.steps", "5"]


def test_several_nodes_meet_at_the_head(capsys):
    text = printed(capsys, "launch", "micro", "--nodes", "2", "--gpus", "2", "--head", "first:1234")
    words = shlex.split(text, comments=True)
    assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--rdzv-endpoint") + 1] == "first:1234"


def test_a_slurm_script_is_valid_shell_and_asks_for_its_nodes(capsys):
    flags = ["--nodes", "2", "--gpus", "2", "--slurm", "--hours", "1.5", "--name", "a b"]
    script = printed(capsys, "launch", "micro", *flags)
    for line in ("--nodes=2", "--gpus-per-node=2", "--time=90"):
        assert f"#SBATCH {line}\n" in script
    assert "perilune train micro --name 'a b'" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--gpus", "0"), "--gpus is 0, expected 1 or more"),
        (("--gpus", "4", "--parallel.tp", "3"), "does not divide the 4 ranks"),
        (("--gpus", "2", "--overwrite"), "--max-restarts 0"),
        (("--gpus", "2", "--parallel.pp", "2"), "make it a multiple of 8, at least 16"),
    ],
)
def test_what_cannot_start_is_refused_with_the_reason(capsys, flags, words):
    with pytest.raises(SystemExit):
        main(["launch", "micro", *flags])
    assert words in capsys.readouterr().err


def test_a_dry_run_shows_the_memory_of_a_rank_and_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(printed(capsys, "train", "micro", "--dry-run", "4", "--json"))
    assert found["world_size"] == 4 and found["parallel"]["dp_shard"] == 4
    assert found["stages"][0]["total_bytes"] > found["stages"][0]["parameter_bytes"] > 0
    assert "4 ranks" in printed(capsys, "train", "micro", "--dry-run", "4")
    assert not (tmp_path / "runs").exists()
