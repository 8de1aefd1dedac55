"""Train a small BERT on made data with Hugging Face's Trainer, while replicas come and go.

adaptdl-run --standalone --nproc-per-node=1:2 --rdzv-id=bert examples/huggingface_trainer.py
adaptdl scale bert --replicas 2                  in another terminal
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments


class Parity(torch.utils.data.Dataset):
    """Sequences of words; the label says whether the first word's number is even."""

    def __init__(self, size):
        self.words = torch.randint(1, 100, (size, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index, 0] % 2}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--output", default="huggingface-trainer")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=options.epochs,
        learning_rate=1e-3,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
    )
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=Parity(options.samples),
        eval_dataset=Parity(200),
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"loss on the evaluation set: {metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
