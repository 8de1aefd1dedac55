"""A Lightning run on made data, whose records tell which samples were trained with, for framework_runs.

SETTINGS are arguments of Trainer as JSON; "batch" is the loader's. Until OUT/hurry exists a step takes PACE.
With "most" the batch size is chosen up to it, and the batch of a replica is another one after each step.
With PLAIN it is Lightning's own strategy for several processes. With "average" it has an average of the
weights and Lightning's own folders, and each replica leaves what it has at the end in OUT/end-PID.json. With
CLI the Trainer is LightningCLI's. With
HOLD a newcomer waits in front of its training until the others, which hurry then, are in the last epoch.
"""

import json
import os
import time
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from step_records import record
from torch.utils.data import DataLoader, Dataset

import adaptdl_elastic.torch as adl

OUT, SIZE = Path(os.environ["OUT"]), int(os.environ["SIZE"])
SETTINGS = json.loads(os.environ["SETTINGS"])
MOST = SETTINGS.pop("most", None)
PLAIN, HOLD = "PLAIN" in os.environ, "HOLD" in os.environ
if not PLAIN:
    from adaptdl_elastic.torch.frameworks.lightning import ElasticStrategy


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.validated, self.trained = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.counts = []

    def training_step(self, batch, batch_idx):
        x, y, numbers = batch
        helper = adl.current_dataloader()
        if PLAIN:
            record(step=self.global_step)
        elif helper is not None:
            record(
                epoch=adl.finished_epochs(), samples=numbers.tolist(), local=helper.local_samples,
                index=helper.current_index, step=self.global_step, rate=self.lr_schedulers().get_last_lr()[0],
            )  # fmt: skip
        self.trained.update(len(x))
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.validated.update(len(x))
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x), y))
        self.log("age", float(self.global_step), sync_dist=True, reduce_fx="max")

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.counts.append(int(self.validated.compute()))
        self.validated.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(L.Callback):
    """Slows training down, and writes what the Trainer's counters are after each validation."""

    def __init__(self):
        self.seen, self.logged, self.updates = [], [], 0

    def on_fit_start(self, trainer, module):
        if HOLD and adl.rank():
            (OUT / "waits").touch()
            while not (OUT / "last").exists():
                time.sleep(0.05)

    def on_train_batch_end(self, trainer, *_):
        self.updates += 1
        if trainer._logger_connector.should_update_logs:
            self.logged.append(trainer.global_step)
        # a boundary is passed only if the batch does not change
        if MOST and self.updates % 3 == 0:
            helper = adl.current_dataloader()
            helper._change({"atomic": 4 + self.updates % 9, "accumulation": self.updates % 2})
        last = trainer.current_epoch == trainer.max_epochs - 1
        if last:
            (OUT / "last").touch()
        if not (OUT / ("waits" if HOLD and not last else "hurry")).exists():
            time.sleep(float(os.environ.get("PACE", "0")))

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.seen.append([trainer.current_epoch, trainer.global_step])

    def state_dict(self):
        seen = [list(line) for line in self.seen]
        return {"seen": seen, "logged": list(self.logged), "updates": self.updates}

    def load_state_dict(self, state):
        self.seen = [list(line) for line in state["seen"]]
        self.logged, self.updates = list(state["logged"]), state["updates"]


class Bar(L.pytorch.callbacks.TQDMProgressBar):
    """Writes nothing, and knows where it is at each epoch's end."""

    def on_train_epoch_end(self, trainer, module):
        assert self.train_progress_bar.n == self.train_progress_bar.total == SIZE // 4


def plain():
    """The settings and the checkpoint of a Trainer that is started again by a launcher."""
    last = OUT / "kept" / "last.ckpt"
    replicas = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy = {"strategy": "ddp", "devices": replicas} if replicas > 1 else {"devices": 1}
    return strategy, last if last.exists() else None


def elastic():
    """The strategy of an elastic Trainer."""
    return ElasticStrategy(max_batch_size=MOST, local_bsz_bounds=(2, 16)) if MOST else ElasticStrategy()


def elastic_cli(strategy, settings, batch):
    """Fit by LightningCLI, as docs/howto/frameworks.md shows it."""
    from lightning.pytorch.cli import LightningCLI

    class ElasticCLI(LightningCLI):
        def instantiate_trainer(self, **kwargs):
            return super().instantiate_trainer(**strategy, **kwargs)

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Points(SIZE), batch_size=batch, shuffle=True)

        def val_dataloader(self):
            return DataLoader(Points(20), batch_size=10)

    return ElasticCLI(
        Net, Data, save_config_kwargs={"overwrite": True}, trainer_defaults=settings,
        seed_everything_default=5, args=["fit"],
    )  # fmt: skip


def main():
    settings = dict(SETTINGS)
    average = settings.pop("average", False)
    batch, saves = settings.pop("batch"), settings.pop("saves", {"monitor": "val_loss"})
    L.seed_everything(5)
    watch, net = Watch(), Net()
    saved = L.pytorch.callbacks.ModelCheckpoint(None if average else OUT / "kept", save_last=True, **saves)
    callbacks = [watch, saved]
    if MOST:
        callbacks.append(Bar())
    if average:
        callbacks.append(L.pytorch.callbacks.EMAWeightAveraging(decay=0.9))
    strategy, last = plain() if PLAIN else ({"strategy": elastic()}, os.environ.get("RESUME"))
    settings |= {
        "accelerator": "cpu", "callbacks": callbacks, "default_root_dir": str(OUT),
        "enable_progress_bar": bool(MOST), "gradient_clip_val": 5.0,
    }  # fmt: skip
    if "CLI" in os.environ:
        cli = elastic_cli(strategy, settings, batch)
        trainer, net = cli.trainer, cli.model
    else:
        trainer = L.Trainer(**strategy, **settings)
        trainer.fit(
            net,
            DataLoader(Points(SIZE), batch_size=batch, shuffle=True),
            DataLoader(Points(20), batch_size=10),
            ckpt_path=last,
            weights_only=False,
        )
    if average:
        end = {
            "weights": [float(one.detach().sum()) for one in net.parameters()], "counts": net.counts,
            "best": saved.best_model_path, "folder": trainer.log_dir, "epoch": trainer.current_epoch,
        }  # fmt: skip
        (OUT / f"end-{os.getpid()}.json").write_text(json.dumps(end))
    if trainer.is_global_zero:
        torch.save(net.state_dict(), OUT / "final.pt")
        summary = {
            "global_step": trainer.global_step, "epoch": trainer.current_epoch, "seen": watch.seen,
            "logged": watch.logged, "updates": watch.updates,
            "saved": sorted(path.name for path in (OUT / "kept").glob("epoch*")),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "best": None if saved.best_model_score is None else float(saved.best_model_score),
        }  # fmt: skip
        (OUT / "summary.json").write_text(json.dumps(summary))
    if average:
        trainer.test(net, DataLoader(Points(20), batch_size=10), ckpt_path="best", weights_only=False)


main()
