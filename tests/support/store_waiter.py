"""`python store_waiter.py PREFIX KEY VALUE`: print a key and its value, and end, as soon as the store has it.

Run on a machine of a room, with `ADAPTDL_ETCD_*` of the store. The key begins with PREFIX and contains KEY,
and its value contains VALUE.
"""

from __future__ import annotations

import os
import sys

from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions


def main(prefix: str, key: str, value: str) -> None:
    """Wait for a key from the first revision of the store on."""
    options = StoreOptions.from_environment(os.environ)
    with connect(os.environ["ADAPTDL_ETCD"], options=options) as store, store.watch(prefix, 1) as watch:
        for change in watch:
            if key in change.key and value in (change.value or ""):
                print(change.key, change.value)
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
