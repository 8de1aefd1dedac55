"""Reads a sequence of tokens, and stops itself after so many batches; prints what this replica has read."""

import json
import sys
import time

import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, collective
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator

size, batch_size, bptt_len, stop_after = (int(argument) for argument in sys.argv[1:])
adl.init_process_group("gloo")
iterator = AdaptiveBPTTIterator(torch.arange(size), batch_size, bptt_len)
read, total, shapes = [], None, []
try:
    for _ in adl.remaining_epochs_until(1):
        sums = adl.Accumulator()
        for number, (text, target) in enumerate(iterator, start=1):
            assert torch.equal(target, text + 1)
            read += text.flatten().tolist()
            shapes.append(list(text.shape))
            sums["read"] += text.numel()
            if number == stop_after and adl.rank() == 0:
                control = _session.current().consensus
                control.request({"kind": "stop"})
                while not control.round_open:  # the replicas have been asked where they are
                    time.sleep(0.001)
            collective.broadcast(None)  # in step, as by the gradients of a training loop
        with sums.synchronized():
            total = sums["read"]
finally:
    print(json.dumps({"read": read, "total": total, "shapes": shapes}))
