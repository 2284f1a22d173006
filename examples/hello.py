"""Ship one call to a worker process and get its result back.

`hello(...)` describes a call and runs nothing; `>> compute` runs it on a node and waits. What the
function prints arrives here while it runs, labelled by node.
"""

import os

import skyward as sky


@sky.function
def hello(name: str) -> str:
    print(f"greeting {name}")
    return f"Hello, {name}, from process {os.getpid()}!"


def main() -> None:
    print(f"this is process {os.getpid()}")
    print(hello.local("here"))

    with sky.Compute() as compute:
        print(hello("there") >> compute)

        # Inside the block the module itself is a target.
        print(hello("anywhere") >> sky)


if __name__ == "__main__":
    main()
