"""transformers copies the code of a folder aside before it runs it: for tests into a folder of their own."""

from collections.abc import Iterator

import pytest

from tests.peers import torchvision_stub


@pytest.fixture(scope="session", autouse=True)
def _code_of_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torchvision_stub.declare_operators()
    modules = pytest.importorskip("transformers.dynamic_module_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
