"""Where the scripts are: they are run, not imported."""

from pathlib import Path

PATH = Path(__file__).with_name("loop_script.py")
MODEL = Path(__file__).with_name("model_script.py")
RECOVERY = Path(__file__).with_name("recovery_script.py")
APART = Path(__file__).with_name("apart_script.py")
CONVERSION = Path(__file__).with_name("conversion_script.py")
OUTSIDE = Path(__file__).with_name("outside_script.py")
NO_SYNC = Path(__file__).with_name("no_sync_script.py")
CHAOS = Path(__file__).with_name("chaos_script.py")
USER = Path(__file__).with_name("user_script.py")
HABIT = Path(__file__).with_name("habit_script.py")
UNGUARDED = Path(__file__).with_name("unguarded_script.py")
OBJECTS = Path(__file__).with_name("objects_script.py")
WRITTEN_BATCH = Path(__file__).with_name("written_batch_script.py")
DRIFT = Path(__file__).with_name("drift_script.py")
FOLDS = Path(__file__).with_name("folds_script.py")
