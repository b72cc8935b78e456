"""What the doctor looks at. Each check says what was found and, if that is not good, what to do about it.

Nothing is loaded and nothing is changed. Always true: whether a checkpoint fits is asked of
the loader's own gate.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from darkbloom_core.cli._check import Check
from darkbloom_core.cli._context import CommandContext
from darkbloom_core.cli._examine import Examined, examine
from darkbloom_core.cli._format import byte_text
from darkbloom_core.cli._places import model_places
from darkbloom_core.cli._service import installed_services
from darkbloom_core.contracts import Device
from darkbloom_core.errors import SetupError
from darkbloom_core.memory import LoadCheck, MachineReadings, Reading
from darkbloom_core.settings import Settings
from darkbloom_core.slots import (
    REFERENCE_BLAS,
    ModelPlaces,
    blas_name,
    check_checkpoint,
    current_device,
    estimated_weight_bytes,
    hub_checkpoints,
    memory_terms,
    plan_models,
)

LEAST_DISK_BYTES = 1024**3
SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What the checks are about. ``root`` and ``home`` are where service files are looked for."""

    command: CommandContext
    settings: Settings
    places: ModelPlaces
    device: Device
    reading: Reading
    root: Path = Path("/")
    home: Path = Path("~")


def this_patient(command: CommandContext, settings: Settings) -> Patient:
    """This machine as it is now, with MLX imported."""
    return Patient(
        command=command,
        settings=settings,
        places=model_places(command, settings),
        device=current_device(),
        reading=MachineReadings().read("device"),
    )


def machine_checks(patient: Patient) -> Iterator[Check]:
    """Memory, accelerator, MLX, the BLAS of a Linux CPU, disk and service files."""
    yield _memory(patient)
    yield _accelerator(patient)
    blas = blas_name(patient.device)
    if blas is not None:
        yield _blas(blas)
    yield _disk(patient.places.hub)
    for service in installed_services(patient.root, patient.home.expanduser()):
        yield Check(
            name="service",
            state="ok" if service.problem is None else "failure",
            found=f"{service.path}" + (f": {service.problem}" if service.problem else " restarts on failure"),
            advice=service.problem
            and "compare it with the file of its name in deploy/, see docs/operations.md",
        )


def model_checks(patient: Patient, words: Sequence[str]) -> Iterator[Check]:
    """Each model that ``words`` name, alone, and whether all together have room."""
    found: list[Examined] = []
    for word in words:
        try:
            model = examine(patient.command, word, patient.places, patient.device)
        except SetupError as error:
            yield Check(
                name=f"model {word}",
                state="failure",
                found=error.message,
                facts={"model": word, "verdict": "unknown"},
            )
            continue
        found.append(model)
        yield _model(patient, model)
    if len(found) > 1:
        yield _together(patient, found)


def fit(patient: Patient, model: Examined) -> LoadCheck:
    """The loader's verdict on ``model``, were it loaded now."""
    return check_checkpoint(patient.settings, patient.reading, model.path, model.description)


def _memory(patient: Patient) -> Check:
    reading = patient.reading
    terms = memory_terms(patient.settings.memory, reading.physical_bytes)
    free = "an unknown amount is" if reading.free_bytes is None else f"{byte_text(reading.free_bytes)} are"
    cap = terms.effective_cap_bytes
    return Check(
        name="memory",
        state="ok" if cap > 0 else "failure",
        found=f"{byte_text(terms.physical_bytes)}, of which models may use {byte_text(cap)}; {free} free now",
        advice=None if cap > 0 else "2 GiB stay with the system: give the machine or its container more",
        facts={"physical_bytes": terms.physical_bytes, "cap_bytes": cap, "free_bytes": reading.free_bytes},
    )


