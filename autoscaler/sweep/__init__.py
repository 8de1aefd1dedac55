"""Search for hyper-parameters: each trial of an Optuna study is a job.

| question | module |
|---|---|
| Which trials run, what do they report, which are pruned? | `search` |
| How is a trial started and watched on this machine? | `trial_process` |
| What does a study file contain? | `study_file` |

The package optuna is optional (the extra `optuna`); only `study_file` imports it.
"""
