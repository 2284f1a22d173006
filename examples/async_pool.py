"""Use a pool from asyncio: `async with`, awaited futures, and a loop that never stalls.

A future is both a `concurrent.futures.Future` and an awaitable, so `asyncio.gather` and `wait_for`
take it as it is. The pool works on a thread of its own, so the operators work inside a running
loop: `>>` blocks the loop while it waits, `await (call > compute)` does not.
"""

import asyncio
import time

import skyward as sky


@sky.function
def slow_square(n: int, seconds: float = 0.2) -> int:
    time.sleep(seconds)
    return n * n


async def count_ticks(ticks: list[float]) -> None:
    """Show that the event loop is alive while the nodes work."""
    while True:
        await asyncio.sleep(0.01)
        ticks.append(time.monotonic())


async def main() -> None:
    ticks: list[float] = []
    ticker = asyncio.create_task(count_ticks(ticks))

    async with sky.Compute(nodes=2) as compute:
        print(f"one    : {await (slow_square(7) > compute)}")

        before = len(ticks)
        squares = await asyncio.gather(*(slow_square(n) > compute for n in range(4)))
        print(f"many   : {squares}")
        print(f"loop   : {'kept running' if len(ticks) > before else 'stalled'} meanwhile")

        try:
            await asyncio.wait_for(slow_square(9, seconds=30) > compute, timeout=0.2)
        except TimeoutError:
            print("timeout: gave up on a slow call, which cancels it on its node")

        # The synchronous operators work here too; this one blocks the loop for a moment.
        print(f"sync   : {slow_square(3, seconds=0) >> compute}")

    ticker.cancel()


if __name__ == "__main__":
    asyncio.run(main())
