"""What `perilune doctor` says about serving."""

import socket

import pytest

from perilune import doctor
from perilune.doctor import EXTRAS, _port_state, _serving


@pytest.fixture
def packages() -> dict[str, str | None]:
    return {name: "1.0" for names in EXTRAS.values() for name in names}


def test_serving_is_tried_and_not_only_looked_up(packages: dict[str, str | None]) -> None:
    found = _serving(packages)
    assert found["serve"] == "ok"
    assert "cache" in found["device"]


def test_an_engine_that_fails_is_reported_in_words(
    packages: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("no pages left")

    monkeypatch.setattr("perilune.serve.engine.Engine.step", broken)
    assert _serving(packages)["serve"] == "failed: RuntimeError: no pages left"


def test_what_is_missing_is_named_and_what_still_works_is_said(packages: dict[str, str | None]) -> None:
    packages["uvicorn"] = None
    assert _serving(packages) == {"serve": "lacks uvicorn", "chat": "with servers elsewhere: perilune chat URL"}
    assert any(line.startswith("serve: lacks uvicorn") for line in doctor._advice(packages))


def test_a_port_that_is_taken_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _port_state(port).startswith("taken")
    assert _port_state(port) == "free"
