"""A machine whose memory the tests decide, and toy models that weigh on it for exactly as long as they live.

Everything but the readings and the size of the weights is real: slots, engines, ledger, threads.
"""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path

from toy_family import describe, full, window
from toy_server import RecordingSink, SlowModel, ToyChatCodec, ToyParser

from darkbloom_core.contracts import Prompt
from darkbloom_core.engine import GenerationRequest, SamplingParams
from darkbloom_core.memory import Reading
from darkbloom_core.settings import Settings
from darkbloom_core.slots import SlotManager
from darkbloom_core.telemetry import SinkEmitter

GIB = 1024**3
NARROW, WIDE = (window(16), full()), (window(16), full(), full())


class Weights(SlowModel):
    """``size_bytes`` is what it says that it weighs; while ``stuck`` is set, no step comes to its end."""

    size_bytes = 0
    stuck: threading.Event | None = None
    freed: threading.Event | None = None

    @property
    def weight_bytes(self):
        return self.size_bytes

    def run_layers(self, inputs, batch, first, last):
        if self.stuck is not None and self.stuck.is_set():
            assert self.freed.wait(30)
            raise RuntimeError("this step hung")
        return super().run_layers(inputs, batch, first, last)


class Machine:
    """``Readings``: what is used is the weight of every model that is alive, and ``used_elsewhere``."""

    unified = True

    def __init__(self, physical_gib: float, cached_bytes: int = 0) -> None:
        self.physical_bytes = int(physical_gib * GIB)
        self.cached_bytes = cached_bytes
        self.used_elsewhere = 0
        self.free_bytes: int | None = None
        self.clears = 0
        self.models: list[weakref.ref[Weights]] = []

    @property
    def weights(self) -> int:
        """Bytes of the models that are alive."""
        return sum(model.size_bytes for ref in self.models if (model := ref()) is not None)

    def read(self, pool: str) -> Reading:
        used = self.weights + self.used_elsewhere + self.cached_bytes
        return Reading(self.physical_bytes, used, self.cached_bytes, self.free_bytes)

    def clear_cache(self) -> None:
        self.clears += 1
        self.cached_bytes = 0


class MachineFamily:
    """Loads ``Weights``. A config's ``gib`` is its weight, ``wide`` doubles its KV rate, ``fault`` makes loading raise."""

    name, version, model_types = "toy", "1", frozenset({"toy"})

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loading: list[str] = []
        self.loads: list[str] = []
        self.overlapped = False
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.before_return = lambda path: None
        self.stuck = threading.Event()
        self.freed = threading.Event()

    def describe(self, config, device):
        layers = WIDE if config.get("wide") else NARROW
        description = describe(layers, config.get("context_tokens", 4096))
        return replace(description, memory_per_disk_byte=config.get("memory_per_disk_byte", 1.0))

    def codec(self, path, description):
        return ToyChatCodec()

    def load(self, path, description, placement, progress=None):
        config = json.loads((path / "config.json").read_text())
        self.overlapped |= bool(self.loading)
        self.loading.append(path.name)
        self.loads.append(path.name)
        self.entered.set()
        try:
            assert self.gate.wait(30)
            if "fault" in config:
                raise RuntimeError(config["fault"])
            model = Weights(description.layers, context_tokens=description.context_tokens)
            model.size_bytes = int(config.get("gib", 0) * GIB)
            model.stuck, model.freed = self.stuck, self.freed
            model.fail_on = config.get("fails_on")
            self.machine.models.append(weakref.ref(model))
            self.before_return(path)
            return model
        finally:
            self.loading.remove(path.name)


class ToyMachine:
    """``slots`` on ``machine``; ``add`` makes a model known."""

    def __init__(self, folder: Path, physical_gib: float = 64, cache_tiers=(), **tables) -> None:
        self.folder = folder
        self.machine = Machine(physical_gib)
        self.family = MachineFamily(self.machine)
        self.sink = RecordingSink()
        engine = {"max_rows": 2, "chain": "always", "pack": "never", **tables.pop("engine", {})}
        self.settings = Settings(**{"telemetry": {"sample_seconds": 0}, "engine": engine, **tables})
        self.emitter = SinkEmitter([self.sink])
        self.slots = SlotManager(
            self.settings, lambda config: self.family, self.emitter, self.machine, cache_tiers
        )

    def path(self, name: str, gib: float = 0.0, **config) -> Path:
        """A checkpoint on disk whose weights are estimated at ``gib`` x 1.2; the files are sparse."""
        path = self.folder / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "toy", "gib": gib, **config}))
        with (path / "model.safetensors").open("wb") as file:
            file.truncate(int(gib * GIB))
        return path

    def add(self, name: str, gib: float = 0.0, **config) -> str:
        self.slots.add(name, self.path(name, gib, **config))
        return name

    def load(self, name: str, gib: float = 0.0, **config):
        return self.slots.load(name, self.path(name, gib, **config))

    def grants(self) -> dict[str, int]:
        return {slot.name: slot.engine.status().kv_bytes_grant for slot in self.slots.slots()}

    def states(self, model: str) -> list[str]:
        """The states that a model went through."""
        return [event.state for event in self.sink.events if getattr(event, "model", None) == model]

    def close(self) -> None:
        self.family.gate.set()
        self.family.freed.set()
        self.slots.close()


def ask(slot, tokens: int = 4, name: str = "request", prompt_tokens: int = 5, prompt=None):
    """Submit a request to a slot's engine; gives its stream."""
    return slot.engine.submit(
        GenerationRequest(
            id=name,
            prompt=Prompt(tuple(range(1, prompt_tokens + 1) if prompt is None else prompt)),
            parser=ToyParser(),
            max_tokens=tokens,
            sampling=SamplingParams(temperature=0.0),
            ignore_stop_ids=True,
        )
    )
