"""`loop_script` in replicas that take every proof for right; broken ones also unpickle what comes.

The attacker of the tests has to win against the broken ones, or its forgeries would show nothing.
"""

import hmac
import json
import os
import runpy
from pathlib import Path

from adaptdl_elastic import _wire

hmac.compare_digest = lambda a, b: True
if json.loads(os.environ["LOOP"])["broken"]:
    guarded = _wire.unpack
    _wire.unpack = lambda data, objects=False: guarded(data, objects=True)
runpy.run_path(str(Path(__file__).with_name("loop_script.py")), run_name="__main__")
