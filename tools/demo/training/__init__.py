"""Makes the two demo checkpoints: synthetic dialogues, pictures, tokenizers, training, export, evaluation.

``python -m tools.demo.training --help`` from the root of the repository. See ``tools/demo/README.md``.
"""
