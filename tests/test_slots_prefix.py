"""What slots tell engines about prefix reuse, and what caches are to the loading of models."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from toy_engine import wait_for
from toy_family import describe, full
from toy_machine import GIB, ToyMachine, ask
from warm import BytesTier

from darkbloom_core.contracts import Device, PrefixSample, TierSample
from darkbloom_core.engine._pictures import MOST_PICTURES
from darkbloom_core.errors import SettingsError, SetupError
from darkbloom_core.memory import Ledger
from darkbloom_core.prefix import numerics_id
from darkbloom_core.settings import Settings
from darkbloom_core.slots._numerics import machine_numerics
from darkbloom_core.slots._prefix import PrefixSetup, _durable_secret
from darkbloom_core.telemetry import SinkEmitter

FAMILY = SimpleNamespace(name="toy", version="1")


class TierFactory:
    """Opens tiers over parts that outlive them; ``fault`` is raised instead."""

    def __init__(self, name="disk", fault=None):
        self.name, self.fault = name, fault
        self.contexts = []
        self.parts: dict = {}
        self.opened: list[ClosedTier] = []

    def open(self, context):
        self.contexts.append(context)
        if self.fault is not None:
            raise self.fault
        self.opened.append(ClosedTier(self.parts))
        return self.opened[-1]


class ClosedTier(BytesTier):
    is_closed = False

    def close(self):
        super().close()
        self.is_closed = True


@pytest.fixture
def subject(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(name="a/b", path=folder, description=describe([full()]), family=FAMILY)


def new_setup(settings, factories, ledger=None) -> PrefixSetup:
    ledger = ledger or Ledger()
    return PrefixSetup(settings, factories, SinkEmitter(), lambda key, size: ledger.hold(key, size, "host"))


@pytest.fixture
def setup(tmp_path):
    """A setup that keeps its state in a folder of the test's."""

    def make(*factories, engine=None, **prefix) -> PrefixSetup:
        prefix = {"state_folder": str(tmp_path / "state"), **prefix}
        return new_setup(Settings(prefix=prefix, engine=engine or {}), factories)

    return make


def test_off_is_off(setup, subject):
    assert setup(reuse="off").begin(subject)() is None


def test_a_grid_that_no_block_fits_is_told_and_reuses_nothing(setup, subject, caplog):
    assert setup(engine={"chunk_tokens": 300}).begin(subject)() is None
    assert "engine.chunk_tokens is 300" in caplog.text


def test_without_tiers_nothing_is_written_and_names_end_with_the_engine(setup, subject, tmp_path):
    made = setup()
    first, second = made.begin(subject)(), made.begin(subject)()
    assert numerics_id(first.numerics) != numerics_id(second.numerics)
    assert first.secret == second.secret != setup().begin(subject)().secret
    assert not first.relaxed
    assert first.open_tiers() == {}
    assert not (tmp_path / "state").exists()


def test_with_tiers_names_and_secret_are_those_of_the_next_process(setup, subject, tmp_path):
    def options():
        return setup(TierFactory(), tiers=("disk",), reuse="relaxed", ram_bytes=5).begin(subject)()

    first, second = options(), options()
    assert numerics_id(first.numerics) == numerics_id(second.numerics)
    assert first.secret == second.secret
    assert (first.relaxed, first.ram_bytes) == (True, 5)
    key = tmp_path / "state" / "scopes.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(file.name for file in key.parent.iterdir()) == ["digests.json", "scopes.key"]
    (subject.path / "model.safetensors").write_bytes(b"others")
    assert numerics_id(options().numerics) != numerics_id(first.numerics)


def test_processes_that_begin_together_have_one_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: _durable_secret(tmp_path), range(32)))
    assert len(found) == 1


def test_a_damaged_or_impossible_secret_is_replaced_for_this_process(tmp_path, caplog):
    (tmp_path / "scopes.key").write_bytes(b"short")
    assert len(_durable_secret(tmp_path)) == 32
    assert (tmp_path / "scopes.key").read_bytes() == b"short"
    assert len(_durable_secret(tmp_path / "scopes.key" / "below")) == 32
    assert len(caplog.records) == 2


def test_a_tier_that_nobody_offers_is_an_error_that_says_what_there_is(setup):
    with pytest.raises(SettingsError, match=r"'disc' .*there are: disk"):
        setup(TierFactory(), tiers=("disc",))


def test_tiers_are_opened_in_the_order_of_the_settings_with_what_they_need(tmp_path, subject):
    one, two = TierFactory("one"), TierFactory("two")
    settings = Settings(
        prefix={
            "tiers": ["two", "one"],
            "tier_bytes": 7,
            "state_folder": str(tmp_path),
        },
        options={"two": {"level": 3}},
    )
    options = new_setup(settings, [one, two]).begin(subject)()
    assert list(options.open_tiers()) == ["two", "one"]
    (context,) = two.contexts
    assert (context.model, context.bytes_limit, context.options) == ("a/b", 7, {"level": 3})
    assert context.directory == tmp_path / "tiers" / "two"


def test_each_tier_that_is_opened_reserves_under_a_key_of_its_own(tmp_path, subject):
    disk, ledger = TierFactory(), Ledger(lambda pool: 100)
    settings = Settings(prefix={"tiers": ["disk"], "state_folder": str(tmp_path)})
    options = new_setup(settings, [disk], ledger).begin(subject)()
    options.open_tiers()
    options.open_tiers()
    first, second = disk.contexts
    assert first.reserve(60)
    assert not second.reserve(60)
    assert second.reserve(40)
    assert first.reserve(0)
    assert ledger.outstanding_bytes("host") == 40


