"""Share state between tasks, and keep an object on a node.

Workers take documents from a queue that all of them share, and count what they find. The model that
scores the documents is made once, on a node, and each call uses it.
"""

import queue

import skyward as sky

DOCUMENTS = ["the sky is blue", "a cloud", "rain falls from the cloud", "wind", "the blue sky"]


@sky.function
def count_words() -> int:
    """Take documents until there are none; runs on every worker."""
    documents: sky.queue[str] = sky.queue("documents")
    words: sky.dict[str, int] = sky.dict("words")
    taken = 0
    # All begin together, so that no worker has taken everything before the others are there.
    sky.barrier("start").wait(timeout=60)
    while True:
        try:
            document = documents.get_nowait()
        except queue.Empty:
            return taken
        taken += 1
        for word in document.split():
            words.change(word, lambda count: count + 1, default=0)
            sky.counter("total").add()


@sky.cls
class Model:
    """Stands for something that takes long to load."""

    def __init__(self, weights: dict[str, int]) -> None:
        print("Model: loaded")
        self._weights = weights
        self._calls = 0

    def score(self, document: str) -> int:
        """How common the words of a document are."""
        self._calls += 1
        return sum(self._weights.get(word, 0) for word in document.split())

    def calls(self) -> int:
        """How often this object was asked."""
        return self._calls


def main() -> None:
    with sky.Compute(nodes=2) as compute:
        for document in DOCUMENTS:
            sky.queue("documents").put(document)
        taken = count_words() @ compute
        words: sky.dict[str, int] = sky.dict("words")
        print(f"{sum(taken)} documents, {sky.counter('total').value} words, {len(words)} different")
        print(f"sky: {words['sky']}, cloud: {words['cloud']}, wind: {words['wind']}")

        model = Model(words.copy()) >> compute
        print(f"first : {model.score(DOCUMENTS[0])}")
        print(f"all   : {list(compute.map(model.score, DOCUMENTS))}")
        print(f"asked : {model.calls()} times, loaded once")

        models = Model(words.copy()) @ compute
        print(f"copies: {len(models)}, which say {models.score('blue sky')}")


if __name__ == "__main__":
    main()
