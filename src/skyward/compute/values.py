"""Values by name: what a client leaves on a pool that stays, for itself or the next client."""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle

from skyward.compute.running import Running
from skyward.errors import ConfigurationError, NodeLostError
from skyward.functions import Function, remote
from skyward.worker import values

_fill = Function(values.fill, name="keep")
_read = Function(values.read, name="kept")


class Keeping(Running):
    """The methods of a `Compute` that keep values by name."""

    def keep(self, name: str, value: object) -> None:
        """Keep a value on the pool by name, in place of an earlier one, until `forget`.

        If it has tensors of a sky device, such as a model or a state dict, it is kept in the memory
        of the node that has them: no byte of them comes here. All else is kept on the head node.

        >>> compute.keep("model", model)
        """
        _check(name)
        node, kind = self._home(name, value)
        with self._open_pool.service(node, "values") as service:
            number, path = service.ask("begin")
            self.run(_fill(path, value), on=node)
            service.ask("finish", number=number, name=name, kind=kind)
        for other in self._serving():
            if other != node:
                self._ask(other, "forget", name=name)

    def kept(self, name: str) -> Any:
        """The value that was kept by that name; tensors of a device are on the device again.

        >>> model = sky.attach("train").kept("model")
        """
        _check(name)
        for node in self._serving():
            try:
                service = self._open_pool.service(node, "values")
            except NodeLostError:
                continue
            # The value stays as it is as long as the connection is open.
            with service:
                found = service.ask("find", name=name)
                if found is not None:
                    call = _read if not found["kind"] else remote(_read, device=found["kind"])
                    return self.run(call(found["path"], found["size"]), on=node)
        there = ", ".join(self.kept_names()) or "nothing"
        raise ConfigurationError(
            f"kept({name!r}): the pool keeps no value of that name; it keeps {there}"
        )

    def kept_names(self) -> list[str]:
        """The names of the values that the pool keeps."""
        return sorted({name for node in self._serving() for name in self._ask(node, "names") or ()})

    def forget(self, name: str) -> None:
        """Discard a value that was kept; nothing happens if there is none of that name."""
        _check(name)
        for node in self._serving():
            self._ask(node, "forget", name=name)

    def _serving(self) -> list[int]:
        return [view.node for view in self._open_pool.views() if view.state == "ready"]

    def _ask(self, node: int, what: str, **arguments: Any) -> Any:
        try:
            with self._open_pool.service(node, "values") as service:
                return service.ask(what, **arguments)
        except NodeLostError:
            # Its values are lost with it.
            return None

    def _home(self, name: str, value: object) -> tuple[int, str]:
        """The node that keeps a value, and the device of its tensors."""
        devices = _devices(value)
        homes = {each: self._open_pool.device_home(each) for each in devices}
        there = {home for home in homes.values() if home is not None}
        if None in homes.values() or len(there) > 1:
            raise ConfigurationError(
                f"keep({name!r}): its tensors are on {', '.join(f'sky:{i}' for i in devices)}, and "
                "only those of one device of this pool are kept together; keep the parts by "
                "several names"
            )
        if there:
            return there.pop()
        return min(self._serving(), default=0), ""


class _DeviceFinder(cloudpickle.Pickler):  # type: ignore[misc]
    """Finds the devices of an object's tensors; reads none of their bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: set[int] = set()

    def persistent_id(self, value: object) -> object | None:
        """Leave tensors out of the pickle, and note their devices."""
        import torch

        if not isinstance(value, torch.Tensor):
            return None
        if value.device.type == "sky":
            self.found.add(value.device.index or 0)
        return "tensor"


def _devices(value: object) -> list[int]:
    if "torch" not in sys.modules:
        return []
    finder = _DeviceFinder()
    finder.dump(value)
    return sorted(finder.found)


def _check(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"keep({name!r}): give a name, such as 'model'")
