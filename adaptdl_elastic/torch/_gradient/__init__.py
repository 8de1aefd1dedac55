"""From gradients to the gradient noise scale, and what a step does to them.

| module | question that it answers |
|---|---|
| `comm_hook` | How are gradients averaged, and what is read off them on the way? |
| `accumulation` | What does a micro-batch weigh, and where does its gradient wait? |
| `measurement` | Which steps are measured, and when is the result taken in? |
| `estimator` | Which estimator follows from two norms? (formulas and sources) |
| `noise_scale` | What are the running estimates, the gain and the progress of a model? |
| `grad_scaler` | What does a GradScaler do in the middle of an accumulation window? |
| `model_state` | What does a checkpoint hold of a model? |
| `model_snapshot` | What does a step change of a model besides its parameters? |
"""