def _accelerator(patient: Patient) -> Check:
    kind, mlx_version = patient.device.kind, version("mlx")
    if kind == "cpu":
        gpu = Path(patient.root, "proc/driver/nvidia/version").exists()
        return Check(
            name="accelerator",
            state="warning" if gpu else "ok",
            found=f"none: MLX {mlx_version} computes on the CPU" + (", beside an NVIDIA GPU" if gpu else ""),
            advice="pip install 'darkbloom[cuda13]' or 'darkbloom[cuda12]' in place of [cpu]"
            if gpu
            else None,
            facts={"kind": kind, "mlx": mlx_version},
        )
    name = str(mx.device_info().get("device_name", "unnamed"))
    return Check(
        name="accelerator",
        state="ok",
        found=f"{name}, MLX {mlx_version} on {kind}",
        facts={"kind": kind, "mlx": mlx_version, "device": name},
    )


def _blas(name: str) -> Check:
    slow = name == REFERENCE_BLAS
    return Check(
        name="BLAS",
        state="warning" if slow else "ok",
        found=name + (", 15 to 20 times slower than OpenBLAS" if slow else ""),
        advice="apt-get install libopenblas0 && LD_PRELOAD=libopenblas.so.0 darkbloom serve ..."
        if slow
        else None,
    )


def _disk(folder: Path) -> Check:
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    enough = free >= LEAST_DISK_BYTES
    return Check(
        name="disk",
        state="ok" if enough else "warning",
        found=f"{byte_text(free)} free for {folder}",
        advice=None if enough else "make room, or set HF_HUB_CACHE to a folder on another disk",
        facts={"folder": str(folder), "free_bytes": free},
    )


def _model(patient: Patient, model: Examined) -> Check:
    check = fit(patient, model)
    weights = estimated_weight_bytes(model.path, model.description)
    found = str(check.verdict)
    if check.required_bytes is not None and check.free_bytes is not None:
        found += (
            f": needs {byte_text(check.required_bytes)} to load, {byte_text(check.free_bytes)} may be taken"
        )
    return Check(
        name=f"model {model.name}",
        state="ok" if check.verdict == "fits" else "warning" if check.verdict == "unknown" else "failure",
        found=f"{model.description.family}, {found}",
        advice=_what_else(patient, model) if check.verdict == "does not fit" else None,
        facts={
            "model": model.name,
            "path": str(model.path),
            "family": model.description.family,
            "verdict": check.verdict,
            "load_bytes": weights,
            "required_bytes": check.required_bytes,
            "free_bytes": check.free_bytes,
        },
    )


def _what_else(patient: Patient, model: Examined) -> str:
    """What to do if ``model`` does not fit."""
    idle = Reading(patient.reading.physical_bytes, 0, 0, None)
    if check_checkpoint(patient.settings, idle, model.path, model.description).verdict == "fits":
        return "it would fit if nothing else used memory: end other programs, or a server that runs already"
    smaller = _fitting(patient)
    if not smaller:
        return "it needs a machine with more memory, or a smaller memory.reserve_bytes if that is set"
    return f"it never fits here; these do: {', '.join(smaller)}"


def _fitting(patient: Patient) -> list[str]:
    """Up to three models that can be named here and fit, the largest first."""
    places = patient.places
    sizes: dict[str, int] = {}
    for word in {**places.aliases, **places.offered, **hub_checkpoints(places.hub)}:
        try:
            model = examine(patient.command, word, places, patient.device)
        except SetupError:  # it has its own line if it was asked about
            continue
        if fit(patient, model).verdict == "fits":
            sizes[word] = model.disk_bytes
    return sorted(sizes, key=lambda word: -sizes[word])[:SUGGESTIONS]


def _together(patient: Patient, models: Sequence[Examined]) -> Check:
    named = [(model.name, model.path, model.description) for model in models]
    refused = [plan.name for plan in plan_models(patient.settings, patient.reading, named) if plan.refusal]
    return Check(
        name="all models",
        state="warning" if refused else "ok",
        found=f"no room beside the others for {', '.join(refused)}"
        if refused
        else "fit into memory together",
        advice="they take turns: one that is asked for is loaded once another is idle; "
        "`darkbloom models plan` shows what each would get"
        if refused
        else None,
    )
