"""One letter is shown, and the same one is to be said: the smallest task that a policy learns in seconds.

    b        ->  b

There are no more tasks than letters, so both splits hold the same ones: it shows that the loop works, nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, last_answer


@dataclass(frozen=True, kw_only=True)
class Copying:
    name: str = "copying"
    letters: str = "abcd"
    max_tokens: int = 4

    def __post_init__(self) -> None:
        if len(self.letters) < 2 or len(set(self.letters)) != len(self.letters) or not self.letters.isalpha():
            raise ValueError(f"copying.letters is {self.letters!r}, expected at least two letters, each once")

    def task(self, number: int, split: Split) -> Task:
        letter = self.letters[number % len(self.letters)]
        return Task(name=f"{split}/{letter}", data={"letter": letter})

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": task.data["letter"]})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        reply = last_answer(messages)
        return {OUTCOME: float(reply == task.data["letter"]), "letter": float(reply in tuple(self.letters))}
