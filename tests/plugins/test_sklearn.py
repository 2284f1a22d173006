"""scikit-learn on a pool: searches, cross-validation and forests run in its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import skyward as sky

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.svm import SVC

Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes, with joblib's plugin next to scikit-learn's."""
    plugins = [sky.plugins.joblib(), sky.plugins.sklearn()]
    with sharing(sky.Compute(nodes=2, plugins=plugins, options=sky.Options(console=False))) as it:
        yield it


class Where(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Notes which process it was fitted in."""

    def __init__(self, folder: str = "", c: float = 1.0) -> None:
        self.folder, self.c = folder, c

    def fit(self, x: np.ndarray, y: np.ndarray) -> Where:
        (Path(self.folder) / str(os.getpid())).touch()
        self.classes_ = np.unique(y)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.c)


def test_a_grid_search_finds_what_it_finds_here(pool: sky.Compute) -> None:
    x, y = load_iris(return_X_y=True)
    grid = {"C": [0.1, 1.0, 10.0], "gamma": [0.01, 0.1]}
    before = pool.stats().submitted

    there = GridSearchCV(SVC(), grid, n_jobs=-1).fit(x, y)
    sent = pool.stats().submitted - before
    here = GridSearchCV(SVC(), grid, n_jobs=1).fit(x, y)

    assert sent > 0
    assert pool.stats().submitted - before == sent
    assert there.best_params_ == here.best_params_
    for name in ("mean_test_score", "std_test_score"):
        np.testing.assert_array_equal(there.cv_results_[name], here.cv_results_[name])


def test_the_fits_of_a_search_run_on_both_nodes(pool: sky.Compute, tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    workers = {str(pid) for pid in sky.function(os.getpid)() @ pool}

    search = GridSearchCV(Where(str(tmp_path)), {"c": [0, 1, 2]}, n_jobs=-1, refit=False)
    search.fit(x, y)

    assert {path.name for path in tmp_path.iterdir()} <= workers


def test_cross_validation_and_forests_run_there(pool: sky.Compute) -> None:
    x, y = load_iris(return_X_y=True)
    before = pool.stats().submitted

    scores = cross_val_score(SVC(), x, y, n_jobs=-1)
    after = pool.stats().submitted
    forest = RandomForestClassifier(n_estimators=20, random_state=0, n_jobs=-1).fit(x, y)

    assert scores.mean() > 0.9
    assert after > before
    assert pool.stats().submitted > after
    assert forest.score(x, y) > 0.9


def test_a_failing_fit_is_reported_as_scikit_learn_does(pool: sky.Compute) -> None:
    x, y = load_iris(return_X_y=True)

    with pytest.raises(ValueError, match="no-such-kernel"):
        GridSearchCV(SVC(), {"kernel": ["no-such-kernel"]}, n_jobs=-1, error_score="raise").fit(
            x, y
        )


def test_the_image_gets_scikit_learn() -> None:
    compute = sky.Compute(plugins=[sky.plugins.sklearn()])

    assert compute._spec.request.image.pip == ("scikit-learn", "joblib")
