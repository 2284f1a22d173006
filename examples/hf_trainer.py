"""Train a small transformer with the Hugging Face Trainer on two nodes.

The torch plugin forms the process group, and the Trainer finds it: it gives each node its part of
every batch and averages the gradients. The model is made from a configuration and reads bytes, so
nothing is downloaded. Its task is to tell prose from code: lines of docstrings and lines of source
from Python's own library, a quarter of them held out.

Exits with an error if it is right about fewer than 90 % of the held-out lines.
"""

import ast
import os
import random
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
EPOCHS = 1 if QUICK else 2
LENGTH = 48
EXPECTED_ACCURACY = 86.0 if QUICK else 90.0


def read_lines(each: int) -> list[tuple[str, int]]:
    """As many lines of prose (0) and of code (1), in an order that is always the same."""
    prose: set[str] = set()
    code: set[str] = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                prose.update((ast.get_docstring(node) or "").split("\n"))
                code.update(ast.unparse(node.body[-1]).split("\n"))
    lines = []
    for label, found in enumerate((prose, code)):
        long_enough = sorted(line.strip() for line in found if len(line.strip()) > 20)
        lines += [(line, label) for line in random.Random(0).sample(long_enough, each)]
    random.Random(0).shuffle(lines)
    return lines


@sky.function
@sky.stdout(only="head")
@sky.stderr(only="head")
def finetune(lines: list[tuple[str, int]], held_out: int, epochs: int) -> dict[str, Any]:
    import warnings

    from datasets import Dataset
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    warnings.simplefilter("ignore")
    set_seed(0)
    rows = [[byte + 1 for byte in line.encode()[:LENGTH]] for line, _ in lines]
    data = Dataset.from_dict(
        {
            "input_ids": [row + [0] * (LENGTH - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (LENGTH - len(row)) for row in rows],
            "labels": [label for _, label in lines],
        }
    ).train_test_split(test_size=held_out, seed=0)

    config = BertConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=epochs,
                per_device_train_batch_size=32,
                learning_rate=2e-3,
                logging_strategy="epoch",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                ddp_find_unused_parameters=False,
            ),
            train_dataset=data["train"],
            eval_dataset=data["test"],
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
        )
        trainer.train()
        measured = trainer.evaluate()
    return {
        "rank": trainer.args.process_index,
        "world": trainer.args.world_size,
        "steps": trainer.state.global_step,
        "accuracy": float(measured["eval_accuracy"]),
        "weights": float(sum(p.detach().abs().sum() for p in trainer.model.parameters())),
    }


def main() -> int:
    lines = read_lines(each=1_500)
    print(f"{len(lines):,} lines, such as {lines[0][0][:40]!r} and {lines[1][0][:40]!r}")

    plugins = [sky.plugins.torch(), sky.plugins.huggingface()]
    with sky.Compute(nodes=2, plugins=plugins) as compute:
        results = finetune(lines, held_out=600, epochs=EPOCHS) @ compute

    for result in results:
        print(f"rank {result['rank']} of {result['world']}: {result['steps']} steps")
    if len({result["weights"] for result in results}) != 1:
        print("the copies of the model differ", file=sys.stderr)
        return 1
    accuracy = 100.0 * results[0]["accuracy"]
    print(f"Held-out accuracy: {accuracy:.1f}%, the same weights on both nodes")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
