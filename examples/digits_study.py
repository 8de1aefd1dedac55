"""A study for `adaptdl sweep examples/digits_study.py --trials 8 --parallel 2 --metric accuracy --maximize`.

Each trial trains the example `image_classification.py` with a learning rate and an initial batch size of its
own.
The learning rate is that of the initial batch size: it grows with the batch size while a trial runs.
"""

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("image_classification.py")


def command(trial: Any) -> list[object]:
    """Return the script and its arguments for an `optuna.Trial`."""
    rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    size = trial.suggest_categorical("batch_size", [32, 64, 128])
    return [SCRIPT, "--epochs", 3, "--lr", rate, "--batch-size", size]
