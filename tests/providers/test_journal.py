"""The journal: written before a machine is made, and enough to remove it after any crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward import providers
from skyward.cli.main import sky as command
from skyward.nodes.cleanup import clean
from skyward.nodes.host import Host
from skyward.nodes.records import Journal
from skyward.providers import Order, Request

WISH = Request(None, None, None, sky.Image(), ())


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return Journal()


def opened(journal: Journal, name: str = "mine") -> str:
    pool = uuid.uuid4().hex[:12]
    journal.open_pool(pool, name, "local", {"transport": "unix"}, 0.5)
    return pool


def made(journal: Journal, pool: str, node: int) -> Path:
    journal.intend(pool, node)
    machine = asyncio.run(sky.Local().create(Order(pool, node, WISH)))
    journal.made(pool, node, machine.id, machine.address)
    return Path(machine.id)


def test_only_its_user_reads_it(journal: Journal) -> None:
    opened(journal)
    assert journal.path.stat().st_mode & 0o777 == 0o600
    journal.path.chmod(0o644)
    opened(journal)
    assert journal.path.stat().st_mode & 0o777 == 0o600


def test_a_pool_and_its_machines_are_on_record(journal: Journal) -> None:
    pool = opened(journal)
    journal.intend(pool, 0)
    journal.intend(pool, 1)
    journal.made(pool, 1, "m-1", "10.0.0.1", 0.5)

    (record,) = journal.pools()

    assert (record.id, record.name, record.provider) == (pool, "mine", "local")
    assert [(each.node, each.id, each.address) for each in record.machines] == [
        (0, None, None),
        (1, "m-1", "10.0.0.1"),
    ]
    assert record.client == "running"
    assert record.cost is not None
    assert 0 <= record.cost < 0.01


class Watched(sky.Local):
    """A provider that looks into the journal when it is to make a machine, and makes none."""

    name, here = "watched", False
    found: ClassVar[list[tuple[int, str | None]]] = []

    async def create(self, order: Order) -> Any:
        """Note what is on record."""
        (record,) = Journal().pools()
        self.found[:] = [(each.node, each.id) for each in record.machines]
        raise sky.errors.PoolStartError("there is no machine")


def test_a_machine_is_on_record_before_it_is_made_and_not_if_there_is_none(
    journal: Journal,
) -> None:
    pool = opened(journal)
    provider, order = Watched(), Order(pool, 3, WISH)
    host = Host(provider, provider.allocate(pool), order, journal)

    with pytest.raises(sky.errors.PoolStartError, match="there is no machine"):
        providers.submit(host.prepare()).result()

    assert Watched.found == [(3, None)]
    assert journal.pools()[0].machines == ()


class Uncertain(sky.Local):
    """A provider that fails, cannot say whether it has made a machine, and is asked for it."""

    name, here = "uncertain", False
    asked: ClassVar[list[str]] = []

    async def create(self, order: Order) -> Any:
        """Fail, as where the answer to a request is lost."""
        problem = sky.errors.PoolStartError("nobody answers")
        problem.leaves_machine = True
        raise problem

    async def find(self, pool: str) -> Any:
        """Note the question."""
        self.asked.append(pool)
        return []


def test_a_machine_that_may_have_been_made_stays_on_record_until_it_was_looked_for(
    journal: Journal,
) -> None:
    pool = opened(journal)
    provider, order = Uncertain(), Order(pool, 3, WISH)
    host = Host(provider, provider.allocate(pool), order, journal)

    with pytest.raises(sky.errors.PoolStartError, match="nobody answers"):
        providers.submit(host.prepare()).result()
    assert [each.node for each in journal.pools()[0].machines] == [3]

    host.stop(0).result()
    assert Uncertain.asked.pop() == pool
    assert journal.pools()[0].machines == ()


def test_a_lost_machine_that_was_not_removed_is_looked_for_when_its_node_ends(
    journal: Journal,
) -> None:
    """Also if the node was about to have another machine, and has none yet."""
    pool = opened(journal)
    provider, order = Uncertain(), Order(pool, 3, WISH)
    allocation = provider.allocate(pool)
    lost = Host(provider, allocation, order, journal)
    with pytest.raises(sky.errors.PoolStartError, match="nobody answers"):
        providers.submit(lost.prepare()).result()
    Host(provider, allocation, order, journal, lost=lost).stop(0).result()
    assert Uncertain.asked.pop() == pool
    assert journal.pools()[0].machines == ()


def test_a_pool_with_machines_left_stays_on_record(journal: Journal) -> None:
    pool = opened(journal)
    journal.intend(pool, 0)

    journal.close_pool(pool)
    assert [record.id for record in journal.pools()] == [pool]

    journal.gone(pool, 0)
    journal.close_pool(pool)
    assert journal.pools() == []


def test_a_process_number_used_again_is_not_the_client(journal: Journal) -> None:
    script = (
        "from skyward.nodes.records import Journal; import os, signal\n"
        "Journal().open_pool('p', 'n', 'local', {}, None)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script])

    assert done.returncode == -signal.SIGKILL
    (record,) = journal.pools()
    assert record.client == "gone"
    assert record.cost is None


def test_many_writers_share_it(journal: Journal) -> None:
    pool = opened(journal)
    threads = [threading.Thread(target=journal.intend, args=(pool, node)) for node in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [each.node for each in journal.pools()[0].machines] == list(range(20))


def test_a_journal_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")

    with pytest.raises(
        sky.errors.PoolStartError, match=r"journal .* cannot be used.*SKYWARD_STATE"
    ):
        opened(Journal(tmp_path / "state" / "journal.sqlite"))


def test_cleaning_removes_machines_also_those_nobody_heard_of(journal: Journal) -> None:
    pool = opened(journal)
    folders = [made(journal, pool, 0), made(journal, pool, 1)]
    journal.intend(pool, 1)  # as if the process had ended before it heard of it

    cleaned = clean(journal, journal.pools()[0])

    assert set(cleaned.removed) == {str(folder) for folder in folders}
    assert cleaned.failures == ()
    assert not any(folder.exists() for folder in folders)
    assert journal.pools() == []


def test_cleaning_waits_for_each_node_that_was_asked_for(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = opened(journal)
    made(journal, pool, 0)
    made(journal, pool, 0)  # a second machine of the same node
    journal.intend(pool, 1)
    late: list[str] = []
    find = sky.Local.find

    async def found_late(self: sky.Local, pool: str) -> list[Any]:
        found = await find(self, pool)
        if not late:
            machine = await self.create(Order(pool, 1, WISH))
            late.append(machine.id)
        return found

    monkeypatch.setattr(sky.Local, "find", found_late)

    cleaned = clean(journal, journal.pools()[0])

    assert late[0] in cleaned.removed
    assert len(cleaned.removed) == 3


def test_a_clock_that_was_ahead_does_not_make_cleaning_wait(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.nodes.cleanup._APPEARING_SECONDS", 0.2)
    pool = opened(journal)
    with monkeypatch.context() as clock:
        ahead = time.time() + 86400
        clock.setattr("time.time", lambda: ahead)
        journal.intend(pool, 0)

    began = time.monotonic()
    clean(journal, journal.pools()[0])

    assert time.monotonic() - began < 60
    assert journal.pools() == []


class TestCommands:
    def test_nothing_to_show(self, journal: Journal) -> None:
        assert "no pool has machines" in CliRunner().invoke(command, ["ps"]).output
        assert "nothing was left behind" in CliRunner().invoke(command, ["down"]).output

    def test_ps_tells_pools_in_use_from_those_left_behind(self, journal: Journal) -> None:
        opened(journal)

        shown = CliRunner().invoke(command, ["ps"])
        (document,) = json.loads(CliRunner().invoke(command, ["ps", "--json"]).output)

        assert "in use" in shown.output
        assert (document["state"], document["pid"]) == ("running", os.getpid())

    @pytest.mark.parametrize("page", ["providers.md", "cli.md"])
    def test_the_documentation_shows_what_ps_prints(self, journal: Journal, page: str) -> None:
        opened(journal)
        heads = CliRunner().invoke(command, ["ps"]).output.splitlines()[0].lower().split()
        lines = Path(__file__).parents[2].joinpath("docs", page).read_text("utf-8").splitlines()

        assert lines[lines.index("$ sky ps") + 1].split() == heads

    def test_down_leaves_pools_in_use_alone(self, journal: Journal) -> None:
        pool = opened(journal)
        folder = made(journal, pool, 0)

        spared = CliRunner().invoke(command, ["down"])
        assert "nothing was left behind" in spared.output
        assert folder.exists()

        refused = CliRunner().invoke(command, ["down", "mine"])
        assert refused.exit_code == 2
        assert "pass --yes" in refused.output

        done = CliRunner().invoke(command, ["down", pool[:6], "--yes"])
        assert "1 machine removed" in done.output
        assert not folder.exists()

    def test_what_cannot_be_removed_stays_until_it_is_forgotten(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = opened(journal)
        folder = made(journal, pool, 0)

        async def unreachable(self: sky.Local, pool: str) -> list[object]:
            raise sky.errors.UnreachableError("nobody answers")

        monkeypatch.setattr(sky.Local, "find", unreachable)
        failed = CliRunner().invoke(command, ["down", "mine", "--yes"])
        assert failed.exit_code == 1
        assert "nobody answers" in failed.output
        assert f"sky down {pool} --forget" in failed.output
        assert [record.id for record in journal.pools()] == [pool]

        monkeypatch.setattr("socket.gethostname", lambda: "another")
        asked = CliRunner().invoke(command, ["down", "mine", "--forget"])
        assert asked.exit_code == 2
        assert "pass --yes to forget" in asked.output

        done = CliRunner().invoke(command, ["down", "mine", "--yes", "--forget"])
        assert f"mine ({pool}): off the record, nothing removed; had: {folder}" in done.output
        assert journal.pools() == []
        assert folder.exists()
        folder.rmdir()

    def test_one_pools_failure_does_not_stop_the_others(self, journal: Journal) -> None:
        journal.open_pool("p1", "lost", "nobody", {}, None)
        pool = opened(journal)
        folder = made(journal, pool, 0)

        failed = CliRunner().invoke(command, ["down", "--all", "--yes"])

        assert failed.exit_code == 1
        assert "lost (p1): nothing removed" in failed.stdout
        assert f"mine ({pool}): 1 machine removed\n" in failed.stdout
        assert "not everything could be removed: lost: no provider is called" in failed.stderr
        assert (folder.exists(), [each.id for each in journal.pools()]) == (False, ["p1"])

    def test_a_machine_that_is_not_found_has_cost_that_much_at_most(self, journal: Journal) -> None:
        pool = opened(journal)
        journal.intend(pool, 0)
        journal.made(pool, 0, "/no/such/machine", "10.0.0.1", 3600.0)

        done = CliRunner().invoke(command, ["down", "--all", "--yes"])

        assert f"mine ({pool}): no machine was left; cost at most " in done.output

    def test_what_is_to_be_forgotten_is_named(self, journal: Journal) -> None:
        refused = CliRunner().invoke(command, ["down", "--forget"])

        assert refused.exit_code == 2
        assert "give the name" in refused.output

    def test_only_one_pool_is_forgotten_at_a_time(self, journal: Journal) -> None:
        pools = [opened(journal), opened(journal)]

        refused = CliRunner().invoke(command, ["down", "mine", "--forget", "--yes"])

        assert refused.exit_code == 2
        assert f"give one of these: {', '.join(pools)}" in refused.output
        assert len(journal.pools()) == 2

    def test_a_pool_whose_process_runs_is_not_forgotten(self, journal: Journal) -> None:
        pool = opened(journal)

        refused = CliRunner().invoke(command, ["down", pool, "--forget", "--yes"])

        assert refused.exit_code == 1
        assert f"its process {os.getpid()} still runs" in refused.output
        assert [record.id for record in journal.pools()] == [pool]

    def test_a_name_nobody_has(self, journal: Journal) -> None:
        opened(journal)

        done = CliRunner().invoke(command, ["down", "yours"])

        assert done.exit_code == 1
        assert "no pool is called 'yours'; on record: mine" in done.output

    def test_a_name_and_all_is_refused(self, journal: Journal) -> None:
        assert CliRunner().invoke(command, ["down", "mine", "--all"]).exit_code == 2
