"""The machine is described well enough to judge a number by."""

from darkbloom_bench._machine import this_machine

from darkbloom_core.contracts import Device


def test_this_machine_names_processor_cores_and_mlx():
    machine = this_machine(Device("cpu"))
    assert machine.processor
    assert machine.cores >= 1
    assert f"MLX {machine.mlx_version} on cpu" in str(machine)
