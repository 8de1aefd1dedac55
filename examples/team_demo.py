"""What `make team-demo` runs: two people share three nodes, one node is unplugged, another is added.

Alice brings a cluster up over ssh and lets Bob use it. Five jobs share six slots. The jobs of the unplugged
node go on elsewhere. `team_site` has the machines. Logs of sshd and a picture of the page are in .team-demo/.
The exit code is not 0 if a job was not done.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from team_site import NODES, NoSiteError, Site, end, find_site

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".team-demo"
SLOTS = 2  # of each node
PATIENCE = 150.0  # most seconds for anything
LOOK_SECONDS = 0.5
JOBS = [  # who, name, replicas, epochs
    ("alice", "digits", "1:6", 30),
    ("alice", "small", "1:2", 10),
    ("alice", "fixed", "2:2", 10),
    ("bob", "bobs", "1:4", 15),
    ("bob", "late", "2:4", 10),
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


class Story:
    """The demo, told line by line.

    Args:
        site: The machines.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        """Print a line of the timeline."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

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
        process = self._site.start(person, ["adaptdl", *arguments, *hidden])
        said, _ = process.communicate(timeout=PATIENCE)
        if process.returncode:
            raise SystemExit(f"team-demo: adaptdl {arguments[0]} failed:\n{said}")
        if not quiet:
            print("".join(f"          {line}\n" for line in said.splitlines() if line), end="", flush=True)
        return said

    def shell(self, person: str, text: str) -> None:
        """Run a line of shell at a person's desk."""
        process = self._site.start(person, ["sh", "-c", text])
        said, _ = process.communicate(timeout=PATIENCE)
        if process.returncode:
            raise SystemExit(f"team-demo: {text} failed:\n{said}")

    def jobs(self) -> dict[str, Row]:
        """Return the rows of `adaptdl ls --all`, by job, as an administrator sees them."""
        rows = json.loads(self.command("alice", "ls", "--all", "--json", quiet=True))
        return {row["job"]: row for row in rows}

    def wait(self, what: str, wanted: Callable[[dict[str, Row]], object]) -> dict[str, Row]:
        """Return the jobs as soon as they are as wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            jobs = self.jobs()
            if wanted(jobs):
                return jobs
            if time.monotonic() > deadline:
                raise SystemExit(f"team-demo: {what} did not happen within {PATIENCE:g} s: {jobs}")
            time.sleep(LOOK_SECONDS)

    def picture(self, person: str, path: Path) -> None:
        """Take a picture of the page by the environment of the integration tests, if it is there."""
        browser = shutil.which("chromium")
        if browser is None or not DRIVER.exists():
            self.tell("no picture of the page: it needs chromium, and make .venv-integrations/.installed")
            return
        page = self._site.start(person, ["adaptdl", "web", "--port", "0"])
        taken = None
        try:
            assert page.stdout is not None
            address = next((word for line in page.stdout for word in line.split() if "://" in word), "")
            taken = self._site.start(person, [str(DRIVER), "-c", TAKE_PICTURE, browser, address])
            said, _ = taken.communicate(timeout=PATIENCE)
            if taken.returncode:
                raise SystemExit(f"team-demo: no picture of the page:\n{said}")
            self._site.fetch(person, "page.png", path)
        finally:
            for process in (page, taken):
                if process is not None:
                    end(process)

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
        """Tell the whole story; return the exit code."""
        site, alice = self._site, "alice"
        self.tell(site.what)
        for person in ("alice", "bob"):
            self.shell(person, f"cp {HERE}/image_classification.py {HERE}/image_data.py .")
        options = (*site.up_options, "--slots", str(SLOTS))
        self.command(alice, "cluster", "up", *NODES[:3], hidden=options)
        self.invite()
        for person, name, replicas, epochs in JOBS:
            script = ("image_classification.py", "--epochs", str(epochs))
            self.command(person, "submit", "--name", name, "--replicas", replicas, *script)
        self.wait(
            "the first loss of three jobs",
            lambda jobs: [row.get("loss") for row in jobs.values()].count(None) <= 2,
        )
        self.command(alice, "ls")
        self.picture(alice, OUT / "page.png")

        site.unplug("node3")
        self.tell("node3 is unplugged")
        self.command(alice, "cluster", "add", "node4")
        self.command(alice, "cluster", "status")
        ended = self.wait("the end of every job", lambda jobs: all(over(row) for row in jobs.values()))
        self.command(alice, "history")
        site.plug("node3")
        self.tell("node3 is plugged in again")
        self.command(alice, "cluster", "down", "--purge")
        states = {name: row["state"] for name, row in ended.items()}
        lost = [f"{name} is {state}" for name, state in states.items() if state != "done"]
        self.tell("every job is done" if not lost else f"not as it should be: {', '.join(lost)}")
        return 1 if lost or len(states) < len(JOBS) else 0


def over(row: Row) -> bool:
    """Return whether a job has ended."""
    return row["state"] in ("done", "failed", "cancelled", "stopped")


def main() -> int:
    """Prepare the folder and the machines, and tell the story."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(mode=0o755)
    try:
        with find_site(OUT) as site:
            return Story(site).run()
    except NoSiteError as error:
        print(f"team-demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
