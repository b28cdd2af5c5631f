"""Options shared by benchmarks."""

import argparse
from collections.abc import Callable, Iterable


def one_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option whose value is a list of choices with commas between them."""

    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(choices):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(choices)}"
            )
        return chosen

    return names
