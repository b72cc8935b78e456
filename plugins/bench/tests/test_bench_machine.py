"""The machine is described well enough to judge a number by."""

import pytest
from darkbloom_bench._machine import blas_of, this_machine

from darkbloom_core.contracts import Device


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (None, "the wheel's own (netlib reference)"),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", "OpenBLAS, preloaded"),
        ("/opt/mkl/libmkl_rt.so.2", "MKL, preloaded"),
        ("/usr/lib/libother.so", "libother.so, preloaded"),
    ],
)
def test_a_blas_is_named_by_the_library_that_answers(file, name):
    assert blas_of(file) == name


def test_this_machine_names_processor_cores_and_mlx():
    machine = this_machine(Device("cpu"))
    assert machine.processor
    assert machine.cores >= 1
    assert f"MLX {machine.mlx_version} on cpu" in str(machine)
