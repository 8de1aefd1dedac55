"""What the adapters of frameworks refuse, each in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ended
from elastic_run import environment

HUGGINGFACE = """
import torch, transformers
from adaptdl_elastic.torch.frameworks.huggingface import ElasticArgumentsMixin, Trainer, TrainingArguments
net = torch.nn.Linear(2, 2)
"""
LIGHTNING = """
import lightning as L, torch
from adaptdl_elastic.torch.frameworks.lightning import ElasticStrategy
class Net(L.LightningModule):
    def __init__(self, automatic=True):
        super().__init__()
        self.automatic_optimization = automatic
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def fit(net, most=None, **options):
    strategy = ElasticStrategy(max_batch_size=most)
    given = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "strategy": strategy}
    trainer = L.Trainer(max_epochs=1, **given, **options)
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(4, 2)))
    return trainer
"""
ACCELERATE = """
import torch
from adaptdl_elastic.torch.frameworks.accelerate import Accelerator
net = torch.nn.Linear(2, 2)
"""


def ran(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder to its end."""
    return ended([sys.executable, "-c", script], folder, env=environment())


# what scripts begin with, the packages that they need, and what each of them goes on with: the message
REFUSED: list[tuple[str, list[str], dict[str, str]]] = [
    (
        HUGGINGFACE,
        ["transformers"],
        {
            "Trainer(net, transformers.TrainingArguments(output_dir='out', use_cpu=True))": (
                "an elastic Trainer needs its own TrainingArguments"
            ),
            "TrainingArguments(output_dir='out', use_cpu=True, auto_find_batch_size=True)": (
                "auto_find_batch_size=True in an elastic Trainer: give the batch size"
            ),
            "Trainer(net, max_batch_size=64)": "max_batch_size in a Trainer: give it to TrainingArguments",
            "TrainingArguments(output_dir='out', use_cpu=True, max_batch_size=4)": (
                "max_batch_size=4 is below the initial batch of 8"
            ),
            "TrainingArguments(output_dir='out', use_cpu=True, local_bsz_bounds=[4, 8])": (
                "local_bsz_bounds without max_batch_size in an elastic Trainer: give both"
            ),
            """
class Arguments(transformers.TrainingArguments, ElasticArgumentsMixin): pass
Arguments(output_dir='out', use_cpu=True)""": (
                "Arguments: ElasticArgumentsMixin must be the first of its bases"
            ),
        },
    ),
    (
        HUGGINGFACE,
        ["transformers", "trl"],
        {
            """
from trl import GRPOConfig
class Arguments(ElasticArgumentsMixin, GRPOConfig): pass
Arguments(output_dir='out', use_cpu=True, max_batch_size=64)""": (
                "num_generations with max_batch_size, by which steps and batches are of many sizes"
            ),
            """
from trl import SFTConfig
class Arguments(TrainingArguments, SFTConfig): pass
Arguments(output_dir='out', use_cpu=True)""": "write class Arguments(ElasticArgumentsMixin, SFTConfig)",
        },
    ),
    (
        LIGHTNING,
        ["lightning"],
        {
            "ElasticStrategy(autoscale_batch_size=64)": (
                "autoscale_batch_size in ElasticStrategy: give max_batch_size"
            ),
            "ElasticStrategy(local_bsz_bounds=(4, 8))": (
                "local_bsz_bounds without max_batch_size in ElasticStrategy: give both"
            ),
            "fit(Net(), 64, reload_dataloaders_every_n_epochs=1)": (
                "reload_dataloaders_every_n_epochs with max_batch_size: leave one of them out"
            ),
            "fit(Net(), 64, limit_train_batches=2)": (
                "limit_train_batches or overfit_batches with max_batch_size"
            ),
            "fit(Net(automatic=False))": (
                "manual optimization with ElasticStrategy: use automatic optimization"
            ),
            "net = Net(); fit(net).fit(net, torch.utils.data.DataLoader(torch.randn(4, 2)))": (
                "fit() a second time with ElasticStrategy: only one fit() per script"
            ),
        },
    ),
    (
        ACCELERATE,
        ["accelerate"],
        {
            "Accelerator(cpu=True, max_batch_size=64)": (
                "max_batch_size in an Accelerator: call prepared_loader.autoscale_batch_size(...)"
            ),
            "Accelerator(cpu=True).prepare(net, torch.optim.SGD(net.parameters()))": (
                "prepare() in an elastic job: give one model, its optimizer and its loader"
            ),
        },
    ),
]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(begin + rest, message, marks=pytest.mark.needs(*packages))
        for begin, packages, lines in REFUSED
        for rest, message in lines.items()
    ],
)
@pytest.mark.processes
def test_refused_in_one_line(script: str, message: str, tmp_path: Path) -> None:
    done = ran(script, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.needs("transformers", "trl")
@pytest.mark.processes
def test_max_batch_size_is_an_argument_of_every_elastic_class(tmp_path: Path) -> None:
    script = """
from dataclasses import dataclass
import transformers, trl
from adaptdl_elastic.torch.frameworks.huggingface import ElasticArgumentsMixin, TrainingArguments
class Plain(ElasticArgumentsMixin, trl.SFTConfig): pass
@dataclass
class Own(ElasticArgumentsMixin, trl.SFTConfig):
    mine: int = 1
for kind in (Plain, Own, TrainingArguments):
    args = kind(output_dir="out", use_cpu=True, max_batch_size=64, local_bsz_bounds=[4, 16])
    assert (args.max_batch_size, args.local_bsz_bounds) == (64, [4, 16]), kind
    assert "max_batch_size" not in kind(output_dir="out", use_cpu=True).to_dict(), kind
for kind in (Own, TrainingArguments):
    line = ["--output_dir", "out", "--use_cpu", "--max_batch_size", "64", "--local_bsz_bounds", "4", "16"]
    (args,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(line)
    assert (args.max_batch_size, args.local_bsz_bounds) == (64, [4, 16]), kind
"""
    done = ran(script, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.needs("transformers", "trl")
@pytest.mark.processes
def test_elastic_arguments_have_every_default_of_the_class_that_they_extend(tmp_path: Path) -> None:
    script = """
from dataclasses import fields
import transformers, trl
from adaptdl_elastic.torch.frameworks import huggingface
for kind in (trl.SFTConfig, trl.DPOConfig, transformers.TrainingArguments):
    elastic = type("Arguments", (huggingface.ElasticArgumentsMixin, kind), {})
    given = {"output_dir": "out", "use_cpu": True, "seed": 3}
    mine, plain = elastic(**given), kind(**given)
    assert [one.name for one in fields(mine)] == [one.name for one in fields(plain)]
    assert len(fields(mine)) > 50
    for one in fields(plain):
        assert repr(getattr(mine, one.name)) == repr(getattr(plain, one.name)), one.name
"""
    done = ran(script, tmp_path)
    assert done.returncode == 0, done.stderr
