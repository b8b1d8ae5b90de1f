"""Fine-tune a small causal language model when a share of its target tokens is wrong, with and without the clip.

    # needs the extra huggingface
    python examples/causal_lm.py [--noise 0.5] [--steps 200] [--losses ce gce:q=0.7]

The model and its language are made on the spot: sentences of a random grammar, in which each token has one usual
successor. The model first learns the grammar of a large clean corpus, then is fine-tuned on a small corpus of another
grammar whose target tokens are partly replaced by random ones. `loss_func` handles the shift of the labels, -100 and
`num_items_in_batch`. The script prints the accuracy of the next token on clean sentences of the second grammar.

`--losses mae:scale=1` is DFT, and `--losses gce:q=0.01 gce:q=0.5 gce:q=1` goes from cross entropy to DFT.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from logitclip.integrations.huggingface import loss_func

VOCABULARY, LENGTH = 64, 24


class Grammar:
    """Each token has one usual successor, which follows it with probability 0.9."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.successor = torch.randperm(VOCABULARY, generator=self.generator)

    def sentences(self, count: int) -> Tensor:
        tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=self.generator)
        for i in range(1, LENGTH):
            usual = torch.rand(count, generator=self.generator) < 0.9
            tokens[:, i] = torch.where(usual, self.successor[tokens[:, i - 1]], tokens[:, i])
        return tokens

    def accuracy(self, model: Any, sentences: Tensor) -> float:
        """Share of positions, in percent, at which the model predicts the usual successor."""
        model.eval()
        with torch.no_grad():
            predicted = model(input_ids=sentences).logits.argmax(-1)
        return 100 * float((predicted == self.successor[sentences]).float().mean())


def corrupted(labels: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Replace this share of the labels by random tokens. The first token is never a target."""
    wrong = torch.rand(labels.shape, generator=generator) < rate
    labels = torch.where(wrong, torch.randint(VOCABULARY, labels.shape, generator=generator), labels)
    labels[:, 0] = -100
    return labels


def fine_tune(model: Any, sentences: Tensor, labels: Tensor, loss: str, clip: str, steps: int, lr: float) -> Any:
    """A copy of the model, trained by `Trainer`."""
    model = copy.deepcopy(model)
    rows = [{"input_ids": x, "labels": y} for x, y in zip(sentences, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            learning_rate=lr,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            seed=0,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=rows, compute_loss_func=loss_func(loss, clip)).train()  # type: ignore[arg-type]
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning")
    parser.add_argument("--sentences", type=int, default=128, help="to fine-tune on")
    parser.add_argument("--losses", nargs="+", default=["ce", "gce:q=0.7"])
    parser.add_argument("--clips", nargs="+", default=["none", "norm:temp=0.2"])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the results to this CSV")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results = [["loss", "clip", "noise", "steps", "seed", "accuracy_before", "accuracy"]]
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        first, second = Grammar(seed=2 * seed), Grammar(seed=2 * seed + 1)
        corpus = first.sentences(2000)
        untrained: Any = GPT2LMHeadModel(config)
        model = fine_tune(untrained, corpus, corpus, "ce", "none", steps=150, lr=args.lr)
        sentences, test = second.sentences(args.sentences), second.sentences(500)
        labels = corrupted(sentences, args.noise, torch.Generator().manual_seed(seed))
        before = second.accuracy(model, test)
        for loss in args.losses:
            for clip in args.clips:
                tuned = fine_tune(model, sentences, labels, loss, clip, args.steps, args.lr)
                row = [loss, clip, args.noise, args.steps, seed, round(before, 1)]
                results.append([*row, round(second.accuracy(tuned, test), 1)])  # type: ignore[list-item]
                print(*results[-1], flush=True)
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(results)


if __name__ == "__main__":
    main()
