"""Does racing disturb the lanes? Speed-up of the bundled pair in a race against what each lane shows alone.

    python -m tests.measure_race [--repeats 5] [--tokens 128]

Lanes alone and lanes racing take turns in one process; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
from statistics import median

from core.lanes import Lane, open_lane, race
from core.loading import load_pair
from core.records import Settings, summarise
from core.text import read_prompts


def speed_up(lanes: list[Lane]) -> float:
    """Speculative over plain tokens per second, decoding apart from prefill."""
    speculative, plain = (summarise(lane.run).tokens_per_second for lane in lanes)
    return speculative / plain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    chosen = parser.parse_args()
    pair = load_pair(Settings("pocket"))
    ratios = []
    for repeat in range(chosen.repeats + 1):
        for prompt in read_prompts():

            def lanes(text: str = prompt.text) -> list[Lane]:
                both = [Settings(method=m, max_new_tokens=chosen.tokens) for m in ("draft", "plain")]
                return [open_lane(pair, text, settings) for settings in both]

            alone = lanes()
            for lane in alone:
                with lane:
                    for _ in lane:
                        pass
            racing = lanes()
            for _ in race(racing):
                pass
            if repeat:  # the first is warm-up
                ratios.append(speed_up(racing) / speed_up(alone))
    print(f"speed-up in a race / alone: median {median(ratios):.3f} of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
