"""A Trainer on made data, whose records tell which samples were trained with, for framework_runs.

SETTINGS are arguments of TrainingArguments as JSON. Until OUT/hurry exists a step takes PACE.
With PLAIN it is transformers' own Trainer; with LANGUAGE the model is a language model, whose loss is a mean
over tokens, and the sequences are padded. With EARLY it
stops early. With GROW the batch of a replica is another one after each step.
With COUNT the model is a table, in which a learning rate of the
batch size adds -1 to the entry of each sample that is trained, and a step takes its PACE in the forward pass.
Every sample that is read is recorded in OUT/read-<pid>.
"""

import copy
import json
import os
import time
from collections import deque
from pathlib import Path

import accelerate
import torch
import torchmetrics
import transformers
from step_records import record
from torch.utils.data import Dataset

import adaptdl_elastic.torch as adl

PLAIN, LANGUAGE, COUNT, GROW = (name in os.environ for name in ("PLAIN", "LANGUAGE", "COUNT", "GROW"))
if PLAIN:
    from transformers import Trainer, TrainingArguments
else:
    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

EARLY = [transformers.EarlyStoppingCallback(1)] if "EARLY" in os.environ else []
OUT, SIZE = Path(os.environ["OUT"]), int(os.environ["SIZE"])
SETTINGS = json.loads(os.environ["SETTINGS"])


class Sequences(Dataset):
    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        words = torch.tensor([number, number % 7 + 1, number % 11 + 1, 3])
        with (OUT / f"read-{os.getpid()}").open("a") as file:
            file.write(f"{number}\n")
        if LANGUAGE:
            words = torch.cat([words, torch.full((8,), number % 5)])
            kept = torch.arange(len(words)) < 2 + number * 7 % 11
            return {"input_ids": words, "labels": torch.where(kept, words, -100)}
        return {"input_ids": words, "labels": torch.tensor(number % 2)}


def pace():
    if not (OUT / "hurry").exists():
        time.sleep(float(os.environ.get("PACE", "0")))


class Pace(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if not COUNT:
            pace()
        # a boundary is passed only if the batch does not change
        if GROW and state.global_step % 3 == 0:
            helper = adl.current_dataloader()
            helper._change({"atomic": 8 + state.global_step % 9, "accumulation": state.global_step % 2})


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = torch.nn.Parameter(torch.zeros(SIZE + 20))

    def forward(self, input_ids, labels):
        if self.training:
            pace()
        return {"loss": self.trained[input_ids[:, 0]].mean()}


class Average(transformers.TrainerCallback):
    """Keeps averages of the weights as a model and as tensors, and counts."""

    def __init__(self):
        self.model, self.shadow, self.updates, self.last = None, {}, 0, deque(maxlen=2)

    def on_train_begin(self, args, state, control, model=None, **_):
        self.model = copy.deepcopy(model)
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **_):
        self.updates += 1
        with torch.no_grad():
            for name, one in model.named_parameters():
                self.shadow[name].lerp_(one, 0.1)
                self.model.get_parameter(name).lerp_(one, 0.1)

    def summary(self):
        both = {name: [self.shadow[name], one] for name, one in self.model.named_parameters()}
        return {"updates": self.updates, "averages": [float(x.sum()) for pair in both.values() for x in pair]}


def counted(prediction):
    metric = torchmetrics.SumMetric()
    metric.update(len(accelerate.utils.gather(torch.as_tensor(prediction.label_ids))))
    return {"counted": int(metric.compute())}


class Recording(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        helper = adl.current_dataloader()
        if PLAIN and model.training:
            record(step=self.state.global_step)
        elif helper is not None and model.training:
            record(
                epoch=adl.finished_epochs(), samples=inputs["input_ids"][:, 0].tolist(),
                local=helper.local_samples, index=helper.current_index, step=self.state.global_step,
                rate=self.lr_scheduler.get_last_lr()[0],
            )  # fmt: skip
        return super().compute_loss(model, inputs, *args, **kwargs)


def main():
    args = TrainingArguments(output_dir=str(OUT / "trainer"), use_cpu=True, report_to=[], seed=3, **SETTINGS)
    transformers.set_seed(7)
    config = transformers.BertConfig(
        vocab_size=SIZE + 200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    if LANGUAGE:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=SIZE + 200, n_positions=16, n_embd=16, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ))  # fmt: skip
    if COUNT:
        model = Table()
    average = Average()
    trainer = Recording(
        model, args, train_dataset=Sequences(0, SIZE), eval_dataset=Sequences(SIZE, 20),
        callbacks=[Pace(), average, *EARLY], compute_metrics=counted,
    )  # fmt: skip
    last = transformers.trainer_utils.get_last_checkpoint(args.output_dir) if PLAIN else None
    result = trainer.train(resume_from_checkpoint=os.environ.get("RESUME", last))
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), OUT / "final.pt")
        log = [{name: line.get(name) for name in ("loss", "eval_loss", "step", "epoch", "learning_rate")}
               for line in trainer.state.log_history]  # fmt: skip
        summary = {"global_step": result.global_step, "train_loss": result.training_loss}
        summary.update(average.summary(), counted=metrics["eval_counted"])
        (OUT / "summary.json").write_text(json.dumps({**summary, "log": log, "eval": metrics["eval_loss"]}))


main()
