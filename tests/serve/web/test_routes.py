"""What the server sends for the page: four files of its own, locked by a policy."""

import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from perilune.serve.web import FILES, web_routes


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=[*web_routes()]))


@pytest.mark.parametrize("path", FILES)
def test_every_file_comes_with_its_type_and_the_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200 and len(answer.text) > 100
    assert answer.headers["content-type"] == f"{FILES[path][1]}; charset=utf-8"
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.head(path).status_code == 200
    assert client.post(path).status_code == 405


def test_files_refer_only_to_each_other(client: TestClient) -> None:
    found = set()
    for path in FILES:
        text = client.get(path).text
        found |= set(re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', text))
        found |= {f"web/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert "style=" not in text and not re.search(r"\son\w+=", text), path  # the policy would refuse them
    assert found == {path.lstrip("/") for path in FILES} - {""}


@pytest.mark.parametrize(
    "path", ["/web/", "/web/../__init__.py", "/web/%2e%2e/__init__.py", "/web/index.html", "/web/x"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404
