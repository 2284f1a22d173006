"""What the values that describe a pool accept, refuse and remember."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import ConfigurationError, SkywardError
from skyward.spec import Image, Nodes, Options, PipIndex, Volume, Worker

WHEELS = "https://download.pytorch.org/whl/cpu"

EXAMPLES = [
    PipIndex(WHEELS, ["torch"]),
    Image(),
    Image(
        python="3.12",
        pip=["torch==2.11.0", "numpy"],
        pip_indexes=[PipIndex(WHEELS, ["torch"])],
        apt=["ffmpeg"],
        env={"B": "2", "A": "1"},
        includes=["src"],
        excludes=["*.pyc"],
    ),
    Nodes(4, min=2, max=8),
    Worker(concurrency=2, executor="thread", per_node="accelerator"),
    Options(cluster=False, console=False, default_timeout=30, retries=2),
    Volume("s3://bucket/data", "/data", read_only=True),
]


def refused(message: str) -> pytest.RaisesExc[ConfigurationError]:
    return pytest.raises(ConfigurationError, match=message)


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
class TestEveryValue:
    def test_survives_pickling(self, value):
        assert pickle.loads(pickle.dumps(value)) == value

    def test_survives_copying(self, value):
        assert copy.deepcopy(value) == value

    def test_equals_and_hashes_by_content(self, value):
        twin = dataclasses.replace(value)
        assert twin is not value
        assert twin == value
        assert hash(twin) == hash(value)
        assert len({twin, value}) == 1

    def test_cannot_be_changed(self, value):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "other")

    def test_has_no_room_for_a_misspelt_field(self, value):
        assert not hasattr(value, "__dict__")


def test_a_refusal_is_both_a_skyward_error_and_a_value_error():
    with pytest.raises(ConfigurationError) as caught:
        Nodes(0)
    assert isinstance(caught.value, SkywardError)
    assert isinstance(caught.value, ValueError)


class TestPipIndex:
    def test_packages_are_stored_as_a_tuple(self):
        assert PipIndex(url=WHEELS, packages=["torch", "torchvision"]).packages == (
            "torch",
            "torchvision",
        )

    @pytest.mark.parametrize("url", ["pypi.org/simple", "torch", "https://", "ftp://host/simple"])
    def test_what_is_not_the_address_of_an_index_is_refused(self, url):
        with refused(rf"PipIndex\(url='{url}'\): not the address of an index; write a whole URL"):
            PipIndex(url, ["torch"])

    def test_a_local_index_is_accepted(self):
        assert PipIndex("file:///srv/wheels", ["torch"]).url == "file:///srv/wheels"

    def test_an_index_for_no_packages_is_refused(self):
        with refused("would serve nothing; name those it is for"):
            PipIndex(WHEELS, [])

    def test_a_bare_string_for_packages_is_refused_with_the_fix(self):
        with refused(r"PipIndex\(packages='torch'\): .* write packages=\['torch'\]"):
            PipIndex(WHEELS, "torch")

    @pytest.mark.parametrize("package", ["torch==2.1", "torch>=2", "jax[cuda12]", "-torch"])
    def test_a_version_is_refused_where_a_name_belongs(self, package):
        with refused("packages takes names alone; put the version in Image"):
            PipIndex(WHEELS, [package])

    def test_credentials_are_used_but_never_shown(self):
        index = PipIndex("https://me:s3cr@t@wheels.example.com/simple", ["torch"])
        assert index.url == "https://me:s3cr@t@wheels.example.com/simple"
        assert "t@wheels" not in repr(index)
        assert "https://***@wheels.example.com/simple" in repr(index)

    def test_credentials_are_not_shown_in_a_refusal_either(self):
        with pytest.raises(ConfigurationError) as caught:
            PipIndex("https://me:s3cret@wheels.example.com/simple", [])
        assert "s3cret" not in str(caught.value)


class TestImage:
    def test_the_default_is_this_pythons_version_and_nothing_else(self):
        image = Image()
        assert image.python == "auto"
        assert image.pip == image.pip_indexes == image.apt == ()
        assert image.includes == image.excludes == ()
        assert image.env == {}

    def test_lists_and_tuples_mean_the_same(self):
        assert Image(pip=["torch"], apt=["git"]) == Image(pip=("torch",), apt=("git",))

    def test_changing_the_list_that_was_given_changes_nothing(self):
        packages, env = ["torch"], {"A": "1"}
        image = Image(pip=packages, env=env)
        packages.append("numpy")
        env["B"] = "2"
        assert image == Image(pip=["torch"], env={"A": "1"})

    @pytest.mark.parametrize("name", ["pip", "apt", "includes", "excludes"])
    def test_a_bare_string_is_refused_with_the_fix(self, name):
        with refused(rf"Image\({name}='torch'\): a bare string .* write {name}=\['torch'\]"):
            Image(**{name: "torch"})

    @pytest.mark.parametrize("name", ["pip", "apt", "includes", "excludes"])
    @pytest.mark.parametrize("value", [None, 5, {"torch"}, {"torch": "2.1"}])
    def test_what_is_not_a_list_is_refused(self, name, value):
        with refused(rf"{name} must be a list of strings, not "):
            Image(**{name: value})

    @pytest.mark.parametrize("name", ["pip", "apt", "includes", "excludes"])
    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            ("", "is empty"),
            ("  ", "is empty"),
            (" torch", "whitespace around it"),
            ("torch\nnumpy", "control characters"),
            (Path("torch"), "must be a str, not PosixPath; pass a str"),
            (None, "must be a str, not None"),
        ],
    )
    def test_a_bad_entry_is_named_by_its_place(self, name, entry, problem):
        with refused(rf"Image\({name}\[1\]=.*\): {name}\[1\] .*{problem}"):
            Image(**{name: ["fine", entry]})

    @pytest.mark.parametrize(
        "requirement",
        [
            "torch==2.11.0",
            "torch >= 2.11, < 3",
            "jax[cuda12]",
            "numpy; python_version < '3.13'",
            "skyward @ git+https://github.com/example/skyward@main",
            "https://example.com/wheels/a-1.0-py3-none-any.whl",
            "./vendored/wheel.whl",
        ],
    )
    def test_any_requirement_of_pip_is_accepted(self, requirement):
        assert Image(pip=[requirement]).pip == (requirement,)

    @pytest.mark.parametrize("option", ["--index-url https://x", "-r requirements.txt", "-e ."])
    def test_an_option_of_pip_is_refused_with_where_it_belongs(self, option):
        with refused(r"an option of pip, .* pip_indexes=\[PipIndex\(...\)\]"):
            Image(pip=[option])

    def test_two_requirements_in_one_entry_are_refused_with_the_fix(self):
        with refused(r"one requirement to an entry; write pip=\['torch', 'numpy'\]"):
            Image(pip=["torch numpy"])

    @pytest.mark.parametrize("package", ["libgl1", "g++", "libc6:amd64", "git=1:2.39.2-1.1"])
    def test_any_package_of_apt_is_accepted(self, package):
        assert Image(apt=[package]).apt == (package,)

    @pytest.mark.parametrize("package", ["git curl", "git; rm -rf /", "$(id)", "-y", "git&&id"])
    def test_what_a_shell_could_misread_is_refused_as_an_apt_package(self, package):
        with refused("not the name of one package"):
            Image(apt=[package])

    @pytest.mark.parametrize("version", ["auto", "3.11", "3.12.4", "3.13"])
    def test_a_python_version_is_auto_or_a_release(self, version):
        assert Image(python=version).python == version

    @pytest.mark.parametrize("version", ["", "3", "py311", ">=3.11", "3.11rc1", "2.7", None])
    def test_what_is_not_a_python_version_is_refused(self, version):
        with refused("not a version; write 'auto' or one such as '3.11'"):
            Image(python=version)

    def test_a_number_for_a_python_version_is_refused_with_the_fix(self):
        with refused(r"Image\(python=3.11\): .* write it in quotes: python='3.11'"):
            Image(python=3.11)  # type: ignore[arg-type]

    def test_a_python_too_old_for_the_nodes_is_refused(self):
        with refused(r"Image\(python='3.9'\): nodes need Python 3.11 or newer"):
            Image(python="3.9")

    def test_indexes_must_be_pip_indexes(self):
        with refused(r"pip_indexes\[0\]='https.*each index must be a PipIndex, not str"):
            Image(pip_indexes=[WHEELS])  # type: ignore[list-item]

    def test_a_bare_index_is_refused_with_the_fix(self):
        with refused(r"must be a list of PipIndex, not PipIndex; write pip_indexes=\[PipIndex"):
            Image(pip_indexes=PipIndex(WHEELS, ["torch"]))  # type: ignore[arg-type]

    def test_replacing_one_field_keeps_the_others(self):
        image = Image(pip=["torch"], env={"A": "1"})
        grown = dataclasses.replace(image, pip=(*image.pip, "numpy"), env={**image.env, "B": "2"})
        assert grown == Image(pip=["torch", "numpy"], env={"A": "1", "B": "2"})

    def test_replacing_validates_again(self):
        with refused("a bare string"):
            dataclasses.replace(Image(), pip="torch")

    def test_requirement_credentials_are_not_shown(self):
        image = Image(pip=["mine @ git+https://ghp_token@github.com/me/mine"])
        assert "ghp_token" not in repr(image)


class TestEnvironment:
    @given(
        st.dictionaries(
            st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True).filter(str.isascii),
            st.text().filter(lambda text: "\0" not in text),
        )
    )
    def test_reads_like_the_mapping_it_was_made_from(self, env):
        image = Image(env=env)
        assert image.env == env
        assert dict(image.env) == env
        assert pickle.loads(pickle.dumps(image)).env == env

    def test_order_does_not_matter(self):
        one, other = Image(env={"A": "1", "B": "2"}), Image(env={"B": "2", "A": "1"})
        assert one == other
        assert hash(one) == hash(other)
        assert repr(one) == repr(other)

    def test_cannot_be_changed(self):
        env: Any = Image(env={"A": "1"}).env
        with pytest.raises(TypeError):
            env["A"] = "2"

    def test_only_what_was_given_is_shown(self):
        assert repr(Image()) == "Image()"
        assert repr(Image(python="auto", pip=["torch"], env={})) == "Image(pip=('torch',))"

    def test_values_are_never_shown(self):
        image = Image(env={"HF_TOKEN": "hf_secret"})
        assert image.env["HF_TOKEN"] == "hf_secret"
        assert "HF_TOKEN" in repr(image)
        assert "hf_secret" not in repr(image)

    @pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A B", 5])
    def test_a_name_no_shell_could_use_is_refused(self, name):
        with refused(rf"Image\(env={{{name!r}: ...}}\): not a variable's name"):
            Image(env={name: "x"})

    def test_a_value_that_is_not_text_is_refused_by_name_alone(self):
        with refused(r"Image\(env={'THREADS': ...}\): the value must be a str, not int") as caught:
            Image(env={"THREADS": 987654})  # type: ignore[dict-item]
        assert "987654" not in str(caught.value)

    def test_a_value_with_a_nul_is_refused(self):
        with refused("contains a NUL character"):
            Image(env={"A": "x\0y"})

    @pytest.mark.parametrize("env", ["TOKEN=secret", ["TOKEN=secret"], None])
    def test_what_is_not_a_mapping_is_refused_without_showing_it(self, env):
        with refused(r"env must be a mapping .* write env={'NAME': 'value'}") as caught:
            Image(env=env)
        assert "secret" not in str(caught.value)


class TestNodes:
    def test_a_number_is_a_fixed_size(self):
        nodes = Nodes.of(3)
        assert nodes == Nodes(desired=3)
        assert (nodes.floor, nodes.ceiling, nodes.elastic) == (3, 3, False)

    def test_a_pair_is_the_bounds_and_starts_at_the_lower(self):
        nodes = Nodes.of((2, 8))
        assert nodes == Nodes(desired=2, min=2, max=8)
        assert (nodes.floor, nodes.ceiling, nodes.elastic) == (2, 8, True)

    def test_nodes_are_taken_as_they_are(self):
        nodes = Nodes(4, min=2, max=8)
        assert Nodes.of(nodes) is nodes

    def test_equal_bounds_are_not_elastic(self):
        assert not Nodes.of((2, 2)).elastic

    @pytest.mark.parametrize(
        ("nodes", "floor", "ceiling"), [(Nodes(4, max=8), 4, 8), (Nodes(4, min=2), 2, 4)]
    )
    def test_a_missing_bound_is_where_the_pool_starts(self, nodes, floor, ceiling):
        assert (nodes.floor, nodes.ceiling, nodes.elastic) == (floor, ceiling, True)

    def test_desired_above_max_is_refused(self):
        with refused(r"Nodes\(desired=5, max=3\): desired exceeds max; .* raise max to 5"):
            Nodes(desired=5, max=3)

    def test_desired_below_min_is_refused(self):
        with refused(r"Nodes\(desired=1, min=2\): desired is below min; .* lower min to 1"):
            Nodes(desired=1, min=2)

    def test_bounds_the_wrong_way_round_are_refused_with_the_fix(self):
        with refused(r"Nodes\(min=8, max=2\): min exceeds max; write min=2, max=8"):
            Nodes.of((8, 2))

    @pytest.mark.parametrize(
        ("name", "number", "least"),
        [("desired", -1, 0), ("min", -1, 0), ("max", -1, 1), ("max", 0, 1)],
    )
    def test_fewer_nodes_than_a_pool_can_have_are_refused(self, name, number, least):
        with refused(rf"Nodes\({name}={number}\): {name} must be at least {least}"):
            Nodes(**{"desired": 1, name: number})

    def test_a_pool_may_have_no_nodes_if_it_can_grow(self):
        assert Nodes.of((0, 4)) == Nodes(0, min=0, max=4)
        assert (Nodes(2, min=0).floor, Nodes(0, max=3).ceiling) == (0, 3)
        for nothing in (lambda: Nodes(0), lambda: Nodes.of(0), lambda: Nodes(0, min=0)):
            with refused(r"Nodes\(desired=0\): .*cannot grow unless max is given.*max=4"):
                nothing()

    @pytest.mark.parametrize("value", [True, 2.0, "2", None])
    def test_what_is_not_a_whole_number_is_refused(self, value):
        with refused(r"desired must be a whole number, not (bool|float|str|None)"):
            Nodes.of(value)

    @pytest.mark.parametrize("value", [(), (1,), (1, 2, 3)])
    def test_a_tuple_that_is_no_pair_is_refused(self, value):
        with refused(r"a pair means \(min, max\); write nodes=2, nodes=\(2, 8\)"):
            Nodes.of(value)

    def test_a_numpy_integer_counts(self):
        np = pytest.importorskip("numpy")
        nodes = Nodes.of(np.int64(3))
        assert nodes == Nodes(3)
        assert type(nodes.desired) is int

    @given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
    def test_accepts_exactly_the_ordered_triples(self, desired, low, high):
        if low <= desired <= high:
            nodes = Nodes(desired, low, high)
            assert nodes.floor <= nodes.desired <= nodes.ceiling
        else:
            with pytest.raises(ConfigurationError):
                Nodes(desired, low, high)


class TestWorker:
    def test_the_default_is_one_process_running_one_task(self):
        worker = Worker()
        assert (worker.concurrency, worker.executor, worker.per_node) == (1, "process", 1)

    @pytest.mark.parametrize("per_node", [1, 4, "accelerator"])
    def test_workers_per_node_are_a_number_or_one_for_each_accelerator(self, per_node):
        assert Worker(per_node=per_node).per_node == per_node

    @pytest.mark.parametrize("per_node", ["gpu", "4", ""])
    def test_another_word_for_per_node_is_refused(self, per_node):
        with refused(rf"Worker\(per_node='{per_node}'\): the only word it takes is 'accelerator'"):
            Worker(per_node=per_node)

    @pytest.mark.parametrize("per_node", [0, -2, 1.5, True, None])
    def test_a_per_node_that_counts_nothing_is_refused(self, per_node):
        with refused("per_node must be (at least 1|a whole number)"):
            Worker(per_node=per_node)

    def test_fewer_than_one_task_at_once_is_refused(self):
        with refused(r"Worker\(concurrency=0\): concurrency must be at least 1"):
            Worker(concurrency=0)

    @pytest.mark.parametrize("executor", ["fork", "", None, ["process"]])
    def test_an_unknown_executor_is_refused(self, executor):
        with refused("no such executor; write 'process' for isolation or 'thread'"):
            Worker(executor=executor)


class TestOptions:
    def test_the_defaults_are_those_documented(self):
        assert Options() == Options(
            cluster=True,
            console=None,
            default_timeout=None,
            idle_timeout=300.0,
            orphan_timeout=60.0,
            retries=0,
            fail_grace=3.0,
            collective_timeout=300.0,
        )

    def test_a_broadcast_may_wait_for_all_ranks_of_a_group(self):
        assert Options(fail_grace=None).fail_grace is None

    @pytest.mark.parametrize(
        "name", ["default_timeout", "idle_timeout", "fail_grace", "collective_timeout"]
    )
    def test_whole_seconds_are_seconds(self, name):
        seconds = getattr(Options(**{name: 30}), name)
        assert seconds == 30.0
        assert type(seconds) is float

    @pytest.mark.parametrize(
        "name", ["default_timeout", "idle_timeout", "fail_grace", "collective_timeout"]
    )
    @pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
    def test_a_timeout_that_never_or_always_passes_is_refused(self, name, value):
        with refused(rf"Options\({name}={value}\): {name} must be a positive, finite number"):
            Options(**{name: value})

    @pytest.mark.parametrize("name", ["default_timeout", "idle_timeout", "orphan_timeout"])
    @pytest.mark.parametrize("value", ["30", True, timedelta(seconds=30), 10**400])
    def test_a_timeout_that_is_no_number_of_seconds_is_refused(self, name, value):
        with refused(f"{name} must be a number of seconds, not {type(value).__name__}"):
            Options(**{name: value})

    @pytest.mark.parametrize("name", ["idle_timeout", "orphan_timeout"])
    def test_other_timeouts_cannot_be_none(self, name):
        with refused(f"{name} must be a number of seconds, not None"):
            Options(**{name: None})

    @pytest.mark.parametrize("name", ["cluster", "console"])
    @pytest.mark.parametrize("value", [1, "no"])
    def test_a_flag_that_is_not_a_bool_is_refused(self, name, value):
        with refused(rf"Options\({name}={value!r}\): {name} must be True or False"):
            Options(**{name: value})

    def test_negative_retries_are_refused(self):
        with refused(r"Options\(retries=-1\): retries must be at least 0"):
            Options(retries=-1)


class TestVolume:
    def test_the_target_defaults_to_the_source(self):
        assert Volume("/data") == Volume("/data", target="/data", read_only=False)

    @pytest.mark.parametrize("source", ["s3://bucket/data", "./data", "my-claim"])
    def test_a_source_that_is_no_path_on_a_node_needs_a_target(self, source):
        with refused(rf"Volume\(source='{source}'\): .* Volume\('{source}', target='/data'\)"):
            Volume(source)
        assert Volume(source, "/data").target == "/data"

    @pytest.mark.parametrize("target", ["data", "~/data", "/", "//", "/data/../etc"])
    def test_a_target_nodes_cannot_mount_is_refused(self, target):
        with refused(r"Volume\(target=.*nodes need an absolute path below '/'"):
            Volume("/data", target)

    @pytest.mark.parametrize("source", ["", "   ", None, Path("/data")])
    def test_a_source_that_is_no_text_is_refused(self, source):
        with refused(r"source (is empty|must be a str)"):
            Volume(source)

    def test_read_only_must_be_a_bool(self):
        with refused(r"Volume\(read_only='ro'\): read_only must be True or False, not str"):
            Volume("/data", read_only="ro")  # type: ignore[arg-type]

    def test_credentials_in_the_source_are_not_shown(self):
        assert "s3cret" not in repr(Volume("s3://key:s3cret@bucket/data", "/data"))
        with pytest.raises(ConfigurationError) as caught:
            Volume("s3://key:s3cret@bucket/data")
        assert "s3cret" not in str(caught.value)
