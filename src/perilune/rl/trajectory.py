"""What an episode was, token by token, exactly as the engine served it.

A `Branch` is one row of tokens: the first prompt, what the policy sampled, what tools and users wrote after it, what
the policy sampled then, and so on. Turns are joined while each prompt begins with all tokens before it; where one does
not (a compacted context, a fresh sub-task), a new branch begins. Only tokens with `mask` are trained: those the policy
itself sampled. What tools, users and sub-agents wrote is context.

Log-probs and the version of the weights are the engine's own, of the moment it sampled; nothing overwrites them.

A `Trajectory` also keeps its task, the transcript, what the episode noted (the journal of its workers) and the facets
of its reward: the environment judges what is stored again and gets the same numbers, bit by bit. Files are JSON lines,
each with a checksum; a file counts only when complete.
"""

import base64
import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perilune.data.media import PATCH_SIZE, Media

Finish = Literal["stop", "length"]
"""How an episode ended: by itself, or cut because it was too long."""
NOT_SAMPLED = -1


class TrajectoryError(ValueError):
    """Tokens that do not fit together, or a file that is not one of trajectories."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """One row of tokens."""

    tokens: np.ndarray
    """int32 [n]"""
    mask: np.ndarray
    """bool [n]: sampled by the policy."""
    logprobs: np.ndarray
    """float32 [n]: the engine's, 0 where the mask is false."""
    versions: np.ndarray
    """int32 [n]: of the weights that sampled, NOT_SAMPLED where the mask is false."""
    media: tuple[Media, ...] = ()
    starts: tuple[int, ...] = ()
    """Where the first <|media_pad|> of each picture stands."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [n - 1, layers of experts, experts per token]: the experts of all tokens but the last, as the
    engine chose them when it first sampled behind them. None where they were not recorded."""

    def __post_init__(self) -> None:
        shapes = {name: getattr(self, name).shape for name in ("tokens", "mask", "logprobs", "versions")}
        if len(set(shapes.values())) != 1 or self.tokens.ndim != 1:
            raise TrajectoryError(f"a branch has arrays of shapes {shapes}, expected [n] for all")
        if len(self.media) != len(self.starts):
            raise TrajectoryError(f"a branch has {len(self.media)} pictures at {len(self.starts)} places")
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != max(0, len(self.tokens) - 1)):
            raise TrajectoryError(
                f"a branch of {len(self.tokens)} tokens has routes of shape {self.routes.shape}, expected "
                f"[{max(0, len(self.tokens) - 1)}, layers, experts]: of all tokens but the last"
            )
        if not np.isfinite(self.logprobs[self.mask]).all() or (self.logprobs[self.mask] > 1e-3).any():
            raise TrajectoryError(
                "a branch holds log-probs that are not finite or above 0: the engine reports ln p <= 0"
            )

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())

    def since(self, version: int) -> "Branch":
        """The same tokens, with those that older weights sampled as context only."""
        kept = self.mask & (self.versions >= version)
        return replace(self, mask=kept, logprobs=np.where(kept, self.logprobs, np.float32(0)).astype(np.float32))


@dataclass
class Recording:
    """Joins the turns of one conversation into branches while they happen."""

    branches: list[Branch] = field(default_factory=list)

    def known_routes(self, prompt: Sequence[int]) -> int:
        """Of how many of the first tokens of this prompt the routes are recorded already."""
        before = self._continued(np.asarray(prompt, dtype=np.int32))
        return 0 if before is None or before.routes is None else len(before.routes)

    def _continued(self, prompt: np.ndarray) -> Branch | None:
        """The last branch, if the prompt begins with all of its tokens."""
        before = self.branches[-1] if self.branches else None
        if before is None or len(prompt) < len(before.tokens) or not _starts_with(prompt, before.tokens):
            return None
        return before

    def add(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        logprobs: Sequence[float],
        version: int | Sequence[int],
        *,
        media: Sequence[Media] = (),
        starts: Sequence[int] = (),
        trained: bool = True,
        routes: np.ndarray | None = None,
    ) -> None:
        """One reply: what it was given, what it sampled, with the engine's log-probs and its weights' version(s).

        `media` are all pictures of the prompt, `starts` the place of each one's first pad. `routes` are those of all
        tokens but the last, or as many of them, from the end, as are not recorded yet; what is recorded stays.
        """
        if len(sampled) != len(logprobs):
            raise TrajectoryError(f"a reply has {len(sampled)} tokens but {len(logprobs)} log-probs")
        versions = [version] * len(sampled) if isinstance(version, int) else list(version)
        if len(versions) != len(sampled):
            raise TrajectoryError(f"a reply has {len(sampled)} tokens but {len(versions)} versions")
        given = np.asarray(prompt, dtype=np.int32)
        before = self._continued(given)
        joined = _joined_routes(before, routes, len(prompt) + len(sampled) - 1)
        if before is not None:
            self.branches.pop()
        added = given if before is None else given[len(before.tokens) :]
        parts = [] if before is None else [before]
        parts += [_context(added), _sampled(sampled, logprobs, versions, trained=trained)]
        self.branches.append(
            Branch(
                **{
                    name: np.concatenate([getattr(part, name) for part in parts])
                    for name in ("tokens", "mask", "logprobs", "versions")
                },
                media=tuple(media),
                starts=tuple(starts),
                routes=joined,
            )
        )


