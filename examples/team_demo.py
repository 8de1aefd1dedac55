"""What `make team-demo` runs: two people share three nodes, one node is unplugged, another is added.

Alice brings a cluster up over ssh and lets Bob use it. Five jobs share six slots. The jobs of the unplugged
node go on elsewhere. `team_site` has the machines. Logs of sshd and a picture of the page are in .team-demo/.
Where a job was not done, one line says what was seen instead, and the exit code is 1.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo_ending import UnmetError, conclude, in_short
from team_site import NODES, NoSiteError, Site, end, find_site

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".team-demo"
SLOTS = 2  # of each node
# Only a demo that goes wrong reaches these: seconds without any progress, and seconds in all.
PATIENCE = 180.0
LIMIT = 540.0
LOOK_SECONDS = 2.0
JOBS = [  # who, name, replicas, epochs
    ("alice", "digits", "1:6", 12),
    ("alice", "small", "1:2", 6),
    ("alice", "fixed", "2:2", 5),
    ("bob", "bobs", "1:4", 7),
    ("bob", "late", "2:4", 4),
]

DRIVER = HERE.parent / ".venv-integrations" / "bin" / "python"
TAKE_PICTURE = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(sys.argv[2])
    page.wait_for_selector("#jobs-body tr", timeout=100_000)
    page.screenshot(path="page.png")
    browser.close()
"""

Row = dict[str, Any]
LOST = ("failed", "cancelled", "stopped")
MOVING = ("state", "replicas", "epoch", "step")


