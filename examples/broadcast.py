"""Run one function on every node at once, each knowing its place in the cluster.

`report(...) @ compute` returns one result per worker, in rank order. `@sky.stdout(only="head")`
keeps the output of one node and drops the copies of the others. `sky.put` declares data frozen: it
is sent once per node, however many calls use it.
"""

import skyward as sky


@sky.function
@sky.stdout(only="head")
def report(table: dict[int, str]) -> str:
    info = sky.instance_info()
    print(f"{info.total_nodes} nodes are up, the head is node {info.node}")
    role = "head" if info.is_head else "member"
    rank, world = info.global_worker_index, info.total_workers
    return f"rank {rank} of {world} is a {role} named {table[info.node]}"


@sky.function
def node() -> int:
    return sky.instance_info().node


def main() -> None:
    names = sky.put({0: "ada", 1: "grace", 2: "edsger"})

    with sky.Compute(nodes=3) as compute:
        for line in report(names) @ compute:
            print(line)

        # A single call can pick its node, too.
        print(f"asked for node 2, ran on node {compute.run(node(), on=2)}")
        print(f"asked for the head, ran on node {compute.run(node(), on='head')}")


if __name__ == "__main__":
    main()
