"""Decide which samples go to which replica, and when.

| module | question that it answers |
|---|---|
| `loader` | How does a data loop run: its position, its windows, the boundaries between its steps? |
| `loader_mixin` | Which attributes has a loader that a script defines? |
| `partition` | Which samples go to which replica? (pure) |
| `sampler` | How does a pass start at any sample, on any number of replicas? |
| `iterable` | How is an `IterableDataset` (a stream) shared among the replicas? |
| `loaders_of_others` | Which loaders and samplers of other libraries are accepted, which are refused? |
| `registry` | Which loaders exist, whose data loop is running, and which batch size does each have? |
| `random_streams` | From which random streams does each replica draw? |
| `window_items` | How much does each batch of a step weigh where a loss is a mean over tokens? |
| `batch_comparison` | Do the replicas train on different batches and read the same stream? |
| `accumulator_state` | Which sums of an Accumulator are kept in checkpoints? |
| `inner_loop` | How does a data loop run inside another data loop? |
| `loop_progress` | How much of a data loop is done, and how many batches are left? |
"""
