"""Hooks of mkdocs: write the pages of docs/reference that are made from the source, and mend links.

The API pages name the modules; mkdocstrings fills them in from the docstrings, without importing anything.
The pages of the two commands are what `--help` prints. A link that leaves docs/ leads to the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from mkdocs.structure.files import File, Files

from adaptdl_elastic.autoscaler.cli import COMMANDS, HEADINGS, adaptdl

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/adaptdl-elastic/adaptdl-elastic/blob/main/"
MODULES = (
    *("torch", "torch.data", "torch.epoch", "torch.parallel", "torch.fully_sharded"),
    *("torch.accumulator", "torch.value", "torch.gathering", "torch.iterator"),
    *("torch.scaling_rules", "torch.gradient_noise_scale", "checkpoint", "collective"),
    *("torch.frameworks.huggingface", "torch.frameworks.accelerate", "torch.frameworks.lightning"),
    *("reducer", "env", "goodput", "sched_hints", "utils"),
)

INTERNAL: dict[str, dict[str, str]] = {
    "torch.data": {
        "AdaptiveDataLoaderHelper": "window_samples local_samples gradient_weight adaptive "
        "training_loader_undecided settled resolve_batch_size train ended pause begin_window begin_batch "
        "end_batch epoch_done "
        "limits sync_local_bsz replaces",
    },
    "torch.parallel": {
        "AdaptiveDataParallel": "reinit_process_group absorb_failures giving_up stuck failure clear_failure "
        "hand_over data_loop_begins stepping skipped_step step_left_out drop_window "
        "has_own_process_group accumulates_by_hand window_under_way attempted_steps progress statistics "
        "load_statistics why_not_resilient needed_groups confirm_step snapshot_step",
    },
    "torch.fully_sharded": {
        "AdaptiveFSDP": "hand_over reinit_process_group absorb_failures giving_up stuck failure "
        "clear_failure data_loop_begins stepping skipped_step step_left_out drop_window "
        "has_own_process_group accumulates_by_hand window_under_way attempted_steps "
        "progress statistics load_statistics why_not_resilient needed_groups confirm_step take_back "
        "snapshot_step thawed refuse_thawed sync_buffers begin_step end_step begin_zero_grad scale gain "
        "initial_batch_size",
    },
    "torch.gradient_noise_scale": {
        "GradientNoiseScale": "set_progress set_accum_scale accum_count should_zero_grad reset_accumulation "
        "count_micro_batch due measured record advance state_dict load_state_dict",
    },
    "torch.frameworks.huggingface": {
        "ElasticTrainerMixin": "become_first begin_training windows get_batch_samples training_step "
        "set_epoch_fraction create_scheduler counters take_counters history take_history",
    },
    "torch.frameworks.accelerate": {
        "Accelerator": "accumulate print save save_model save_state init_trackers log",
    },
    "torch.frameworks.lightning": {
        "ElasticStrategy": "setup_environment setup process_dataloader on_train_start on_train_end "
        "begin_epoch steps ends training_step validation_step test_step predict_step optimizer_step",
    },
    "checkpoint": {"": "agree end_epoch restore_states snapshot_states"},
    "reducer": {"": "Reducer"},
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {f"reference/api/{short}.md": api_page(short) for short in MODULES}
    pages["contributing/index.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pages["reference/adaptdl.md"] = "# adaptdl\n\n" + "\n".join(commands())
    pages["reference/adaptdl-run.md"] = f"# adaptdl-run\n\n{text_block(help_of_run())}"
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to files outside docs/ lead to the repository; drop `test=...` from blocks of code."""
    generated = page.file.src_uri == "contributing/index.md"
    folder = ROOT if generated else (ROOT / "docs" / page.file.src_uri).parent

    def mended(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        there = Path(os.path.normpath(folder / target))
        if there.is_relative_to(ROOT / "docs"):
            shown = os.path.relpath(there, ROOT / "docs" / "contributing") if generated else target
        else:
            shown = REPOSITORY + str(there.relative_to(ROOT))
        return f"{match[1]}{shown}{'#' + anchor if anchor else ''})"

    markdown = re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"(\]\()([^)\s]+)\)", mended, markdown)


def api_page(short: str) -> str:
    """Return the page of one module; names by which the library's parts call each other are left out."""
    hidden = " ".join(INTERNAL.get(short, {}).values()).split()
    left_out = "".join(f'\n        - "!^{name}$"' for name in hidden)
    options = f'    options:\n      filters:\n        - "!^_[^_]"\n        - "!^__"{left_out}'
    return f"# {short}\n\n::: adaptdl_elastic.{short}\n{options}\n"


def help_of(*command: str) -> str:
    """Return what `adaptdl COMMAND --help` prints."""
    line = [*command, "--help"]
    done = CliRunner().invoke(adaptdl, line, prog_name="adaptdl", terminal_width=98)
    assert done.exit_code == 0, done.output
    return done.output


def help_of_run() -> str:
    """Return what `adaptdl-run --help` prints."""
    line = [sys.executable, "-m", "adaptdl_elastic.agent", "--help"]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def text_block(text: str) -> str:
    """Return a block of text as it stands."""
    return f"```text\n{text.rstrip()}\n```\n"


def commands() -> Iterator[str]:
    """Yield a section for each subcommand of `adaptdl`."""
    yield text_block(help_of())
    for heading, names in HEADINGS.items():
        yield f"## {heading}\n"
        for name in names.split():
            yield f"### {name}\n\n{text_block(help_of(name))}"
            command = COMMANDS.load(name)
            for below in command.commands if isinstance(command, click.Group) else ():
                yield f"#### {name} {below}\n\n{text_block(help_of(name, below))}"
