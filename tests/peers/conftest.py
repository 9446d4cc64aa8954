"""transformers imports torchvision where it is installed, whatever the test asks of it."""

from tests.peers import torchvision_stub  # noqa: F401
