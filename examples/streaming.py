"""Stream values out of a function, into a function, and through one.

A generator function yields its values here as they are produced, and waits when nobody takes them.
A parameter annotated `Iterator[T]` streams the other way: the worker pulls items from an iterator
that runs here. Closing the stream stops the remote generator, and its `finally` runs there.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice

import skyward as sky


@sky.function
def squares() -> Generator[int, None, None]:
    """All square numbers; it ends only when it is closed."""
    n = 0
    try:
        while True:
            yield n * n
            n += 1
    finally:
        print("squares: closed by the caller")


@sky.function
def average(samples: Iterator[float]) -> float:
    """Consume a stream that is produced on the caller's side."""
    total, count = 0.0, 0
    for sample in samples:
        total, count = total + sample, count + 1
    return total / count


@sky.function
def running_max(samples: Iterator[float]) -> Generator[float, None, None]:
    """Both ways at once."""
    best = float("-inf")
    for sample in samples:
        best = max(best, sample)
        yield best


def sensor(count: int) -> Iterator[float]:
    """Stands for something that exists only on this machine."""
    for i in range(count):
        yield float(i * 7 % 10)


def main() -> None:
    with sky.Compute() as compute:
        with closing(squares() >> compute) as stream:
            print(f"out    : {list(islice(stream, 6))}")

        # The stream above was infinite; the node is free again because it was closed.
        print(f"in     : {average(sensor(10)) >> compute}")
        print(f"through: {list(running_max(sensor(6)) >> compute)}")


if __name__ == "__main__":
    main()
