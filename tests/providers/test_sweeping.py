"""What a pool has besides machines: removed with it, or later by `sky down` and `sky gc`."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward import providers
from skyward.cli.main import sky as command
from skyward.errors import UnreachableError
from skyward.nodes import cleanup, records
from skyward.nodes.records import Journal
from skyward.providers import Order, owner
from skyward.testing import Shop, ShopAllocation, plain_request

from ..conftest import PATIENCE

QUIET = sky.Options(console=False)


@pytest.fixture
def shop(only_shop: Shop) -> Shop:
    return only_shop


def rules(shop: Shop) -> list[str]:
    return sorted(path.name for path in Path(shop.root, "rules").glob("*"))


def leave(shop: Shop, pool: str, **about: Any) -> Path:
    """Leave a pool behind, with one machine; returns the machine's folder."""
    machine = asyncio.run(shop.create(Order(pool, 0, plain_request(), name="old")))
    rule = Path(shop.root, "rules", pool)
    rule.write_text(json.dumps({"owner": owner(), "pid": ended(), "name": "old"} | about))
    return Path(machine.id)


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def sky_command(*args: str) -> Result:
    return CliRunner().invoke(command, args)


class TestPools:
    def test_a_pool_sweeps_up_after_its_last_machine(self, shop: Shop, state: Journal) -> None:
        with sky.Compute(shop, options=QUIET) as compute:
            (pool,) = rules(shop)
            assert compute._open_fleet.id == pool
            assert shop.stock.swept == []
        assert (shop.stock.swept, rules(shop), state.pools()) == ([pool], [], [])

    def test_also_when_it_does_not_start(self, shop: Shop, state: Journal) -> None:
        shop.stock.failures = [sky.errors.UnavailableError("sold out")]
        with pytest.raises(sky.errors.UnavailableError):
            sky.Compute(shop, options=QUIET).__enter__()
        assert (len(shop.stock.swept), rules(shop), state.pools()) == (1, [], [])

    def test_what_cannot_be_swept_stays_on_record_for_sky_down(
        self, shop: Shop, state: Journal, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shop.stock.unswept = [OSError("in use"), OSError("still in use")]
        with sky.Compute(shop, options=QUIET, name="p"):
            (pool,) = rules(shop)
        said = capsys.readouterr().err
        assert "what the pool had besides its machines could not be removed: in use; `sky" in said
        assert [record.id for record in state.pools()] == [pool]

        failed = sky_command("down", "p", "--yes")
        assert failed.exit_code == 1
        assert "p: what it had besides its machines: still in use" in failed.output

        assert "no machine was left" in sky_command("down", "p", "--yes").output
        assert (rules(shop), state.pools()) == ([], [])

    def test_a_node_whose_end_fails_keeps_nobody_from_sweeping(
        self, shop: Shop, state: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compute = sky.Compute(shop, options=QUIET).start()
        (node,) = compute._open_fleet.nodes
        stop = node.host.stop

        def fail(seconds: float) -> Future[None]:
            stop(seconds).result()
            failed: Future[None] = Future()
            failed.set_exception(OSError("no answer"))
            return failed

        monkeypatch.setattr(node.host, "stop", fail)
        with pytest.raises(OSError, match="no answer"):
            compute.close()
        assert (rules(shop), state.pools()) == ([], [])

    def test_a_provider_that_fails_at_the_very_end_leaves_neither_threads_nor_a_record(
        self, shop: Shop, state: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(self: ShopAllocation) -> None:
            raise OSError("its connection is gone")

        monkeypatch.setattr(ShopAllocation, "close", fail)
        compute = sky.Compute(shop, options=QUIET).start()
        loop = compute._open_fleet.loop
        with pytest.raises(OSError, match="its connection is gone"):
            compute.close()
        assert not loop._thread.is_alive()
        assert state.pools() == []

    def test_a_client_killed_before_its_first_machine_is_swept_up_after(
        self, shop: Shop, state: Journal
    ) -> None:
        script = (
            "from skyward.nodes.records import Journal; import os, signal\n"
            f"Journal().open_pool('p1', 'n', 'shop', {shop.describe()!r}, None)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
        Path(shop.root, "rules").mkdir()
        Path(shop.root, "rules", "p1").write_text("{}")

        assert "n (p1): no machine was left" in sky_command("down").output

        assert (rules(shop), state.pools()) == ([], [])


class TestGc:
    def test_removes_what_the_journal_does_not_know(
        self, shop: Shop, state: Journal, nothing_left: None
    ) -> None:
        folder = leave(shop, "p1")

        shown = sky_command("gc", "--dry-run").output.splitlines()
        assert shown[0].split() == ["POOL", "NAME", "PROVIDER", "OWNER", "STATE", "RESOURCES"]
        assert shown[1].startswith(f"p1    old   shop      {owner()}  left behind  machine ")
        assert folder.exists()

        done = sky_command("gc")
        assert done.output == "old (p1): 1 machine, rule p1 removed\n"
        assert (folder.exists(), rules(shop)) == (False, [])
        assert sky_command("gc").output == "nothing of any pool: shop\n"

    def test_leaves_pools_of_others_and_pools_in_use_alone(
        self, shop: Shop, state: Journal, nothing_left: None
    ) -> None:
        leave(shop, "p1", owner="you@there")
        leave(shop, "p2", pid=os.getpid())

        done = sky_command("gc")
        assert re.search("you@there +of another user", done.output)
        assert "may be in use" in done.output
        assert "--all removes these, too" in done.stderr
        assert rules(shop) == ["p1", "p2"]

        refused = sky_command("gc", "--all")
        assert refused.exit_code == 2
        assert "old (p1) of you@there, " in refused.output
        assert "pass --yes to remove" in refused.output

        documents = json.loads(sky_command("gc", "--all", "--yes", "--json").output)
        assert [(each["id"], each["state"], each["removed"]) for each in documents] == [
            ("p1", "other", True),
            ("p2", "running", True),
        ]
        assert rules(shop) == []

    def test_the_journal_says_who_is_in_use(self, shop: Shop, state: Journal) -> None:
        with sky.Compute(shop, options=QUIET):
            Path(shop.root, "rules", rules(shop)[0]).write_text(
                json.dumps({"owner": owner(), "pid": 0, "name": ""})
            )
            (document,) = json.loads(sky_command("gc", "--json").output)
            assert (document["state"], document["removed"]) == ("running", False)

    def test_what_cannot_be_removed_is_told(self, shop: Shop, nothing_left: None) -> None:
        leave(shop, "p1")
        shop.stock.unswept = [OSError("in use")]

        failed = sky_command("gc")

        assert failed.exit_code == 1
        assert failed.stdout == "old (p1): 1 machine removed\n"
        assert "not everything could be removed: old: what it had besides" in failed.stderr
        assert "in use. Try again later" in failed.stderr
        assert sky_command("gc").exit_code == 0

    def test_providers_are_asked_at_once(
        self, shop: Shop, state: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each answers when the other has been asked, too; one of them is out of reach."""
        state.open_pool("p1", "n", "shop", {**shop.describe(), "region": "there-2"}, None)
        asked: list[str] = []
        both = asyncio.Event()

        async def remains(self: Shop) -> list[Any]:
            asked.append(self.region)
            if len(asked) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), PATIENCE)
            if self.region == "there-2":
                raise UnreachableError("no way there")
            return []

        monkeypatch.setattr(Shop, "remains", remains)
        done = sky_command("gc")
        assert done.exit_code == 0
        assert (done.stdout, len(asked)) == ("nothing of any pool: shop\n", 2)
        assert done.stderr == "passed over: shop: no way there\n"
        state.close_pool("p1")

    def test_one_provider_may_be_named_with_its_options(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        async def remains(self: Shop) -> list[Any]:
            asked.append(self.region)
            return []

        monkeypatch.setattr(Shop, "remains", remains)
        assert sky_command("gc", "--provider", "shop", "--region", "there-2").exit_code == 0
        assert sky_command("gc", "--region", "there-3").exit_code == 0
        assert asked == ["there-2", "there-3"]
        for args, message in (
            (["--provider", "shop", "--profile", "me"], "--profile: shop has none"),
            (["--provider", "local"], "it does not know the pools of other processes"),
        ):
            refused = sky_command("gc", *args)
            assert refused.exit_code == 2
            assert message in refused.output

    def test_two_machines_of_one_name_are_told_apart(
        self, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
    ) -> None:
        known = tmp_path / "machine-id"
        monkeypatch.setattr(providers, "_MACHINE_ID", known)
        monkeypatch.setattr("uuid.getnode", lambda: 0x0242AC110002)
        bare, there = owner(), f"{getpass.getuser()}@{socket.gethostname()}"
        assert re.fullmatch(f"{re.escape(there)}#[0-9a-f]{{8}}", bare)
        known.write_text("\n")
        assert owner() == bare, "an empty file is none"
        known.write_text("0123456789abcdef0123456789abcdef\n")
        assert owner() not in (bare, there)
        leave(shop, "p1", owner=bare)

        (document,) = json.loads(sky_command("gc", "--json").output)

        assert (document["state"], document["removed"]) == ("other", False)
        assert sky_command("gc", "--all", "--yes").exit_code == 0

    def test_the_owner_fits_into_a_tag_and_is_the_same_in_every_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(providers, "_MACHINE_ID", tmp_path / "none")
        monkeypatch.setattr("socket.gethostname", lambda: "h" * 300)
        made_up = iter((0x010000000001, 0x010000000002))
        monkeypatch.setattr("uuid.getnode", lambda: next(made_up))
        first = owner()
        assert (len(first), first[-9]) == (256, "#")
        assert owner() == first, "an address that Python makes up does not count"

    def test_names_the_places_where_it_looked(
        self, shop: Shop, state: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = property(lambda self: f"shop in {self.region}")
        monkeypatch.setattr(Shop, "where", place, raising=False)
        state.open_pool("p1", "old", "shop", shop.describe() | {"region": "there-2"}, None)

        said = sky_command("gc").output

        assert said == "nothing of any pool: shop in there-2, shop in here-1\n"

    def test_a_provider_that_does_not_answer_is_an_error(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def remains(self: Shop) -> list[Any]:
            raise sky.errors.UnavailableError("no credentials")

        monkeypatch.setattr(Shop, "remains", remains)
        failed = sky_command("gc")
        assert failed.exit_code == 1
        assert failed.stderr == "Error: no provider answered: shop: no credentials\n"

    def test_one_that_is_not_set_up_is_passed_over_in_silence(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built_in = {"slurm": "skyward.providers.slurm:Slurm"} | providers.BUILT_IN
        monkeypatch.setattr(providers, "BUILT_IN", built_in)
        monkeypatch.setenv("PATH", "/nowhere")
        said = sky_command("gc")
        assert (said.exit_code, said.output) == (0, "nothing of any pool: shop\n")
        named = sky_command("gc", "--provider", "slurm")
        assert (named.exit_code, "there is no `squeue` on this machine" in named.output) == (
            1,
            True,
        )

    def test_slurms_commands_alone_are_no_cluster(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        squeue = tmp_path / "bin" / "squeue"
        squeue.parent.mkdir()
        words = "squeue: error: x\nsqueue: fatal: Could not establish a configuration source"
        squeue.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        squeue.chmod(0o755)
        built_in = {"slurm": "skyward.providers.slurm:Slurm"} | providers.BUILT_IN
        monkeypatch.setattr(providers, "BUILT_IN", built_in)
        monkeypatch.setenv("PATH", str(squeue.parent))
        said = sky_command("gc")
        assert (said.exit_code, said.output) == (0, "nothing of any pool: shop\n")
        named = sky_command("gc", "--provider", "slurm").output
        assert "they know no cluster" in named
        assert "fatal" not in named
        assert 'Slurm(login="me@cluster")' in named

    def test_ray_without_a_cluster_or_a_record_is_no_answer(
        self, state: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(providers, "BUILT_IN", {"ray": "skyward.providers.ray:Ray"})
        for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        failed = sky_command("gc")
        assert failed.exit_code == 1
        assert "no provider answered: ray: Ray(): no cluster runs on this machine" in failed.stderr
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("head:6379")
        assert sky_command("gc").output == "nothing of any pool: ray at auto\n"

    def test_aws_is_passed_over_in_silence_only_if_nobody_uses_it(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        pytest.importorskip("boto3")
        built_in = {"aws": "skyward.providers.aws:AWS"} | providers.BUILT_IN
        monkeypatch.setattr(providers, "BUILT_IN", built_in)
        for variable in [each for each in os.environ if each.startswith("AWS_")]:
            monkeypatch.delenv(variable)
        for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(variable, str(tmp_path / variable))
        assert sky_command("gc").output == "nothing of any pool: shop\n"
        with monkeypatch.context() as named:
            named.setenv("AWS_PROFILE", "nope")
            said = sky_command("gc")
            assert "passed over: aws: AWS: The config profile (nope) could not" in said.stderr
        (tmp_path / "AWS_CONFIG_FILE").write_text("[default]\n")
        assert "passed over: aws: AWS(): no region" in sky_command("gc").stderr

    def test_a_record_that_cannot_be_read_may_be_that_of_a_kept_pool(
        self, shop: Shop, nothing_left: None
    ) -> None:
        leave(shop, "p1")
        records.folder().mkdir(parents=True)
        records.path_of("old").write_text("{")
        (document,) = json.loads(sky_command("gc", "--json").output)
        assert (document["state"], document["removed"]) == ("running", False)
        records.forget_damaged("old")
        assert "1 machine" in sky_command("gc").output

    def test_clusters_are_asked_whatever_their_arguments_are(
        self, shop: Shop, state: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[Any] = []

        async def remains(self: sky.Kubernetes) -> list[Any]:
            asked.append(self.node_selector)
            return []

        monkeypatch.setattr(sky.Kubernetes, "remains", remains)
        built_in = {"kubernetes": "skyward.providers.kubernetes:Kubernetes"} | providers.BUILT_IN
        monkeypatch.setattr(providers, "BUILT_IN", built_in)
        config = tmp_path / "config"
        monkeypatch.setenv("KUBECONFIG", str(config))
        # Nobody has set it up, which needs no word.
        said = sky_command("gc")
        assert (said.output, asked) == ("nothing of any pool: shop\n", [])
        context = {"name": "here", "context": {"cluster": "c", "user": "u"}}
        config.write_text(json.dumps({"current-context": "here", "contexts": [context]}))
        cluster = sky.Kubernetes(node_selector={"zone": "a"})
        for pool in ("p1", "p2"):
            state.open_pool(pool, "old", "kubernetes", cluster.describe(), None)
        place = "kubernetes in the namespace default of here"
        assert sky_command("gc").output == f"nothing of any pool: {place}, shop\n"
        assert asked == [{"zone": "a"}, None]

    def test_so_is_one_that_cannot_be_made(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: Shop, *_: Any, **given: Any) -> None:
            raise sky.errors.ConfigurationError(f"no region called {given.get('region')}")

        monkeypatch.setattr(Shop, "__init__", refuse)
        monkeypatch.setattr(Shop, "__signature__", inspect.signature(Shop.in_region), raising=False)
        failed = sky_command("gc", "--region", "mars")
        assert (failed.exit_code, failed.stdout) == (1, "")
        assert "no provider answered: shop: no region called mars" in failed.stderr
        nobody = sky_command("gc", "--profile", "me")
        assert nobody.exit_code == 1
        assert "no provider answered: there is none to ask" in nobody.stderr

    def test_one_pools_failure_does_not_stop_the_others(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, nothing_left: None
    ) -> None:
        leave(shop, "p1")
        leave(shop, "p2")
        clean = cleanup.clean_remains

        def clean_second(journal: Any, collector: Any, remains: Any) -> Any:
            if remains.pool == "p1":
                raise ValueError("an odd answer")
            return clean(journal, collector, remains)

        with monkeypatch.context() as patched:
            patched.setattr(cleanup, "clean_remains", clean_second)
            failed = sky_command("gc", "--json")
        assert failed.exit_code == 1
        first, second = json.loads(failed.stdout)
        assert (first["removed"], first["failures"]) == (False, ["an odd answer"])
        assert second["removed"]
        assert "not everything could be removed: old: an odd answer. Try" in failed.stderr
        assert "rule p1 removed" in sky_command("gc").stdout
