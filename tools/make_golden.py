"""Writes the golden files of families: ``python tools/make_golden.py gpt_oss gemma4 qwen3``.

Runs in an environment of its own (``tools/golden/requirements.txt``), never in the
project's: the reference implementation is no dependency of ours.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

TOOLS = Path(__file__).parent


def main() -> None:
    families = sorted(file.stem for file in (TOOLS / "golden").glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="+", choices=families, help="whose goldens to write")
    sys.path.insert(0, str(TOOLS))
    for family in parser.parse_args().family:
        importlib.import_module(f"golden.{family}").write_goldens()


if __name__ == "__main__":
    main()
