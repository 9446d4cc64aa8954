"""A scripted model server that ships with the package: the demonstration's model and the tests' double.

`python -m perilune.swarm.scripted` starts one by hand. The model is a Python function, not a neural network.
"""

from perilune.swarm.scripted.chaos import FAULTS, Chaos
from perilune.swarm.scripted.launch import ServerProcess, ThreadedServer, load_script, start_server
from perilune.swarm.scripted.script import Call, Reply, Script, Turn
from perilune.swarm.scripted.server import Behaviour, ScriptedServer

__all__ = [
    "FAULTS",
    "Behaviour",
    "Call",
    "Chaos",
    "Reply",
    "Script",
    "ScriptedServer",
    "ServerProcess",
    "ThreadedServer",
    "Turn",
    "load_script",
    "start_server",
]
