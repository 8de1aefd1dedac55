"""A Trainer whose model has memory for 24 samples in training, and whose gradients are noise.

The first argument is the framework. It prints the samples of its forward passes, and its steps, as JSON.
"""

import collections
import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

PASSES = collections.Counter()


def remember(count):
    PASSES[count] += 1
    if count > 24:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def with_lightning():
    import lightning

    from adaptdl_elastic.torch.frameworks.lightning import ElasticStrategy

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, index):
            remember(len(batch[0]))
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        max_epochs=4, strategy=ElasticStrategy(max_batch_size=256), enable_progress_bar=False, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4000, 8), torch.randn(4000, 1)), batch_size=8))
    return trainer.global_step


def with_trainer():
    from transformers import GPT2Config, GPT2LMHeadModel

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

    class Model(GPT2LMHeadModel):
        def forward(self, input_ids=None, labels=None, **items):
            remember(len(input_ids))
            return super().forward(input_ids=input_ids, labels=labels, **items)

    rows = torch.randint(1, 50, (4000, 8))
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-3,
        save_strategy="no", logging_strategy="no", report_to=[], max_batch_size=256,
    )  # fmt: skip
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    trainer = Trainer(Model(config), args, train_dataset=[{"input_ids": one, "labels": one} for one in rows])
    trainer.train()
    return trainer.state.global_step


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps = {"lightning": with_lightning, "trainer": with_trainer}[sys.argv[1]]()
    print(json.dumps({"passes": sorted(PASSES.items()), "steps": steps}))
