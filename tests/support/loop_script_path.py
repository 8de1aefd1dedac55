"""Where loop_script is: it is run, not imported."""

from pathlib import Path

PATH = Path(__file__).with_name("loop_script.py")
