"""The BLAS that answers is named, so that a slow one can be seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from darkbloom_core.contracts import Device
from darkbloom_core.slots import REFERENCE_BLAS, blas_name
from darkbloom_core.slots._blas import blas_of


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (None, REFERENCE_BLAS),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", "OpenBLAS, preloaded"),
        ("/opt/mkl/libmkl_rt.so.2", "MKL, preloaded"),
        ("/usr/lib/libother.so", "libother.so, preloaded"),
    ],
)
def test_a_blas_is_named_by_the_library_that_answers(file, name):
    assert blas_of(file) == name


def test_only_a_linux_cpu_has_one_to_choose():
    assert (blas_name(Device("cpu")) is not None) is (sys.platform == "linux")
    assert blas_name(Device("cuda")) is blas_name(Device("metal")) is None


@pytest.mark.system
def test_a_preloaded_openblas_is_found_in_the_process_that_it_answers_in():
    script = "from darkbloom_core.contracts import Device\nfrom darkbloom_core.slots import blas_name\n"
    done = subprocess.run(
        [sys.executable, "-c", script + "print(blas_name(Device('cpu')))"],
        env={"LD_PRELOAD": "libopenblas.so.0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("OpenBLAS, preloaded\n", "")
