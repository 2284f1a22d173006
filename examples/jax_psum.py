"""Let JAX compute across two processes: collectives, and a model trained on both halves of data.

The jax plugin has called `jax.distributed.initialize()` before a function runs, so `jax.devices()`
are those of all nodes. `pmap` sums over them with `psum`; gradient descent averages its gradients
the same way, so that every node takes the same steps although it sees its own half of the data.

Exits with an error if the classifier recognises fewer than 92 % of the held-out tumours.
"""

import sys
from typing import Any

import skyward as sky

EXPECTED_ACCURACY = 92.0


@sky.function
def sum_of_ranks() -> tuple[int, int, float]:
    import jax
    import jax.numpy as jnp

    mine = jnp.full(jax.local_device_count(), 1.0 + jax.process_index())
    total = jax.pmap(lambda x: jax.lax.psum(x, "nodes"), axis_name="nodes")(mine)
    return jax.process_index(), jax.device_count(), float(total[0])


@sky.function
@sky.stdout(only="head")
def train(x_full: Any, y_full: Any, steps: int) -> tuple[int, Any]:
    import jax
    import jax.numpy as jnp

    x, y = sky.shard(x_full, y_full, shuffle=True, seed=0, drop_last=True)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        logits = x @ weights[:-1] + weights[-1]
        return jnp.mean(jnp.logaddexp(0.0, logits) - y * logits)

    def step(weights: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        value, gradient = jax.lax.pmean((value, gradient), "nodes")
        return weights - 0.5 * gradient, value

    # One replica per device, of which each node has one here.
    everywhere = jax.pmap(step, axis_name="nodes")
    weights, x, y = jnp.zeros((1, x.shape[1] + 1)), x[None], y[None]
    for number in range(1, steps + 1):
        weights, value = everywhere(weights, x, y)
        if number % (steps // 4) == 0:
            print(f"step {number:3d}/{steps}: loss={float(value[0]):.4f}")
    return x.shape[1], jax.device_get(weights[0])


def main() -> int:
    import numpy as np
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(x, y, stratify=y, random_state=0)

    with sky.Compute(nodes=2, plugins=[sky.plugins.jax()]) as compute:
        for process, devices, total in sum_of_ranks() @ compute:
            print(f"process {process} of {devices} devices: the sum of 1 + rank is {total:.0f}")
        (rows, weights), (other_rows, other_weights) = train(x_train, y_train, 200) @ compute

    print(f"Trained on {rows} + {other_rows} rows; the nodes agree to the last bit: ", end="")
    print("yes" if np.array_equal(weights, other_weights) else "no")
    right = (x_test @ weights[:-1] + weights[-1] > 0) == y_test
    accuracy = 100.0 * right.mean()
    print(f"Held-out accuracy: {accuracy:.1f}% of {len(right)} tumours")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