@pytest.mark.parametrize("fault", [SetupError("no disk here"), RuntimeError("a bug")])
def test_a_tier_that_cannot_be_opened_is_told_and_missing(setup, subject, caplog, fault):
    broken = TierFactory("broken", fault)
    options = setup(broken, TierFactory(), tiers=("broken", "disk")).begin(subject)()
    assert list(options.open_tiers()) == ["disk"]
    assert "runs without the cache tier broken" in caplog.text


def test_the_machine_says_what_computes(monkeypatch):
    found = machine_numerics(Device("cpu"))
    assert found.backend == "cpu"
    assert {"core", "computation", "blas"} <= found.kernels.keys()
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    assert machine_numerics(Device("cpu")).kernels["MLX_ENABLE_TF32"] == "1"


# --- slots ------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    made = []

    def make(*factories, **tables) -> ToyMachine:
        prefix = {"state_folder": str(tmp_path / "state"), **tables.pop("prefix", {})}
        made.append(ToyMachine(tmp_path, cache_tiers=factories, prefix=prefix, **tables))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(slot, tokens=600, name="request") -> int:
    """Ask with a prompt of so many tokens; gives how many were cached."""
    prompt = [number % 50 + 1 for number in range(tokens)]
    stream = ask(slot, 1, name, prompt=prompt)
    return list(stream)[-1].usage.cached_tokens


def test_a_served_model_reuses_by_default(machine):
    toy = machine()
    slot = toy.load("a")
    assert [run(slot), run(slot)] == [0, 512]
    toy.slots._sample_engines()
    sample, tier = toy.sink.take(PrefixSample, TierSample)
    assert (sample.lookups, sample.hits, sample.missed_absent, sample.tokens_reused) == (2, 1, 1, 512)
    assert (tier.tier, tier.bytes_used) == ("ram", tier.full_bytes + tier.window_bytes)


def test_settings_turn_it_off(machine):
    toy = machine(prefix={"reuse": "off"})
    slot = toy.load("a")
    assert [run(slot), run(slot)] == [0, 0]
    assert slot.engine.status().prefix is None


def test_arrays_of_requests_and_caches_are_counted_and_bounded(machine):
    rows = 2 * 2 + 2 * 2 * 2  # the window's and the shared slab; full buffers of two rows that grow
    toy = machine(memory={"live_arrays": 2 * (rows + MOST_PICTURES + 4)}, slots={"max_models": 2})
    slot = toy.load("a")
    assert slot.engine._loop.store.most_arrays == rows
    idle = slot.engine.status().live_arrays
    assert idle == 4
    for number in range(5):
        list(ask(slot, 1, str(number), prompt=[number + 1, *range(1, 60)] * 20))
        assert slot.engine.status().live_arrays <= idle + 4
    assert slot.engine.status().live_arrays == idle + 4
    stream = ask(slot, 1000, "runs", prompt=[7] * 3000)
    wait_for(lambda: slot.engine.status().live_arrays >= idle + 4 + 2)  # its own buffers
    assert slot.engine.status().live_arrays <= rows + 4
    stream.cancel()
    list(stream)
    wait_for(lambda: slot.engine.status().live_arrays == idle + 4)


def test_a_tier_brings_back_what_was_computed_before_an_unload_and_is_closed_with_its_engine(machine):
    factory = TierFactory()
    toy = machine(factory, prefix={"tiers": ("disk",)})
    slot = toy.load("a")
    assert run(slot) == 0
    slot.engine._loop.reuse._spill.wait()
    slot.engine._loop.reuse._spill.dropped = 3
    toy.slots._sample_engines()
    (sample,) = toy.sink.take(PrefixSample)
    assert sample.parts_unoffered == 3
    toy.slots.unload("a")
    assert factory.opened[0].is_closed
    assert run(toy.slots.acquire("a")) == 512


def test_an_engine_that_is_rebuilt_reuses_again(machine):
    toy = machine()
    slot = toy.load("a")
    run(slot)
    toy.slots._recovery.rebuild(slot)
    assert [run(slot), run(slot)] == [0, 512]


def test_caches_give_way_to_a_model_that_loads(machine):
    toy = machine(physical_gib=16, prefix={"ram_bytes": 1 << 40})
    first = toy.load("a", 5)
    run(first, 4000)
    cached = first.engine.cache_bytes
    assert cached > 0
    toy.machine.used_elsewhere = 4 * GIB  # as if the cache were that large
    dropped = []
    trim = first.engine.trim_cache

    def trim_cache(size):
        dropped.append(size)
        toy.machine.used_elsewhere = 0
        return trim(size)

    first.engine.trim_cache = trim_cache
    second = toy.load("b", 3)
    assert {slot.name for slot in toy.slots.slots()} == {"a", "b"}
    assert second.state == "serving"
    assert dropped
    assert first.engine.cache_bytes == 0


def test_caches_shrink_with_the_grant_before_another_grows(machine):
    toy = machine(memory={"kv_bytes": 4 << 20})
    first = toy.load("a")
    for number in range(8):
        list(ask(first, 1, prompt=[(number + place) % 50 + 1 for place in range(1500)]))
    assert first.engine.cache_bytes > 700_000
    toy.load("b")
    assert first.engine.status().kv_bytes_grant == 2 << 20
    assert first.engine.cache_bytes <= (2 << 20) // 4


def test_memory_that_somebody_lacks_comes_out_of_the_cache(machine):
    toy = machine(memory={"kv_bytes": 8 << 20})
    slot = toy.load("a")
    run(slot, 3000)
    held = slot.engine.cache_bytes
    toy.slots.memory.reclaimer.want(1)
    wait_for(lambda: slot.engine.cache_bytes < held)
    toy.slots.memory.reclaimer.want(1 << 30)
    wait_for(lambda: slot.engine.cache_bytes == 0)
