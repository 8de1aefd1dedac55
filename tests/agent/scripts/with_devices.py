"""`with_devices.py SCRIPT ARGUMENTS...`: say which device this replica has, and who else has it."""

import os
import runpy
import sys
from pathlib import Path

job, rank = os.environ["ADAPTDL_JOB_ID"], int(os.environ["LOCAL_RANK"])
name = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[rank]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


ledger = Path(os.environ["LEDGER"])
for line in ledger.read_text().splitlines() if ledger.exists() else ():
    pid, of, device, _ = line.split()
    if device == name and lives(int(pid)):
        print(f"CLASH {job} has {name}, and so has process {pid} of {of}", flush=True)
with ledger.open("a") as file:
    file.write(f"{os.getpid()} {job} {name} {rank}\n")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
