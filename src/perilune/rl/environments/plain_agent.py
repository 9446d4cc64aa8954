"""The smallest agent: reads a task, asks the policy once, writes what it said. An example, and the default of BlackBox.

Needs nothing but Python. Like any agent it finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os
import sys
import urllib.request


def main() -> None:
    task = json.load(sys.stdin)
    body = {"model": "any", "messages": task["messages"]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"] or "")


if __name__ == "__main__":
    main()
