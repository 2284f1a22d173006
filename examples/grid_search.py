"""Search a grid of hyperparameters on the nodes of a pool, in plain scikit-learn.

Inside the block of a pool with the sklearn plugin, whatever takes `n_jobs` runs on its nodes: the
search below is one call per fold and candidate. The digits are sent to each node once.

Exits with an error if the best model recognises fewer than 95 % of the held-out digits.
"""

import os
import sys
import time
from collections import Counter

import joblib
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC

import skyward as sky

GRID = {"C": [0.1, 1.0, 10.0], "gamma": [1e-4, 1e-3, 1e-2]}
EXPECTED_ACCURACY = 95.0


def where(_: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def main() -> int:
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, stratify=y, random_state=0)

    with sky.Compute(nodes=2, plugins=[sky.plugins.sklearn()]) as compute:
        pids = joblib.Parallel(n_jobs=-1)(joblib.delayed(where)(i) for i in range(20))
        print(f"{joblib.effective_n_jobs(-1)} places, {len(Counter(pids))} processes, ", end="")
        print("none of them this one" if os.getpid() not in pids else "this one among them")

        started = time.monotonic()
        search = GridSearchCV(SVC(), GRID, cv=3, n_jobs=-1, refit=True).fit(x_train, y_train)
        seconds = time.monotonic() - started
        calls = compute.stats().succeeded

    results = search.cv_results_
    for rank in range(1, 4):
        best = list(results["rank_test_score"]).index(rank)
        print(f"{100 * results['mean_test_score'][best]:.1f}%  {results['params'][best]}")
    print(f"{len(results['params']) * 3} fits in {seconds:.1f} s, {calls} calls to the pool")
    accuracy = 100.0 * search.score(x_test, y_test)
    print(f"Held-out accuracy: {accuracy:.1f}% of {len(y_test)} digits")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
