"""Tell whether the files of a job's code are still those with which its training began.

These are the script and the modules beside it, as the replicas had them at the first step of the run. A file
that was written after the replica's start does not count: the script may write it itself. Nor does one that
cannot be read now: a network's file system may be away, and a copy that was unpacked for the start may be
gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_ISREG

from adaptdl_elastic.agent.core.states import AgentIdentity, Evidence, ReplicaExited, StartReplicas
from adaptdl_elastic.agent.terminal.run_options import RunOptions
from adaptdl_elastic.rendezvous.schema.records import CHANGED_CODE

_AGAIN = "the same command goes on with the new text"


class CodeVersion:
    """The files by their paths below the script's directory, with their digests.

    Args:
        options: Of the agent.
        me: Its names.
        register: Writes a file that differs into the node's registration; "": none differs.
        say: Prints a line for the user, from any thread.
    """

    def __init__(
        self,
        options: RunOptions,
        me: AgentIdentity,
        register: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.files: Mapping[str, str] = {}
        self._told = ""  # the file that was told of last
        self._job, self._register, self._say = me.spec.job, register, say
        self._known = dict[str, tuple[object, str]]()
        script = (options.directory / options.command[0]).resolve()
        self._script = script.name if options.mode == "script" else ""
        self._base = script.parent if self._script else options.directory.resolve()
        # what a node service or a stack has unpacked is not edited
        self._fixed = me.on_demand or bool(me.spec.code) or options.mode == "exec"
        self._at_start = ""

    def starts(self) -> None:
        """Note the script's text, which is about to be read by a replica."""
        self._at_start = self._digest(self._script)

    def trained(self, paths: Iterable[str], since: float) -> None:
        """Take the modules that a replica has at its first step, if the run's code is not known yet.

        Args:
            paths: Files of modules that are not installed.
            since: Wall clock when the replica was started.
        """
        if self.files or self._fixed:
            return
        below = (Path(path) for path in paths)
        names = [str(path.relative_to(self._base)) for path in below if path.is_relative_to(self._base)]
        found = {name: digest for name in names if (digest := self._digest(name, since))}
        self.files = found | ({self._script: self._at_start} if self._at_start else {})

    def refusal(self, quiet: bool = False) -> str:
        """Return why no newcomer may join here; "": it may. Plans then put no further replicas here."""
        was = {} if self._fixed else self.files
        changed = next((name for name in was if self._digest(name) not in ("", was[name])), "")
        why, then = f"{changed} has changed since training began", f"`adaptdl stop {self._job}`, and {_AGAIN}"
        if changed != self._told:
            self._told = changed
            self._register(changed)
            if changed and not quiet:
                self._say(f"{why}: no further replicas here; {then}")
        return changed and f"{why}; {then}"

    def refuse(self, start: StartReplicas, quiet: bool, now: float, post: Callable[[object], None]) -> bool:
        """Return whether replicas are not to be started, because the code is another one; post their ends.

        No newcomer or size is blamed for it, and no restart helps the others.

        Args:
            start: The replicas.
            quiet: Nothing is printed here, since the change that is called off names the reason.
            now: Wall clock.
            post: Hands an event to the agent.
        """
        plan = start.plan
        self.files = self.files or start.master.code
        if plan.generation == plan.first or not (why := self.refusal(quiet or not start.join)):
            return False
        why = why if start.join else f"{why.partition(';')[0]}; once the job has ended, {_AGAIN}"
        evidence = Evidence(CHANGED_CODE, final=not start.join)
        for slot in start.local_ranks:
            post(ReplicaExited(plan.generation, slot, 1, now, why, evidence=evidence))
        return True

    def _digest(self, name: str, since: float = float("inf")) -> str:
        """Return the digest of a file, which is read again when it has changed.

        It is "" if the file cannot be read, is no regular file, or was written since that time.
        """
        path = self._base / name
        try:
            status = path.stat()
            mark = (status.st_size, status.st_mtime_ns, status.st_ino)
            if not S_ISREG(status.st_mode) or status.st_mtime >= since:
                return ""
            if self._known.get(name, ("", ""))[0] != mark:
                self._known[name] = (mark, hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        except (OSError, ValueError):
            return ""
        return self._known[name][1]
