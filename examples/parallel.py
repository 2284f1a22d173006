"""Run many calls at once: `&`, `sky.gather`, `compute.map` and futures.

All of them keep the types: `(a() & b()) >> compute` is a `tuple[A, B]`, a gather of `int` calls is
a `list[int]`, and `>` gives a `Future[int]` that is a `concurrent.futures.Future`.
"""

import concurrent.futures

import skyward as sky


@sky.function
def primes(start: int, stop: int) -> int:
    """Count the primes in `[start, stop)`."""
    return sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(start, stop))


@sky.function
def longest(words: list[str]) -> str:
    return max(words, key=len)


def main() -> None:
    blocks = [(start, start + 2_000) for start in range(0, 10_000, 2_000)]

    with sky.Compute(nodes=2) as compute:
        # Different calls, one tuple.
        count, word = (primes(0, 1_000) & longest(["sky", "horizon", "cloud"])) >> compute
        print(f"&      : {count} primes below 1,000, longest word {word!r}")

        # Any number of calls, one list, in the order given.
        counts = sky.gather(*(primes(*block) for block in blocks)) >> compute
        print(f"gather : {counts}, {sum(counts)} primes below 10,000")

        # The same as a stream: values arrive as they are ready.
        calls = [primes(*block) for block in blocks]
        arrived = sky.gather(*calls, stream=True, ordered=False) >> compute
        print(f"stream : {sum(arrived)} primes, added up as the counts arrived")

        # One call per item, without holding all of them: `map` pulls as nodes become free.
        starts, stops = zip(*blocks, strict=True)
        print(f"map    : {list(compute.map(primes, starts, stops))}")

        # `>` does not wait. Note the parentheses: Python would chain `a > b > c`.
        futures = [(primes(*block) > compute) for block in blocks]
        finished = [f.result() for f in concurrent.futures.as_completed(futures)]
        print(f"futures: {len(finished)} done, {sum(finished)} primes")


if __name__ == "__main__":
    main()
