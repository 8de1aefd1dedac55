"""Decide which samples go to which replica, and when.

| module | question that it answers |
|---|---|
| `loader` | What do all elastic loaders share: the position, the steps of a data loop? |
| `loader_batch_size` | Which batch size does a loader have, and how do all replicas agree on it? |
| `loader_mixin` | Which attributes and methods of a loader are public? |
| `partition` | Which samples go to which replica? (pure) |
| `sampler` | How does a pass start at any sample, on any number of replicas? |
| `iterable` | How is an `IterableDataset` (a stream) shared among the replicas? |
| `loaders_of_others` | Which loaders and samplers of other libraries are accepted, which are refused? |
| `registry` | Which loaders exist, under which keys, and whose data loop is running? |
| `random_streams` | From which random streams does each replica draw? |
| `window_items` | How much does each batch of a step weigh where a loss is a mean over tokens? |
| `batch_comparison` | Do the replicas train on different batches and read the same stream? |
| `accumulator_state` | Which sums of an Accumulator are kept in checkpoints? |
| `checks` | Which arguments may a script pass to data and epoch loops? |
| `inner_loop` | How does a data loop run inside another data loop? |
| `loop_length` | How much of a data loop is done, and how many batches are left? (pure) |
| `loop_progress` | How far has training come in the running data loop? |
| `step_loop` | How does a loop over step numbers, without a loader, run? |
"""
