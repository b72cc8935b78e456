"""`darkbloom doctor` and `darkbloom models plan`: what they say is what the loader does."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from toy_machine import GIB, ToyMachine

from darkbloom_core.cli._checks import Patient, machine_checks, model_checks
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.contracts import Device
from darkbloom_core.errors import CapacityExhausted, SetupError
from darkbloom_core.memory import FixedReadings, Reading
from darkbloom_core.plugins import load_plugins
from darkbloom_core.settings import Settings
from darkbloom_core.slots import REFERENCE_BLAS, ModelPlaces, check_checkpoint, plan_models
from darkbloom_core.slots._memory import SlotMemory
from darkbloom_core.slots._weights import estimated_weight_bytes
from darkbloom_core.telemetry import SinkEmitter

CPU = Device("cpu")


@pytest.fixture
def toy(tmp_path):
    toys = []

    def build(**tables) -> ToyMachine:
        folder = tmp_path / f"machine{len(toys)}"
        folder.mkdir()
        toys.append(ToyMachine(folder, **tables))
        return toys[-1]

    yield build
    for each in toys:
        each.close()


def described(toy: ToyMachine, path: Path):
    return toy.family.describe(json.loads((path / "config.json").read_text()), CPU)


def test_doctor_and_loader_give_one_verdict_over_ten_thousand_machines(tmp_path, toy):
    draw = random.Random(5)
    description = described(toy(), toy().path("any"))
    checkpoint = tmp_path / "weights"
    checkpoint.mkdir()
    seen = {"fits": 0, "does not fit": 0}
    for reserve in (0, GIB, 4 * GIB, 9 * GIB):
        settings = Settings(memory={"reserve_bytes": reserve})
        readings = FixedReadings(GIB)
        memory = SlotMemory(settings.memory, readings, lambda: (), lambda: None, SinkEmitter([]))
        try:
            for _ in range(50):
                disk_bytes = int(draw.choice((0.01, 1, 4, 12)) * GIB * draw.random()) + 1
                with (checkpoint / "model.safetensors").open("wb") as file:
                    file.truncate(disk_bytes)
                weights = estimated_weight_bytes(checkpoint, description)
                for _ in range(50):
                    readings.physical_bytes = draw.choice((2, 4, 8, 16, 24, 64, 128)) * GIB
                    readings.used_bytes = int(draw.random() * readings.physical_bytes / 2)
                    readings.free_bytes = draw.choice((None, int(draw.random() * readings.physical_bytes)))
                    doctor = check_checkpoint(settings, readings.read("device"), checkpoint, description)
                    loads = memory.claim("model", weights)
                    assert (doctor.verdict == "fits") is loads
                    seen[doctor.verdict] += 1
                    memory.release("model")
        finally:
            memory.close()
    assert sum(seen.values()) == 10_000
    assert min(seen.values()) > 1_000


@pytest.mark.parametrize(("physical_gib", "gib"), [*itertools.product((8, 16, 24, 64), (1, 3, 7, 10, 14))])
def test_the_whole_loader_agrees_with_the_doctor(toy, physical_gib, gib):
    machine = toy(physical_gib=physical_gib)
    path = machine.path("model", gib)
    found = machine.machine.read("device")
    verdict = check_checkpoint(machine.settings, found, path, described(machine, path)).verdict
    if verdict == "fits":
        machine.slots.load("model", path)
    else:
        with pytest.raises(CapacityExhausted):
            machine.slots.load("model", path)


@pytest.mark.parametrize("sizes", [(10, 8), (20, 20, 8), (1, 30, 30, 2)])
def test_a_plan_is_what_loading_gives_to_the_byte(toy, sizes):
    machine = toy(slots={"max_models": 3}, max_rows={"m1": 7})
    models = [
        (f"m{index}", machine.path(f"m{index}", gib, wide=index % 2 == 1)) for index, gib in enumerate(sizes)
    ]
    plans = plan_models(
        machine.settings,
        machine.machine.read("device"),
        [(name, path, described(machine, path)) for name, path in models],
    )
    for (name, path), plan in zip(models, plans, strict=True):
        if plan.refusal is None:
            machine.slots.load(name, path)
        else:
            with pytest.raises(type(plan.refusal)):
                machine.slots.load(name, path)
    planned = {plan.name: plan for plan in plans if plan.refusal is None}
    assert {slot.name: slot.grant_bytes for slot in machine.slots.slots()} == {
        name: plan.grant_bytes for name, plan in planned.items()
    }
    for slot, told in zip(machine.slots.slots(), machine.slots.capacity(), strict=True):
        plan = planned[slot.name]
        assert (slot.weight_bytes, slot.slab_bytes) == (plan.weight_bytes, plan.slab_bytes)
        assert told.token_budget == plan.token_budget


def patient(tmp_path, reading, settings=None, **fields) -> Patient:
    plugins = load_plugins()
    return Patient(
        command=CommandContext(plugins),
        settings=settings or Settings(),
        places=ModelPlaces(
            hub=tmp_path / "hub", offered=plugins.checkpoints(), aliases=fields.get("aliases", {})
        ),
        device=fields.pop("device", CPU),
        reading=reading,
        root=tmp_path,
        home=tmp_path / "home",
    )


def test_a_model_that_does_not_fit_now_is_told_apart_from_one_that_never_does(tmp_path):
    busy = patient(tmp_path, Reading(8 * GIB, 0, 0, 2**20))
    (check,) = model_checks(busy, ["demo/gpt-oss"])
    assert (check.state, check.facts["verdict"]) == ("failure", "does not fit")
    assert "if nothing else used memory" in check.advice
    small = patient(tmp_path, Reading(2 * GIB, 0, 0, None))
    (check,) = model_checks(small, ["demo/gpt-oss"])
    assert check.state == "failure"
    assert "more memory" in check.advice
    large = patient(tmp_path, Reading(64 * GIB, 0, 0, None))
    assert [check.state for check in model_checks(large, ["demo/gpt-oss", "demo/gemma4"])] == ["ok"] * 3


def test_a_model_that_never_fits_names_up_to_three_that_do_the_largest_first(tmp_path):
    aliases = {"lost": "/nowhere", "one": "demo/gpt-oss", "two": "demo/gpt-oss"}
    ill = patient(tmp_path, Reading(8 * GIB, 0, 0, None), aliases=aliases)
    large = tmp_path / "large"
    shutil.copytree(ill.places.offered["demo/gpt-oss"], large)
    with (large / "more.safetensors").open("wb") as file:
        file.truncate(60 * GIB)
    (check,) = model_checks(ill, [str(large)])
    assert check.state == "failure"
    assert check.advice.endswith("these do: demo/gemma4, one, two")


def test_a_machine_without_room_for_any_model_fails(tmp_path):
    checks = {check.name: check for check in machine_checks(patient(tmp_path, Reading(2 * GIB, 0, 0, None)))}
    assert checks["memory"].state == "failure"
    assert checks["memory"].advice


def test_the_reference_blas_is_named_with_the_line_that_mends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("darkbloom_core.slots._blas._preloaded_blas", lambda: None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    checks = {check.name: check for check in machine_checks(patient(tmp_path, Reading(8 * GIB, 0, 0, None)))}
    assert checks["BLAS"].state == "warning"
    assert checks["BLAS"].found.startswith(REFERENCE_BLAS)
    assert "LD_PRELOAD=libopenblas.so.0" in checks["BLAS"].advice


def test_a_gpu_that_mlx_does_not_use_is_pointed_out(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    checks = {check.name: check for check in machine_checks(patient(tmp_path, Reading(8 * GIB, 0, 0, None)))}
    assert checks["accelerator"].state == "warning"
    assert "cuda13" in checks["accelerator"].advice


def test_a_disk_that_is_nearly_full_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(GIB, GIB - 1, 2**20))
    checks = {check.name: check for check in machine_checks(patient(tmp_path, Reading(8 * GIB, 0, 0, None)))}
    assert checks["disk"].state == "warning"
    assert "HF_HUB_CACHE" in checks["disk"].advice


def test_an_installed_service_file_is_looked_at(tmp_path):
    unit = tmp_path / "etc/systemd/system/darkbloom.service"
    unit.parent.mkdir(parents=True)
    for restart, state in (("no", "failure"), ("on-failure", "ok")):
        unit.write_text(f"[Service]\nExecStart={sys.executable}\nRestart={restart}\n")
        checks = {each.name: each for each in machine_checks(patient(tmp_path, Reading(8 * GIB, 0, 0, None)))}
        assert checks["service"].state == state
        assert (checks["service"].advice is None) == (state == "ok")


def test_models_that_take_turns_are_a_warning(tmp_path):
    together = patient(tmp_path, Reading(64 * GIB, 0, 0, None), Settings(slots={"max_models": 1}))
    *alone, check = model_checks(together, ["demo/gpt-oss", "demo/gemma4"])
    assert [each.state for each in alone] == ["ok", "ok"]
    assert (check.name, check.state) == ("all models", "warning")
    assert "demo/gemma4" in check.found
    assert "take turns" in check.advice


def test_without_a_backend_the_doctor_says_what_to_install(run_darkbloom, monkeypatch):
    def missing():
        raise SetupError("no backend: pip install 'darkbloom[cpu]'")

    monkeypatch.setattr("darkbloom_core.cli._backend.require_backend", missing)
    assert "failure  MLX: no backend: pip install" in run_darkbloom("doctor", code=1).stdout


def test_the_command_says_ok_for_what_is_well_and_exits_with_1_for_what_is_not(run_darkbloom, tmp_path):
    well = json.loads(run_darkbloom("doctor", "demo/gpt-oss", "--json").stdout)
    assert well["status"] == "ok"
    assert {check["name"] for check in well["checks"]} >= {"settings", "access", "plugins", "memory", "disk"}
    (tmp_path / "settings.toml").write_text('[server]\nhost = "0.0.0.0"\n[models]\nlost = "/nowhere"\n')
    ill = run_darkbloom("doctor", "--config", "settings.toml", code=1).stdout
    assert "failure  model lost: models.lost: no model '/nowhere'" in ill
    assert "failure  access: server.host 0.0.0.0 can be reached from other machines" in ill
    (tmp_path / "settings.toml").write_text("[engine]\nmax_rosw = 1\n")
    ill = json.loads(run_darkbloom("doctor", "--config", "settings.toml", "--json", code=1).stdout)
    assert [check["name"] for check in ill["checks"] if check["state"] == "failure"] == ["settings"]


def test_a_broken_plugin_fails_the_doctor(run_darkbloom, make_plugin):
    make_plugin("broken", "raise RuntimeError('boom')\n")
    assert "failure  plugin: broken" in run_darkbloom("doctor", code=1).stdout


def test_a_plan_is_printed_for_people_and_for_programs(run_darkbloom):
    planned = json.loads(run_darkbloom("models", "plan", "demo/gpt-oss", "demo/gemma4", "--json").stdout)
    assert [plan["model"] for plan in planned] == ["demo/gpt-oss", "demo/gemma4"]
    assert all(plan["refusal"] is None and plan["token_budget"] > 0 for plan in planned)
    text = run_darkbloom("models", "plan", "demo/gpt-oss", "demo/gemma4").stdout
    assert f"{planned[0]['token_budget'] // 10**6}," in text
