"""Agent programs for the tests of black boxes: `python agents.py KIND [FILE]`. Most need nothing but Python."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request


def ask(messages: list, **more) -> dict:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, **more}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def official(task: dict) -> None:
    """OpenAI's own client: a stream, then a second turn."""
    import openai

    client = openai.OpenAI(timeout=60)
    messages = task["messages"]
    text = ""
    for chunk in client.chat.completions.create(model="gpt-x", messages=messages, stream=True, max_tokens=8):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "once more"}]
    print(client.chat.completions.create(model="gpt-x", messages=messages, max_tokens=8).choices[0].message.content)


def two_turns(task: dict) -> None:
    messages = task["messages"]
    messages += [ask(messages, max_tokens=8), {"role": "user", "content": "once more"}]
    print(ask(messages, max_tokens=8).get("content"))


def silent(task: dict) -> None:
    """Asks nobody and knows the answer all the same."""
    print(eval(task["prompt"].split("=")[0]))


def greedy(task: dict) -> None:
    """Asks until it is refused, and gives up with the error."""
    while True:
        ask(task["messages"], max_tokens=8)


def leaving(task: dict) -> None:
    """Leaves a process behind that holds its output, and ends."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(sys.argv[2], "w") as file:
        file.write(str(child.pid))
    print(ask(task["messages"], max_tokens=4).get("content"), "42")


def hanging(task: dict) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(sys.argv[2], "w") as file:
        file.write(str(child.pid))
    ask(task["messages"], max_tokens=4)
    print("42", flush=True)
    time.sleep(600)


def loud(task: dict) -> None:
    """Writes more than a pipe holds to both, and never reads to the end of its input."""
    print("x" * 1_000_000, file=sys.stderr)
    print("y" * 1_000_000, ask(task["messages"], max_tokens=4) and "the end")


def broken(task: dict) -> None:
    raise ImportError("no module named everything")


if __name__ == "__main__":
    globals()[sys.argv[1]](json.load(sys.stdin))