def _joined_routes(before: Branch | None, routes: np.ndarray | None, count: int) -> np.ndarray | None:
    """Those of `count` tokens: what was recorded before, and behind it what is new."""
    if routes is None:
        return None
    known = routes[:0] if before is None or before.routes is None else before.routes
    first = count - len(routes)
    if not 0 <= first <= len(known):
        raise TrajectoryError(
            f"a reply has routes of its last {len(routes)} tokens of {count}, and those of the first {len(known)} are "
            "recorded: expected all of the others"
        )
    return np.concatenate([known, routes[len(known) - first :]])


def _starts_with(tokens: np.ndarray, first: np.ndarray) -> bool:
    return bool(np.array_equal(tokens[: len(first)], first))


def _context(tokens: np.ndarray) -> Branch:
    count = len(tokens)
    return Branch(
        tokens=tokens,
        mask=np.zeros(count, dtype=bool),
        logprobs=np.zeros(count, dtype=np.float32),
        versions=np.full(count, NOT_SAMPLED, dtype=np.int32),
    )


def _sampled(tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, trained: bool) -> Branch:
    if not trained:
        return _context(np.asarray(tokens, dtype=np.int32))
    return Branch(
        tokens=np.asarray(tokens, dtype=np.int32),
        mask=np.ones(len(tokens), dtype=bool),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.asarray(versions, dtype=np.int32),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    environment: str
    task: str
    """Name of the task; all samples with one task and iteration form a group."""
    task_data: Mapping[str, Any]
    """What the environment needs to judge again; JSON."""
    weights: Mapping[str, float]
    """What each facet counts for in the reward."""
    sample: int
    """Which of the K samples of its group."""
    seed: int
    iteration: int
    branches: tuple[Branch, ...]
    messages: tuple[Mapping[str, Any], ...]
    """The transcript in the OpenAI form: what the judge reads."""
    facets: Mapping[str, float]
    """Parts of the reward by name."""
    reward: float
    finish: Finish
    events: tuple[Mapping[str, Any], ...] = ()
    """What the episode noted; JSON."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward) or not all(math.isfinite(value) for value in self.facets.values()):
            raise TrajectoryError(
                f"the reward of {self.task!r} is {self.reward!r} with facets {dict(self.facets)!r}: "
                "expected finite numbers"
            )

    @property
    def num_trained(self) -> int:
        return sum(branch.num_trained for branch in self.branches)

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that sampled anything of it; None when nothing was sampled."""
        versions = [branch.versions[branch.mask] for branch in self.branches if branch.num_trained]
        return int(min(each.min() for each in versions)) if versions else None


# Files ----------------------------------------------------------------------------------------------------------------


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write all of them, or nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    count = 0
    try:
        with aside.open("w", encoding="utf-8") as file:
            for trajectory in trajectories:
                file.write(_line(_plain(trajectory)))
                count += 1
            file.write(_line({"end": count}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """TrajectoryError names the line that is damaged or missing."""
    found: list[Trajectory] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:  # bytes that are no text fail their checksum
        for number, line in enumerate(file, start=1):
            plain = _checked(line, f"{path}, line {number}")
            if "end" in plain:
                if plain["end"] != len(found):
                    raise TrajectoryError(
                        f"{path} holds {len(found)} trajectories but says {plain['end']}: lines are gone"
                    )
                return found
            try:
                found.append(_from_plain(plain))
            except (KeyError, TypeError, ValueError) as error:
                raise TrajectoryError(f"{path}, line {number} is not a trajectory: {error}") from error
    raise TrajectoryError(f"{path} breaks off after {len(found)} trajectories: it was not written to its end")


def verified_trajectories(path: str | Path) -> tuple[list[Trajectory], list[str]]:
    """The trajectories whose checksums hold, and all that is wrong with the file: damaged lines, lines that are gone,
    lines behind its end. For whoever looks into a file that somebody may have changed."""
    found: list[Trajectory] = []
    problems: list[str] = []
    damaged, said = 0, None
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if said is not None:
                problems.append(f"{place} stands behind the end of the file")
                break
            try:
                plain = _checked(line.decode(), place)
                if "end" in plain:
                    said = plain["end"]
                else:
                    found.append(_from_plain(plain))
            except TrajectoryError as error:
                problems.append(str(error))
                damaged += 1
            except (KeyError, TypeError, ValueError) as error:  # bytes that are no text among them
                problems.append(f"{place} is not a trajectory: {error}")
                damaged += 1
    if said is None:
        problems.append(f"{path} breaks off after {len(found)} trajectories: it was not written to its end")
    elif said != len(found) + damaged:
        problems.append(
            f"{path} holds {len(found) + damaged} trajectories but says {said}: lines are gone or were added"
        )
    return found, problems


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    names = ("environment", "task", "task_data", "weights", "sample", "seed", "iteration", "facets", "reward", "finish")
    plain: dict[str, Any] = {name: getattr(trajectory, name) for name in names}
    plain |= {name: dict(plain[name]) for name in ("task_data", "weights", "facets")}
    plain["messages"] = list(trajectory.messages)
    if trajectory.events:
        plain["events"] = list(trajectory.events)
    plain["branches"] = [
        {
            "tokens": branch.tokens.tolist(),
            "mask": _runs(branch.mask),
            # A float32 is exactly a Python float, whose shortest text gives it back.
            "logprobs": branch.logprobs[branch.mask].tolist(),
            "versions": branch.versions[branch.mask].tolist(),
            **({"media": [_plain_media(*pair) for pair in zip(branch.media, branch.starts)]} if branch.media else {}),
            **({} if branch.routes is None else {"routes": plain_routes(branch.routes)}),
        }
        for branch in trajectory.branches
    ]
    return plain


def _from_plain(plain: dict[str, Any]) -> Trajectory:
    branches = []
    for each in plain.pop("branches"):
        tokens = np.asarray(each["tokens"], dtype=np.int32)
        mask = _from_runs(each["mask"], len(tokens))
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        versions = np.full(len(tokens), NOT_SAMPLED, dtype=np.int32)
        logprobs[mask], versions[mask] = each["logprobs"], each["versions"]
        media = [_media_of(item) for item in each.get("media", ())]
        starts = tuple(int(item["start"]) for item in each.get("media", ()))
        branches.append(
            Branch(
                tokens=tokens,
                mask=mask,
                logprobs=logprobs,
                versions=versions,
                media=tuple(media),
                starts=starts,
                routes=routes_of(each["routes"]) if "routes" in each else None,
            )
        )
    messages, events = tuple(plain.pop("messages")), tuple(plain.pop("events", ()))
    return Trajectory(branches=tuple(branches), messages=messages, events=events, **plain)


def plain_routes(routes: np.ndarray) -> dict[str, Any]:
    """JSON; `routes_of` gives them back."""
    # Low byte first, on every machine.
    packed = zlib.compress(np.ascontiguousarray(routes, dtype=routes.dtype.newbyteorder("<")).tobytes(), 6)
    return {"shape": list(routes.shape), "dtype": routes.dtype.name, "packed": base64.b64encode(packed).decode()}


def routes_of(plain: Mapping[str, Any]) -> np.ndarray:
    if plain["dtype"] not in ("uint8", "uint16"):
        raise TrajectoryError(f"routes have dtype {plain['dtype']!r}, expected 'uint8' or 'uint16'")
    stored = np.dtype(plain["dtype"]).newbyteorder("<")
    flat = np.frombuffer(zlib.decompress(base64.b64decode(plain["packed"])), dtype=stored)
    return flat.reshape(plain["shape"]).astype(plain["dtype"])


def _plain_media(media: Media, start: int) -> dict[str, Any]:
    packed = zlib.compress(np.ascontiguousarray(media.pixels).tobytes(), 6)
    return {"grid": list(media.grid), "start": start, "pixels": base64.b64encode(packed).decode()}


def _media_of(plain: dict[str, Any]) -> Media:
    t, h, w = (int(side) for side in plain["grid"])
    raw = zlib.decompress(base64.b64decode(plain["pixels"]))
    pixels = np.frombuffer(raw, dtype=np.uint8).reshape(t * h * w, 3, PATCH_SIZE, PATCH_SIZE)
    return Media(pixels=pixels, grid=(t, h, w))


def _runs(mask: np.ndarray) -> list[list[int]]:
    """[start, end) of each run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _from_runs(runs: list[list[int]], length: int) -> np.ndarray:
    mask = np.zeros(length, dtype=bool)
    for start, end in runs:
        mask[start:end] = True
    return mask


def _line(plain: dict[str, Any]) -> str:
    content = json.dumps(plain, allow_nan=False)
    return f"{_opening(content)}{content}}}\n"


def _checked(line: str, place: str) -> dict[str, Any]:
    content = line[OPENING_LENGTH:].rstrip("\n")[:-1]
    if f"{_opening(content)}{content}}}" != line.rstrip("\n"):
        raise TrajectoryError(f"{place} is damaged: its checksum differs")
    return json.loads(content)


def _opening(content: str) -> str:
    return f'{{"sha256": "{hashlib.sha256(content.encode()).hexdigest()[:16]}", "content": '


OPENING_LENGTH = len(_opening(""))
