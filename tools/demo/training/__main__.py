"""The command line: ``python -m tools.demo.training`` with ``tokenizers``, ``train``, ``export``, ``evaluate`` or ``check``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("demo")


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    parser = argparse.ArgumentParser(prog="python -m tools.demo.training", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if name != "tokenizers":
            added.add_argument("checkpoint", choices=["gpt-oss", "gemma4"])
        return added

    train = command("train", _train, "train a checkpoint and write it into a folder")
    train.add_argument("--minutes", type=float, required=True, help="of training, without getting ready")
    train.add_argument("--steps", type=int, help="stop after so many steps, for a try")
    train.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    evaluate = command(
        "evaluate", _evaluate, "exact match on held-out dialogues, twice: fast, and as users run it"
    )
    evaluate.add_argument("folder", type=Path)
    evaluate.add_argument("--dialogues", type=int, default=128, help="of each task, the fast way")
    evaluate.add_argument("--answers", type=int, default=50, help="of each task, as users run it; 0: none")
    evaluate.add_argument("--report", type=Path, metavar="FILE", help="write the accuracies as JSON, too")
    export = command("export", _export, "write the folder anew from the tensors that training kept")
    export.add_argument("tensors", type=Path)
    export.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    command("check", _check, "compare the fast path of training with transformers")
    tokenizers = command("tokenizers", _tokenizers, "train both tokenizers anew; the checkpoints keep theirs")
    tokenizers.add_argument("--dialogues", type=int, default=40_000)
    tokenizers.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    arguments.run(arguments)


def _recipe(name: str) -> Any:
    if name == "gpt-oss":
        from tools.demo.training.gpt_oss import GptOssRecipe

        return GptOssRecipe()
    from tools.demo.training.gemma4 import Gemma4Recipe

    return Gemma4Recipe()


def _train(arguments: argparse.Namespace) -> None:
    from tools.demo.training.trainer import train

    recipe = _recipe(arguments.checkpoint)
    train(recipe, arguments.minutes * 60, arguments.out, steps=arguments.steps)


def _evaluate(arguments: argparse.Namespace) -> None:
    from tools.demo.training.evaluation import evaluate

    recipe = _recipe(arguments.checkpoint)
    found = evaluate(recipe, arguments.folder, dialogues=arguments.dialogues, answers=arguments.answers)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(found, indent=1) + "\n")


def _export(arguments: argparse.Namespace) -> None:
    from tools.demo.training.export import export_again

    export_again(_recipe(arguments.checkpoint), arguments.tensors, arguments.out)


def _check(arguments: argparse.Namespace) -> None:
    from tools.demo.training import check

    recipe = _recipe(arguments.checkpoint)
    if arguments.checkpoint == "gpt-oss":
        differences = check.check_gpt_oss(recipe)
    else:
        differences = check.check_gemma4(recipe)
        log.info("painting and PIL differ by %.4f of 1 in the mean", check.painting_error(recipe))
    log.info("differences of logits, relative to the largest: %s", json.dumps(differences))
    if max(differences.values()) > check.TOLERANCE:
        raise SystemExit(f"more than {check.TOLERANCE}")


def _tokenizers(arguments: argparse.Namespace) -> None:
    from tools.demo.training.tokenizer_training import train_gemma, train_harmony

    for name, train in (("gpt-oss", train_harmony), ("gemma4", train_gemma)):
        start = time.monotonic()
        tokenizer = train(arguments.out / name / "tokenizer.json", arguments.dialogues)
        seconds = time.monotonic() - start
        log.info("%s: %d tokens in %.0f s", name, tokenizer.get_vocab_size(), seconds)


if __name__ == "__main__":
    main()
