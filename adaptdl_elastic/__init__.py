"""adaptdl-elastic: PyTorch training jobs that adapt while they run.

What a training script imports is `adaptdl_elastic.torch`, and for states of its own
`adaptdl_elastic.checkpoint`. This package imports neither torch nor any of its own parts by itself:
torch loads the entry point in `adaptdl_elastic.rendezvous` while it is still importing its own
rendezvous package, so whatever that needs must not import torch in turn.
"""

__version__ = "0.1.0"
