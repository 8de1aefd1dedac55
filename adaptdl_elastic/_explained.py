"""Name the address where a message is explained: a heading of docs/howto/when-it-fails.md."""

from __future__ import annotations

import re

DOCS = "https://github.com/adaptdl-elastic/adaptdl-elastic/blob/main/docs"
"""Address of the documentation: whoever reads a message may have no clone."""

PAGE = f"{DOCS}/howto/when-it-fails.md"

EXPLAINED = [
    *("runs already", "puts these checkpoints aside", "and this node was to run", "with the same on all"),
    *("as in the command that", "cannot listen on", "with --local-addr=ADDRESS"),
    *("etcd cannot be reached", "TLS with etcd is refused", "this etcd asks for a user"),
    *("etcd refused the login", "its role needs readwrite on the prefix"),
    *("the client certificate has a common name", "no coordinator has answered"),
    "of the records, this program reads",
    *("checkpoints cannot be written to", "no checkpoint can be written to", "cannot be read now"),
    *(
        "every checkpoint in",
        "is recorded for this job and is not in",
        "the path must be shared by all nodes",
    ),
    *("does not fit this script", "holds what is not tensors or plain values"),
    *("all replicas must step at the same batches", "all replicas must change parameters alike"),
    *("all have to leave it at the same batch", "the others wait for replica"),
    "because this process continued behind its assignment",
    *("two data loops over one loader at the same time", "was not given the GradScaler in use"),
    *("keeps no second moment of its gradients", "gradients are inf or nan in every step"),
    *("does not fit into memory", "every change is a restart", "another program has"),
    *("killed from outside", "failed twice in the same way", "has changed since training began"),
    *("is left out", "stays at or below", "waits for nodes", "waits for slots"),
    *("its agent exits with code", "not tried again before", "ask an administrator of cluster"),
    *("ssh cannot log in", "its answer cannot be read", "first node of cluster", "3.12 or later is needed"),
    *("etcd cannot listen on", "of another `adaptdl cluster up`", "MiB may travel"),
    *("which does not travel with", "set the clocks of that node", "a job of this name was submitted"),
    *("most slots", "may not use this cluster"),
    *("no permission for", "can be bought in", "give each cluster groups of its own"),
]
"""Fixed words of messages: the headings of the page."""


def see(message: str) -> str:
    """Return ` (PAGE#ANCHOR)` for a message that the page explains, else an empty string.

    Of several headings in the message the last one counts, since a remedy follows the problem.
    """
    found = [words for words in EXPLAINED if words in message]
    if not found or PAGE in message:
        return ""
    last = max(found, key=lambda words: (message.rfind(words) + len(words), len(words)))
    return f" ({PAGE}#{anchor(last)})"


def anchor(heading: str) -> str:
    """Return the anchor that the site gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading)).lower()
