"""What a result was made with."""

import torch

from perilune.train.environment import COMMIT_VARIABLE, describe_environment


def test_the_commit_is_told_where_there_is_no_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert "commit" not in describe_environment(torch.device("cpu"))
    monkeypatch.setenv(COMMIT_VARIABLE, "1234abc")
    assert describe_environment(torch.device("cpu"))["commit"] == "1234abc"
