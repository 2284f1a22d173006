"""Train one Keras model on two nodes, each with its own half of the data.

With the jax and keras plugins a model lives on the devices of all nodes at once: every node calls
`fit` with its shard, and each step's gradients are those of both halves of the batch. The data are
1,797 handwritten digits of 8 x 8 pixels, of which a quarter is held out.

Exits with an error if the model recognises fewer than 92 % of the held-out digits.
"""

import sys
from typing import Any

import skyward as sky

EXPECTED_ACCURACY = 92.0


@sky.function
@sky.stdout(only="head")
def train(
    x_full: Any, y_full: Any, x_test_full: Any, y_test_full: Any, epochs: int
) -> dict[str, float]:
    import keras

    # Equal parts, as every node takes part in every step.
    x, y = sky.shard(x_full, y_full, shuffle=True, seed=42, drop_last=True)
    x_test, y_test = sky.shard(x_test_full, y_test_full, drop_last=True)

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    replicas = keras.distribution.distribution().num_model_replicas
    print(f"Keras on {keras.backend.backend()}: {replicas} replicas, {len(x)} digits each")

    for epoch in range(epochs):
        history = model.fit(x, y, batch_size=32, verbose=0)
        print(f"epoch {epoch + 1:2d}/{epochs}: loss={history.history['loss'][0]:.4f}")

    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return {"accuracy": accuracy, "weights": float(abs(model.get_weights()[0]).sum())}


def main() -> int:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (x / 16).astype("float32"), y, test_size=0.25, stratify=y, random_state=0
    )

    plugins = [sky.plugins.jax(), sky.plugins.keras(backend="jax")]
    with sky.Compute(nodes=2, plugins=plugins) as compute:
        results = train(x_train, y_train, x_test, y_test, epochs=8) @ compute

    same = results[0] == results[1]
    print(f"The nodes' models are {'the same' if same else 'different'}")
    accuracy = 100.0 * results[0]["accuracy"]
    print(f"Held-out accuracy: {accuracy:.1f}%")
    return 0 if same and accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
