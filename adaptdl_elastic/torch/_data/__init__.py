"""Which samples go to which replica, and when.

| module | question that it answers |
|---|---|
| `loader` | What have all elastic loaders in common: position, batch size, the pace of a loop? |
| `loader_mixin` | What do users of a loader read and call? |
| `partition` | Which samples go to which replica? (pure) |
| `sampler` | How does a pass begin anywhere, on any number of replicas? |
| `iterable` | What is promised of a stream? |
| `loaders_of_others` | What is taken over from other loaders and samplers, and what is refused? |
| `registry` | Which loaders are there, by what name, and which one is at work? |
| `random_streams` | What does each replica draw random numbers from? |
| `batch_comparison` | Do the replicas read what they should: different batches, one stream? |
| `accumulator_state` | What is kept of an Accumulator? |
| `checks` | What can be given to data and epoch loops? |
"""
