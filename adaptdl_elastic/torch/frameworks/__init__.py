"""Make other training frameworks elastic. Each has a public module, which only its users import.

| module | question that it answers |
|---|---|
| `huggingface` | How does the Trainer of transformers become elastic? |
| `accelerate` | How does a loop of Hugging Face Accelerate become elastic? |
| `lightning` | How does Lightning's Trainer become elastic? |
| `_trainer_arguments` | Which arguments of a Trainer are refused? |
| `_trainer_steps` | How do the Trainer's steps count when the batch size is chosen during training? |
| `_lightning_steps` | How do those of Lightning's Trainer count then? |
| `_single_process` | How does a framework see a single process? |
| `_callback_states` | How are the states of callbacks saved and given to newcomers? |

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

docs/howto/frameworks.md says which features of each framework work. Adapters use only public names of the
library.
"""
