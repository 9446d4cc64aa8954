"""What a result was made with."""

import torch

from perilune.train.environment import COMMIT_VARIABLE, describe_environment


def test_the_commit_is_what_was_told_and_none_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv(COMMIT_VARIABLE, "1234abc")
    assert describe_environment(torch.device("cpu"))["commit"] == "1234abc"
    monkeypatch.delenv(COMMIT_VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "commit" not in describe_environment(torch.device("cpu"))