class Story:
    """The demo, told line by line.

    Args:
        site: The machines.
        clock: Tells the time, in seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        site: Site,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._site, self._clock, self._sleep = site, clock, sleep
        self._began = clock()

    @property
    def _now(self) -> float:
        return self._clock() - self._began

    def tell(self, text: str) -> None:
        """Print a line of the timeline."""
        print(f"{self._now:6.1f} s  {text}", flush=True)

    def _output(self, person: str, command: Sequence[str], what: str) -> str:
        """Run a command at a person's desk to its end; return its output."""
        process = self._site.start(person, command)
        try:
            said, _ = process.communicate(timeout=max(1.0, LIMIT - self._now))
        except subprocess.TimeoutExpired:
            end(process)
            raise UnmetError(f"expected the end of `{what}` within {LIMIT:g} s; it still runs") from None
        if process.returncode:
            raise UnmetError(f"expected `{what}` to succeed; it said: {in_short(said)}")
        return said

    def command(self, person: str, *arguments: str, hidden: tuple[str, ...] = (), quiet: bool = False) -> str:
        """Run `adaptdl` at a person's desk; return its output.

        Args:
            person: Who types it.
            arguments: Of the command.
            hidden: Further arguments, which the demo needs and the story does not.
            quiet: Print neither the command nor its output.
        """
        if not quiet:
            self.tell(f"{person}$ adaptdl {' '.join(arguments)}")
        said = self._output(person, ["adaptdl", *arguments, *hidden], f"adaptdl {arguments[0]}")
        if not quiet:
            print("".join(f"          {line}\n" for line in said.splitlines() if line), end="", flush=True)
        return said

    def shell(self, person: str, text: str) -> None:
        """Run a line of shell at a person's desk."""
        self._output(person, ["sh", "-c", text], text)

    def jobs(self) -> dict[str, Row]:
        """Return the rows of `adaptdl ls --all`, by job, as an administrator sees them."""
        rows = json.loads(self.command("alice", "ls", "--all", "--json", quiet=True))
        return {row["job"]: row for row in rows}

    def wait(self, what: str, wanted: Callable[[dict[str, Row]], object]) -> dict[str, Row]:
        """Return the jobs as soon as they are as wanted; give up when nothing goes on any more."""
        known, since = None, self._now
        while True:
            jobs = self.jobs()
            if wanted(jobs):
                return jobs
            if any(row["state"] in LOST for row in jobs.values()):
                raise UnmetError(f"expected {what}; {seen(jobs)}")
            if (position := progress(jobs)) != known:
                known, since = position, self._now
            if self._now - since > PATIENCE:
                raise UnmetError(f"expected {what}; for {PATIENCE:g} s {seen(jobs)}")
            if self._now > LIMIT:
                raise UnmetError(f"expected {what} within {LIMIT:g} s; {seen(jobs)}")
            self._sleep(LOOK_SECONDS)

    def picture(self, person: str, path: Path) -> None:
        """Take a picture of the page by the environment of the integration tests, if it is there."""
        browser = shutil.which("chromium")
        if browser is None or not DRIVER.exists():
            self.tell("no picture of the page: it needs chromium, and make .venv-integrations/.installed")
            return
        page = self._site.start(person, ["adaptdl", "web", "--port", "0"])
        try:
            assert page.stdout is not None
            address = next((word for line in page.stdout for word in line.split() if "://" in word), "")
            self._output(person, [str(DRIVER), "-c", TAKE_PICTURE, browser, address], "take a picture")
            self._site.fetch(person, "page.png", path)
        finally:
            end(page)

    def invite(self) -> None:
        """Let Bob use the cluster: he sends his key, and gets an archive back."""
        key = "~/.config/adaptdl/default/identity"
        self.shell("bob", f"mkdir -p ~/.config/adaptdl/default && ssh-keygen -q -t ed25519 -N '' -f {key}")
        self.shell("bob", f"cp {key}.pub identity.pub")
        self._site.hand_over("identity.pub", "bob", "alice")
        self.command("alice", "cluster", "grant", "bob", "identity.pub", "--archive", "bob.tar")
        self._site.hand_over("bob.tar", "alice", "bob")
        self.shell("bob", "tar -xf bob.tar -C ~/.config/adaptdl && rm bob.tar")

    def run(self) -> int:
        """Tell the whole story; return the exit code, which is 0."""
        site, alice = self._site, "alice"
        self.tell(site.what)
        for person in ("alice", "bob"):
            scripts = (str(HERE / name) for name in ("image_classification.py", "image_data.py"))
            self.shell(person, f"cp {shlex.join(scripts)} .")
        options = (*site.up_options, "--slots", str(SLOTS))
        self.command(alice, "cluster", "up", *NODES[:3], hidden=options)
        self.invite()
        for person, name, replicas, epochs in JOBS:
            script = ("image_classification.py", "--epochs", str(epochs))
            self.command(person, "submit", "--name", name, "--replicas", replicas, *script)
        self.command("bob", "queue")
        self.wait(
            "a loss of two jobs",
            lambda jobs: sum(row.get("loss") is not None for row in jobs.values()) >= 2,
        )
        self.command(alice, "ls")
        self.picture(alice, OUT / "page.png")

        site.unplug("node3")
        self.tell("node3 is unplugged")
        self.command(alice, "cluster", "add", "node4")
        self.command(alice, "cluster", "status")
        self.wait(
            "every job to be done",
            lambda jobs: [row["state"] for row in jobs.values()] == ["done"] * len(JOBS),
        )
        self.command(alice, "history")
        site.plug("node3")
        self.tell("node3 is plugged in again")
        self.command(alice, "cluster", "down", "--purge")
        self.tell("every job is done")
        return 0


def progress(jobs: dict[str, Row]) -> dict[str, tuple[Any, ...]]:
    """Return what changes while anything goes on."""
    return {job: tuple(row.get(name) for name in MOVING) for job, row in jobs.items()}


def seen(jobs: dict[str, Row]) -> str:
    """Say in short how far the jobs are."""
    texts = []
    for job, row in jobs.items():
        epoch = "" if row.get("epoch") is None else f" at epoch {row['epoch']}/{row.get('epochs')}"
        texts.append(
            f"{job} waits ({row['reason']})"
            if row["state"] == "queued"
            else f"{job} is {row['state']}{epoch}"
        )
    return ", ".join(texts) or "there is no job"


def demo() -> int:
    """Prepare the machines, and tell the story."""
    try:
        with find_site(OUT) as site:
            return Story(site).run()
    except NoSiteError as error:
        raise UnmetError(f"expected machines for it; {error}") from None


def main() -> int:
    """Prepare the folder, and run the demo."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(mode=0o755)
    return conclude("team-demo", OUT, demo)


if __name__ == "__main__":
    sys.exit(main())
