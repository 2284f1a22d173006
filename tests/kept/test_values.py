"""Values by name: they outlive the client that kept them, and device tensors stay on their node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.closing import shut
from skyward.nodes import host
from skyward.wire.channel import ServiceConnection
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


@pytest.mark.parametrize(("what", "shut_at"), [("keep", 1), ("keep", 2), ("kept", 1)])
def test_a_connection_that_is_cut_is_made_anew(
    bench: str, monkeypatch: pytest.MonkeyPatch, what: str, shut_at: int
) -> None:
    """Before the first question is asked, or before the second."""
    with sky.attach(bench) as compute:
        compute.keep("whole", [1])
        cuts = cut_services(compute, monkeypatch, shut_at, times=1)
        if what == "keep":
            compute.keep("whole", [1, 2])
        else:
            assert compute.kept("whole") == [1]
        assert cuts == [0]
        assert compute.kept("whole") == ([1, 2] if what == "keep" else [1])


def test_a_value_whose_place_went_with_its_connection_is_kept_anew(
    bench: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """The agent discards the file as soon as the client has gone, and a function would fill it."""
    with sky.attach(bench) as compute:

        def gone(begun: tuple[int, str]) -> None:
            eventually(lambda: not os.path.exists(begun[1]))

        cuts = cut_services(compute, monkeypatch, 1, times=1, answered=gone)
        compute.keep("filled", [3])
        assert cuts == [0]
        assert compute.kept("filled") == [3]


def test_a_connection_that_is_cut_over_and_over_is_given_up_in_words(
    bench: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sky.attach(bench) as compute:
        compute.keep("whole", [1])
        cut_services(compute, monkeypatch, 1, times=99)
        with pytest.raises(sky.NodeLostError, match=r"was lost 5 times while .* and call again"):
            compute.kept("whole")


def test_a_connection_that_is_cut_while_it_is_made_is_made_again(
    bench: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sky.attach(bench) as compute:
        compute.keep("whole", [1])
        left = refuse_services(monkeypatch, 2)
        assert compute.kept("whole") == [1]
        assert left == [0]
        left[:] = [2]
        assert "whole" in [each.name for each in compute.kept_values()]
        assert left == [0]
        left[:] = [2]
        compute.keep("whole", [2])
        assert left == [0]
        assert compute.kept("whole") == [2]
        left[:] = [2]
        compute.forget("whole")
        assert left == [0]
        assert "whole" not in [each.name for each in compute.kept_values()]


def test_a_node_that_serves_and_is_not_reached_is_not_passed_over(
    bench: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sky.attach(bench) as compute:
        compute.keep("whole", [1])
        with monkeypatch.context() as patch:
            refuse_services(patch, 99)
            for ask in (
                compute.kept_values,
                lambda: compute.forget("whole"),
                lambda: compute.kept("whole"),
            ):
                with pytest.raises(sky.NodeLostError, match=r"lost 5 times .*cut while .* again"):
                    ask()
        assert compute.kept("whole") == [1]


def refuse_services(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Cut the next connections for kept values while they are made; gives how many are left."""
    real, left = host.connect, [times]

    def connect(endpoint: str, hello: Any, *arguments: Any, **more: Any) -> Any:
        if hello.role == "service-values" and left[0] > 0:
            left[0] -= 1
            raise ConnectionResetError("cut while it was made")
        return real(endpoint, hello, *arguments, **more)

    monkeypatch.setattr(host, "connect", connect)
    return left


def cut_services(
    compute: sky.Compute,
    monkeypatch: pytest.MonkeyPatch,
    shut_at: int,
    times: int,
    *,
    answered: Callable[[Any], object] | None = None,
) -> list[int]:
    """Cut the next connections at their nth question, or when it was answered; gives those left."""
    fleet, left = compute._open_fleet, [times]
    real = fleet.service

    def service(index: int, name: str) -> ServiceConnection:
        connection = real(index, name)
        real_ask, asked = connection.ask, []

        def ask(what: str, **arguments: Any) -> Any:
            asked.append(what)
            cuts = len(asked) == shut_at and left[0] > 0
            if not cuts:
                return real_ask(what, **arguments)
            left[0] -= 1
            found = real_ask(what, **arguments) if answered else None
            shut(connection.channel._sender)
            if answered:
                answered(found)
                return found
            return real_ask(what, **arguments)

        monkeypatch.setattr(connection, "ask", ask)
        return connection

    monkeypatch.setattr(fleet, "service", service)
    return left


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
