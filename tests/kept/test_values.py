"""Values by name: they outlive the client that kept them, and device tensors stay on their node."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.worker import kept_values

from ..conftest import PATIENCE
from .conftest import said

torch = pytest.importorskip("torch")

Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def bench(home: Path) -> Iterator[str]:
    options = sky.Options(console=False)
    local = sky.Local(transport="tcp")
    with sky.Compute(local, nodes=2, name="values", keep=True, options=options):
        pass
    yield "values"
    sky.attach("values").down(force=True)


def test_a_value_is_found_by_the_next_client(bench: str, script: Script) -> None:
    with sky.attach(bench) as compute:
        compute.keep("settings", {"rate": 0.1, "layers": [1, 2]})
        compute.keep("settings", {"rate": 0.2, "layers": [1, 2]})
    other = script(f"print(sky.attach({bench!r}).kept('settings'))")
    out, problems = other.communicate(timeout=PATIENCE)
    assert out.strip() == "{'rate': 0.2, 'layers': [1, 2]}", problems


def test_a_value_is_of_the_class_that_the_client_has_imported(
    bench: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_shapes.py").write_text("class Point:\n    x = 7\n")
    client = script(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import kept_shapes
        with sky.attach({bench!r}) as compute:
            compute.keep("point", kept_shapes.Point())
        """
    )
    said(client)
    monkeypatch.syspath_prepend(str(tmp_path))
    import kept_shapes  # type: ignore[import-not-found]

    with sky.attach(bench) as compute:
        assert type(compute.kept("point")) is kept_shapes.Point


def test_a_value_that_is_read_stays_while_others_replace_it(bench: str) -> None:
    with sky.attach(bench) as compute:
        compute.keep("number", 1)
        with compute._open_fleet.service(0, "values") as reader:
            found = reader.ask("find", name="number")
            for number in range(2, 6):
                compute.keep("number", number)
            call = sky.functions.Function(kept_values.read, name="read")(
                found["path"], found["size"]
            )
            assert compute.run(call, on=0) == 1
        assert compute.kept("number") == 5


def test_an_unknown_name_is_refused_with_those_that_there_are(bench: str) -> None:
    with sky.attach(bench) as compute:
        compute.keep("here", 1)
        with pytest.raises(sky.errors.ConfigurationError, match=r"it keeps .*here"):
            compute.kept("nowhere")
        compute.forget("here")
        assert "here" not in compute.kept_names()
        compute.forget("here")


def test_a_model_on_a_device_is_found_on_the_device_again(bench: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    with sky.attach(bench) as compute:
        device = compute.device("cpu", node=1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(device)
        model[1].weight.data.mul_(3)
        compute.keep("model", model)
        wanted = model(x.to(device)).cpu()
    with sky.attach(bench) as compute:
        again = compute.kept("model")
        assert {p.device.type for p in again.parameters()} == {"sky"}
        assert torch.equal(again(x.to(compute.device("cpu", node=1))).cpu(), wanted)
        assert compute._open_fleet.devices.home(again[0].weight.device.index) == (1, "cpu")


def test_tensors_of_a_device_do_not_cross_the_wire(bench: str) -> None:
    with sky.attach(bench) as compute:
        tensor = torch.ones(4 << 20, device=compute.device("cpu"))
        before = sum(compute._open_fleet.dispatcher.traffic())
        compute.keep("large", {"weights": tensor})
        again = compute.kept("large")["weights"]
        assert sum(compute._open_fleet.dispatcher.traffic()) - before < 100_000
        assert float(again.sum()) == 4 << 20
        compute.forget("large")


def test_tensors_of_two_nodes_need_two_names(bench: str) -> None:
    with sky.attach(bench) as compute:
        both = [torch.ones(2, device=each) for each in compute.devices("cpu")]
        with pytest.raises(sky.errors.ConfigurationError, match="several names"):
            compute.keep("both", both)
