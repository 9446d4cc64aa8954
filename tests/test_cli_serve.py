"""`perilune serve`: what it refuses, what it says at the start, whom it answers, and how it ends."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from perilune import hub
from perilune.cli import UserError, main
from perilune.cli_chat import chat_verb
from perilune.cli_serve import ServeFlags, _announce, _fetch, _keys, folder_dtype, load, serve_verb, served_inside
from perilune.data.chat_folder_template import BUILT_IN
from perilune.train.run_folder import load_run
from tests.test_cli import TINY

SECONDS = 120.0
COMMAND = (
    "import sys; from perilune.cli import main, VERBS, _verb_of; VERBS.setdefault('serve', _verb_of('serve')); main()"
)
TEMPLATE = "{% for message in messages %}<|im_user|>{{ message.content }}<|im_end|>{% endfor %}<|im_assistant|>"
KEY, ADMIN = "an-api-key-of-the-tests", "an-admin-key-of-the-tests"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run named micro, and the same model exported."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "micro", "--quiet", *TINY])
    model, tokenizer, _ = load_run(folder / "runs" / "micro")
    hub.export_model(model, folder / "exported", tokenizer=tokenizer, chat_template=BUILT_IN.read_text())
    hub.export_model(model, folder / "released", tokenizer=tokenizer, chat_template=TEMPLATE)
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    for name in ("PERILUNE_API_KEY", "PERILUNE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    return workplace


@contextmanager
def serving(folder: Path, *arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its first line of standard output."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, line
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def get(url: str, key: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["micra"], "no run or folder 'micra', did you mean 'micro'?"),
        (["localhost:8000/v1"], "no run or folder 'localhost:8000/v1'; an address begins with its scheme: http://local"),
        (["runs"], "'runs' holds no config.json"),
        (["micro", "--host", "0.0.0.0"], "needs an API key: --api-keys FILE, or the variable PERILUNE_API_KEY"),
        (["micro", "--port", "70000"], "--port is 70000, expected 0"),
        (["micro", "--host", "192.0.2.1", "--api-keys", "keys"], "cannot listen on 192.0.2.1"),
        (["micro", "--api-keys", "empty"], "'empty' holds no key"),
        (["micro", "--api-keys", "short"], "an api key of 3 characters: expected at least 16"),
        (["micro", "--admin-key", "keys"], "there are 2 admin keys"),
        (["micro", "--image-hosts", "a/b"], "--image-hosts"),
        (["micro", "--token-budget", "3"], "token_budget is 3, expected at least"),
        (["micro", "--port", "0", "--max-length", "9", "--memory-gib", "1e-9"], "raise memory_gib"),
    ],
)
def test_wrong_input_is_refused_in_one_line_before_anything_listens(
    inside: Path, arguments: list[str], said: str
) -> None:
    for name, content in (("empty", "# nothing\n\n"), ("short", "abc\n"), ("keys", f"{KEY}\n{ADMIN}\n")):
        (inside / name).write_text(content)
        (inside / name).chmod(0o600)
    with pytest.raises((UserError, ValueError)) as caught:
        serve_verb(arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_help_shows_every_flag_also_to_those_who_have_no_model_yet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve_verb(["--help"])
    assert ended.value.code == 0
    assert {"--port", "--max-sequences", "--limits.requests-per-minute"} <= set(capsys.readouterr().out.split())


def test_a_port_that_is_taken_is_named_with_the_way_out(inside: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} .*--port 0 takes a free one"):
            serve_verb(["micro", "--port", str(port)])


def test_a_key_given_in_the_place_of_a_file_is_not_repeated(inside: Path) -> None:
    with pytest.raises(UserError, match="never a key") as caught:
        serve_verb(["micro", "--api-keys", KEY])
    assert KEY not in str(caught.value)


def test_keys_come_from_files_and_variables(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = inside / "several"
    path.write_text(f"# people\n{KEY}-1\n\n  {KEY}-2  \n")
    path.chmod(0o644)
    monkeypatch.setenv("PERILUNE_API_KEY", f"{KEY}-3")
    monkeypatch.setenv("OTHER", ADMIN)
    keys = _keys(ServeFlags(api_keys=str(path), admin_key_env="OTHER"))
    assert keys.api == (f"{KEY}-1", f"{KEY}-2", f"{KEY}-3") and keys.admin == ADMIN
    assert "chmod 600" in capsys.readouterr().err
    path.chmod(0o600)
    _keys(ServeFlags(api_keys=str(path)))
    assert capsys.readouterr().err == ""


def test_missing_packages_are_named_all_at_once(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.cli_serve.NEEDED", ("torch", "no_such_a", "no_such_b"))
    with pytest.raises(UserError, match=r"needs no_such_a, no_such_b: pip install 'perilune\[train,serve\]'"):
        serve_verb(["micro"])


@pytest.mark.parametrize(
    "hosts, url", [(("example.org",), "http://evil.example/a.png"), (("*",), "http://127.0.0.1:1/a.png")]
)
def test_pictures_are_fetched_from_named_hosts_and_public_addresses_only(hosts: tuple[str, ...], url: str) -> None:
    fetch = _fetch(hosts)
    assert fetch is not None and _fetch(()) is None
    with pytest.raises(ValueError, match="allow-list|port|public"):
        asyncio.run(fetch(url, 1000))  # pyrefly: ignore


# What is served -------------------------------------------------------------------------------------------------------


def test_a_served_run_answers_and_drains(inside: Path) -> None:
    arguments = ("micro", "--port", "0", "--json", "--max-sequences", "4", "--max-length", "4096", "--name", "moon")
    with serving(inside, *arguments, PERILUNE_API_KEY=KEY, PERILUNE_ADMIN_KEY=ADMIN) as (process, line):
        facts = json.loads(line)
        assert facts["model"] == "moon" and facts["max_sequences"] == 4 and facts["max_length"] == 4096
        assert facts["parameters"] > 0 and facts["cache_bytes_per_token"] > 0 and facts["cache_tokens"] >= 4096
        assert (facts["api_keys"], facts["admin_key"], facts["chat"], facts["pictures"]) == (1, True, False, False)
        url = facts["url"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=SECONDS, max_retries=0)
        assert [model.id for model in client.models.list()] == ["moon"]
        words = client.completions.create(model="moon", prompt="def ", max_tokens=5, temperature=0)
        assert words.usage is not None and words.usage.completion_tokens <= 5
        assert get(f"{url}/v1/models")[0] == 401
        assert get(f"{url}/metrics", KEY)[0] == 403 and "perilune_" in get(f"{url}/metrics", ADMIN)[1]
        status, page = get(f"{url}/")
        assert status == 200 and "<title>Perilune" in page
        stream = client.completions.create(
            model="moon", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        received = iter(stream)
        next(received)
        process.send_signal(signal.SIGINT)
        assert sum(1 for _ in received) > 0  # what is under way goes on
        assert process.wait(SECONDS) == 0
        assert process.stdout is not None and process.stdout.read() == ""


def test_without_a_terminal_it_says_one_line_and_loads_weights_for_the_admin(inside: Path) -> None:
    with serving(inside, "exported", "--port", "0", "--no-page", PERILUNE_ADMIN_KEY=ADMIN) as (process, line):
        assert line.startswith("serving exported at http://127.0.0.1:") and line.endswith("/v1\n")
        url = line.split()[-1].removesuffix("/v1")
        assert get(f"{url}/")[0] == 404
        body = json.dumps({"path": str(inside / "exported")}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
        request = urllib.request.Request(f"{url}/admin/weights", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer) == {"weight_version": 1}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read().split("perilune: ")[1:] == [
            "no new requests; those under way have 30 s to finish, Ctrl-C again ends them at once\n",
            "stopped\n",
        ]


def test_a_second_control_c_does_not_wait(inside: Path) -> None:
    with serving(inside, "micro", "--port", "0") as (process, line):
        client = openai.OpenAI(base_url=line.split()[-1], api_key="none", timeout=SECONDS, max_retries=0)
        endless = {"ignore_eos": True}
        stream = client.completions.create(
            model="micro", prompt="a", max_tokens=100_000, stream=True, extra_body=endless
        )
        next(iter(stream))
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline() + process.stderr.readline()
        assert "those under way have 30 s" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process.stderr.read() == "perilune: stopped, requests under way were cut\n"
        stream.close()


def test_a_run_and_its_export_are_the_same_model(inside: Path) -> None:
    run, folder = load(inside / "runs" / "micro"), load(inside / "exported", name="other")
    assert (run.name, folder.name) == ("micro", "other")
    assert run.model.num_parameters() == folder.model.num_parameters()
    assert (run.is_chat, folder.is_chat, load(inside / "exported", chat=True).is_chat) == (False, False, True)
    assert load(inside / "runs" / "micro", dtype="bfloat16").model.config.compute_dtype == "bfloat16"


def test_a_folder_is_read_in_half_precision_for_a_gpu_and_in_float32_for_a_cpu_unless_told(inside: Path) -> None:
    assert (folder_dtype("auto", "cuda"), folder_dtype("auto", "cpu")) == ("bfloat16", "float32")
    assert (folder_dtype("float32", "cuda"), folder_dtype("bfloat16", "cpu")) == ("float32", "bfloat16")
    wide, half = load(inside / "exported", device="cpu"), load(inside / "exported", device="cpu", dtype="bfloat16")
    assert wide.model.embed_tokens.weight.dtype == torch.float32
    assert half.model.embed_tokens.weight.dtype == torch.bfloat16 and half.model.config.compute_dtype == "bfloat16"


def test_a_chat_in_this_process_continues_as_generate_does(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "micro", "--prompt", "def ", "--max-new-tokens", "12", "--temperature", "0", "--json"])
    expected = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    chat_verb(["micro", "--raw", "--max-tokens", "12", "--temperature", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["text"] == expected


def test_a_model_that_brings_its_own_chat_template_is_asked_with_it(inside: Path) -> None:
    with served_inside("released", runs="runs", device="cpu") as (url, key):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=SECONDS, max_retries=0)
        assert client.models.list().data[0].to_dict()["chat"] is True
        answer = client.chat.completions.create(
            model="released",
            messages=[{"role": "user", "content": "moon"}],
            max_tokens=3,
            extra_body={"return_token_ids": True},
        )
    tokenizer = load(inside / "released").tokenizer
    names = tokenizer.special_ids
    expected = [names["<|im_user|>"], *tokenizer.encode("moon"), names["<|im_end|>"], names["<|im_assistant|>"]]
    assert [each for each in answer.to_dict()["prompt_token_ids"] if each != tokenizer.bos_id] == expected


def test_a_model_in_this_process_is_behind_a_key(inside: Path) -> None:
    with served_inside("released", runs="runs", device="cpu") as (url, key):
        assert get(f"{url}/v1/models")[0] == 401 and get(f"{url}/v1/models", key)[0] == 200
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/health")


# What is said ---------------------------------------------------------------------------------------------------------


def test_a_terminal_gets_the_whole_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    facts: dict[str, Any] = {
        "model": "nano", "parameters": 9_900_000, "dtype": "float32", "device": "cpu", "chat": False, "pictures": True,
        "cache_bytes_per_token": 1152, "state_bytes_per_sequence": 3 << 19, "cache_tokens": 65536, "max_sequences": 32,
        "max_length": 8192, "deterministic": True, "api_keys": 0, "admin_key": False, "url": "http://127.0.0.1:8000",
    }  # fmt: skip
    _announce(facts, ServeFlags())
    shown = capsys.readouterr().out
    for words in (
        "nano, 9,900,000 parameters in float32 on cpu, deterministic",
        "a base model: it continues text",
        "text and pictures",
        "1,152 bytes a token, 1.5 MiB a sequence",
        "65,536 tokens, 32 sequences at once, each at most 8,192 tokens",
        "only this machine can ask",
        "http://127.0.0.1:8000/v1",
    ):
        assert words in shown, shown
