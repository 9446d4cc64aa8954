"""What the visual corpus consists of: a table of kinds, shapes, lengths and questions.

python -m perilune.data.scenes.statistics --count 1000 --kinds scene chart
"""

import argparse
from collections import Counter
from typing import get_args

from perilune.data.scenes.make import make_sample
from perilune.data.scenes.sample import Sample, SampleKind, ScenesConfig, ScenesError


def statistics_table(samples: list[Sample]) -> str:
    """Plain text: per kind the number of samples, their shares, shapes, characters of source and questions per task."""
    lines = [f"{'kind':<10} {'samples':>7} {'share':>6} {'shapes':>13} {'characters':>19} {'questions':>9}"]
    lines.append(f"{'':<10} {'':>7} {'':>6} {'mean (max)':>13} {'median / 95% / max':>19} {'mean':>9}")
    kinds = Counter(sample.kind for sample in samples)
    for kind, count in kinds.most_common():
        group = [sample for sample in samples if sample.kind == kind]
        lengths = sorted(len(sample.source) for sample in group)
        shapes = [len(sample.shapes) for sample in group]
        characters = f"{lengths[count // 2]} / {lengths[count * 95 // 100]} / {lengths[-1]}"
        asked = sum(len(sample.questions) for sample in group) / count
        drawn = f"{sum(shapes) / count:.1f} ({max(shapes)})"
        lines.append(f"{kind:<10} {count:>7} {count / len(samples):>6.1%} {drawn:>13} {characters:>19} {asked:>9.1f}")
    lines.append("")
    for title, counts in (
        ("shapes", Counter(shape.kind for sample in samples for shape in sample.shapes)),
        ("tasks", Counter(question.task for sample in samples for question in sample.questions)),
        ("answers to yes or no", Counter(q.answer for s in samples for q in s.questions if q.answer in ("yes", "no"))),
    ):
        total = max(1, sum(counts.values()))
        lines.append(f"{title}: " + ", ".join(f"{name} {number / total:.1%}" for name, number in counts.most_common()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="samples to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    everything = get_args(SampleKind)
    parser.add_argument("--kinds", nargs="+", choices=everything, default=[k for k in everything if k != "icon"])
    parser.add_argument("--icons", default="", help="folder or .jsonl(.zst) file of icons, for kind icon")
    parser.add_argument("--held-out", action="store_true", help="count the samples for testing")
    given = parser.parse_args(arguments)
    if given.count < 1:
        parser.error(f"--count is {given.count!r}: expected 1 or more")
    try:
        config = ScenesConfig(kinds=tuple(given.kinds), icons=given.icons)
        samples = [make_sample(given.seed, i, config, held_out=given.held_out) for i in range(given.count)]
    except ScenesError as error:
        parser.error(str(error))
    print(statistics_table(samples))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
